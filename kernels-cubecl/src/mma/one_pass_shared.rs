//! What a warp of the pass for all gradients computes of weights that others have put into shared memory: the
//! other warps' part of its sums, and its part of the query gradient.

use super::config::Config;
use super::fragment::{Accumulator, Chunk, Place, Registers, further, load_block, zeros};
use super::one_pass_blueprint::OnePass;
use super::one_pass_tiles::{ROW_TILES, Slots, Step, Tiles, by_key, key_weight, work};
use super::products::add_columns;
use super::weights::{Steps, add_row_by_row};
use cubecl::prelude::*;

/// What the queries of other warps of the same keys add to the warp's sums.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_other_parts<E: Float>(
    tiles: &Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    step: Step,
    slots: Slots,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let work = work(tiles, one_pass, config);
    let part = comptime!(one_pass.part());
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    let key_columns = comptime!(config.head_dim / one_pass.sides / 8);
    let value_columns = comptime!(config.value_dim / one_pass.sides / 8);
    #[unroll]
    for n in 1..one_pass.sides {
        let row = (work.side + n) % one_pass.sides * part;
        let query_row = slots.query + row * key_pitch;
        let gradient_row = slots.gradient + row * value_pitch;
        if step.careful {
            add_row_by_row(
                value_sums,
                &tiles.value_weights,
                key_weight(work.row, row, weight_pitch),
                &tiles.gradients,
                gradient_row + work.value_chunk,
                comptime!(by_key(weight_pitch)),
                part,
                config.value_dim,
                ROW_TILES,
                value_columns,
            );
            add_row_by_row(
                key_sums,
                &tiles.score_weights,
                key_weight(work.row, row, weight_pitch),
                &tiles.queries,
                query_row + work.key_chunk,
                comptime!(by_key(weight_pitch)),
                part,
                config.head_dim,
                ROW_TILES,
                key_columns,
            );
        } else {
            add_stored::<E>(
                value_sums,
                &tiles.value_weights,
                further(work.probability, row / 8),
                &tiles.gradients,
                further(work.gradient_sum, gradient_row),
                part,
                value_columns,
                value_pitch,
                weight_pitch,
                config,
            );
            add_stored::<E>(
                key_sums,
                &tiles.score_weights,
                further(work.score, row / 8),
                &tiles.queries,
                further(work.query_sum, query_row),
                part,
                key_columns,
                key_pitch,
                weight_pitch,
                config,
            );
        }
    }
}

/// The warp's tile of the query gradient that the cube's keys add.
#[cube]
pub(crate) fn query_tile<E: Float>(
    tiles: &Tiles<E>,
    step: Step,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) -> Sequence<Accumulator> {
    let work = work(tiles, one_pass, config);
    let instructions = comptime!(config.instructions());
    let block_kv = comptime!(one_pass.owned());
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    let (row_tiles, features) = comptime!(one_pass.query_tile(config.head_dim));
    let columns = comptime!(features / 8);
    let mut tile = zeros(comptime!(row_tiles * columns));
    if step.careful {
        add_row_by_row(
            &mut tile,
            &tiles.score_weights,
            work.tile_query + UNIT_POS_PLANE as usize / 4,
            &tiles.keys,
            work.tile_chunk,
            comptime!(Steps {
                row: 1,
                summed: 8 * weight_pitch
            }),
            block_kv,
            config.head_dim,
            row_tiles,
            columns,
        );
    } else {
        #[unroll]
        for k in 0..comptime!(block_kv / 16) {
            let mut rows = Sequence::<Registers>::new();
            #[unroll]
            for r in 0..row_tiles {
                rows.push(load_block(
                    &tiles.score_weights,
                    work.tile_score,
                    comptime!(16 * k * weight_pitch + 2 * r),
                    true,
                    instructions,
                ));
            }
            add_columns::<E>(
                &mut tile,
                &rows,
                &tiles.keys,
                work.tile_key,
                comptime!(16 * k * key_pitch),
                row_tiles,
                columns,
                instructions,
            );
        }
    }
    tile
}

/// Adds the products of weights in shared memory.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_stored<E: Float>(
    sums: &mut Sequence<Accumulator>,
    weights: &Shared<[Chunk<E>]>,
    place: Place,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] part: usize,
    #[comptime] columns: usize,
    #[comptime] pitch: usize,
    #[comptime] weight_pitch: usize,
    #[comptime] config: Config,
) {
    let instructions = comptime!(config.instructions());
    #[unroll]
    for k in 0..comptime!(part / 16) {
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..ROW_TILES {
            rows.push(load_block(
                weights,
                place,
                comptime!(16 * r * weight_pitch + 2 * k),
                false,
                instructions,
            ));
        }
        add_columns::<E>(
            sums,
            &rows,
            b,
            b_place,
            comptime!(16 * k * pitch),
            ROW_TILES,
            columns,
            instructions,
        );
    }
}
