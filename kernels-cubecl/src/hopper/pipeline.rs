//! Stages of shared memory that tensor copies fill and planes are done with.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::count_up;
use crate::schedule::Geometry;
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

/// Asks for a block of queries of a head, with output gradients and statistics, to `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_queries<E: Float>(
    full: &Shared<Barrier>,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    query_tiles: &mut Shared<[E]>,
    gradient_tiles: &mut Shared<[E]>,
    statistic_tiles: &mut Shared<[f32]>,
    #[comptime] stage: usize,
    batch: usize,
    head: u32,
    block: u32,
    geometry: &Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let panel = comptime!(block_q * 64);
    let row = (block * comptime!(block_q as u32)) as i32;
    full.arrive_and_expect_tx(
        1,
        comptime!(((key_panels + value_panels) * panel * 2 + 3 * block_q * 4) as u32),
    );
    load_rows(
        full,
        query,
        query_tiles,
        comptime!(stage * key_panels * panel).runtime(),
        batch as i32,
        head as i32,
        row,
        key_panels,
        panel,
    );
    full.tma_load_3d(
        statistics,
        &mut statistic_tiles[comptime!(stage * blueprint.statistics())
            ..comptime!((stage + 1) * blueprint.statistics())],
        (batch * geometry.heads) as i32 + head as i32,
        0i32,
        row,
    );
    load_rows(
        full,
        output_gradient,
        gradient_tiles,
        comptime!(stage * value_panels * panel).runtime(),
        batch as i32,
        head as i32,
        row,
        value_panels,
        panel,
    );
}
