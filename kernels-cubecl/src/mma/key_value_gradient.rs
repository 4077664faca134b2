//! The key and value gradients: one cube for each block of keys of a key head.
//!
//! `dV = sum over queries of P^T dO` and `dK = scale * sum over queries of dT^T Q`, over all query
//! heads that read the key head, one after the other: no atomics, so the sums are reproducible.
//! Scores are computed transposed, keys along the rows: so the sums of `K Q^T` and `V dO^T` are the
//! weights of the two products that follow.

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
use super::instructions::by_value;
use super::products::{as_weights, dot_products, weighted_sum};
use super::rows::{share_rows, store_rows};
use super::scores::Position;
use super::stage::{await_copies, issue, land, round_first, rows_of, stage_first};
use crate::schedule::{Geometry, queries_of_block, wholly_visible};
use crate::unit::unit;
use cubecl::prelude::*;

/// Which gradients a launch computes. Two launches take half the registers of one, and repeat a
/// product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sides {
    pub key: bool,
    pub value: bool,
}

impl Sides {
    pub(crate) const BOTH: Self = Self {
        key: true,
        value: true,
    };
    pub(crate) const KEY: Self = Self {
        key: true,
        value: false,
    };
    pub(crate) const VALUE: Self = Self {
        key: false,
        value: true,
    };
}

