//! The query gradient: one cube for each block of queries, `dQ = scale * sum over keys of dT K`.

use super::apart::{pair_up, take_apart};
use super::config::Config;
use super::fragment::{
    Chunk, Side, along_columns, along_rows, along_sums, further, place_again, zeros,
};
use super::gradient::{
    Block, keep_dots, load_statistics, rebuild_probabilities, scale_all, score_gradients,
    store_statistics,
};
use super::hidden::{add_flagged_rows, clear_flagged_rows, flag_rows, lower_flags, row_flags};
use super::products::{as_weights, dot_products, weighted_sum};
use super::rows::{share_rows, store_rows};
use super::scores::Position;
use super::stage::{await_copies, issue, land, round_first, rows_of, stage_first};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use cubecl::prelude::*;

/// Writes the gradient of the query, packed, `[batch, heads, seq_q, head_dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn query_gradient_kernel<E: Float, B: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<B>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    query_gradient: &mut [Vector<E, N>],
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
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let instructions = comptime!(config.instructions());
    let crowded = comptime!(config.crowded());
    let block_of_scores = comptime!(Block {
        row_tiles,
        column_tiles: key_tiles,
        transposed: false,
        staged: block_q,
    });

    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let batch_head = CUBE_POS / query_blocks;
    if batch_head >= geometry.batch * geometry.heads {
        terminate!();
    }
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    let first_query = ((query_blocks - 1 - CUBE_POS % query_blocks) * block_q) as i32;
    let warp_row = UNIT_POS as usize / 32 * comptime!(16 * row_tiles);

    let query_rows = rows_of(query, batch, head, geometry.seq_q);
    let gradient_rows = rows_of(output_gradient, batch, head, geometry.seq_q);
    let key_rows = rows_of(key, batch, head / geometry.group, geometry.seq_kv);
    let value_rows = rows_of(value, batch, head / geometry.group, geometry.seq_kv);

    let read_key_pitch = comptime!(config.walked_pitch(config.head_dim));
    let read_value_pitch = comptime!(config.walked_pitch(config.value_dim));
    let key_slot = comptime!(block_kv * read_key_pitch);
    let value_slot = comptime!(block_kv * read_value_pitch);
    let key_landing = comptime!(config.landing(config.head_dim));
    let value_landing = comptime!(config.landing(config.value_dim));
    let mut queries =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_q * key_pitch), 16usize);
    let mut gradients =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_q * value_pitch), 16usize);
    let mut keys = Shared::<[Chunk<E>]>::new_aligned_slice(
        comptime!(config.walked_tile(config.head_dim)),
        16usize,
    );
    let mut values = Shared::<[Chunk<E>]>::new_aligned_slice(
        comptime!(config.walked_tile(config.value_dim)),
        16usize,
    );
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(3 * block_q));
    let mut flags = row_flags(block_kv);

    let query_staging = comptime!(config.staging(block_q, config.head_dim));
    let gradient_staging = comptime!(config.staging(block_q, config.value_dim));
    let key_staging = comptime!(config.staging(block_kv, config.head_dim));
    let value_staging = comptime!(config.staging(block_kv, config.value_dim));
    let read_keys = comptime!(config.walked_staging(config.head_dim));
    // Issued ahead: to a place of its own, or to registers.
    let ahead = comptime!(!key_staging.asynchronous || blocks.stages == 2 || blocks.apart);
    let mut pending_key = Array::<Chunk<E>>::new(comptime!(key_staging.pending()));
    let mut pending_value = Array::<Chunk<E>>::new(comptime!(value_staging.pending()));

    let query_place = along_rows(&queries, warp_row, key_pitch, false, instructions);
    let gradient_place = along_rows(&gradients, warp_row, value_pitch, false, instructions);
    let key_place = along_columns(&keys, read_key_pitch, false, instructions);
    let key_sum_place = along_sums(&keys, read_key_pitch, false, instructions);
    let value_place = along_columns(&values, read_value_pitch, false, instructions);

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
    stage_first(
        output_gradient,
        gradient_rows,
        first_query,
        &mut gradients,
        &mut pending_key,
        gradient_staging,
    );
    let mut pending_statistics = Array::<f32>::new(3usize);
    let no_reference = Array::<f32>::new(1usize);
    #[unroll]
    for n in 0..comptime!(block_q.div_ceil(blocks.units())) {
        let row = n * blocks.units() + UNIT_POS as usize;
        if row < block_q {
            load_statistics(
                row_statistics,
                &mut pending_statistics,
                batch,
                head,
                first_query + row as i32,
                &geometry,
                config,
            );
            store_statistics(&pending_statistics, &mut statistics, 0usize, row, block_q);
        }
    }

    let mut out = zeros(comptime!(row_tiles * config.tiles(config.head_dim)));
    if comptime!(ahead) && first_block < end_block {
        let first_kv = (first_block * block_kv) as i32;
        issue(
            key,
            key_rows,
            first_kv,
            &mut keys,
            key_landing,
            &mut pending_key,
            key_staging,
        );
        issue(
            value,
            value_rows,
            first_kv,
            &mut values,
            value_landing,
            &mut pending_value,
            value_staging,
        );
    }
    round_first(&mut queries, query_staging);
    round_first(&mut gradients, gradient_staging);
    if comptime!(blocks.apart) {
        await_copies(query_staging);
        sync_cube();
        pair_up(&mut queries, block_q, config.head_dim, blocks.units());
        pair_up(&mut gradients, block_q, config.value_dim, blocks.units());
    }
    for block in first_block..end_block {
        let first_kv = (block * block_kv) as i32;
        let edge = comptime!(mask.is_some() || bias.is_some())
            || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
        let stage = (block - first_block) % blocks.stages;
        let at_key = stage * key_slot;
        let at_value = stage * value_slot;

        let landing_key = at_key + key_landing;
        let landing_value = at_value + value_landing;
        if comptime!(blocks.stages == 1 && !blocks.apart) {
            // Every warp is done with the last block.
            sync_cube();
        }
        if comptime!(!ahead) {
            issue(
                key,
                key_rows,
                first_kv,
                &mut keys,
                landing_key,
                &mut pending_key,
                key_staging,
            );
            issue(
                value,
                value_rows,
                first_kv,
                &mut values,
                landing_value,
                &mut pending_value,
                value_staging,
            );
        }
        land(
            key,
            key_rows,
            first_kv,
            &mut keys,
            landing_key,
            &pending_key,
            key_staging,
        );
        land(
            value,
            value_rows,
            first_kv,
            &mut values,
            landing_value,
            &pending_value,
            value_staging,
        );
        if comptime!(blocks.apart) {
            // Every warp is done with the last block, and its copies are here.
            sync_cube();
            take_apart(
                &mut keys,
                key_landing,
                block_kv,
                config.head_dim,
                blocks.units(),
            );
            take_apart(
                &mut values,
                value_landing,
                block_kv,
                config.value_dim,
                blocks.units(),
            );
        }
        sync_cube();
        if comptime!(ahead) && block + 1 < end_block {
            let next = first_kv + comptime!(block_kv as i32);
            let other = (stage + 1) % blocks.stages;
            issue(
                key,
                key_rows,
                next,
                &mut keys,
                other * key_slot + key_landing,
                &mut pending_key,
                key_staging,
            );
            issue(
                value,
                value_rows,
                next,
                &mut values,
                other * value_slot + value_landing,
                &mut pending_value,
                value_staging,
            );
        }
        if edge {
            lower_flags(&mut flags, key_staging);
        }

        let mut probabilities = dot_products::<E>(
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
                    read_key_pitch,
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
        let dots = keep_dots(&probabilities, comptime!(row_tiles * key_tiles), config);
        let position = Position {
            batch,
            head,
            first_query: first_query + warp_row as i32,
            first_kv,
        };
        rebuild_probabilities::<B, M>(
            &mut probabilities,
            &statistics,
            warp_row,
            position,
            &mask,
            &bias,
            &geometry,
            edge,
            block_of_scores,
            config,
        );
        let mut score_gradient = dot_products::<E>(
            &gradients,
            place_again(
                gradient_place,
                &gradients,
                comptime!(Side::Rows(16 * row_tiles)),
                value_pitch,
                crowded,
                instructions,
            ),
            &values,
            further(
                place_again(
                    value_place,
                    &values,
                    comptime!(Side::Columns),
                    read_value_pitch,
                    crowded,
                    instructions,
                ),
                at_value,
            ),
            row_tiles,
            key_tiles,
            config.value_dim,
            instructions,
        );
        let mut flagged = false;
        if edge {
            // Every warp is done with the keys as they are.
            sync_cube();
            flag_rows(&keys, at_key, &mut flags, config.exponent(), read_keys);
            sync_cube();
            flagged = flags[block_kv] != 0;
            if flagged {
                clear_flagged_rows(&mut keys, at_key, &flags, read_keys);
                sync_cube();
            }
        }
        score_gradients(
            &mut score_gradient,
            &probabilities,
            &dots,
            &statistics,
            warp_row,
            &geometry,
            edge,
            block_of_scores,
            config,
        );
        if flagged {
            add_flagged_rows(
                &mut out,
                &score_gradient,
                &no_reference,
                0.0f32,
                &flags,
                key,
                key_rows,
                first_kv,
                row_tiles,
                key_tiles,
                comptime!(None),
                key_staging,
            );
        }
        let weights = as_weights::<E>(&score_gradient, row_tiles, key_tiles, instructions);
        weighted_sum::<E>(
            &mut out,
            &weights,
            &keys,
            further(
                place_again(
                    key_sum_place,
                    &keys,
                    comptime!(Side::Sums),
                    read_key_pitch,
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
    }

    // Every warp is done with the queries; their place is for the gradient.
    await_copies(query_staging);
    sync_cube();
    scale_all(
        &mut out,
        geometry.scale,
        comptime!(row_tiles * config.tiles(config.head_dim)),
    );
    share_rows::<E>(
        &out,
        &mut queries,
        warp_row,
        row_tiles,
        config.head_dim,
        config,
    );
    sync_cube();
    store_rows::<E, N>(
        &queries,
        query_gradient,
        batch_head * geometry.seq_q as usize,
        first_query,
        geometry.seq_q,
        block_q,
        config.head_dim,
        config,
    );
}
