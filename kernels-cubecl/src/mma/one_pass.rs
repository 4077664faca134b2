//! All gradients in one pass over the scores: one cube for each block of keys of a key head, a warp for 32
//! of them, or several where heads are wide.
//!
//! Scores are computed transposed, keys along the rows, as in the two kernels that this one stands for:
//! sums of products are the weights of the next. The queries of every head of the group are walked one
//! after the other, from the last.
//!
//! ```text
//! for each head of the group, block of queries
//!     next Q, dO, statistics on their way
//!     P of the warp's part of the queries; dV += P dO
//!     dS of the same; dS to shared memory; dK += dS Q
//!     every warp's weights are there; the cube's turn to add has come
//!     where several warps share keys: dV, dK of the others' parts of the queries
//!     dQ = dS K, added to the sums in global memory
//!     next Q, dO have arrived
//! ```
//!
//! A warp whose keys no other owns has all sums of them in its registers and multiplies weights where they
//! are. Of warps that share keys each sums a part of the features, and takes the weights of the others'
//! queries from shared memory. The query gradient needs those of all keys in any case: 32 queries of it a
//! warp, by a part of the features.
//!
//! A hidden row that is not finite must not meet a weight of 0 in a product. Blocks with hidden scores are
//! looked through, and where there is such a row their sums are formed row by row.

use super::blueprint::Config;
use super::forward::store_rows;
use super::fragment::{
    Chunk, Registers, along_columns, along_rows, along_sums, as_weights, by_value,
    dot_products, further, load_block, zeros,
};
use super::gradient::{
    Block, keep_dots, load_statistics, rebuild_probabilities, scale_all, score_gradients,
    store_statistics,
};
use super::one_pass_blueprint::{KEYS, OnePass};
use super::query_sums::add_to_sums;
use super::softmax::Position;
use super::stage::{await_copies, issue, land, rows_of, stage_first};
use super::turns::{fence, pass_turn, turn_at, wait_turn};
use super::weights::{
    Steps, add_columns, add_row_by_row, along_weights, finds_non_finite, store_weights,
};
use crate::schedule::{Geometry, queries_of_block, wholly_visible};
use cubecl::prelude::*;

/// Tiles of a warp's keys.
const ROW_TILES: usize = KEYS / 16;

