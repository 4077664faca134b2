//! One step of the pass over keys as text: five products of which only the last waits for those before
//! it in full.
//!
//! ```text
//! S^T = K Q^T                 issued
//! dP^T = V dO^T               issued
//! wait for S^T
//! P^T = 2^(S^T - m - ln l)    while dP^T is computed
//! wait for dP^T
//! dS^T = P^T (dP^T - D)       both rounded, pair by pair, into the registers that they leave
//! dS to shared memory
//! dV += P^T dO                issued
//! dK += dS^T Q                issued
//! wait for both
//! ```
//!
//! It is one asm block, for CubeCL's values may not be copied while a product writes them. The query
//! gradient's product stands apart: it needs the `dS` of the other warpgroup, and takes that of the step
//! before, so that no warpgroup waits for the other.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::products::{CLOSE, OPEN, column_descriptor, registers, row_descriptor};
use super::turns::errands_text;
use cubecl::prelude::*;

/// `log2(e)` as PTX writes it.
const LOG2_E: &str = "0f3FB8AA3B";

impl GradientBlueprint {
    /// Registers of both sums of a unit: that of the value, then that of the key.
    pub(crate) const fn sum_registers(&self) -> usize {
        self.summed().next_power_of_two()
    }

    /// Where the sum of the key begins.
    pub(crate) const fn key_sum(&self) -> usize {
        self.value_dim / 2
    }

    const fn summed(&self) -> usize {
        (self.value_dim + self.head_dim) / 2
    }

    /// Bytes of a stage of `dS`: queries along the rows, in panels of 64 keys.
    pub(crate) const fn score_stage(&self) -> usize {
        self.walked * self.owned() * 2
    }

    /// Tiles of 64 queries by 64 features that a step adds to the query gradient, one to a warpgroup.
    pub(crate) const fn query_tiles(&self) -> usize {
        self.walked / 64 * self.head_dim.div_ceil(64)
    }

    /// A step on a block that is wholly visible, with plain scores. Operands after the sums: the
    /// descriptors of key, value, query by rows and by columns, output gradient by rows and by columns;
    /// the addresses of statistics and of `dS`, if it is `stored`; the scale; the address of
    /// errands, where tiles are added in a fixed order.
    pub(crate) fn step(&self, stored: bool, ordered: bool) -> String {
        let n = self.walked;
        let sums = self.sum_registers();
        let operand = |i: usize| format!("%{}", 2 * sums + i);
        let (key, value) = (operand(0), operand(1));
        let (query_rows, query_columns) = (operand(2), operand(3));
        let (gradient_rows, gradient_columns) = (operand(4), operand(5));
        let (statistics, store, scale) = (operand(6), operand(7), operand(8));
        let element = self.element();
        let mut text = format!(
            "{OPEN}.reg .f32 s<{}>, d<{}>, x, m0, m1, l0, l1; .reg .b32 w<{}>, g<{}>;\n",
            n / 2,
            n / 2,
            n / 4,
            n / 4
        );
        text += &self.kept(sums);
        text += "wgmma.fence.sync.aligned;\n";
        text += &self.by_rows("s", self.head_dim, &key, &query_rows);
        text += "wgmma.commit_group.sync.aligned;\n";
        text += &self.by_rows("d", self.value_dim, &value, &gradient_rows);
        text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;\n";
        for j in 0..n / 8 {
            text += &format!(
                "ld.shared.v2.f32 {{m0, m1}}, [{statistics}+{}]; ld.shared.v2.f32 {{l0, l1}}, [{statistics}+{}];\n\
                 neg.f32 l0, l0; neg.f32 l1, l1;\n",
                32 * j,
                4 * n + 32 * j
            );
            for i in 0..4 {
                let (at, c) = (4 * j + i, i % 2);
                // The product is rounded, for the saved maximum is.
                text += &format!(
                    "mul.rn.f32 x, s{at}, {scale}; sub.rn.f32 x, x, m{c}; \
                     fma.rn.f32 x, x, {LOG2_E}, l{c}; ex2.approx.ftz.f32 s{at}, x;\n"
                );
            }
        }
        text += "wgmma.wait_group.sync.aligned 0;\n";
        for j in 0..n / 8 {
            text += &format!(
                "ld.shared.v2.f32 {{m0, m1}}, [{statistics}+{}];\n",
                8 * n + 32 * j
            );
            for r in 0..2 {
                let (low, high, pair) = (4 * j + 2 * r, 4 * j + 2 * r + 1, 2 * j + r);
                text += &format!(
                    "cvt.rn.{element}x2.f32 w{pair}, s{high}, s{low};\n\
                     sub.rn.f32 d{low}, d{low}, m0; mul.rn.f32 d{low}, d{low}, s{low};\n\
                     sub.rn.f32 d{high}, d{high}, m1; mul.rn.f32 d{high}, d{high}, s{high};\n\
                     cvt.rn.{element}x2.f32 g{pair}, d{high}, d{low};\n"
                );
            }
        }
        if stored {
            text += &self.stores("g", &store);
        }
        text += "wgmma.fence.sync.aligned;\n";
        text += &self.weighted("w", 0, self.value_dim, &gradient_columns);
        text += "wgmma.commit_group.sync.aligned;\n";
        text += &self.weighted("g", self.key_sum(), self.head_dim, &query_columns);
        text += "wgmma.commit_group.sync.aligned;\n";
        if ordered {
            text += &errands_text(&operand(9));
        }
        text + "wgmma.wait_group.sync.aligned 0; }"
    }

