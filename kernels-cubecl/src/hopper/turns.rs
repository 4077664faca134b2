//! Tiles of the query gradient on their way from shared memory to the sums that every cube of a head
//! adds to, and the counters that tell a tile's turn ([`crate::turns`]).

use super::instructions::{by_value, load_shared_wide, store_shared};
use cubecl::prelude::*;

/// Adds the 64 by 64 floats at `tile` in shared memory to those `at` bytes from `sums` on.
#[cube]
pub(crate) fn add_tile(sums: *const f32, at: u64, tile: u32) {
    let at = by_value::<u64>(at);
    let tile = by_value::<u32>(tile);
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {sums}; add.u64 g, g, {at};",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [g], [{tile}], 16384;",
        "cp.async.bulk.commit_group; }}",
        sums = in(_) sums, at = in(_) at, tile = in(_) tile
    );
}

/// Waits until the tiles have been read.
#[cube]
pub(crate) fn tiles_read() {
    gpu_asm!("cp.async.bulk.wait_group.read 0;");
}

/// Waits until the tiles have been added.
#[cube]
pub(crate) fn tiles_added() {
    gpu_asm!("cp.async.bulk.wait_group 0;");
}

/// The next number, from the counter `at` bytes from `turns` on.
#[cube]
pub(crate) fn draw_number(turns: *const u32, at: u64) -> u32 {
    let at = by_value::<u64>(at);
    let y: u32;
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {turns}; add.u64 g, g, {at};",
        "atom.relaxed.gpu.global.add.u32 {y}, [g], 1; }}",
        turns = in(_) turns, at = in(_) at, y = out(_) y
    );
    y
}

/// Where the counter `at` bytes from `turns` on lies.
#[cube]
pub(crate) fn counter(turns: *const u32, at: u64) -> u64 {
    let at = by_value::<u64>(at);
    let y: u64;
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {turns}; add.u64 {y}, g, {at}; }}",
        turns = in(_) turns, at = in(_) at, y = out(_) y, options(pure, nomem)
    );
    y
}

/// Waits until the counter is `turn`; additions that come after see those before it.
#[cube]
pub(crate) fn wait_turn(counter: u64, turn: u32) {
    let counter = by_value::<u64>(counter);
    let turn = by_value::<u32>(turn);
    gpu_asm!(
        "{{ .reg .u32 v; .reg .pred p;",
        "AGAIN: ld.acquire.gpu.global.u32 v, [{counter}]; setp.ne.u32 p, v, {turn}; @p bra AGAIN;",
        "fence.proxy.async.global; }}",
        counter = in(_) counter, turn = in(_) turn
    );
}

/// Lets the next add, after [`tiles_added`].
#[cube]
pub(crate) fn pass_turn(counter: u64) {
    let counter = by_value::<u64>(counter);
    gpu_asm!("red.release.gpu.global.add.u32 [{counter}], 1;", counter = in(_) counter);
}

/// What a warpgroup's unit 0 and unit 32 do between steps: unit 0 lets the next add once its own tile is
/// in, unit 32 asks whether it is its turn, though not here.
///
/// `errands` addresses three numbers of 64 bits: the counter of the tile that was added last, or 0; that
/// of the next tile; and what it said.
#[cube]
pub(crate) fn run_errands(errands: u32, unit: u32) {
    if unit == 0 {
        tiles_added();
        let added = load_shared_wide(errands);
        if added != 0 {
            pass_turn(added);
        }
    }
    if unit == 32 {
        // No count is so high.
        store_shared(errands + 16, u32::MAX);
    }
}

/// The same as text, where the warpgroup waits for products anyway: both wait for memory far away. Unit
/// 32 does ask.
pub(super) fn errands_text(errands: &str) -> String {
    format!(
        ".reg .b32 t, v; .reg .b64 r; .reg .pred c;\n\
         mov.u32 t, %tid.x; and.b32 t, t, 127; mov.b64 r, 0;\n\
         setp.eq.u32 c, t, 0;\n\
         @c cp.async.bulk.wait_group 0;\n\
         @c ld.shared.u64 r, [{errands}];\n\
         setp.ne.u64 c, r, 0;\n\
         @c red.release.gpu.global.add.u32 [r], 1;\n\
         setp.eq.u32 c, t, 32;\n\
         @c ld.shared.u64 r, [{errands}+8];\n\
         @c ld.acquire.gpu.global.u32 v, [r];\n\
         @c fence.proxy.async.global;\n\
         @c st.shared.u32 [{errands}+16], v;\n"
    )
}
