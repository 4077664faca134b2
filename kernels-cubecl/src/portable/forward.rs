//! The forward kernel: one cube for each block of queries of a head.

use super::stage::{rows_of, stage_columns, stage_features};
use super::tile::{Config, Quad, accumulate_dots, accumulate_rows, column_passes};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use crate::score::{counts, finish_score, lowest, score_row};
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]` and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn forward_kernel<E: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output: &mut [Vector<E, N>],
    statistics: &mut [f32],
    geometry: Geometry,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    let block_kv = comptime!(tile.block_kv());
    let passes = comptime!(column_passes(tile, config.value_dim));
    let staged = comptime!(tile.staged_rows());

    let blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let batch_head = CUBE_POS / blocks;
    if batch_head >= geometry.batch * geometry.heads {
        terminate!();
    }
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    // The last block of queries sees the most keys where the problem is causal: it starts first.
    let first_query = ((blocks - 1 - CUBE_POS % blocks) * block_q) as i32;
    let unit_x = UNIT_POS as usize % tile.units_x;
    let unit_y = UNIT_POS as usize / tile.units_x;

    let query_rows = rows_of(query, batch, head, geometry.seq_q);
    let key_rows = rows_of(key, batch, head / geometry.group, geometry.seq_kv);
    let value_rows = rows_of(value, batch, head / geometry.group, geometry.seq_kv);

    let mut stage = Shared::<[Quad]>::new_slice(comptime!(tile.stage()));
    let mut probabilities = Shared::<[Quad]>::new_slice(comptime!(block_q * tile.score_pitch()));
    let mut partial = Shared::<[f32]>::new_slice(comptime!(block_q * tile.units_x));
    let mut non_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        non_finite[0] = 0u32;
    }

    let mut out = Array::<Quad>::new(comptime!(tile.rows * passes));
    let mut scores = Array::<f32>::new(comptime!(tile.rows * 4));
    let mut maximum = Array::<f32>::new(tile.rows);
    let mut sum = Array::<f32>::new(tile.rows);
    #[unroll]
    for r in 0..tile.rows {
        maximum[r] = lowest();
        sum[r] = 0.0f32;
        #[unroll]
        for n in 0..passes {
            out[comptime!(r * passes + n)] = Quad::new(0.0);
        }
    }

    let keys = keys_of_block(&geometry, first_query, block_q);
    let first_block = keys.first as usize / block_kv;
    let end_block = (keys.end as usize).div_ceil(block_kv);
    for block in first_block..end_block {
        let first_kv = (block * block_kv) as i32;
        let edge = comptime!(mask.is_some())
            || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);

        // S = Q K^T
        #[unroll]
        for n in 0..comptime!(tile.rows * 4) {
            scores[n] = 0.0f32;
        }
        for chunk in 0..comptime!(config.head_dim.div_ceil(4).div_ceil(tile.depth)) {
            let quad = chunk * tile.depth;
            sync_cube();
            stage_features(
                query,
                query_rows,
                first_query,
                quad,
                &mut stage,
                0usize,
                block_q,
                false,
                config.head_dim,
                config,
            );
            stage_features(
                key,
                key_rows,
                first_kv,
                quad,
                &mut stage,
                comptime!(block_q * tile.pitch()),
                block_kv,
                true,
                config.head_dim,
                config,
            );
            sync_cube();
            accumulate_dots(&stage, &mut scores, unit_x, unit_y, tile);
        }

        // Scores and their maximum over the row: the unit's own part, then all of them.
        #[unroll]
        for r in 0..tile.rows {
            let row = unit_y + r * tile.units_y;
            let view = score_row::<E, M>(
                first_query + row as i32,
                batch,
                head,
                &mask,
                &bias,
                &geometry,
            );
            let mut highest = lowest();
            #[unroll]
            for c in 0..4usize {
                let score = finish_score::<E, M>(
                    scores[comptime!(r * 4 + c)],
                    view,
                    first_kv + (unit_x * 4 + c) as i32,
                    &mask,
                    &bias,
                    &geometry,
                    config.capped,
                );
                scores[comptime!(r * 4 + c)] = score;
                highest = max(highest, score);
            }
            partial[row * tile.units_x + unit_x] = highest;
        }
        sync_cube();
        #[unroll]
        for r in 0..tile.rows {
            let row = unit_y + r * tile.units_y;
            let mut highest = maximum[r];
            for x in 0..tile.units_x {
                highest = max(highest, partial[row * tile.units_x + x]);
            }
            let rescale = (maximum[r] - highest).exp();
            maximum[r] = highest;
            let mut row_sum = sum[r] * rescale;
            let mut quad = Quad::new(0.0);
            #[unroll]
            for c in 0..4usize {
                let score = scores[comptime!(r * 4 + c)];
                let mut p = 0.0f32;
                if counts(score) {
                    p = (score - highest).exp();
                }
                row_sum += p;
                quad.insert(c, p);
            }
            sum[r] = row_sum;
            probabilities[row * comptime!(tile.score_pitch()) + unit_x] = quad;
            #[unroll]
            for n in 0..passes {
                let index = comptime!(r * passes + n);
                out[index] *= Quad::new(rescale);
            }
        }

        // O += P V
        #[unroll]
        for pass in 0..passes {
            for part in 0..comptime!(block_kv / staged) {
                let first = part * staged;
                sync_cube();
                stage_columns(
                    value,
                    value_rows,
                    first_kv + first as i32,
                    &mut stage,
                    &mut non_finite,
                    edge,
                    staged,
                    pass,
                    config.value_dim,
                    config,
                );
                sync_cube();
                if edge && non_finite[0] != 0 {
                    accumulate_rows(
                        &probabilities,
                        &stage,
                        &mut out,
                        unit_x,
                        unit_y,
                        first,
                        staged,
                        pass,
                        passes,
                        true,
                        tile,
                    );
                } else {
                    accumulate_rows(
                        &probabilities,
                        &stage,
                        &mut out,
                        unit_x,
                        unit_y,
                        first,
                        staged,
                        pass,
                        passes,
                        false,
                        tile,
                    );
                }
            }
        }
    }

    // The row sums, over the x units.
    sync_cube();
    #[unroll]
    for r in 0..tile.rows {
        let row = unit_y + r * tile.units_y;
        partial[row * tile.units_x + unit_x] = sum[r];
    }
    sync_cube();
    let statistics_half = geometry.batch * geometry.heads * geometry.seq_q as usize;
    #[unroll]
    for r in 0..tile.rows {
        let row = unit_y + r * tile.units_y;
        let mut total = 0.0f32;
        for x in 0..tile.units_x {
            total += partial[row * tile.units_x + x];
        }
        let i = first_query + row as i32;
        if i < geometry.seq_q {
            let at = batch_head * geometry.seq_q as usize + i as usize;
            // A row that sees nothing: o = 0, lse = 0 + -inf.
            let mut inverse = 0.0f32;
            let mut log_sum = geometry.negative_infinity;
            let mut row_maximum = 0.0f32;
            if total != 0.0f32 {
                inverse = 1.0f32 / total;
                log_sum = total.ln();
                row_maximum = maximum[r];
            }
            if unit_x == 0 {
                statistics[at] = row_maximum;
                statistics[statistics_half + at] = log_sum;
            }
            #[unroll]
            for n in 0..passes {
                store_quad(
                    output,
                    at * config.value_dim,
                    comptime!(n * tile.units_x) + unit_x,
                    out[comptime!(r * passes + n)] * Quad::new(inverse),
                    config.value_dim,
                    config,
                );
            }
        }
    }
}

/// Stores features `4 quad .. 4 quad + 4` of the packed row that starts at `base`.
#[cube]
pub(crate) fn store_quad<E: Float, N: Size>(
    output: &mut [Vector<E, N>],
    base: usize,
    quad: usize,
    values: Quad,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    if comptime!(config.vectorized) {
        if quad < comptime!(dim / 4) {
            output[base / 4 + quad] = Vector::cast_from(values);
        }
    } else {
        #[unroll]
        for e in 0..4usize {
            let feature = quad * 4 + e;
            if feature < dim {
                output[base + feature] = Vector::cast_from(values.extract(e));
            }
        }
    }
}
