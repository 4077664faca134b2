//! The forward kernel: one cube for each block of queries of a head.

use super::gradient::{BlockPosition, block_dots, share_scores};
use super::product::multiply_rows;
use super::stage::rows_of;
use super::sums::{SPAN, both_levels, fold, zero_totals};
use super::tile::{Columns, Config, Quad, key_of};
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
    let quads = comptime!(Columns::of(tile, config.value_dim).quads());

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

    let mut out = Array::<Quad>::new(comptime!(tile.rows * quads));
    let mut scores = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut maximum = Array::<f32>::new(tile.rows);
    let mut sum = Array::<f32>::new(tile.rows);
    let mut out_totals = zero_totals(config.long, comptime!(tile.rows * quads));
    let mut sum_totals = Array::<f32>::new(tile.rows);
    // The maximum that the totals are relative to.
    let mut folded_maximum = Array::<f32>::new(tile.rows);
    #[unroll]
    for r in 0..tile.rows {
        maximum[r] = lowest();
        sum[r] = 0.0f32;
        sum_totals[r] = 0.0f32;
        folded_maximum[r] = lowest();
        #[unroll]
        for n in 0..quads {
            out[comptime!(r * quads + n)] = Quad::new(0.0);
        }
    }

    let keys = keys_of_block(&geometry, first_query, block_q, false);
    let first_block = keys.first as usize / block_kv;
    let end_block = (keys.end as usize).div_ceil(block_kv);
    for block in first_block..end_block {
        let first_kv = (block * block_kv) as i32;
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

        // S = Q K^T
        block_dots(
            query,
            query_rows,
            key,
            key_rows,
            position,
            &mut stage,
            &mut scores,
            config.head_dim,
            config,
        );

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
            for c in 0..tile.columns {
                let index = comptime!(r * tile.columns + c);
                let dots = scores[index];
                let mut quad = Quad::new(0.0);
                #[unroll]
                for e in 0..4usize {
                    let score = finish_score::<E, M>(
                        dots.extract(e),
                        view,
                        first_kv + key_of(unit_x, c, e, tile),
                        &mask,
                        &bias,
                        &geometry,
                        config.capped,
                    );
                    quad.insert(e, score);
                    highest = max(highest, score);
                }
                scores[index] = quad;
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
            #[unroll]
            for c in 0..tile.columns {
                let index = comptime!(r * tile.columns + c);
                let row_scores = scores[index];
                let mut quad = Quad::new(0.0);
                #[unroll]
                for e in 0..4usize {
                    let score = row_scores.extract(e);
                    let mut p = 0.0f32;
                    if counts(score) {
                        p = (score - highest).exp();
                    }
                    row_sum += p;
                    quad.insert(e, p);
                }
                scores[index] = quad;
            }
            sum[r] = row_sum;
            #[unroll]
            for n in 0..quads {
                let index = comptime!(r * quads + n);
                out[index] *= Quad::new(rescale);
            }
        }

        share_scores(&scores, &mut probabilities, position, config);

        // O += P V
        multiply_rows(
            &probabilities,
            value,
            value_rows,
            first_kv,
            &mut stage,
            &mut non_finite,
            edge,
            &mut out,
            unit_x,
            unit_y,
            config.value_dim,
            config,
        );

        if comptime!(config.long) {
            let seen = block + 1 - first_block;
            if seen.is_multiple_of(comptime!(SPAN / block_kv)) || block + 1 == end_block {
                #[unroll]
                for r in 0..tile.rows {
                    let rescale = (folded_maximum[r] - maximum[r]).exp();
                    folded_maximum[r] = maximum[r];
                    sum_totals[r] = fma(sum_totals[r], rescale, sum[r]);
                    sum[r] = 0.0f32;
                    fold(
                        &mut out,
                        &mut out_totals,
                        rescale,
                        comptime!(r * quads),
                        quads,
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
        partial[row * tile.units_x + unit_x] = sum[r] + sum_totals[r];
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
            for n in 0..quads {
                let index = comptime!(r * quads + n);
                let sums = both_levels(&out, &out_totals, index, config.long);
                store_quad(
                    output,
                    at * config.value_dim,
                    comptime!(n * tile.units_x) + unit_x,
                    sums * Quad::new(inverse),
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
