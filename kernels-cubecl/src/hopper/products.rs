//! Warpgroup products as text, and as functions of CubeCL's values.
//!
//! A product is one asm block from fence to wait, because its accumulators are values in CubeCL and may
//! not be copied while the product runs. Registers of a vector are `%0..`, results before operands; a
//! vector's length is a power of two and the product uses its first registers.

use super::instructions::by_value;
use cubecl::prelude::*;

/// A range of the registers of an asm block, as PTX writes it.
pub(super) fn registers(from: usize, count: usize) -> String {
    let names: Vec<String> = (from..from + count).map(|i| format!("%{i}")).collect();
    format!("{{{}}}", names.join(","))
}

/// A tile in shared memory as the product's descriptors step through it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Products {
    /// `bf16` or `f16`.
    pub element: &'static str,
    /// Keys of a block.
    pub block_kv: usize,
    /// Features of query and key.
    pub head_dim: usize,
    /// Features of the value.
    pub value_dim: usize,
    /// Bytes of the query's 64 feature wide panels.
    pub query_panel: usize,
    /// Whether the scores are those of the negated query.
    pub negated: bool,
}

pub(super) const OPEN: &str =
    "{ .reg .pred p0, p1; .reg .b64 a, b; setp.ne.b32 p0, 0, 0; setp.eq.b32 p1, 0, 0;\n";
pub(super) const CLOSE: &str =
    "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }";

impl Products {
    /// `S = Q K^T` of 64 queries; operands are the two descriptors, after `length` results.
    pub fn scores(&self, length: usize) -> String {
        let mut text = format!("{OPEN}wgmma.fence.sync.aligned;\n");
        text += &self.score_products(0, length);
        text + CLOSE
    }

    /// `O = C + P V` of 64 queries; operands are C, P and V's descriptor, after `length` results.
    pub fn values(&self, length: usize, probabilities: usize) -> String {
        let mut text = OPEN.to_string();
        text += &self.kept(length);
        text += "wgmma.fence.sync.aligned;\n";
        text += &self.value_products(2 * length, 2 * length + probabilities);
        text + CLOSE
    }

    /// [`scores`](Self::scores) when it is the warpgroup's turn, an operand more; then it is the other's.
    pub fn scores_in_turn(&self, length: usize) -> String {
        let turn = length + 2;
        let mut text = format!("{OPEN}{}wgmma.fence.sync.aligned;\n", await_turn(turn));
        text += &self.score_products(0, length);
        text += &end_turn(turn);
        text + CLOSE
    }

    /// [`values`](Self::values) in the same way.
    pub fn values_in_turn(&self, length: usize, probabilities: usize) -> String {
        let operands = 2 * length + probabilities;
        let mut text = OPEN.to_string();
        text += &self.kept(length);
        text += &format!("{}wgmma.fence.sync.aligned;\n", await_turn(operands + 1));
        text += &self.value_products(2 * length, operands);
        text += &end_turn(operands + 1);
        text + CLOSE
    }

    /// Both in one turn: results are [`JOINED`], O and behind it S; operands are C, of `length` registers,
    /// P, the descriptors of Q, K and V, and the turn.
    pub fn joined(&self, length: usize, probabilities: usize) -> String {
        let weights = JOINED + length;
        let descriptors = weights + probabilities;
        let turn = descriptors + 3;
        let mut text = OPEN.to_string();
        text += &self.kept(JOINED);
        text += &format!("{}wgmma.fence.sync.aligned;\n", await_turn(turn));
        text += &self.score_products(self.value_dim / 2, descriptors);
        text += &self.value_products(weights, descriptors + 2);
        text += &end_turn(turn);
        text + CLOSE
    }

    /// C, behind `length` results, as results.
    fn kept(&self, length: usize) -> String {
        (0..self.value_dim / 2)
            .map(|i| format!("mov.f32 %{i}, %{};\n", length + i))
            .collect()
    }

    /// Products of the queries and keys whose descriptors are the operands from `descriptors` on, to the
    /// registers from `first` on.
    fn score_products(&self, first: usize, descriptors: usize) -> String {
        let (n, element) = (self.block_kv, self.element);
        let results = registers(first, n / 2);
        let key_panel = n * 128;
        let sign = if self.negated { -1 } else { 1 };
        // Only the low half of a descriptor changes from step to step.
        let mut text = format!(
            "{{ .reg .b32 l, q, k, qh, kh; mov.b64 {{q, qh}}, %{descriptors}; mov.b64 {{k, kh}}, %{};\n",
            descriptors + 1
        );
        // 16 features a step, four steps a panel. Features past the last were filled with zeros.
        for step in 0..self.head_dim.div_ceil(16) {
            let at = |panel: usize| ((step / 4) * panel + (step % 4) * 32) / 16;
            let add = if step == 0 { "p0" } else { "p1" };
            text += &format!(
                "add.s32 l, q, {}; mov.b64 a, {{l, qh}}; add.s32 l, k, {}; mov.b64 b, {{l, kh}};\n\
                 wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {results}, a, b, {add}, {sign}, 1, 0, 0;\n",
                at(self.query_panel),
                at(key_panel),
            );
        }
        text + "}\n"
    }

    /// Products of the probabilities from operand `weights` on and the values with that descriptor, added
    /// to the first registers.
    fn value_products(&self, weights: usize, descriptor: usize) -> String {
        let (n, element) = (self.value_dim, self.element);
        let results = registers(0, n / 2);
        let mut text = format!("{{ .reg .b32 l, v, vh; mov.b64 {{v, vh}}, %{descriptor};\n");
        for step in 0..self.block_kv / 16 {
            let p = registers(weights + 4 * step, 4);
            text += &format!(
                "add.s32 l, v, {}; mov.b64 b, {{l, vh}};\n\
                 wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {results}, {p}, b, p1, 1, 1, 1;\n",
                step * 16 * 128 / 16,
            );
        }
        text + "}\n"
    }
}

