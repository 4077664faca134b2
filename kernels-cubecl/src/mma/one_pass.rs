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
use super::fragment::{Accumulator, Chunk, as_weights, further, zeros};
use super::gradient::{load_statistics, scale_all, store_statistics};
use super::one_pass_blueprint::{KEYS, OnePass};
use super::one_pass_step::{ROW_TILES, Step, add_other_parts, add_own_part, query_tile, tiles};
use super::one_pass_walk::{
    BATCH, BATCH_HEAD, COUNTER, FIRST_HEAD, FIRST_KV, KEYS_CAREFUL, LAST_OF_HEAD, NOTES, NUMBER,
    PER_HEAD, SEEN, STEP_CAREFUL, STEPS, step_again, walked,
};
use super::query_sums::add_to_sums;
use super::stage::{await_copies, issue, land, rows_of, stage_first};
use super::turns::{fence, pass_turn, turn_at, wait_turn};
use super::weights::{along_weights, finds_non_finite, store_weights};
use crate::schedule::{Geometry, queries_of_block, wholly_visible};
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
    let query_slot = comptime!(block_q * config.pitch(config.head_dim));
    let gradient_slot = comptime!(block_q * config.pitch(config.value_dim));
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
        number = notes[NUMBER] as usize;
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
    if UNIT_POS == 0 {
        notes[BATCH_HEAD] = batch_head as u32;
        notes[FIRST_KV] = first_kv as u32;
    }
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;
    let key_rows = rows_of(key, batch, kv_head, geometry.seq_kv);
    let value_rows = rows_of(value, batch, kv_head, geometry.seq_kv);

    let mut tiles = tiles::<E>(one_pass, config);

    let key_staging = comptime!(
        config
            .staging(block_kv, config.head_dim)
            .crowded(config.assembly)
    );
    let value_staging = comptime!(
        config
            .staging(block_kv, config.value_dim)
            .crowded(config.assembly)
    );
    let query_staging = comptime!(
        config
            .staging(block_q, config.head_dim)
            .crowded(config.assembly)
    );
    let gradient_staging = comptime!(
        config
            .staging(block_q, config.value_dim)
            .crowded(config.assembly)
    );
    let asynchronous = comptime!(query_staging.asynchronous);
    // Without asynchronous copies the next rows wait in registers once weights have left them.
    let late = comptime!(!asynchronous);
    let mut pending_query = Array::<Chunk<E>>::new(comptime!(query_staging.pending()));
    let mut pending_gradient = Array::<Chunk<E>>::new(comptime!(gradient_staging.pending()));

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
        &mut pending_query,
        key_staging,
    );
    stage_first(
        value,
        value_rows,
        first_kv,
        &mut tiles.values,
        &mut pending_query,
        value_staging,
    );
    if steps > 0 {
        let own = UNIT_POS as usize;
        let mut pending_statistics = Array::<f32>::new(3usize);
        let head = kv_head * geometry.group;
        let first_query = (last_of_head * block_q) as i32;
        stage_first(
            query,
            rows_of(query, batch, head, geometry.seq_q),
            first_query,
            &mut tiles.queries,
            &mut pending_query,
            query_staging,
        );
        stage_first(
            output_gradient,
            rows_of(output_gradient, batch, head, geometry.seq_q),
            first_query,
            &mut tiles.gradients,
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
            store_statistics(
                &pending_statistics,
                &mut tiles.statistics,
                0usize,
                own,
                block_q,
            );
        }
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
        let at_query = stage * query_slot;
        let at_gradient = stage * gradient_slot;
        let flag = STEP_CAREFUL + step as usize % 2;

        if goes_on {
            if comptime!(asynchronous && stages == 2) {
                issue(
                    query,
                    rows_of(query, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.queries,
                    other * query_slot,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.gradients,
                    other * gradient_slot,
                    &mut pending_gradient,
                    gradient_staging,
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
            let found = finds_non_finite(&tiles.queries, at_query, exponent, query_staging)
                || finds_non_finite(&tiles.gradients, at_gradient, exponent, gradient_staging);
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
            at_query,
            at_gradient,
            at_statistics: stage * comptime!(3 * block_q),
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
                let turn = turn_at(
                    now.counter,
                    now.first_query,
                    first_kv,
                    &geometry,
                    block_q,
                    block_kv,
                );
                if comptime!(!fenced) || notes[SEEN] != turn.count {
                    wait_turn(turns, turn);
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
            if comptime!(late && stages == 2) {
                issue(
                    query,
                    rows_of(query, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.queries,
                    other * query_slot,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.gradients,
                    other * gradient_slot,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
        }

        let current = Step {
            batch: now.batch,
            head: now.head,
            first_query: now.first_query,
            first_kv: notes[FIRST_KV] as i32,
            at_query: stage * query_slot,
            at_gradient: stage * gradient_slot,
            at_statistics: stage * comptime!(3 * block_q),
            stage: stage as u32,
            edge,
            careful,
        };
        add_other_parts(
            &tiles,
            &mut key_sums,
            &mut value_sums,
            current,
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
                issue(
                    query,
                    rows_of(query, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.queries,
                    0usize,
                    &mut pending_query,
                    query_staging,
                );
                issue(
                    output_gradient,
                    rows_of(output_gradient, next.batch, next.head, geometry.seq_q),
                    next.first_query,
                    &mut tiles.gradients,
                    0usize,
                    &mut pending_gradient,
                    gradient_staging,
                );
            }
            land(
                query,
                rows_of(query, next.batch, next.head, geometry.seq_q),
                next.first_query,
                &mut tiles.queries,
                other * query_slot,
                &pending_query,
                query_staging,
            );
            land(
                output_gradient,
                rows_of(output_gradient, next.batch, next.head, geometry.seq_q),
                next.first_query,
                &mut tiles.gradients,
                other * gradient_slot,
                &pending_gradient,
                gradient_staging,
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

    // Every warp is done with keys and values; their places are for the gradients.
    sync_cube();
    scale_all(
        &mut key_sums,
        geometry.scale,
        comptime!(ROW_TILES * key_columns),
    );
    share_sums(
        &mut tiles.keys,
        &key_sums,
        config.head_dim,
        one_pass,
        config,
    );
    share_sums(
        &mut tiles.values,
        &value_sums,
        config.value_dim,
        one_pass,
        config,
    );
    sync_cube();
    let first_row = notes[BATCH_HEAD] as usize * geometry.seq_kv as usize;
    let first_kv = notes[FIRST_KV] as i32;
    store_rows::<E, N>(
        &tiles.keys,
        key_gradient,
        first_row,
        first_kv,
        geometry.seq_kv,
        block_kv,
        config.head_dim,
        config,
    );
    store_rows::<E, N>(
        &tiles.values,
        value_gradient,
        first_row,
        first_kv,
        geometry.seq_kv,
        block_kv,
        config.value_dim,
        config,
    );
}

/// Writes a warp's sums, of its part of `dim` features, to a shared tile.
#[cube]
fn share_sums<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    sums: &Sequence<Accumulator>,
    #[comptime] dim: usize,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let instructions = comptime!(config.instructions());
    let columns = comptime!(dim / one_pass.sides / 8);
    let own = unit(config.assembly) as usize;
    let side = own / 32 % one_pass.sides;
    let row = own / comptime!(32 * one_pass.sides) * KEYS;
    let place = along_weights(
        &*tile,
        row,
        config.pitch(dim),
        one_pass.wide,
        config.assembly,
        instructions,
    );
    store_weights(
        tile,
        further(place, side * columns),
        &as_weights::<E>(sums, ROW_TILES, columns, instructions),
        ROW_TILES,
        columns,
        config.pitch(dim),
        one_pass.wide,
        instructions,
    );
}