    /// The sum of walked rows of `dim` features by weights in registers, added to the sums from
    /// register `first` on.
    pub(crate) fn weighted_sum(&self, first: usize, dim: usize) -> String {
        let sums = self.sum_registers();
        let weights = self.weight_registers();
        let mut text = format!("{OPEN}.reg .b32 w<{}>;\n", self.walked / 4);
        text += &self.kept(sums);
        for i in 0..self.walked / 4 {
            text += &format!("mov.b32 w{i}, %{};\n", 2 * sums + i);
        }
        text += "wgmma.fence.sync.aligned;\n";
        text += &self.weighted("w", first, dim, &format!("%{}", 2 * sums + weights));
        text + CLOSE
    }

    /// `dS` in registers to shared memory.
    pub(crate) fn store_scores(&self) -> String {
        let mut text = format!("{{ .reg .b32 g<{}>;\n", self.walked / 4);
        for i in 0..self.walked / 4 {
            text += &format!("mov.b32 g{i}, %{i};\n");
        }
        text += &self.stores("g", &format!("%{}", self.weight_registers()));
        text + "}"
    }

    /// `dS K` of 64 queries and 64 features over the cube's keys, both from shared memory.
    pub(crate) fn query_product(&self) -> String {
        let element = self.element();
        let results = registers(0, 32);
        let mut text = format!("{OPEN}wgmma.fence.sync.aligned;\n");
        for step in 0..self.owned() / 16 {
            let add = if step == 0 { "p0" } else { "p1" };
            text += &format!(
                "add.s64 a, %32, {}; add.s64 b, %33, {};\n\
                 wgmma.mma_async.sync.aligned.m64n64k16.f32.{element}.{element} {results}, a, b, {add}, 1, 1, 0, 1;\n",
                (step / 4 * self.walked * 128 + step % 4 * 32) / 16,
                step * 16 * 128 / 16,
            );
        }
        text + CLOSE
    }

    /// The sums, which come as operands, as results.
    fn kept(&self, sums: usize) -> String {
        (0..self.summed())
            .map(|i| format!("mov.f32 %{i}, %{};\n", sums + i))
            .collect()
    }

    /// Products of owned rows with walked ones.
    fn by_rows(&self, results: &str, dim: usize, owned: &str, walked: &str) -> String {
        let (n, element) = (self.walked, self.element());
        let names: Vec<String> = (0..n / 2).map(|i| format!("{results}{i}")).collect();
        let names = names.join(",");
        let mut text = String::new();
        for step in 0..dim.div_ceil(16) {
            let at = |panel: usize| ((step / 4) * panel + (step % 4) * 32) / 16;
            let add = if step == 0 { "p0" } else { "p1" };
            text += &format!(
                "add.s64 a, {owned}, {}; add.s64 b, {walked}, {};\n\
                 wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {{{names}}}, a, b, {add}, 1, 1, 0, 0;\n",
                at(self.owned() * 128),
                at(n * 128),
            );
        }
        text
    }

    /// Walked rows by weights, added to the results from `first` on.
    fn weighted(&self, weights: &str, first: usize, dim: usize, walked: &str) -> String {
        let element = self.element();
        let results = registers(first, dim / 2);
        let mut text = String::new();
        for step in 0..self.walked / 16 {
            let names: Vec<String> = (4 * step..4 * step + 4)
                .map(|i| format!("{weights}{i}"))
                .collect();
            text += &format!(
                "add.s64 b, {walked}, {};\n\
                 wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.{element}.{element} {results}, {{{}}}, b, p1, 1, 1, 1;\n",
                step * 16 * 128 / 16,
                names.join(","),
            );
        }
        text
    }