/// Waits for the turn of a warpgroup, which is a named barrier; those of two are [`FIRST_TURN`] and the
/// next.
fn await_turn(turn: usize) -> String {
    format!("barrier.cta.sync.aligned %{turn}, 256;\n")
}

/// The other warpgroup's turn.
fn end_turn(turn: usize) -> String {
    format!(
        "{{ .reg .b32 t; sub.s32 t, {}, %{turn}; barrier.cta.arrive.aligned t, 256; }}\n",
        2 * FIRST_TURN + 1
    )
}

/// The named barrier that is the first warpgroup's turn.
pub(crate) const FIRST_TURN: u32 = 2;

/// Scores of a warpgroup's 64 queries with a block of keys.
#[cube]
pub(crate) fn dot_product<S: Size>(
    query: u64,
    key: u64,
    #[comptime] body: String,
) -> Vector<f32, S> {
    let scores: Vector<f32, S>;
    gpu_asm!("/* {scores} {query} {key} */ {body}", query = in(_) query, key = in(_) key, scores = out(_) scores);
    scores
}

/// A warpgroup's output with the values of a block of keys added.
#[cube]
pub(crate) fn value_product<P: Size, O: Size>(
    output: Vector<f32, O>,
    probabilities: Vector<u32, P>,
    value: u64,
    #[comptime] body: String,
) -> Vector<f32, O> {
    let c = by_value::<Vector<f32, O>>(output);
    let p = by_value::<Vector<u32, P>>(probabilities);
    let sum: Vector<f32, O>;
    gpu_asm!("/* {sum} {c} {p} {value} */ {body}", c = in(_) c, p = in(_) p, value = in(_) value, sum = out(_) sum);
    sum
}

/// [`dot_product`] in a warpgroup's turn.
#[cube]
pub(crate) fn dot_product_in_turn<S: Size>(
    query: u64,
    key: u64,
    turn: u32,
    #[comptime] body: String,
) -> Vector<f32, S> {
    let turn = by_value::<u32>(turn);
    let scores: Vector<f32, S>;
    gpu_asm!("/* {scores} {query} {key} {turn} */ {body}", query = in(_) query, key = in(_) key, turn = in(_) turn, scores = out(_) scores);
    scores
}

/// [`value_product`] in a warpgroup's turn.
#[cube]
pub(crate) fn value_product_in_turn<P: Size, O: Size>(
    output: Vector<f32, O>,
    probabilities: Vector<u32, P>,
    value: u64,
    turn: u32,
    #[comptime] body: String,
) -> Vector<f32, O> {
    let c = by_value::<Vector<f32, O>>(output);
    let p = by_value::<Vector<u32, P>>(probabilities);
    let turn = by_value::<u32>(turn);
    let sum: Vector<f32, O>;
    gpu_asm!("/* {sum} {c} {p} {value} {turn} */ {body}", c = in(_) c, p = in(_) p, value = in(_) value, turn = in(_) turn, sum = out(_) sum);
    sum
}

/// Registers of the results of [`joined_product`].
pub(crate) const JOINED: usize = 256;

/// Scores with a block of keys, behind the output with the values of another block added, in one turn.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn joined_product<P: Size, O: Size>(
    output: Vector<f32, O>,
    probabilities: Vector<u32, P>,
    query: u64,
    key: u64,
    value: u64,
    turn: u32,
    #[comptime] body: String,
) -> Vector<f32, Const<JOINED>> {
    let c = by_value::<Vector<f32, O>>(output);
    let p = by_value::<Vector<u32, P>>(probabilities);
    let turn = by_value::<u32>(turn);
    let both: Vector<f32, Const<JOINED>>;
    gpu_asm!(
        "/* {both} {c} {p} {query} {key} {value} {turn} */ {body}",
        c = in(_) c,
        p = in(_) p,
        query = in(_) query,
        key = in(_) key,
        value = in(_) value,
        turn = in(_) turn,
        both = out(_) both
    );
    both
}

/// Passes a warpgroup's turn by.
#[cube]
pub(crate) fn pass_turn(turn: u32) {
    let turn = by_value::<u32>(turn);
    let last = comptime!(2 * FIRST_TURN + 1);
    gpu_asm!(
        "barrier.cta.sync.aligned {turn}, 256; {{ .reg .b32 t; sub.s32 t, {last}, {turn}; barrier.cta.arrive.aligned t, 256; }}",
        turn = in(_) turn
    );
}

/// Gives the first warpgroup the first turn, in the name of the second.
#[cube]
pub(crate) fn give_first_turn() {
    let first = comptime!(FIRST_TURN);
    gpu_asm!("barrier.cta.arrive.aligned {first}, 256;");
}

/// Descriptor of a tile whose rows are 64 features wide, swizzled over 128 bytes; rows are the product's
/// rows or columns.
#[cube]
pub(crate) fn row_descriptor(address: u32) -> u64 {
    (1u64 << 62) | (64u64 << 32) | (1u64 << 16) | u64::cast_from((address & 0x3FFFF) >> 4)
}

/// Descriptor of such a tile whose features are the product's columns, in panels of `panel` bytes.
#[cube]
pub(crate) fn column_descriptor(address: u32, #[comptime] panel: usize) -> u64 {
    let stride = comptime!((panel as u64) >> 4);
    (1u64 << 62) | (64u64 << 32) | (stride << 16) | u64::cast_from((address & 0x3FFFF) >> 4)
}
