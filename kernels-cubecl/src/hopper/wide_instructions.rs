//! Instructions of the wide gradients: products with part of the owned operand in registers, four
//! numbers at once through shared memory, and named barriers that not everyone waits at.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::{by_value, load_shared, unit_again};
use super::pipeline::row_of;
use super::products::{registers, row_descriptor};
use cubecl::prelude::*;

/// Scores of 64 owned rows with a block of walked ones over `dim` features, as text: operands are the
/// two descriptors, then the registers of the owned rows' first [`GradientBlueprint::held`] steps.
///
/// Only the low half of a descriptor changes from step to step.
pub(crate) fn held_scores(blueprint: &GradientBlueprint, dim: usize) -> String {
    let (n, element, length) = (
        blueprint.walked,
        blueprint.element(),
        blueprint.score_registers(),
    );
    let results = registers(0, n / 2);
    let mut text = format!(
        "{{ .reg .pred p0, p1; .reg .b64 a, b; .reg .b32 al, ah, bl, bh, l;\n\
         setp.ne.b32 p0, 0, 0; setp.eq.b32 p1, 0, 0;\n\
         mov.b64 {{al, ah}}, %{length}; mov.b64 {{bl, bh}}, %{};\n\
         wgmma.fence.sync.aligned;\n",
        length + 1
    );
    // 16 features a step, four steps a panel. Features past the last were filled with zeros.
    for step in 0..dim.div_ceil(16) {
        let at = |rows: usize| (step / 4 * rows * 128 + step % 4 * 32) / 16;
        text += &format!("add.u32 l, bl, {}; mov.b64 b, {{l, bh}};\n", at(n));
        let (owned, transposed) = if step < blueprint.held() {
            (registers(length + 2 + 4 * step, 4), "0")
        } else {
            let next = at(blueprint.owned());
            text += &format!("add.u32 l, al, {next}; mov.b64 a, {{l, ah}};\n");
            ("a".to_string(), "0, 0")
        };
        let add = if step == 0 { "p0" } else { "p1" };
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {results}, {owned}, b, {add}, 1, 1, {transposed};\n",
        );
    }
    text + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
}

/// The product of [`held_scores`] of the rows at two addresses.
#[cube]
pub(crate) fn held_product<H: Size, S: Size>(
    owned: u32,
    walked: u32,
    held: Vector<u32, H>,
    #[comptime] body: String,
) -> Vector<f32, S> {
    let held = by_value::<Vector<u32, H>>(held);
    let a = row_descriptor(owned);
    let b = row_descriptor(walked);
    let scores: Vector<f32, S>;
    gpu_asm!("/* {scores} {a} {b} {held} */ {body}", a = in(_) a, b = in(_) b, held = in(_) held, scores = out(_) scores);
    scores
}

/// What a unit holds of 64 rows of `dim` features at an address, as a product's operand.
#[cube]
pub(crate) fn held_rows<H: Size>(
    address: u32,
    #[comptime] dim: usize,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, H> {
    let unit = unit_again();
    let row = row_of(unit) as u32;
    let mut fragments = Vector::<u32, H>::new(0u32);
    #[unroll]
    for step in 0..comptime!(usize::min(blueprint.held(), dim.div_ceil(16))) {
        #[unroll]
        for n in 0..4usize {
            // Rows eight apart, then features; 16-byte chunks of a row are swizzled by the row.
            let at = address + comptime!((step / 4 * 8192 + n % 2 * 1024) as u32) + row * 128;
            let chunk = comptime!((step % 4 * 2 + n / 2) as u32) ^ (row % 8);
            fragments.insert(
                comptime!(4 * step + n),
                load_shared(at + chunk * 16 + (unit % 4) * 4),
            );
        }
    }
    fragments
}

/// Four numbers to shared memory, at a multiple of 16 bytes.
#[cube]
pub(crate) fn store_shared_quad(address: u32, numbers: Vector<f32, Const<4>>) {
    let a = by_value::<u32>(address);
    let x = by_value::<Vector<f32, Const<4>>>(numbers);
    gpu_asm!("/* {a} {x} */ st.shared.v4.f32 [%0], {{%1, %2, %3, %4}};", a = in(_) a, x = in(_) x);
}

/// Four neighbouring numbers in shared memory, at a multiple of 16 bytes.
#[cube]
pub(crate) fn load_shared_quad(address: u32) -> Vector<f32, Const<4>> {
    let a = by_value::<u32>(address);
    let y: Vector<f32, Const<4>>;
    gpu_asm!("/* {y} {a} */ ld.shared.v4.f32 {{%0, %1, %2, %3}}, [%4];", a = in(_) a, y = out(_) y);
    y
}

/// Lets those of `units` go on that wait at named barrier `id`, once all the others came.
#[cube]
pub(crate) fn named_arrive(#[comptime] id: u32, #[comptime] units: u32) {
    gpu_asm!("barrier.cta.arrive.aligned {id}, {units};");
}

/// Waits at named barrier `id` until all of `units` came.
#[cube]
pub(crate) fn named_wait(#[comptime] id: u32, #[comptime] units: u32) {
    gpu_asm!("barrier.cta.sync.aligned {id}, {units};");
}
