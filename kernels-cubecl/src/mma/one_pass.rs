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

use super::config::Config;
use super::fragment::zeros;
use super::gradient::{load_statistics, store_statistics};
use super::hidden::finds_non_finite;
use super::one_pass_blueprint::OnePass;
use super::one_pass_end::store_gradients;
use super::one_pass_shared::{add_other_parts, query_tile};
use super::one_pass_step::add_own_part;
use super::one_pass_tiles::{ROW_TILES, Step, slots, tiles};
use super::one_pass_walk::{
    BATCH, BATCH_HEAD, COUNTER, FIRST_HEAD, FIRST_KV, KEYS_CAREFUL, LAST_OF_HEAD, NOTES, PER_HEAD,
    SEEN, STEP_CAREFUL, STEPS, draw_number, step_again, walked,
};
use super::queries::{issue_queries, land_queries, pending, stage_first_queries};
use super::query_sums::add_to_sums;
use super::stage::{await_copies, rows_of, stage_first};
use super::turns::{fence, pass_turn, wait_turn};
use crate::schedule::{Geometry, Seat, queries_of_block, wholly_visible};
use crate::turns::turn_at;
use crate::unit::unit;
use cubecl::prelude::*;

/// Writes the gradients of key and value, packed, and adds to the sums of the query's.
///
/// `query_sums` and `turns` start as zeros: blocks of sums, and a counter for each of them and one for the
/// cubes. `section` heads at a time have their cubes run side by side, so that the cache keeps their
/// queries and output gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
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
    let stages = one_pass.stages;
    let block_kv = comptime!(one_pass.owned());
    let block_q = one_pass.walked;
    let key_columns = comptime!(config.head_dim / one_pass.sides / 8);
    let value_columns = comptime!(config.value_dim / one_pass.sides / 8);
    // Tiles of a warp's part of the query gradient.
    let (query_row_tiles, query_features) = comptime!(one_pass.query_tile(config.head_dim));
    let tile_columns = comptime!(query_row_tiles * query_features / 8);
    let always = comptime!(mask.is_some() || bias.is_some());
    let ordered = comptime!(one_pass.ordered());
    // One unit's fences are assembly text.
    let fenced = comptime!(ordered && config.assembly);

    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let heads = geometry.batch * kv_heads;
    let mut notes = Shared::<[u32]>::new_slice(NOTES);
    let number = draw_number(&mut notes, turns, query_blocks, &geometry, ordered);
    if number >= blocks * heads {
        terminate!();
    }
    // Heads in sections, the first block of keys first, for the most queries see it.
    let seat = Seat::of(number, blocks, heads, section);
    let batch_head = seat.batch_head;
    let first_kv = (seat.block() * block_kv) as i32;
    if UNIT_POS == 0 {
        notes[BATCH_HEAD] = batch_head as u32;
        notes[FIRST_KV] = first_kv as u32;
    }
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;
    let key_rows = rows_of(key, batch, kv_head, geometry.seq_kv);
    let value_rows = rows_of(value, batch, kv_head, geometry.seq_kv);

    let mut tiles = tiles::<E>(one_pass, config);

    let key_staging = comptime!(one_pass.staging(&config, block_kv, config.head_dim));
    let value_staging = comptime!(one_pass.staging(&config, block_kv, config.value_dim));
    let staging = comptime!(one_pass.query_staging(&config));
    let asynchronous = comptime!(staging.query.asynchronous);
    let mut pending = pending::<E>(staging);

    // The blocks of queries that see some key of the block through the band, in every head of the group.
    let visible = queries_of_block(&geometry, first_kv, block_kv, true);
    let first_block = visible.first as usize / block_q;
    let end_block = (visible.end as usize).div_ceil(block_q);
    let per_head = select(end_block > first_block, end_block - first_block, 0usize);
    let steps = per_head * geometry.group;
    let last_of_head = select(per_head > 0, end_block - 1, 0usize);
    if UNIT_POS == 0 {
        notes[STEPS] = steps as u32;
        notes[PER_HEAD] = per_head as u32;
        notes[LAST_OF_HEAD] = last_of_head as u32;
        notes[BATCH] = batch as u32;
        notes[FIRST_HEAD] = (kv_head * geometry.group) as u32;
    }

    stage_first(
        key,
        key_rows,
        first_kv,
        &mut tiles.keys,
        &mut pending.query,
        key_staging,
    );
    stage_first(
        value,
        value_rows,
        first_kv,
        &mut tiles.values,
        &mut pending.query,
        value_staging,
    );
    if steps > 0 {
        stage_first_queries(
            query,
            output_gradient,
            row_statistics,
            batch,
            kv_head,
            last_of_head,
            &mut tiles,
            &mut pending,
            &geometry,
            staging,
            config,
        );
    }
    await_copies(key_staging);
    sync_cube();
    if finds_non_finite(&tiles.keys, 0usize, config.exponent(), key_staging) {
        notes[KEYS_CAREFUL] = 1u32;
    }

    let mut key_sums = zeros(comptime!(ROW_TILES * key_columns));
    let mut value_sums = zeros(comptime!(ROW_TILES * value_columns));
    let mut step = 0u32;
    while step < notes[STEPS] {
        let own = unit(config.assembly) as usize;
        let first_kv = notes[FIRST_KV] as i32;
        let goes_on = step + 1 < notes[STEPS];
        let now = walked(&notes, step, &geometry, block_q);
        let next = walked(&notes, step + 1, &geometry, block_q);
        let stage = step as usize % stages;
        let other = (stage + 1) % stages;
        let at = slots(stage, one_pass, config);
        let flag = STEP_CAREFUL + step as usize % 2;

        if goes_on {
            if comptime!(asynchronous && stages == 2) {
                issue_queries(
                    query,
                    output_gradient,
                    next.batch,
                    next.head,
                    next.first_query,
                    &mut tiles.queries,
                    &mut tiles.gradients,
                    other,
                    &mut pending,
                    &geometry,
                    staging,
                );
            }
        }
        if comptime!(!fenced) {
            if own == 0 {
                notes[COUNTER] = now.counter as u32;
            }
        } else {
            // Here, where the other warps have products to wait for, and not where all wait for this one.
            // What the cube added in the step before is in, and if it is its turn already, nothing that
            // comes after happens before.
            if own == 0 {
                let seen = turns[now.counter].load();
                fence();
                if step > 0 {
                    pass_turn(turns, notes[COUNTER] as usize);
                }
                notes[SEEN] = seen;
                notes[COUNTER] = now.counter as u32;
            }
        }
        let edge =
            always || !wholly_visible(&geometry, now.first_query, first_kv, block_q, block_kv);
        let mut careful = false;
        if edge {
            let exponent = comptime!(config.exponent());
            let found = finds_non_finite(&tiles.queries, at.query, exponent, staging.query)
                || finds_non_finite(&tiles.gradients, at.gradient, exponent, staging.gradient);
            if found {
                notes[flag] = 1u32;
            }
            sync_cube();
            careful = notes[KEYS_CAREFUL] != 0 || notes[flag] != 0;
        }

        let current = Step {
            batch: now.batch,
            head: now.head,
            first_query: now.first_query,
            first_kv,
            stage: stage as u32,
            edge,
            careful,
        };
        // Blocks off the edge have code of their own, in one piece, except where the generator has no
        // text for products: its arrays take compilers long.
        if edge || comptime!(!config.assembly) {
            add_own_part::<E, B, M>(
                &mut tiles,
                &mut key_sums,
                &mut value_sums,
                current,
                &mask,
                &bias,
                &geometry,
                true,
                one_pass,
                config,
            );
        } else if comptime!(!always && config.assembly) {
            add_own_part::<E, B, M>(
                &mut tiles,
                &mut key_sums,
                &mut value_sums,
                current,
                &mask,
                &bias,
                &geometry,
                false,
                one_pass,
                config,
            );
        }

        // The second half finds out again where it is.
        let same = step_again(step, config.assembly);
        let own = unit(config.assembly) as usize;
        let now = walked(&notes, same, &geometry, block_q);
        let stage = same as usize % stages;
        let other = (stage + 1) % stages;
        if comptime!(ordered) {
            if own == 0 {
                let first_kv = notes[FIRST_KV] as i32;
                let turn = turn_at(now.first_query, first_kv, &geometry, block_q, block_kv);
                if comptime!(!fenced) || notes[SEEN] != turn {
                    wait_turn(turns, now.counter, turn);
                    if comptime!(fenced) {
                        fence();
                    }
                }
            }
        }
        if comptime!(ordered && !fenced) {
            sync_storage();
        } else {
            sync_cube();
        }
        if own == 0 {
            notes[STEP_CAREFUL + (same as usize + 1) % 2] = 0u32;
        }
        let next = walked(&notes, same + 1, &geometry, block_q);
        let goes_on = same + 1 < notes[STEPS];
        let mut pending_statistics = Array::<f32>::new(3usize);
        load_statistics(
            row_statistics,
            &mut pending_statistics,
            next.batch,
            next.head,
            select(goes_on, next.first_query + own as i32, geometry.seq_q),
            &geometry,
            config,
        );
        if goes_on {
            // Without asynchronous copies the next rows wait in registers once weights have left them.
            if comptime!(!asynchronous && stages == 2) {
                issue_queries(
                    query,
                    output_gradient,
                    next.batch,
                    next.head,
                    next.first_query,
                    &mut tiles.queries,
                    &mut tiles.gradients,
                    other,
                    &mut pending,
                    &geometry,
                    staging,
                );
            }
        }

        let current = Step {
            batch: now.batch,
            head: now.head,
            first_query: now.first_query,
            first_kv: notes[FIRST_KV] as i32,
            stage: stage as u32,
            edge,
            careful,
        };
        let at = slots(stage, one_pass, config);
        add_other_parts(
            &tiles,
            &mut key_sums,
            &mut value_sums,
            current,
            at,
            one_pass,
            config,
        );
        let tile = query_tile(&tiles, current, one_pass, config);
        // Where turns are fenced the note is the turn's, and the counter is found anyhow.
        let counter = if comptime!(fenced) {
            now.counter
        } else {
            notes[COUNTER] as usize
        };
        add_to_sums(
            query_sums,
            (counter * one_pass.warps + own / 32) * comptime!(tile_columns * 128),
            &tile,
            tile_columns,
            one_pass.wide,
            config.assembly,
        );

        if comptime!(stages == 1) {
            // Every warp is done with the block.
            sync_cube();
        }
        if goes_on {
            if comptime!(stages == 1) {
                issue_queries(
                    query,
                    output_gradient,
                    next.batch,
                    next.head,
                    next.first_query,
                    &mut tiles.queries,
                    &mut tiles.gradients,
                    0usize,
                    &mut pending,
                    &geometry,
                    staging,
                );
            }
            land_queries(
                query,
                output_gradient,
                next.batch,
                next.head,
                next.first_query,
                &mut tiles.queries,
                &mut tiles.gradients,
                other,
                &pending,
                &geometry,
                staging,
            );
        }
        if own < block_q {
            store_statistics(
                &pending_statistics,
                &mut tiles.statistics,
                other * comptime!(3 * block_q),
                own,
                block_q,
            );
        }
        if comptime!(ordered && !fenced) {
            sync_storage();
            if own == 0 {
                pass_turn(turns, now.counter);
            }
        } else {
            sync_cube();
        }
        step += 1;
    }
    if comptime!(fenced) {
        if UNIT_POS == 0 && step > 0 {
            fence();
            pass_turn(turns, notes[COUNTER] as usize);
        }
    }

    store_gradients::<E, N>(
        &mut tiles,
        &mut key_sums,
        &mut value_sums,
        &notes,
        key_gradient,
        value_gradient,
        &geometry,
        one_pass,
        config,
    );
}
