//! Stages of shared memory that tensor copies fill and planes are done with, in the gradient kernels.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::count_up;
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// The first of a unit's two rows within its warpgroup; the other is eight on.
#[cube]
pub(crate) fn row_of(unit: u32) -> i32 {
    ((unit % 128) / 32 * 16 + unit % 32 / 4) as i32
}

/// Asks for the rows from `row` on of a head, to `tiles[at..]`; past the sequence's end they are 0.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_stage<E: Float>(
    full: &Barrier,
    operand: &TensorMap<E, Tiled>,
    tiles: &mut Shared<[E]>,
    at: usize,
    batch: i32,
    head: i32,
    row: i32,
    #[comptime] panels: usize,
    #[comptime] panel: usize,
) {
    full.arrive_and_expect_tx(1, comptime!((panels * panel * 2) as u32));
    load_rows(full, operand, tiles, at, batch, head, row, panels, panel);
}

/// Asks for the rows from `row` on of a head, to `tiles[at..]`; past the sequence's end they are 0.
/// Whoever waits has to be told of `panels * panel` elements.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_rows<E: Float>(
    full: &Barrier,
    operand: &TensorMap<E, Tiled>,
    tiles: &mut Shared<[E]>,
    at: usize,
    batch: i32,
    head: i32,
    row: i32,
    #[comptime] panels: usize,
    #[comptime] panel: usize,
) {
    #[unroll]
    for p in 0..panels {
        full.tma_load_4d(
            operand,
            &mut tiles[at + comptime!(p * panel)..at + comptime!((p + 1) * panel)],
            batch,
            head,
            row,
            comptime!(p as i32 * 64),
        );
    }
}

/// Asks for the rows from `row` on of a head that a cube owns, of two operands.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_owned<E: Float>(
    full: &Barrier,
    first: &TensorMap<E, Tiled>,
    second: &TensorMap<E, Tiled>,
    first_tile: &mut Shared<[E]>,
    second_tile: &mut Shared<[E]>,
    batch: usize,
    head: usize,
    row: i32,
    #[comptime] blueprint: GradientBlueprint,
) {
    let first_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let second_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let panel = comptime!(blueprint.owned() * 64);
    full.arrive_and_expect_tx(
        1,
        comptime!(((first_panels + second_panels) * panel * 2) as u32),
    );
    let (batch, head) = (batch as i32, head as i32);
    load_rows(
        full,
        first,
        first_tile,
        0usize,
        batch,
        head,
        row,
        first_panels,
        panel,
    );
    load_rows(
        full,
        second,
        second_tile,
        0usize,
        batch,
        head,
        row,
        second_panels,
        panel,
    );
}

/// A block of the queries of a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Walked {
    pub batch: usize,
    pub head: u32,
    pub block: u32,
}

/// The plane is done with a stage. Whether it is the last of the cube's planes, and this lane has to
/// refill the stage; nobody waits.
#[cube]
pub(crate) fn retire(counter: u32, lane: u32, more: bool, #[comptime] last_plane: u32) -> bool {
    // Every lane's reads are back.
    sync_plane();
    let mut last = false;
    if lane == 0 && more {
        last = count_up(counter, last_plane) == last_plane;
    }
    last
}

/// The plane is done with a stage; the last of the cube's planes refills it. Nobody waits.
///
/// Kernels evaluate both sides of `&&`: the count stands in an `if` of its own.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn release<E: Float>(
    counter: u32,
    lane: u32,
    more: bool,
    #[comptime] last_plane: u32,
    stage: u32,
    full_0: &Shared<Barrier>,
    full_1: &Shared<Barrier>,
    operand: &TensorMap<E, Tiled>,
    tiles: &mut Shared<[E]>,
    batch: i32,
    head: i32,
    row: i32,
    #[comptime] panels: usize,
    #[comptime] panel: usize,
) {
    // Every lane's reads are back.
    sync_plane();
    if lane == 0 && more {
        if count_up(counter, last_plane) == last_plane {
            if stage == 0 {
                load_stage(
                    full_0, operand, tiles, 0usize, batch, head, row, panels, panel,
                );
            } else {
                load_stage(
                    full_1,
                    operand,
                    tiles,
                    comptime!(panels * panel),
                    batch,
                    head,
                    row,
                    panels,
                    panel,
                );
            }
        }
    }
    sync_plane();
}

/// Waits for the copies to one of two stages.
#[cube]
pub(crate) fn wait_stage(
    stage: u32,
    phase: u32,
    full_0: &Shared<Barrier>,
    full_1: &Shared<Barrier>,
) {
    if stage == 0 {
        full_0.wait_parity(phase);
    } else {
        full_1.wait_parity(phase);
    }
}
