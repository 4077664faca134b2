//! One block of queries in the pass that computes all gradients.

use super::blueprint::Config;
use super::fragment::{
    Accumulator, Chunk, Instructions, Place, Registers, along_columns, along_rows, along_sums,
    as_weights, dot_products, further, load_block, zeros,
};
use super::gradient::{Block, keep_dots, rebuild_probabilities, score_gradients};
use super::one_pass_blueprint::{KEYS, OnePass};
use super::one_pass_walk::step_again;
use super::softmax::Position;
use super::weights::{Steps, add_columns, add_row_by_row, along_weights, store_weights};
use crate::schedule::{Geometry, partly_visible};
use crate::unit::unit;
use cubecl::prelude::*;

/// Tiles of a warp's keys.
pub(crate) const ROW_TILES: usize = KEYS / 16;

/// Operands of a cube in shared memory.
#[derive(CubeType)]
pub(crate) struct Tiles<E: Float> {
    pub keys: Shared<[Chunk<E>]>,
    pub values: Shared<[Chunk<E>]>,
    /// Stages of queries and of output gradients.
    pub queries: Shared<[Chunk<E>]>,
    pub gradients: Shared<[Chunk<E>]>,
    /// Gradients of scores, keys along the rows.
    pub score_weights: Shared<[Chunk<E>]>,
    /// Probabilities, where warps share keys.
    pub value_weights: Shared<[Chunk<E>]>,
    /// Stages of the queries' statistics.
    pub statistics: Shared<[f32]>,
}

/// The tiles, not filled yet.
#[cube]
pub(crate) fn tiles<E: Float>(
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) -> Tiles<E> {
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weights = comptime!(one_pass.owned() * config.pitch(one_pass.walked));
    let staged = comptime!(one_pass.stages * one_pass.walked);
    let shared = comptime!(if one_pass.shares_probabilities() {
        weights
    } else {
        1
    });
    Tiles::<E> {
        keys: Shared::new_aligned_slice(comptime!(one_pass.owned() * key_pitch), 16usize),
        values: Shared::new_aligned_slice(comptime!(one_pass.owned() * value_pitch), 16usize),
        queries: Shared::new_aligned_slice(comptime!(staged * key_pitch), 16usize),
        gradients: Shared::new_aligned_slice(comptime!(staged * value_pitch), 16usize),
        score_weights: Shared::new_aligned_slice(weights, 16usize),
        value_weights: Shared::new_aligned_slice(shared, 16usize),
        statistics: Shared::new_slice(comptime!(3 * staged)),
    }
}

/// What a warp works on, and its lanes' places in the tiles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Work {
    /// The warp's first key among the cube's.
    row: usize,
    /// Its number among the warps that own the same keys.
    side: usize,
    /// Its first query of a block.
    own_query: usize,
    /// Its first features of key and value sums, in chunks.
    key_chunk: usize,
    value_chunk: usize,
    /// Its first query of the query gradient, and its first feature in chunks.
    tile_query: usize,
    tile_chunk: usize,
    key: Place,
    value: Place,
    query: Place,
    gradient: Place,
    query_sum: Place,
    gradient_sum: Place,
    score_store: Place,
    value_store: Place,
    score: Place,
    probability: Place,
    tile_score: Place,
    tile_key: Place,
}

/// The work of the unit's warp, found out where it is needed: sums leave no registers for places that
/// stay the same.
#[cube]
fn work<E: Float>(
    tiles: &Tiles<E>,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) -> Work {
    let again = config.assembly;
    let sides = one_pass.sides;
    let wide = one_pass.wide;
    let instructions = comptime!(config.instructions());
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    let (query_row_tiles, query_features) = comptime!(one_pass.query_tile(config.head_dim));
    let warp_columns = comptime!(config.head_dim / query_features);

    let warp = unit(again) as usize / 32;
    let row = warp / sides * KEYS;
    let side = warp % sides;
    let own_query = side * comptime!(one_pass.part());
    let key_chunk = side * comptime!(config.head_dim / sides / 8);
    let value_chunk = side * comptime!(config.value_dim / sides / 8);
    let tile_query = warp / warp_columns * comptime!(16 * query_row_tiles);
    let tile_chunk = warp % warp_columns * comptime!(query_features / 8);
    let score_store = along_weights(
        &tiles.score_weights,
        row,
        weight_pitch,
        wide,
        again,
        instructions,
    );
    let value_store = along_weights(
        &tiles.value_weights,
        row,
        weight_pitch,
        wide,
        again,
        instructions,
    );
    let query = along_columns(&tiles.queries, key_pitch, again, instructions);
    let gradient = along_columns(&tiles.gradients, value_pitch, again, instructions);
    let query_sum = along_sums(&tiles.queries, key_pitch, again, instructions);
    let gradient_sum = along_sums(&tiles.gradients, value_pitch, again, instructions);
    let tile_score = along_columns(&tiles.score_weights, weight_pitch, again, instructions);
    let tile_key = along_sums(&tiles.keys, key_pitch, again, instructions);
    Work {
        row,
        side,
        own_query,
        key_chunk,
        value_chunk,
        tile_query,
        tile_chunk,
        key: along_rows(&tiles.keys, row, key_pitch, again, instructions),
        value: along_rows(&tiles.values, row, value_pitch, again, instructions),
        query: further(query, own_query * key_pitch),
        gradient: further(gradient, own_query * value_pitch),
        query_sum: further(query_sum, key_chunk),
        gradient_sum: further(gradient_sum, value_chunk),
        score_store: further(score_store, own_query / 8),
        value_store: further(value_store, own_query / 8),
        score: along_rows(&tiles.score_weights, row, weight_pitch, again, instructions),
        probability: along_rows(&tiles.value_weights, row, weight_pitch, again, instructions),
        tile_score: further(tile_score, tile_query / 8),
        tile_key: further(tile_key, tile_chunk),
    }
}

