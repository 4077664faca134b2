//! The query gradient: one cube for each block of queries, `dQ = scale * sum over keys of dT K`.

use super::forward::store_quad;
use super::gradient::{
    BlockPosition, block_dots, rebuild_probabilities, score_gradients, share_scores,
    uncap_gradients, value_dots,
};
use super::product::multiply_rows;
use super::stage::rows_of;
use super::sums::{SPAN, both_levels, fold, zero_totals};
use super::tile::{Columns, Config, Quad};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use cubecl::prelude::*;

/// Writes the gradient of the query, packed, `[batch, heads, seq_q, head_dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn query_gradient_kernel<E: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: ComptimeOption<&Tensor<Vector<E, N>>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    query_gradient: &mut [Vector<E, N>],
    geometry: Geometry,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    let block_kv = comptime!(tile.block_kv());
    let quads = comptime!(Columns::of(tile, config.head_dim).quads());

    let blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let batch_head = CUBE_POS / blocks;
    if batch_head >= geometry.batch * geometry.heads {
        terminate!();
    }
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    let first_query = ((blocks - 1 - CUBE_POS % blocks) * block_q) as i32;
    let unit_x = UNIT_POS as usize % tile.units_x;
    let unit_y = UNIT_POS as usize / tile.units_x;

    let query_rows = rows_of(query, batch, head, geometry.seq_q);
    let key_rows = rows_of(key, batch, head / geometry.group, geometry.seq_kv);

    let mut stage = Shared::<[Quad]>::new_slice(comptime!(tile.stage()));
    let mut shared = Shared::<[Quad]>::new_slice(comptime!(block_q * tile.score_pitch()));
    let mut non_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        non_finite[0] = 0u32;
    }
    let mut out = Array::<Quad>::new(comptime!(tile.rows * quads));
    #[unroll]
    for n in 0..comptime!(tile.rows * quads) {
        out[n] = Quad::new(0.0);
    }
    let mut totals = zero_totals(config.long, comptime!(tile.rows * quads));
    let mut dots = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut probabilities = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut gradients = Array::<Quad>::new(comptime!(tile.rows * tile.columns));

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
        share_scores(&gradients, &mut shared, position, config);

        multiply_rows(
            &shared,
            key,
            key_rows,
            first_kv,
            &mut stage,
            &mut non_finite,
            edge,
            &mut out,
            unit_x,
            unit_y,
            config.head_dim,
            config,
        );

        if comptime!(config.long) {
            let seen = block + 1 - first_block;
            if seen.is_multiple_of(comptime!(SPAN / block_kv)) {
                fold(
                    &mut out,
                    &mut totals,
                    1.0f32,
                    0usize,
                    comptime!(tile.rows * quads),
                );
            }
        }
    }

    #[unroll]
    for r in 0..tile.rows {
        let i = first_query + (unit_y + r * tile.units_y) as i32;
        if i < geometry.seq_q {
            let at = batch_head * geometry.seq_q as usize + i as usize;
            #[unroll]
            for n in 0..quads {
                let sums = both_levels(&out, &totals, comptime!(r * quads + n), config.long);
                store_quad(
                    query_gradient,
                    at * config.head_dim,
                    comptime!(n * tile.units_x) + unit_x,
                    sums * Quad::new(geometry.scale),
                    config.head_dim,
                    config,
                );
            }
        }
    }
}
