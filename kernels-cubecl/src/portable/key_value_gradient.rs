//! The key and value gradients: one cube for each block of keys of a key head.
//!
//! `dV = sum over queries of P^T dO` and `dK = scale * sum over queries of dT^T Q`, over all query
//! heads that read the key head, one after the other: no atomics, so the sums are reproducible.

use super::forward::store_quad;
use super::gradient::{
    BlockPosition, block_dots, rebuild_probabilities, score_gradients, share_scores,
    uncap_gradients,
};
use super::stage::{rows_of, stage_columns};
use super::tile::{Config, Quad, accumulate_columns, column_passes};
use crate::schedule::{Geometry, partly_visible, queries_of_block, wholly_visible};
use cubecl::prelude::*;

/// Writes the gradients that are there, packed: of the key `[batch, kv_heads, seq_kv, head_dim]`,
/// of the value `[batch, kv_heads, seq_kv, value_dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn key_value_gradient_kernel<E: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    gradient: &mut [Vector<E, N>],
    geometry: Geometry,
    #[comptime] of_key: bool,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    let block_kv = comptime!(tile.block_kv());
    let dim = comptime!(if of_key {
        config.head_dim
    } else {
        config.value_dim
    });
    let passes = comptime!(column_passes(tile, dim));
    let staged = comptime!(tile.staged_rows().min(block_q));

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
    let value_rows = rows_of(value, batch, kv_head, geometry.seq_kv);

    let mut stage = Shared::<[Quad]>::new_slice(comptime!(tile.stage()));
    let mut shared = Shared::<[Quad]>::new_slice(comptime!(block_q * tile.score_pitch()));
    let mut non_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        non_finite[0] = 0u32;
    }
    let mut out = Array::<Quad>::new(comptime!(tile.key_groups() * 4 * passes));
    #[unroll]
    for n in 0..comptime!(tile.key_groups() * 4 * passes) {
        out[n] = Quad::new(0.0);
    }
    let mut dots = Array::<f32>::new(comptime!(tile.rows * 4));
    let mut probabilities = Array::<f32>::new(comptime!(tile.rows * 4));
    let mut gradients = Array::<f32>::new(comptime!(tile.rows * 4));

    // The queries that see some key of the block through the band.
    let queries = queries_of_block(&geometry, first_kv, block_kv);
    let first_block = queries.first as usize / block_q;
    let end_block = (queries.end as usize).div_ceil(block_q);

    for member in 0..geometry.group {
        let head = kv_head * geometry.group + member;
        let query_rows = rows_of(query, batch, head, geometry.seq_q);
        let gradient_rows = rows_of(output_gradient, batch, head, geometry.seq_q);
        for block in first_block..end_block {
            let first_query = (block * block_q) as i32;
            if partly_visible(&geometry, first_query, first_kv, block_q, block_kv) {
                let edge = comptime!(mask.is_some())
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
                if comptime!(of_key) {
                    block_dots(
                        output_gradient,
                        gradient_rows,
                        value,
                        value_rows,
                        position,
                        &mut stage,
                        &mut gradients,
                        config.value_dim,
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
                    share_scores(&gradients, &mut shared, position, config);
                } else {
                    share_scores(&probabilities, &mut shared, position, config);
                }

                #[unroll]
                for pass in 0..passes {
                    for part in 0..comptime!(block_q / staged) {
                        let first = part * staged;
                        sync_cube();
                        if comptime!(of_key) {
                            stage_columns(
                                query,
                                query_rows,
                                first_query + first as i32,
                                &mut stage,
                                &mut non_finite,
                                edge,
                                staged,
                                pass,
                                dim,
                                config,
                            );
                        } else {
                            stage_columns(
                                output_gradient,
                                gradient_rows,
                                first_query + first as i32,
                                &mut stage,
                                &mut non_finite,
                                edge,
                                staged,
                                pass,
                                dim,
                                config,
                            );
                        }
                        sync_cube();
                        if edge && non_finite[0] != 0 {
                            accumulate_columns(
                                &shared, &stage, &mut out, unit_x, unit_y, first, staged, pass,
                                passes, true, tile,
                            );
                        } else {
                            accumulate_columns(
                                &shared, &stage, &mut out, unit_x, unit_y, first, staged, pass,
                                passes, false, tile,
                            );
                        }
                    }
                }
            }
        }
    }

    let mut factor = 1.0f32;
    if comptime!(of_key) {
        factor = geometry.scale;
    }
    #[unroll]
    for g in 0..comptime!(tile.key_groups()) {
        #[unroll]
        for e in 0..4usize {
            let j = first_kv + ((unit_y + g * tile.units_y) * 4 + e) as i32;
            if j < geometry.seq_kv {
                let at = batch_head * geometry.seq_kv as usize + j as usize;
                #[unroll]
                for n in 0..passes {
                    store_quad(
                        gradient,
                        at * dim,
                        comptime!(n * tile.units_x) + unit_x,
                        out[comptime!((g * 4 + e) * passes + n)] * Quad::new(factor),
                        dim,
                        config,
                    );
                }
            }
        }
    }
}