/// A block of queries, and where it lies in the tiles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Step {
    pub batch: usize,
    pub head: usize,
    pub first_query: i32,
    pub first_kv: i32,
    pub at_query: usize,
    pub at_gradient: usize,
    pub at_statistics: usize,
    /// The block's stage.
    pub stage: u32,
    /// Whether the block has scores that may be hidden.
    pub edge: bool,
    /// Whether sums are formed row by row.
    pub careful: bool,
}

/// The warp's part of the queries: their weights, which go to shared memory, and what they add to the
/// warp's sums. Not `tested`: code for blocks off the edge alone, which are never careful.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_own_part<E: Float, B: Float, M: Int>(
    tiles: &mut Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    step: Step,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<B>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let chunk = comptime!(one_pass.chunk());
    let column_tiles = comptime!(chunk / 8);
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    #[unroll]
    for c in 0..comptime!(one_pass.part() / chunk) {
        let work = work(&*tiles, one_pass, config);
        // Of the three distances none waits in a register while the chunk before is summed.
        let stage = step_again(step.stage, config.assembly) as usize;
        let step = Step {
            batch: step.batch,
            head: step.head,
            first_query: step.first_query,
            first_kv: step.first_kv,
            at_query: stage * comptime!(one_pass.walked * config.pitch(config.head_dim)),
            at_gradient: stage * comptime!(one_pass.walked * config.pitch(config.value_dim)),
            at_statistics: stage * comptime!(3 * one_pass.walked),
            stage: step.stage,
            edge: step.edge,
            careful: step.careful,
        };
        let first = comptime!(c * chunk);
        let mut hidden = false;
        if comptime!(tested) {
            let first_query = step.first_query + (work.own_query + first) as i32;
            let first_kv = step.first_kv + work.row as i32;
            hidden = !partly_visible(geometry, first_query, first_kv, chunk, KEYS, true);
            if hidden {
                let mut weights = Sequence::<Registers>::new();
                #[unroll]
                for _ in 0..comptime!(ROW_TILES * column_tiles / 2) {
                    weights.push(Registers::new(0u32));
                }
                store_weights(
                    &mut tiles.score_weights,
                    further(work.score_store, comptime!(first / 8)),
                    &weights,
                    ROW_TILES,
                    column_tiles,
                    weight_pitch,
                    one_pass.wide,
                    config.instructions(),
                );
                if comptime!(one_pass.shares_probabilities()) {
                    store_weights(
                        &mut tiles.value_weights,
                        further(work.value_store, comptime!(first / 8)),
                        &weights,
                        ROW_TILES,
                        column_tiles,
                        weight_pitch,
                        one_pass.wide,
                        config.instructions(),
                    );
                }
            }
        }
        if !hidden {
            add_chunk::<E, B, M>(
                tiles, key_sums, value_sums, work, step, mask, bias, geometry, first, tested,
                one_pass, config,
            );
        }
    }
}

