//! The shared memory of the pass that computes all gradients, and where each warp's part of the work lies in
//! it.

use super::config::Config;
use super::fragment::{Chunk, Place, along_columns, along_rows, along_sums, further};
use super::one_pass_blueprint::{KEYS, OnePass};
use super::weights::{Steps, along_weights};
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
pub(crate) struct Work {
    /// The warp's first key among the cube's.
    pub row: usize,
    /// Its number among the warps that own the same keys.
    pub side: usize,
    /// Its first query of a block.
    pub own_query: usize,
    /// Its first features of key and value sums, in chunks.
    pub key_chunk: usize,
    pub value_chunk: usize,
    /// Its first query of the query gradient, and its first feature in chunks.
    pub tile_query: usize,
    pub tile_chunk: usize,
    pub key: Place,
    pub value: Place,
    pub query: Place,
    pub gradient: Place,
    pub query_sum: Place,
    pub gradient_sum: Place,
    pub score_store: Place,
    pub value_store: Place,
    pub score: Place,
    pub probability: Place,
    pub tile_score: Place,
    pub tile_key: Place,
}

/// The work of the unit's warp, found out where it is needed: sums leave no registers for places that
/// stay the same.
#[cube]
pub(crate) fn work<E: Float>(
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

/// A block of queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Step {
    pub batch: usize,
    pub head: usize,
    pub first_query: i32,
    pub first_kv: i32,
    /// The block's stage.
    pub stage: u32,
    /// Whether the block has scores that may be hidden.
    pub edge: bool,
    /// Whether sums are formed row by row.
    pub careful: bool,
}

/// Where a stage lies among the stages of queries, output gradients and statistics.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Slots {
    pub query: usize,
    pub gradient: usize,
    pub statistics: usize,
}

/// The slots of a stage.
#[cube]
pub(crate) fn slots(
    stage: usize,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) -> Slots {
    Slots {
        query: stage * comptime!(one_pass.walked * config.pitch(config.head_dim)),
        gradient: stage * comptime!(one_pass.walked * config.pitch(config.value_dim)),
        statistics: stage * comptime!(3 * one_pass.walked),
    }
}

/// How far apart weights lie where sums have keys along their rows.
pub(crate) const fn by_key(weight_pitch: usize) -> Steps {
    Steps {
        row: 8 * weight_pitch,
        summed: 1,
    }
}

/// The element of the lane's first row among a warp's weights, of query `row`.
#[cube]
pub(crate) fn key_weight(first: usize, row: usize, #[comptime] weight_pitch: usize) -> usize {
    (first + UNIT_POS_PLANE as usize / 4) * comptime!(8 * weight_pitch) + row
}