/// Writes the gradients of key and value, packed, and adds to the sums of the query's.
///
/// `query_sums` and `turns` start as zeros: blocks of sums, and a counter for each of them and one for the
/// cubes. `section` heads at a time have their cubes run side by side, so that the cache keeps their
/// queries and output gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn one_pass_kernel<E: Float, B: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<B>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    key_gradient: &mut [Vector<E, N>],
    value_gradient: &mut [Vector<E, N>],
    query_sums: &[Atomic<f32>],
    turns: &[Atomic<u32>],
    geometry: Geometry,
    section: usize,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(B)] _bias_element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let sides = one_pass.sides;
    let stages = one_pass.stages;
    let wide = one_pass.wide;
    let block_kv = comptime!(one_pass.owned());
    let block_q = one_pass.walked;
    let part = comptime!(one_pass.part());
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weight_pitch = comptime!(config.pitch(block_q));
    let key_columns = comptime!(config.head_dim / sides / 8);
    let value_columns = comptime!(config.value_dim / sides / 8);
    let (query_row_tiles, query_features) = comptime!(one_pass.query_tile(config.head_dim));
    let query_columns = comptime!(query_features / 8);
    let query_slot = comptime!(block_q * key_pitch);
    let gradient_slot = comptime!(block_q * value_pitch);
    let instructions = comptime!(config.instructions());
    let ordered = comptime!(one_pass.ordered());
    // One unit's fences are assembly text.
    let fenced = comptime!(ordered && config.assembly);

    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let heads = geometry.batch * kv_heads;
    // The cube's number; whether there are keys that are not finite; whether queries and output gradients
    // of this step, and of the next.
    let mut notes = Shared::<[u32]>::new_slice(4usize);
    if UNIT_POS < 4 {
        let mut note = 0u32;
        if comptime!(ordered) {
            if UNIT_POS == 0 {
                note = turns[geometry.batch * geometry.heads * query_blocks].fetch_add(1u32);
            }
        }
        notes[UNIT_POS as usize] = note;
    }
    sync_cube();
    let mut number = CUBE_POS;
    if comptime!(ordered) {
        number = notes[0] as usize;
    }
    if number >= blocks * heads {
        terminate!();
    }
    // Heads in sections, the first block of keys first, for the most queries see it.
    let first_head = number / (blocks * section) * section;
    let width = select(heads - first_head < section, heads - first_head, section);
    let place = number - first_head * blocks;
    let batch_head = first_head + place % width;
    let first_kv = (place / width * block_kv) as i32;
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;
    let key_rows = rows_of(key, batch, kv_head, geometry.seq_kv);
    let value_rows = rows_of(value, batch, kv_head, geometry.seq_kv);

    let mut keys =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_kv * key_pitch), 16usize);
    let mut values =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_kv * value_pitch), 16usize);
    let mut queries =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(stages * query_slot), 16usize);
    let mut gradients =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(stages * gradient_slot), 16usize);
    let mut score_weights =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(block_kv * weight_pitch), 16usize);
    let mut value_weights = Shared::<[Chunk<E>]>::new_aligned_slice(
        comptime!(if one_pass.shares_probabilities() {
            block_kv * weight_pitch
        } else {
            1
        }),
        16usize,
    );
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(stages * 3 * block_q));

    let key_staging = comptime!(config.staging(block_kv, config.head_dim));
    let value_staging = comptime!(config.staging(block_kv, config.value_dim));
    let query_staging = comptime!(config.staging(block_q, config.head_dim));
    let gradient_staging = comptime!(config.staging(block_q, config.value_dim));
    let asynchronous = comptime!(query_staging.asynchronous);
    // Without asynchronous copies the next rows wait in registers once weights have left them.
    let late = comptime!(!asynchronous);
    let mut pending_query = Array::<Chunk<E>>::new(comptime!(query_staging.pending()));
    let mut pending_gradient = Array::<Chunk<E>>::new(comptime!(gradient_staging.pending()));
    let mut pending_statistics = Array::<f32>::new(3usize);

    // The warp's keys, its part of the queries and of the features.
    let warp = UNIT_POS as usize / 32;
    let warp_row = warp / sides * KEYS;
    let side = warp % sides;
    let own_query = side * part;
    let key_chunk = side * key_columns;
    let value_chunk = side * value_columns;
    let key_place = along_rows(&keys, warp_row, key_pitch, instructions);
    let value_place = along_rows(&values, warp_row, value_pitch, instructions);
    let query_place = further(
        along_columns(&queries, key_pitch, instructions),
        own_query * key_pitch,
    );
    let gradient_place = further(
        along_columns(&gradients, value_pitch, instructions),
        own_query * value_pitch,
    );
    let query_sum_place = further(along_sums(&queries, key_pitch, instructions), key_chunk);
    let gradient_sum_place = further(
        along_sums(&gradients, value_pitch, instructions),
        value_chunk,
    );
    let score_store = further(
        along_weights(&score_weights, warp_row, weight_pitch, wide, instructions),
        own_query / 8,
    );
    let value_store = further(
        along_weights(&value_weights, warp_row, weight_pitch, wide, instructions),
        own_query / 8,
    );
    let score_place = along_rows(&score_weights, warp_row, weight_pitch, instructions);
    let probability_place = along_rows(&value_weights, warp_row, weight_pitch, instructions);
    // The warp's tile of the query gradient.
    let warp_columns = comptime!(config.head_dim / query_features);
    let tile_query = warp / warp_columns * comptime!(16 * query_row_tiles);
    let tile_chunk = warp % warp_columns * query_columns;
    let tile_score_place = further(
        along_columns(&score_weights, weight_pitch, instructions),
        tile_query / 8,
    );
    let tile_key_place = further(along_sums(&keys, key_pitch, instructions), tile_chunk);

    // The blocks of queries that see some key of the block through the band, in every head of the group.
    let visible = queries_of_block(&geometry, first_kv, block_kv);
    let first_block = visible.first as usize / block_q;
    let end_block = (visible.end as usize).div_ceil(block_q);
    let per_head = select(end_block > first_block, end_block - first_block, 0usize);
    let steps = per_head * geometry.group;
    let last_of_head = select(per_head > 0, end_block - 1, 0usize);
    let mut walked_head = kv_head * geometry.group;
    let mut walked_block = last_of_head;

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
    let own = UNIT_POS as usize;
    if steps > 0 {
        let head = kv_head * geometry.group;
        let first_query = (last_of_head * block_q) as i32;
        stage_first(
            query,
            rows_of(query, batch, head, geometry.seq_q),
            first_query,
            &mut queries,
            &mut pending_query,
            query_staging,
        );
        stage_first(
            output_gradient,
            rows_of(output_gradient, batch, head, geometry.seq_q),
            first_query,
            &mut gradients,
            &mut pending_gradient,
            gradient_staging,
        );
        load_statistics(
            row_statistics,
            &mut pending_statistics,
            batch,
            head,
            first_query + own as i32,
            &geometry,
            config,
        );
        if own < block_q {
            store_statistics(&pending_statistics, &mut statistics, 0usize, own, block_q);
        }
    }
    await_copies(key_staging);
    sync_cube();
    if finds_non_finite(&keys, 0usize, config.exponent(), key_staging) {
        notes[1] = 1u32;
    }

    let mut key_sums = zeros(comptime!(ROW_TILES * key_columns));
    let mut value_sums = zeros(comptime!(ROW_TILES * value_columns));
    for step in 0..steps {
        let head = by_value::<usize>(walked_head);
        let block = by_value::<usize>(walked_block);
        let first_query = (block * block_q) as i32;
        let head_ends = block == first_block;
        let next_head = select(head_ends, head + 1, head);
        let next_block = select(head_ends, last_of_head, block - 1);
        let next_query = (next_block * block_q) as i32;
        walked_head = next_head;
        walked_block = next_block;
        let stage = step % stages;
        let other = (stage + 1) % stages;
        let at_query = stage * query_slot;
        let at_gradient = stage * gradient_slot;
        let at_statistics = stage * comptime!(3 * block_q);
        let counter = (batch * geometry.heads + head) * query_blocks + block;
        let turn = turn_at(counter, first_query, first_kv, &geometry, block_q, block_kv);

        if step + 1 < steps {
            if comptime!(asynchronous && stages == 2) {
                issue(
                    query,
                    rows_of(query, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut queries,
                    other * query_slot,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut gradients,
                    other * gradient_slot,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
            load_statistics(
                row_statistics,
                &mut pending_statistics,
                batch,
                next_head,
                next_query + own as i32,
                &geometry,
                config,
            );
        }
        let edge = comptime!(mask.is_some() || bias.is_some())
            || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
        let mut careful = false;
        if edge {
            let exponent = comptime!(config.exponent());
            let found = finds_non_finite(&queries, at_query, exponent, query_staging)
                || finds_non_finite(&gradients, at_gradient, exponent, gradient_staging);
            if found {
                notes[2 + step % 2] = 1u32;
            }
            sync_cube();
            careful = notes[1] != 0 || notes[2 + step % 2] != 0;
        }

        #[unroll]
        for c in 0..comptime!(part / one_pass.chunk()) {
            let chunk = comptime!(one_pass.chunk());
            let first = comptime!(c * chunk);
            let column_tiles = comptime!(chunk / 8);
            let block_of_scores = comptime!(Block {
                row_tiles: ROW_TILES,
                column_tiles,
                transposed: true,
                staged: block_q,
            });
            let row = own_query + first;
            let at_row = at_statistics + row;
            let mut probabilities = dot_products::<E>(
                &keys,
                key_place,
                &queries,
                further(query_place, at_query + comptime!(first * key_pitch)),
                ROW_TILES,
                column_tiles,
                config.head_dim,
                instructions,
            );
            let dots = keep_dots(&probabilities, comptime!(ROW_TILES * column_tiles), config);
            let position = Position {
                batch,
                head,
                first_query: first_query + row as i32,
                first_kv: first_kv + warp_row as i32,
            };
            rebuild_probabilities::<B, M>(
                &mut probabilities,
                &statistics,
                at_row,
                position,
                &mask,
                &bias,
                &geometry,
                edge,
                block_of_scores,
                config,
            );
            let weights =
                as_weights::<E>(&probabilities, ROW_TILES, column_tiles, instructions);
            if comptime!(one_pass.shares_probabilities()) {
                store_weights(
                    &mut value_weights,
                    further(value_store, comptime!(first / 8)),
                    &weights,
                    ROW_TILES,
                    column_tiles,
                    weight_pitch,
                    wide,
                    instructions,
                );
            }
            if careful {
                // Where nobody else needs them they stand in the place of their gradients for a while.
                if comptime!(!one_pass.shares_probabilities()) {
                    store_weights(
                        &mut score_weights,
                        further(score_store, comptime!(first / 8)),
                        &weights,
                        ROW_TILES,
                        column_tiles,
                        weight_pitch,
                        wide,
                        instructions,
                    );
                }
                sync_plane();
                let lent = if comptime!(one_pass.shares_probabilities()) {
                    &value_weights
                } else {
                    &score_weights
                };
                add_row_by_row(
                    &mut value_sums,
                    lent,
                    key_weight(warp_row, row, weight_pitch),
                    &gradients,
                    at_gradient + row * value_pitch + value_chunk,
                    comptime!(by_key(weight_pitch)),
                    chunk,
                    config.value_dim,
                    ROW_TILES,
                    value_columns,
                );
                sync_plane();
            } else {
                #[unroll]
                for k in 0..comptime!(column_tiles / 2) {
                    add_columns::<E>(
                        &mut value_sums,
                        &fragments(&weights, k, comptime!(column_tiles / 2)),
                        &gradients,
                        further(gradient_sum_place, at_gradient + row * value_pitch),
                        comptime!(16 * k * value_pitch),
                        ROW_TILES,
                        value_columns,
                        instructions,
                    );
                }
            }
            let mut score_gradient = dot_products::<E>(
                &values,
                value_place,
                &gradients,
                further(gradient_place, at_gradient + comptime!(first * value_pitch)),
                ROW_TILES,
                column_tiles,
                config.value_dim,
                instructions,
            );
            score_gradients(
                &mut score_gradient,
                &probabilities,
                &dots,
                &statistics,
                at_row,
                &geometry,
                edge,
                block_of_scores,
                config,
            );
            let weights =
                as_weights::<E>(&score_gradient, ROW_TILES, column_tiles, instructions);
            store_weights(
                &mut score_weights,
                further(score_store, comptime!(first / 8)),
                &weights,
                ROW_TILES,
                column_tiles,
                weight_pitch,
                wide,
                instructions,
            );
            if careful {
                sync_plane();
                add_row_by_row(
                    &mut key_sums,
                    &score_weights,
                    key_weight(warp_row, row, weight_pitch),
                    &queries,
                    at_query + row * key_pitch + key_chunk,
                    comptime!(by_key(weight_pitch)),
                    chunk,
                    config.head_dim,
                    ROW_TILES,
                    key_columns,
                );
            } else {
                #[unroll]
                for k in 0..comptime!(column_tiles / 2) {
                    add_columns::<E>(
                        &mut key_sums,
                        &fragments(&weights, k, comptime!(column_tiles / 2)),
                        &queries,
                        further(query_sum_place, at_query + row * key_pitch),
                        comptime!(16 * k * key_pitch),
                        ROW_TILES,
                        key_columns,
                        instructions,
                    );
                }
            }
        }

        if comptime!(ordered) {
            if own == 0 {
                if comptime!(fenced) {
                    // What the cube added in the step before is in; nothing is added before its turn.
                    fence();
                    if step > 0 {
                        let first_of_head = block == last_of_head;
                        let before = select(first_of_head, first_block, block + 1);
                        let head = select(first_of_head, head - 1, head);
                        let before = (batch * geometry.heads + head) * query_blocks + before;
                        pass_turn(turns, before);
                    }
                }
                wait_turn(turns, turn);
                if comptime!(fenced) {
                    fence();
                }
            }
        }
        if comptime!(ordered && !fenced) {
            sync_storage();
        } else {
            sync_cube();
        }
        if own == 0 {
            notes[2 + (step + 1) % 2] = 0u32;
        }
        if step + 1 < steps {
            if comptime!(late && stages == 2) {
                issue(
                    query,
                    rows_of(query, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut queries,
                    other * query_slot,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut gradients,
                    other * gradient_slot,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
        }

        #[unroll]
        for n in 1..sides {
            let row = (side + n) % sides * part;
            if careful {
                add_row_by_row(
                    &mut value_sums,
                    &value_weights,
                    key_weight(warp_row, row, weight_pitch),
                    &gradients,
                    at_gradient + row * value_pitch + value_chunk,
                    comptime!(by_key(weight_pitch)),
                    part,
                    config.value_dim,
                    ROW_TILES,
                    value_columns,
                );
                add_row_by_row(
                    &mut key_sums,
                    &score_weights,
                    key_weight(warp_row, row, weight_pitch),
                    &queries,
                    at_query + row * key_pitch + key_chunk,
                    comptime!(by_key(weight_pitch)),
                    part,
                    config.head_dim,
                    ROW_TILES,
                    key_columns,
                );
            } else {
                #[unroll]
                for k in 0..comptime!(part / 16) {
                    let mut rows = Sequence::<Registers>::new();
                    #[unroll]
                    for r in 0..ROW_TILES {
                        rows.push(load_block(
                            &value_weights,
                            further(probability_place, row / 8),
                            comptime!(16 * r * weight_pitch + 2 * k),
                            false,
                            instructions,
                        ));
                    }
                    add_columns::<E>(
                        &mut value_sums,
                        &rows,
                        &gradients,
                        further(gradient_sum_place, at_gradient + row * value_pitch),
                        comptime!(16 * k * value_pitch),
                        ROW_TILES,
                        value_columns,
                        instructions,
                    );
                }
                #[unroll]
                for k in 0..comptime!(part / 16) {
                    let mut rows = Sequence::<Registers>::new();
                    #[unroll]
                    for r in 0..ROW_TILES {
                        rows.push(load_block(
                            &score_weights,
                            further(score_place, row / 8),
                            comptime!(16 * r * weight_pitch + 2 * k),
                            false,
                            instructions,
                        ));
                    }
                    add_columns::<E>(
                        &mut key_sums,
                        &rows,
                        &queries,
                        further(query_sum_place, at_query + row * key_pitch),
                        comptime!(16 * k * key_pitch),
                        ROW_TILES,
                        key_columns,
                        instructions,
                    );
                }
            }
        }

        let mut tile = zeros(comptime!(query_row_tiles * query_columns));
        if careful {
            add_row_by_row(
                &mut tile,
                &score_weights,
                tile_query + UNIT_POS_PLANE as usize / 4,
                &keys,
                tile_chunk,
                comptime!(Steps {
                    row: 1,
                    summed: 8 * weight_pitch
                }),
                block_kv,
                config.head_dim,
                query_row_tiles,
                query_columns,
            );
        } else {
            #[unroll]
            for k in 0..comptime!(block_kv / 16) {
                let mut rows = Sequence::<Registers>::new();
                #[unroll]
                for r in 0..query_row_tiles {
                    rows.push(load_block(
                        &score_weights,
                        tile_score_place,
                        comptime!(16 * k * weight_pitch + 2 * r),
                        true,
                        instructions,
                    ));
                }
                add_columns::<E>(
                    &mut tile,
                    &rows,
                    &keys,
                    tile_key_place,
                    comptime!(16 * k * key_pitch),
                    query_row_tiles,
                    query_columns,
                    instructions,
                );
            }
        }
        add_to_sums(
            query_sums,
            counter * comptime!(block_q * config.head_dim)
                + warp * comptime!(16 * query_row_tiles * query_features),
            &tile,
            comptime!(query_row_tiles * query_columns),
            wide,
            config.assembly,
        );

        if comptime!(stages == 1) {
            // Every warp is done with the block.
            sync_cube();
        }
        if step + 1 < steps {
            if comptime!(stages == 1) {
                issue(
                    query,
                    rows_of(query, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut queries,
                    0usize,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, batch, next_head, geometry.seq_q),
                    next_query,
                    &mut gradients,
                    0usize,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
            land(
                query,
                rows_of(query, batch, next_head, geometry.seq_q),
                next_query,
                &mut queries,
                other * query_slot,
                &pending_query,
                query_staging,
            );
            land(
                output_gradient,
                rows_of(output_gradient, batch, next_head, geometry.seq_q),
                next_query,
                &mut gradients,
                other * gradient_slot,
                &pending_gradient,
                gradient_staging,
            );
            if own < block_q {
                store_statistics(
                    &pending_statistics,
                    &mut statistics,
                    other * comptime!(3 * block_q),
                    own,
                    block_q,
                );
            }
        }
        if comptime!(ordered && !fenced) {
            sync_storage();
            if own == 0 {
                pass_turn(turns, counter);
            }
        } else {
            sync_cube();
        }
    }
    if comptime!(fenced) {
        if own == 0 && steps > 0 {
            fence();
            let head = kv_head * geometry.group + geometry.group - 1;
            pass_turn(
                turns,
                (batch * geometry.heads + head) * query_blocks + first_block,
            );
        }
    }

    // Every warp is done with keys and values; their places are for the gradients.
    sync_cube();
    scale_all(
        &mut key_sums,
        geometry.scale,
        comptime!(ROW_TILES * key_columns),
    );
    let place = along_weights(&keys, warp_row, key_pitch, wide, instructions);
    store_weights(
        &mut keys,
        further(place, key_chunk),
        &as_weights::<E>(&key_sums, ROW_TILES, key_columns, instructions),
        ROW_TILES,
        key_columns,
        key_pitch,
        wide,
        instructions,
    );
    let place = along_weights(&values, warp_row, value_pitch, wide, instructions);
    store_weights(
        &mut values,
        further(place, value_chunk),
        &as_weights::<E>(&value_sums, ROW_TILES, value_columns, instructions),
        ROW_TILES,
        value_columns,
        value_pitch,
        wide,
        instructions,
    );
    sync_cube();
    let first_row = batch_head * geometry.seq_kv as usize;
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

/// How far apart weights lie where sums have keys along their rows.
const fn by_key(weight_pitch: usize) -> Steps {
    Steps {
        row: 8 * weight_pitch,
        summed: 1,
    }
}

/// The element of the lane's first row among a warp's weights, of query `row`.
#[cube]
fn key_weight(warp_row: usize, row: usize, #[comptime] weight_pitch: usize) -> usize {
    (warp_row + UNIT_POS_PLANE as usize / 4) * comptime!(8 * weight_pitch) + row
}

/// The fragments of 16 weights of each row.
#[cube]
fn fragments(
    weights: &Sequence<Registers>,
    #[comptime] k: usize,
    #[comptime] columns: usize,
) -> Sequence<Registers> {
    let mut rows = Sequence::<Registers>::new();
    #[unroll]
    for r in 0..ROW_TILES {
        rows.push(*weights.index(comptime!(r * columns + k)));
    }
    rows
}