/// Writes the gradients asked for, packed: of the key `[batch, kv_heads, seq_kv, head_dim]`, of the
/// value `[batch, kv_heads, seq_kv, value_dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn key_value_gradient_kernel<E: Float, B: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<B>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    key_gradient: &mut [Vector<E, N>],
    value_gradient: &mut [Vector<E, N>],
    geometry: Geometry,
    #[comptime] sides: Sides,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(B)] _bias_element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let blocks = comptime!(config.blocks);
    let block_kv = comptime!(blocks.owned());
    let block_q = comptime!(blocks.walked);
    let row_tiles = comptime!(blocks.row_tiles);
    let query_tiles = comptime!(block_q / 8);
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let key_columns = comptime!(config.tiles(config.head_dim));
    let value_columns = comptime!(config.tiles(config.value_dim));
    let instructions = comptime!(config.instructions());
    let crowded = comptime!(config.crowded());
    let block_of_scores = comptime!(Block {
        row_tiles,
        column_tiles: query_tiles,
        transposed: true,
        staged: block_q,
    });

    let kv_heads = geometry.heads / geometry.group;
    let key_blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let batch_head = CUBE_POS / key_blocks;
    if batch_head >= geometry.batch * kv_heads {
        terminate!();
    }
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;
    // The first block of keys is seen by the most queries where the problem is causal: it starts
    // first.
    let first_kv = ((CUBE_POS % key_blocks) * block_kv) as i32;
    let warp_row = UNIT_POS as usize / 32 * comptime!(16 * row_tiles);

    let key_rows = rows_of(key, batch, kv_head, geometry.seq_kv);
    let value_rows = rows_of(value, batch, kv_head, geometry.seq_kv);

    let query_pitch = comptime!(config.walked_pitch(config.head_dim));
    let gradient_pitch = comptime!(config.walked_pitch(config.value_dim));
    let query_slot = comptime!(block_q * query_pitch);
    let gradient_slot = comptime!(block_q * gradient_pitch);
    let query_landing = comptime!(config.landing(config.head_dim));
    let gradient_landing = comptime!(config.landing(config.value_dim));
    let mut keys =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_kv * key_pitch), 16usize);
    let mut values =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_kv * value_pitch), 16usize);
    let mut queries = Shared::<[Chunk<E>]>::new_aligned_slice(
        comptime!(config.walked_tile(config.head_dim)),
        16usize,
    );
    let mut gradients = Shared::<[Chunk<E>]>::new_aligned_slice(
        comptime!(config.walked_tile(config.value_dim)),
        16usize,
    );
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(blocks.stages * 3 * block_q));
    let mut flags = row_flags(block_q);

    let key_staging = comptime!(config.staging(block_kv, config.head_dim));
    let value_staging = comptime!(config.staging(block_kv, config.value_dim));
    let query_staging = comptime!(config.staging(block_q, config.head_dim));
    let gradient_staging = comptime!(config.staging(block_q, config.value_dim));
    let read_queries = comptime!(config.walked_staging(config.head_dim));
    let read_gradients = comptime!(config.walked_staging(config.value_dim));
    // Issued ahead: to a place of its own, or to registers.
    let ahead = comptime!(!query_staging.asynchronous || blocks.stages == 2 || blocks.apart);
    let mut pending_query = Array::<Chunk<E>>::new(comptime!(query_staging.pending()));
    let mut pending_gradient = Array::<Chunk<E>>::new(comptime!(gradient_staging.pending()));
    // Where registers are scarce statistics do not wait in them all along a block: they are read while its
    // rows land or are taken apart.
    let late = comptime!(config.halved() && (blocks.apart || row_tiles > 1 && blocks.stages == 1));
    let mut pending_statistics = Array::<f32>::new(3usize);
    let no_reference = Array::<f32>::new(1usize);

    let key_place = along_rows(&keys, warp_row, key_pitch, false, instructions);
    let value_place = along_rows(&values, warp_row, value_pitch, false, instructions);
    let query_place = along_columns(&queries, query_pitch, false, instructions);
    let query_sum_place = along_sums(&queries, query_pitch, false, instructions);
    let gradient_place = along_columns(&gradients, gradient_pitch, false, instructions);
    let gradient_sum_place = along_sums(&gradients, gradient_pitch, false, instructions);

    // The queries that see some key of the block through the band, in every head of the group.
    let visible = queries_of_block(&geometry, first_kv, block_kv, false);
    let first_block = visible.first as usize / block_q;
    let end_block = (visible.end as usize).div_ceil(block_q);
    let per_head = select(end_block > first_block, end_block - first_block, 0usize);
    let steps = per_head * geometry.group;
    // All blocks of the first head that reads the key head, then of the next.
    let first_of_head = (first_block * block_q) as i32;
    let end_of_head = (end_block * block_q) as i32;
    let mut walked_head = kv_head * geometry.group;
    let mut walked_query = (first_block * block_q) as i32;

    stage_first(
        key,
        key_rows,
        first_kv,
        &mut keys,
        &mut pending_query,
        key_staging,
    );
    stage_first(
        value,
        value_rows,
        first_kv,
        &mut values,
        &mut pending_query,
        value_staging,
    );

    let mut key_sums = zeros(comptime!(if sides.key {
        row_tiles * key_columns
    } else {
        0
    }));
    let mut value_sums = zeros(comptime!(if sides.value {
        row_tiles * value_columns
    } else {
        0
    }));
    if steps > 0 {
        let head = kv_head * geometry.group;
        if comptime!(ahead) {
            issue(
                query,
                rows_of(query, batch, head, geometry.seq_q),
                first_of_head,
                &mut queries,
                query_landing,
                &mut pending_query,
                query_staging,
            );
            issue(
                output_gradient,
                rows_of(output_gradient, batch, head, geometry.seq_q),
                first_of_head,
                &mut gradients,
                gradient_landing,
                &mut pending_gradient,
                gradient_staging,
            );
        }
        if comptime!(!late) {
            load_statistics(
                row_statistics,
                &mut pending_statistics,
                batch,
                head,
                first_of_head + unit(crowded) as i32,
                &geometry,
                config,
            );
        }
        round_first(&mut keys, key_staging);
        round_first(&mut values, value_staging);
        if comptime!(blocks.apart) {
            await_copies(key_staging);
            sync_cube();
            pair_up(&mut keys, block_kv, config.head_dim, blocks.units());
            pair_up(&mut values, block_kv, config.value_dim, blocks.units());
        }
    }
    for step in 0..steps {
        let head = by_value::<usize>(walked_head);
        let first_query = by_value::<i32>(walked_query);
        let following = first_query + comptime!(block_q as i32);
        let last_of_head = following >= end_of_head;
        let next_head = select(last_of_head, head + 1, head);
        let next_query = select(last_of_head, first_of_head, following);
        walked_head = next_head;
        walked_query = next_query;
        let query_rows = rows_of(query, batch, head, geometry.seq_q);
        let gradient_rows = rows_of(output_gradient, batch, head, geometry.seq_q);
        let stage = step % blocks.stages;
        let at_query = stage * query_slot;
        let at_gradient = stage * gradient_slot;
        let at_statistics = stage * comptime!(3 * block_q);
        let landing_query = at_query + query_landing;
        let landing_gradient = at_gradient + gradient_landing;
        if comptime!(blocks.stages == 1 && !blocks.apart) {
            // Every warp is done with the last block.
            sync_cube();
        }
        if comptime!(!ahead) {
            issue(
                query,
                query_rows,
                first_query,
                &mut queries,
                landing_query,
                &mut pending_query,
                query_staging,
            );
            issue(
                output_gradient,
                gradient_rows,
                first_query,
                &mut gradients,
                landing_gradient,
                &mut pending_gradient,
                gradient_staging,
            );
        }
        if comptime!(late) {
            load_statistics(
                row_statistics,
                &mut pending_statistics,
                batch,
                head,
                first_query + unit(crowded) as i32,
                &geometry,
                config,
            );
        }
        land(
            query,
            query_rows,
            first_query,
            &mut queries,
            landing_query,
            &pending_query,
            query_staging,
        );
        land(
            output_gradient,
            gradient_rows,
            first_query,
            &mut gradients,
            landing_gradient,
            &pending_gradient,
            gradient_staging,
        );
        if comptime!(blocks.apart) {
            // Every warp is done with the last block, and its copies are here.
            sync_cube();
            take_apart(
                &mut queries,
                query_landing,
                block_q,
                config.head_dim,
                blocks.units(),
            );
            take_apart(
                &mut gradients,
                gradient_landing,
                block_q,
                config.value_dim,
                blocks.units(),
            );
        }
        let own = unit(crowded) as usize;
        if own < block_q {
            store_statistics(
                &pending_statistics,
                &mut statistics,
                at_statistics,
                own,
                block_q,
            );
        }
        sync_cube();
        if step + 1 < steps {
            if comptime!(ahead) {
                let other = (stage + 1) % blocks.stages;
                issue(
                    query,
                    rows_of(query, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut queries,
                    other * query_slot + query_landing,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut gradients,
                    other * gradient_slot + gradient_landing,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
            if comptime!(!late) {
                load_statistics(
                    row_statistics,
                    &mut pending_statistics,
                    batch,
                    next_head,
                    next_query + unit(crowded) as i32,
                    &geometry,
                    config,
                );
            }
        }
        let edge = comptime!(mask.is_some() || bias.is_some())
            || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
        if edge {
            lower_flags(&mut flags, query_staging);
        }
        let mut probabilities = dot_products::<E>(
            &keys,
            place_again(
                key_place,
                &keys,
                comptime!(Side::Rows(16 * row_tiles)),
                key_pitch,
                crowded,
                instructions,
            ),
            &queries,
            further(
                place_again(
                    query_place,
                    &queries,
                    comptime!(Side::Columns),
                    query_pitch,
                    crowded,
                    instructions,
                ),
                at_query,
            ),
            row_tiles,
            query_tiles,
            config.head_dim,
            instructions,
        );
        let dots = keep_dots(&probabilities, comptime!(row_tiles * query_tiles), config);
        let position = Position {
            batch,
            head,
            first_query,
            first_kv: first_kv + warp_row as i32,
        };
        rebuild_probabilities::<B, M>(
            &mut probabilities,
            &statistics,
            at_statistics,
            position,
            &mask,
            &bias,
            &geometry,
            edge,
            block_of_scores,
            config,
        );
        let mut score_gradient = if comptime!(sides.key) {
            dot_products::<E>(
                &values,
                place_again(
                    value_place,
                    &values,
                    comptime!(Side::Rows(16 * row_tiles)),
                    value_pitch,
                    crowded,
                    instructions,
                ),
                &gradients,
                further(
                    place_again(
                        gradient_place,
                        &gradients,
                        comptime!(Side::Columns),
                        gradient_pitch,
                        crowded,
                        instructions,
                    ),
                    at_gradient,
                ),
                row_tiles,
                query_tiles,
                config.value_dim,
                instructions,
            )
        } else {
            zeros(0usize)
        };
        if comptime!(sides.key) {
            score_gradients(
                &mut score_gradient,
                &probabilities,
                &dots,
                &statistics,
                at_statistics,
                &geometry,
                edge,
                block_of_scores,
                config,
            );
        }
        let mut flagged = false;
        if edge {
            // Every warp is done with queries and output gradients as they are.
            sync_cube();
            if comptime!(sides.key) {
                flag_rows(
                    &queries,
                    at_query,
                    &mut flags,
                    config.exponent(),
                    read_queries,
                );
            }
            if comptime!(sides.value) {
                flag_rows(
                    &gradients,
                    at_gradient,
                    &mut flags,
                    config.exponent(),
                    read_gradients,
                );
            }
            sync_cube();
            flagged = flags[block_q] != 0;
            if flagged {
                clear_flagged_rows(&mut queries, at_query, &flags, read_queries);
                clear_flagged_rows(&mut gradients, at_gradient, &flags, read_gradients);
                sync_cube();
            }
        }
        if comptime!(sides.value) {
            if flagged {
                add_flagged_rows(
                    &mut value_sums,
                    &probabilities,
                    &no_reference,
                    0.0f32,
                    &flags,
                    output_gradient,
                    rows_of(output_gradient, batch, head, geometry.seq_q),
                    first_query,
                    row_tiles,
                    query_tiles,
                    comptime!(None),
                    gradient_staging,
                );
            }
            let weights = as_weights::<E>(&probabilities, row_tiles, query_tiles, instructions);
            weighted_sum::<E>(
                &mut value_sums,
                &weights,
                &gradients,
                further(
                    place_again(
                        gradient_sum_place,
                        &gradients,
                        comptime!(Side::Sums),
                        gradient_pitch,
                        crowded,
                        instructions,
                    ),
                    at_gradient,
                ),
                row_tiles,
                query_tiles,
                config.value_dim,
                instructions,
            );
        }
        if comptime!(sides.key) {
            if flagged {
                add_flagged_rows(
                    &mut key_sums,
                    &score_gradient,
                    &no_reference,
                    0.0f32,
                    &flags,
                    query,
                    rows_of(query, batch, head, geometry.seq_q),
                    first_query,
                    row_tiles,
                    query_tiles,
                    comptime!(None),
                    query_staging,
                );
            }
            let weights = as_weights::<E>(&score_gradient, row_tiles, query_tiles, instructions);
            weighted_sum::<E>(
                &mut key_sums,
                &weights,
                &queries,
                further(
                    place_again(
                        query_sum_place,
                        &queries,
                        comptime!(Side::Sums),
                        query_pitch,
                        crowded,
                        instructions,
                    ),
                    at_query,
                ),
                row_tiles,
                query_tiles,
                config.head_dim,
                instructions,
            );
        }
    }

    // Every warp is done with keys and values; their places are for the gradients.
    await_copies(key_staging);
    sync_cube();
    let first_row = batch_head * geometry.seq_kv as usize;
    if comptime!(sides.key) {
        scale_all(
            &mut key_sums,
            geometry.scale,
            comptime!(row_tiles * key_columns),
        );
        share_rows::<E>(
            &key_sums,
            &mut keys,
            warp_row,
            row_tiles,
            config.head_dim,
            config,
        );
    }
    if comptime!(sides.value) {
        share_rows::<E>(
            &value_sums,
            &mut values,
            warp_row,
            row_tiles,
            config.value_dim,
            config,
        );
    }
    sync_cube();
    if comptime!(sides.key) {
        store_rows::<E, N>(
            &keys,
            key_gradient,
            first_row,
            first_kv,
            geometry.seq_kv,
            block_kv,
            config.head_dim,
            config,
        );
    }
    if comptime!(sides.value) {
        store_rows::<E, N>(
            &values,
            value_gradient,
            first_row,
            first_kv,
            geometry.seq_kv,
            block_kv,
            config.value_dim,
            config,
        );
    }
}