/// The same for some queries of the part, `first` of them on.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn add_chunk<E: Float, B: Float, M: Int>(
    tiles: &mut Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    work: Work,
    step: Step,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<B>>,
    geometry: &Geometry,
    #[comptime] first: usize,
    #[comptime] tested: bool,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let instructions = comptime!(config.instructions());
    let wide = one_pass.wide;
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    let key_columns = comptime!(config.head_dim / one_pass.sides / 8);
    let value_columns = comptime!(config.value_dim / one_pass.sides / 8);
    let chunk = comptime!(one_pass.chunk());
    let column_tiles = comptime!(chunk / 8);
    let block_of_scores = comptime!(Block {
        row_tiles: ROW_TILES,
        column_tiles,
        transposed: true,
        staged: one_pass.walked,
    });
    let mut edge = step.edge;
    if comptime!(!tested) {
        edge = false.runtime();
    }
    let row = work.own_query + first;
    let at_row = step.at_statistics + row;
    let query_row = step.at_query + row * key_pitch;
    let gradient_row = step.at_gradient + row * value_pitch;
    let mut probabilities = dot_products::<E>(
        &tiles.keys,
        work.key,
        &tiles.queries,
        further(work.query, step.at_query + comptime!(first * key_pitch)),
        ROW_TILES,
        column_tiles,
        config.head_dim,
        instructions,
    );
    let dots = keep_dots(&probabilities, comptime!(ROW_TILES * column_tiles), config);
    let position = Position {
        batch: step.batch,
        head: step.head,
        first_query: step.first_query + row as i32,
        first_kv: step.first_kv + work.row as i32,
    };
    rebuild_probabilities::<B, M>(
        &mut probabilities,
        &tiles.statistics,
        at_row,
        position,
        mask,
        bias,
        geometry,
        edge,
        block_of_scores,
        config,
    );
    let weights = as_weights::<E>(&probabilities, ROW_TILES, column_tiles, instructions);
    if comptime!(one_pass.shares_probabilities()) {
        store_weights(
            &mut tiles.value_weights,
            further(work.value_store, comptime!(first / 8)),
            &weights,
            ROW_TILES,
            column_tiles,
            weight_pitch,
            wide,
            instructions,
        );
    }
    let mut row_by_row = false;
    if comptime!(tested) {
        row_by_row = step.careful;
        if row_by_row {
            // Where nobody else needs them they stand in the place of their gradients for a while.
            if comptime!(!one_pass.shares_probabilities()) {
                store_weights(
                    &mut tiles.score_weights,
                    further(work.score_store, comptime!(first / 8)),
                    &weights,
                    ROW_TILES,
                    column_tiles,
                    weight_pitch,
                    wide,
                    instructions,
                );
            }
            sync_plane();
            let lent = if comptime!(one_pass.shares_probabilities()) {
                &tiles.value_weights
            } else {
                &tiles.score_weights
            };
            add_row_by_row(
                value_sums,
                lent,
                key_weight(work.row, row, weight_pitch),
                &tiles.gradients,
                gradient_row + work.value_chunk,
                comptime!(by_key(weight_pitch)),
                chunk,
                config.value_dim,
                ROW_TILES,
                value_columns,
            );
            sync_plane();
        }
    }
    if !row_by_row {
        add_fragments::<E>(
            value_sums,
            &weights,
            &tiles.gradients,
            further(work.gradient_sum, gradient_row),
            column_tiles,
            value_columns,
            value_pitch,
            instructions,
        );
    }
    let mut score_gradient = dot_products::<E>(
        &tiles.values,
        work.value,
        &tiles.gradients,
        further(
            work.gradient,
            step.at_gradient + comptime!(first * value_pitch),
        ),
        ROW_TILES,
        column_tiles,
        config.value_dim,
        instructions,
    );
    score_gradients(
        &mut score_gradient,
        &probabilities,
        &dots,
        &tiles.statistics,
        at_row,
        geometry,
        edge,
        block_of_scores,
        config,
    );
    let weights = as_weights::<E>(&score_gradient, ROW_TILES, column_tiles, instructions);
    store_weights(
        &mut tiles.score_weights,
        further(work.score_store, comptime!(first / 8)),
        &weights,
        ROW_TILES,
        column_tiles,
        weight_pitch,
        wide,
        instructions,
    );
    if comptime!(tested) {
        if row_by_row {
            sync_plane();
            add_row_by_row(
                key_sums,
                &tiles.score_weights,
                key_weight(work.row, row, weight_pitch),
                &tiles.queries,
                query_row + work.key_chunk,
                comptime!(by_key(weight_pitch)),
                chunk,
                config.head_dim,
                ROW_TILES,
                key_columns,
            );
        }
    }
    if !row_by_row {
        add_fragments::<E>(
            key_sums,
            &weights,
            &tiles.queries,
            further(work.query_sum, query_row),
            column_tiles,
            key_columns,
            key_pitch,
            instructions,
        );
    }
}

/// What the queries of other warps of the same keys add to the warp's sums.
#[cube]
pub(crate) fn add_other_parts<E: Float>(
    tiles: &Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    step: Step,
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
        let query_row = step.at_query + row * key_pitch;
        let gradient_row = step.at_gradient + row * value_pitch;
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

/// Adds the products of weights in registers.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_fragments<E: Float>(
    sums: &mut Sequence<Accumulator>,
    weights: &Sequence<Registers>,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] weight_tiles: usize,
    #[comptime] columns: usize,
    #[comptime] pitch: usize,
    #[comptime] instructions: Instructions,
) {
    #[unroll]
    for k in 0..comptime!(weight_tiles / 2) {
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..ROW_TILES {
            rows.push(*weights.index(comptime!(r * (weight_tiles / 2) + k)));
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

/// How far apart weights lie where sums have keys along their rows.
const fn by_key(weight_pitch: usize) -> Steps {
    Steps {
        row: 8 * weight_pitch,
        summed: 1,
    }
}

/// The element of the lane's first row among a warp's weights, of query `row`.
#[cube]
fn key_weight(first: usize, row: usize, #[comptime] weight_pitch: usize) -> usize {
    (first + UNIT_POS_PLANE as usize / 4) * comptime!(8 * weight_pitch) + row
}
