//! The key and value gradients: one cube for each block of keys of a key head.
//!
//! `dV = sum over queries of P^T dO` and `dK = scale * sum over queries of dT^T Q`, over all query
//! heads that read the key head, one after the other: no atomics, so the sums are reproducible.

use super::forward::store_quad;
use super::gradient::{
    BlockPosition, block_dots, rebuild_probabilities, score_gradients, share_scores,
    uncap_gradients, value_dots,
};
use super::product::multiply_columns;
use super::stage::rows_of;
use super::sums::{SPAN, both_levels, fold, zero_totals};
use super::tile::{Columns, Config, Quad, Tile};
use crate::schedule::{Geometry, partly_visible, queries_of_block, wholly_visible};
use cubecl::prelude::*;

/// Which of the two gradients a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sides {
    pub key: bool,
    pub value: bool,
}

/// Writes the gradients asked for, packed, into one buffer, so that one kernel computes both within
/// the bindings of WebGPU: of the key `[batch, kv_heads, seq_kv, head_dim]` at its start, of the
/// value `[batch, kv_heads, seq_kv, value_dim]` from element `value_start`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn key_value_gradient_kernel<E: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: ComptimeOption<&Tensor<Vector<E, N>>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    gradient: &mut [Vector<E, N>],
    value_start: usize,
    geometry: Geometry,
    #[comptime] sides: Sides,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    let block_kv = comptime!(tile.block_kv());

    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let batch_head = CUBE_POS / blocks;
    if batch_head >= geometry.batch * kv_heads {
        terminate!();
    }
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;
    let first_kv = ((CUBE_POS % blocks) * block_kv) as i32;
    let unit_x = UNIT_POS as usize % tile.units_x;
    let unit_y = UNIT_POS as usize / tile.units_x;
    let key_rows = rows_of(key, batch, kv_head, geometry.seq_kv);

    let mut stage = Shared::<[Quad]>::new_slice(comptime!(tile.stage()));
    let mut shared = Shared::<[Quad]>::new_slice(comptime!(block_q * tile.score_pitch()));
    let mut non_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        non_finite[0] = 0u32;
    }
    let key_count = comptime!(key_sums_of(sides.key, config.head_dim, tile));
    let value_count = comptime!(key_sums_of(sides.value, config.value_dim, tile));
    let mut key_sums = zero_totals(true, key_count);
    let mut value_sums = zero_totals(true, value_count);
    let mut key_totals = zero_totals(config.long, key_count);
    let mut value_totals = zero_totals(config.long, value_count);
    let mut seen = 0usize;
    let mut dots = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut probabilities = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut gradients = Array::<Quad>::new(comptime!(tile.rows * tile.columns));

    // The queries that see some key of the block through the band.
    let queries = queries_of_block(&geometry, first_kv, block_kv, false);
    let first_block = queries.first as usize / block_q;
    let end_block = (queries.end as usize).div_ceil(block_q);

    for member in 0..geometry.group {
        let head = kv_head * geometry.group + member;
        let query_rows = rows_of(query, batch, head, geometry.seq_q);
        let gradient_rows = rows_of(output_gradient, batch, head, geometry.seq_q);
        for block in first_block..end_block {
            let first_query = (block * block_q) as i32;
            if partly_visible(&geometry, first_query, first_kv, block_q, block_kv, false) {
                let edge = comptime!(mask.is_some() || bias.is_some())
                    || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
                let position = BlockPosition {
                    batch,
                    head,
                    first_query,
                    first_kv,
                    unit_x,
                    unit_y,
                };
                block_dots(
                    query,
                    query_rows,
                    key,
                    key_rows,
                    position,
                    &mut stage,
                    &mut dots,
                    config.head_dim,
                    config,
                );
                rebuild_probabilities::<E, M>(
                    &dots,
                    &mut probabilities,
                    row_statistics,
                    position,
                    &mask,
                    &bias,
                    &geometry,
                    config,
                );
                if comptime!(sides.value) {
                    share_scores(&probabilities, &mut shared, position, config);
                    multiply_columns(
                        &shared,
                        output_gradient,
                        gradient_rows,
                        first_query,
                        &mut stage,
                        &mut non_finite,
                        edge,
                        &mut value_sums,
                        unit_x,
                        unit_y,
                        config.value_dim,
                        config,
                    );
                }
                if comptime!(sides.key) {
                    value_dots(
                        output_gradient,
                        key,
                        value,
                        position,
                        &mut stage,
                        &mut gradients,
                        &geometry,
                        config,
                    );
                    score_gradients(
                        &probabilities,
                        &mut gradients,
                        row_statistics,
                        position,
                        &geometry,
                        config,
                    );
                    uncap_gradients(&dots, &mut gradients, &geometry, config);
                    // The block's dots have met at a barrier since the shared tile was last read.
                    share_scores(&gradients, &mut shared, position, config);
                    multiply_columns(
                        &shared,
                        query,
                        query_rows,
                        first_query,
                        &mut stage,
                        &mut non_finite,
                        edge,
                        &mut key_sums,
                        unit_x,
                        unit_y,
                        config.head_dim,
                        config,
                    );
                }
                if comptime!(config.long) {
                    seen += block_q;
                    if seen >= SPAN {
                        seen = 0usize;
                        fold(&mut key_sums, &mut key_totals, 1.0f32, 0usize, key_count);
                        fold(
                            &mut value_sums,
                            &mut value_totals,
                            1.0f32,
                            0usize,
                            value_count,
                        );
                    }
                }
            }
        }
    }

    let first_row = batch_head * geometry.seq_kv as usize;
    if comptime!(sides.key) {
        store_sums(
            &key_sums,
            &key_totals,
            gradient,
            first_row * config.head_dim,
            first_kv,
            geometry.scale,
            unit_x,
            unit_y,
            &geometry,
            config.head_dim,
            config,
        );
    }
    if comptime!(sides.value) {
        store_sums(
            &value_sums,
            &value_totals,
            gradient,
            value_start + first_row * config.value_dim,
            first_kv,
            1.0f32,
            unit_x,
            unit_y,
            &geometry,
            config.value_dim,
            config,
        );
    }
}

/// Accumulators for `dim` features of the unit's keys; one that nothing uses where not `wanted`.
fn key_sums_of(wanted: bool, dim: usize, tile: Tile) -> usize {
    match wanted {
        true => tile.key_groups() * 4 * Columns::of(tile, dim).quads(),
        false => 1,
    }
}

/// Stores the unit's accumulators, times `factor`, to the packed rows from element `base`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_sums<E: Float, N: Size>(
    sums: &Array<Quad>,
    totals: &Array<Quad>,
    gradient: &mut [Vector<E, N>],
    base: usize,
    first_kv: i32,
    factor: f32,
    unit_x: usize,
    unit_y: usize,
    geometry: &Geometry,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let quads = comptime!(Columns::of(tile, dim).quads());
    #[unroll]
    for g in 0..comptime!(tile.key_groups()) {
        #[unroll]
        for e in 0..4usize {
            let j = first_kv + ((unit_y + g * tile.units_y) * 4 + e) as i32;
            if j < geometry.seq_kv {
                #[unroll]
                for n in 0..quads {
                    store_quad(
                        gradient,
                        base + j as usize * dim,
                        comptime!(n * tile.units_x) + unit_x,
                        both_levels(
                            sums,
                            totals,
                            comptime!((g * 4 + e) * quads + n),
                            config.long,
                        ) * Quad::new(factor),
                        dim,
                        config,
                    );
                }
            }
        }
    }
}
