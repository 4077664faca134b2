//! The forward kernel: one cube for each block of queries of a head.

use super::config::Config;
use super::fragment::{
    Accumulator, Chunk, Pair, Registers, Side, along_columns, along_rows, along_sums, further,
    place_again, zeros,
};
use super::hidden::{add_flagged_rows, clear_flagged_rows, flag_rows, lower_flags, row_flags};
use super::products::{add_weighted_rows, dot_products};
use super::rows::{share_rows, store_rows};
use super::scores::{Position, finish_scores};
use super::softmax::{
    exponent_factor, exponentials, no_statistics, raise_maximum, references, row_result,
};
use super::stage::{await_copies, issue, land, round_first, rows_of, stage_first};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]` and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn forward_kernel<E: Float, B: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<B>>,
    output: &mut [Vector<E, N>],
    statistics: &mut [f32],
    geometry: Geometry,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(B)] _bias_element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let blocks = comptime!(config.blocks);
    let block_q = comptime!(blocks.owned());
    let block_kv = comptime!(blocks.walked);
    let row_tiles = comptime!(blocks.row_tiles);
    let key_tiles = comptime!(block_kv / 8);
    let value_tiles = comptime!(config.tiles(config.value_dim));
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));

    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let batch_head = CUBE_POS / query_blocks;
    if batch_head >= geometry.batch * geometry.heads {
        terminate!();
    }
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    // The last block of queries sees the most keys where the problem is causal: it starts first.
    let first_query = ((query_blocks - 1 - CUBE_POS % query_blocks) * block_q) as i32;
    let warp_row = UNIT_POS as usize / 32 * comptime!(16 * row_tiles);

    let query_rows = rows_of(query, batch, head, geometry.seq_q);
    let key_rows = rows_of(key, batch, head / geometry.group, geometry.seq_kv);
    let value_rows = rows_of(value, batch, head / geometry.group, geometry.seq_kv);

    // Queries at first, outputs at the end.
    let widest = comptime!(Ord::max(key_pitch, value_pitch));
    let mut queries = Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_q * widest), 16usize);
    // With two stages a block's keys and values arrive while the one before is worked on; with one
    // they take turns: values arrive during the first product, the next keys during the second.
    let stages = comptime!(blocks.stages);
    let twice = comptime!(stages == 2);
    let key_slot = comptime!(block_kv * key_pitch);
    let value_slot = comptime!(block_kv * value_pitch);
    let mut keys = Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(stages * key_slot), 16usize);
    let mut values =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(stages * value_slot), 16usize);
    let mut flags = row_flags(block_kv);

    let query_staging = comptime!(config.staging(block_q, config.head_dim));
    let key_staging = comptime!(config.staging(block_kv, config.head_dim).unrounded());
    let value_staging = comptime!(config.staging(block_kv, config.value_dim).unrounded());
    let mut pending_key = Array::<Chunk<E>>::new(comptime!(key_staging.pending()));
    let mut pending_value = Array::<Chunk<E>>::new(comptime!(value_staging.pending()));

    let instructions = comptime!(config.instructions().rounding_columns());
    let crowded = comptime!(config.crowded());
    let query_place = along_rows(&queries, warp_row, key_pitch, false, instructions);
    let key_place = along_columns(&keys, key_pitch, false, instructions);
    let value_place = along_sums(&values, value_pitch, false, instructions);

    let mut out = zeros(comptime!(row_tiles * value_tiles));
    let mut running = no_statistics(row_tiles);

    let visible = keys_of_block(&geometry, first_query, block_q, false);
    let first_block = visible.first as usize / block_kv;
    let end_block = (visible.end as usize).div_ceil(block_kv);

    stage_first(
        query,
        query_rows,
        first_query,
        &mut queries,
        &mut pending_key,
        query_staging,
    );
    if first_block < end_block {
        let first_kv = (first_block * block_kv) as i32;
        issue(
            key,
            key_rows,
            first_kv,
            &mut keys,
            0usize,
            &mut pending_key,
            key_staging,
        );
        if comptime!(twice) {
            issue(
                value,
                value_rows,
                first_kv,
                &mut values,
                0usize,
                &mut pending_value,
                value_staging,
            );
        }
    }
    round_first(&mut queries, query_staging);
    for block in first_block..end_block {
        let first_kv = (block * block_kv) as i32;
        let next_kv = first_kv + comptime!(block_kv as i32);
        let edge = comptime!(mask.is_some() || bias.is_some())
            || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
        let stage = (block - first_block) % stages;
        let at_key = stage * key_slot;
        let at_value = stage * value_slot;

        // The keys are there, and every warp is done with the last block.
        land(
            key,
            key_rows,
            first_kv,
            &mut keys,
            at_key,
            &pending_key,
            key_staging,
        );
        sync_cube();
        if comptime!(!twice) {
            issue(
                value,
                value_rows,
                first_kv,
                &mut values,
                at_value,
                &mut pending_value,
                value_staging,
            );
        } else if block + 1 < end_block {
            let other = (stage + 1) % stages;
            issue(
                key,
                key_rows,
                next_kv,
                &mut keys,
                other * key_slot,
                &mut pending_key,
                key_staging,
            );
            issue(
                value,
                value_rows,
                next_kv,
                &mut values,
                other * value_slot,
                &mut pending_value,
                value_staging,
            );
        }
        if edge {
            lower_flags(&mut flags, value_staging);
        }

        let mut scores = dot_products::<E>(
            &queries,
            place_again(
                query_place,
                &queries,
                comptime!(Side::Rows(16 * row_tiles)),
                key_pitch,
                crowded,
                instructions,
            ),
            &keys,
            further(
                place_again(
                    key_place,
                    &keys,
                    comptime!(Side::Columns),
                    key_pitch,
                    crowded,
                    instructions,
                ),
                at_key,
            ),
            row_tiles,
            key_tiles,
            config.head_dim,
            instructions,
        );

        if comptime!(!twice) {
            // The values are there, and every warp is done with the keys.
            land(
                value,
                value_rows,
                first_kv,
                &mut values,
                at_value,
                &pending_value,
                value_staging,
            );
            sync_cube();
            if block + 1 < end_block {
                issue(
                    key,
                    key_rows,
                    next_kv,
                    &mut keys,
                    at_key,
                    &mut pending_key,
                    key_staging,
                );
            }
        }

        let position = Position {
            batch,
            head,
            first_query: first_query + warp_row as i32,
            first_kv,
        };
        finish_scores::<B, M>(
            &mut scores,
            position,
            &mask,
            &bias,
            &geometry,
            edge,
            key_tiles,
            config,
        );
        let mut flagged = false;
        if edge {
            if comptime!(twice) {
                // The flags are down.
                sync_cube();
            }
            flag_rows(
                &values,
                at_value,
                &mut flags,
                config.exponent(),
                value_staging,
            );
            sync_cube();
            flagged = flags[block_kv] != 0;
            if flagged {
                clear_flagged_rows(&mut values, at_value, &flags, value_staging);
                sync_cube();
            }
        }
        raise_maximum(
            &scores,
            &mut out,
            &mut running,
            &geometry,
            key_tiles,
            value_tiles,
            config,
        );
        let factor = exponent_factor(&geometry, config);
        let references = references(&running, &geometry, config);
        if flagged {
            add_flagged_rows(
                &mut out,
                &scores,
                &references,
                factor,
                &flags,
                value,
                value_rows,
                first_kv,
                row_tiles,
                key_tiles,
                comptime!(Some(config)),
                value_staging,
            );
        }
        // Exponentials of the next 16 keys and products of these run side by side.
        #[unroll]
        for k in 0..comptime!(block_kv / 16) {
            let mut weights = Sequence::<Registers>::new();
            #[unroll]
            for r in 0..row_tiles {
                exponentials::<E>(
                    &mut weights,
                    &scores,
                    &references,
                    &mut running.sum,
                    factor,
                    r,
                    comptime!(r * key_tiles + 2 * k),
                    config,
                );
            }
            add_weighted_rows::<E>(
                &mut out,
                &weights,
                &values,
                further(
                    place_again(
                        value_place,
                        &values,
                        comptime!(Side::Sums),
                        value_pitch,
                        crowded,
                        instructions,
                    ),
                    at_value,
                ),
                row_tiles,
                k,
                config.value_dim,
                instructions,
            );
        }
    }

    // Every warp is done with the queries; their place is for the outputs.
    await_copies(query_staging);
    sync_cube();
    let lane = UNIT_POS_PLANE as usize;
    let rows = geometry.batch * geometry.heads * geometry.seq_q as usize;
    let first_row = batch_head * geometry.seq_q as usize;
    #[unroll]
    for r in 0..row_tiles {
        #[unroll]
        for half in 0..2usize {
            let result = row_result(&running, &geometry, comptime!(2 * r + half), config);
            let row = warp_row + comptime!(16 * r + 8 * half) + lane / 4;
            let i = first_query + row as i32;
            if lane & 3 == 0 && i < geometry.seq_q {
                let at = first_row + i as usize;
                statistics[at] = result.maximum;
                statistics[rows + at] = result.log_sum;
            }
            scale_rows(
                &mut out,
                result.inverse,
                comptime!(r * value_tiles),
                value_tiles,
                half,
            );
        }
    }
    share_rows::<E>(
        &out,
        &mut queries,
        warp_row,
        row_tiles,
        config.value_dim,
        config,
    );
    sync_cube();
    store_rows::<E, N>(
        &queries,
        output,
        first_row,
        first_query,
        geometry.seq_q,
        block_q,
        config.value_dim,
        config,
    );
}

/// Multiplies one half of a row tile's rows.
#[cube]
fn scale_rows(
    out: &mut Sequence<Accumulator>,
    factor: f32,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] half: usize,
) {
    #[unroll]
    for n in 0..count {
        let tile = out.index_mut(comptime!(first + n));
        tile[half] *= Pair::new(factor);
    }
}
