//! The end of the pass for all gradients: from the sums of a cube's warps to rows of the gradients of key and
//! value.

use super::config::Config;
use super::fragment::{Accumulator, Chunk, further};
use super::gradient::scale_all;
use super::one_pass_blueprint::{KEYS, OnePass};
use super::one_pass_tiles::{ROW_TILES, Tiles};
use super::one_pass_walk::{BATCH_HEAD, FIRST_KV};
use super::products::as_weights;
use super::rows::store_rows;
use super::weights::{along_weights, store_weights};
use crate::schedule::Geometry;
use crate::unit::unit;
use cubecl::prelude::*;

/// Writes both gradients.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn store_gradients<E: Float, N: Size>(
    tiles: &mut Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    notes: &Shared<[u32]>,
    key_gradient: &mut [Vector<E, N>],
    value_gradient: &mut [Vector<E, N>],
    geometry: &Geometry,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let block_kv = comptime!(one_pass.owned());
    let key_columns = comptime!(config.head_dim / one_pass.sides / 8);
    // Every warp is done with keys and values; their places are for the gradients.
    sync_cube();
    scale_all(key_sums, geometry.scale, comptime!(ROW_TILES * key_columns));
    share_sums(
        &mut tiles.keys,
        &*key_sums,
        config.head_dim,
        one_pass,
        config,
    );
    share_sums(
        &mut tiles.values,
        &*value_sums,
        config.value_dim,
        one_pass,
        config,
    );
    sync_cube();
    let first_row = notes[BATCH_HEAD] as usize * geometry.seq_kv as usize;
    let first_kv = notes[FIRST_KV] as i32;
    store_rows::<E, N>(
        &tiles.keys,
        key_gradient,
        first_row,
        first_kv,
        geometry.seq_kv,
        block_kv,
        config.head_dim,
        config,
    );
    store_rows::<E, N>(
        &tiles.values,
        value_gradient,
        first_row,
        first_kv,
        geometry.seq_kv,
        block_kv,
        config.value_dim,
        config,
    );
}

/// Writes a warp's sums, of its part of `dim` features, to a shared tile.
#[cube]
fn share_sums<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    sums: &Sequence<Accumulator>,
    #[comptime] dim: usize,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let instructions = comptime!(config.instructions());
    let columns = comptime!(dim / one_pass.sides / 8);
    let own = unit(config.assembly) as usize;
    let side = own / 32 % one_pass.sides;
    let row = own / comptime!(32 * one_pass.sides) * KEYS;
    let place = along_weights(
        &*tile,
        row,
        config.pitch(dim),
        one_pass.wide,
        config.assembly,
        instructions,
    );
    store_weights(
        tile,
        further(place, side * columns),
        &as_weights::<E>(sums, ROW_TILES, columns, instructions),
        ROW_TILES,
        columns,
        config.pitch(dim),
        one_pass.wide,
        instructions,
    );
}