    /// Sixteen queries of a plane's sixteen keys at a time, turned over.
    fn stores(&self, scores: &str, address: &str) -> String {
        (0..self.walked / 16)
            .map(|i| {
                let names: Vec<String> =
                    (4 * i..4 * i + 4).map(|i| format!("{scores}{i}")).collect();
                format!(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{address}+{}], {{{}}};\n",
                    i * 16 * 128,
                    names.join(",")
                )
            })
            .collect()
    }
}

/// Where a step's tiles lie, and its statistics; `store` is where `dS` goes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct StepPlaces {
    pub key: u32,
    pub value: u32,
    pub query: u32,
    pub gradient: u32,
    pub statistics: u32,
    pub store: u32,
}

/// A step of [`GradientBlueprint::step`]; panels of walked rows are `panel` bytes.
#[cube]
pub(crate) fn step_product<G: Size>(
    sums: Vector<f32, G>,
    at: StepPlaces,
    scale: f32,
    errands: u32,
    #[comptime] panel: usize,
    #[comptime] body: String,
) -> Vector<f32, G> {
    let key = row_descriptor(at.key);
    let value = row_descriptor(at.value);
    let query_rows = row_descriptor(at.query);
    let query_columns = column_descriptor(at.query, panel);
    let gradient_rows = row_descriptor(at.gradient);
    let gradient_columns = column_descriptor(at.gradient, panel);
    let errands = by_value::<u32>(errands);
    let c = by_value::<Vector<f32, G>>(sums);
    let statistics = by_value::<u32>(at.statistics);
    let store = by_value::<u32>(at.store);
    let scale = by_value::<f32>(scale);
    let sum: Vector<f32, G>;
    gpu_asm!(
        "/* {sum} {c} {key} {value} {query_rows} {query_columns} {gradient_rows} {gradient_columns} {statistics} {store} {scale} {errands} */ {body}",
        c = in(_) c,
        key = in(_) key,
        value = in(_) value,
        query_rows = in(_) query_rows,
        query_columns = in(_) query_columns,
        gradient_rows = in(_) gradient_rows,
        gradient_columns = in(_) gradient_columns,
        statistics = in(_) statistics,
        store = in(_) store,
        scale = in(_) scale,
        errands = in(_) errands,
        sum = out(_) sum
    );
    sum
}

/// Writes `dS` as the query gradient's product reads it.
#[cube]
pub(crate) fn store_scores<P: Size>(
    scores: Vector<u32, P>,
    address: u32,
    #[comptime] body: String,
) {
    let scores = by_value::<Vector<u32, P>>(scores);
    let address = by_value::<u32>(address);
    gpu_asm!("/* {scores} {address} */ {body}", scores = in(_) scores, address = in(_) address);
}

/// Where a unit's first row of [`store_scores`] goes, from the start of a stage of `dS`.
///
/// A unit's sixteen bytes are eight keys of a query: lane `l` addresses matrix `l / 8` of four (the
/// plane's first or last eight keys, of eight queries or the next eight), query `l % 8` of it. Chunks of
/// a row are swizzled by the row.
#[cube]
pub(crate) fn score_place(unit: u32, #[comptime] walked: usize) -> u32 {
    let lane = unit % 32;
    let query = lane / 16 * 8 + lane % 8;
    let chunk = (unit % 128 / 32 * 2 + lane / 8 % 2) ^ (lane % 8);
    unit / 128 * comptime!((walked * 128) as u32) + query * 128 + chunk * 16
}

/// Writes a warpgroup's tile of the query gradient, four registers of every unit after the other.
#[cube]
pub(crate) fn store_tile(tile: Vector<f32, Const<32>>, address: u32) {
    let tile = by_value::<Vector<f32, Const<32>>>(tile);
    let address = by_value::<u32>(address);
    gpu_asm!(
        "/* {tile} {address} */",
        "st.shared.v4.f32 [%32], {{%0, %1, %2, %3}};",
        "st.shared.v4.f32 [%32+2048], {{%4, %5, %6, %7}};",
        "st.shared.v4.f32 [%32+4096], {{%8, %9, %10, %11}};",
        "st.shared.v4.f32 [%32+6144], {{%12, %13, %14, %15}};",
        "st.shared.v4.f32 [%32+8192], {{%16, %17, %18, %19}};",
        "st.shared.v4.f32 [%32+10240], {{%20, %21, %22, %23}};",
        "st.shared.v4.f32 [%32+12288], {{%24, %25, %26, %27}};",
        "st.shared.v4.f32 [%32+14336], {{%28, %29, %30, %31}};",
        tile = in(_) tile,
        address = in(_) address
    );
}
