//! The key and value gradients of wide heads: one cube for 64 keys of a key head, whose gradients are
//! more than the registers of one warpgroup. Two warpgroups share the work without repeating any.
//!
//! ```text
//! warpgroup 0                               warpgroup 1
//!     S^T = K Q^T                               dP^T = V dO^T
//!     P^T = 2^(S^T - m - ln l)  -- weights -->  dS^T = P^T (dP^T - D)
//!     dV += P^T dO                              dK += dS^T Q
//! ```
//!
//! Both hold scores in the same layout, so that each unit hands its weights to one other unit, through
//! one of two buffers in shared memory. While one warpgroup takes exponents the other multiplies.

use super::careful::{add_careful, non_finite};
use super::gradient::{Position, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::handover::*;
use super::instructions::*;
use super::pipeline::{load_stage, row_of};
use super::wide_instructions::{held_product, held_rows, held_scores};
use super::wide_pipeline::*;
use crate::schedule::{Geometry, queries_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the gradients of key and value, packed, in pairs.
///
/// `statistics` is what `statistics_kernel` wrote. `S`, `P`, `K`, `V` and `H` are the registers of a
/// unit for scores, rounded weights, the two gradients and the owned operand's part that stays in
/// registers. `section` heads at a time have their cubes run side by side, so that the cache keeps
/// their queries and output gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn wide_key_value_gradient_kernel<
    E: Float,
    M: Int,
    S: Size,
    P: Size,
    K: Size,
    V: Size,
    H: Size,
>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    key_gradient: &mut [u32],
    value_gradient: &mut [u32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: GradientBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let owned_panel = comptime!(block_kv * 64);
    let panel = comptime!(block_q * 64);
    let layout = comptime!(Layout::new(&blueprint));
    let element = comptime!(blueprint.element());
    let units = comptime!(blueprint.units());

    // Which keys: heads in sections, the first block of keys first, for the most queries see it.
    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let heads = geometry.batch * kv_heads;
    if CUBE_POS >= blocks * heads {
        terminate!();
    }
    let first_head = CUBE_POS / (blocks * section) * section;
    let width = select(heads - first_head < section, heads - first_head, section);
    let place = CUBE_POS - first_head * blocks;
    let batch_head = first_head + place % width;
    let first_kv = (place / width * block_kv) as i32;
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;

    // The blocks of queries that the cube walks, once for each head of the group.
    let queries = queries_of_block(&geometry, first_kv, block_kv, true);
    let first_block = queries.first as u32 / comptime!(block_q as u32);
    let end_block = (queries.end as u32).div_ceil(comptime!(block_q as u32));
    let per_head = select(end_block > first_block, end_block - first_block, 0u32);
    let count = per_head * geometry.group as u32;
    let group_head = (kv_head * geometry.group) as u32;

    let mut tiles = Shared::<[E]>::new_aligned_slice(comptime!(layout.elements), 1024usize);
    let mut numbers = Shared::<[f32]>::new_aligned_slice(comptime!(layout.numbers), 128usize);
    let mut words = Shared::<[u32]>::new_slice(comptime!(WORDS));
    let key_full = Barrier::shared_uninit();
    let value_full = Barrier::shared_uninit();
    let query_full_0 = Barrier::shared_uninit();
    let query_full_1 = Barrier::shared_uninit();
    let gradient_full_0 = Barrier::shared_uninit();
    let gradient_full_1 = Barrier::shared_uninit();
    let elected = UNIT_POS == 0;
    if UNIT_POS < 4 {
        words[UNIT_POS as usize] = 0u32;
    }
    if elected {
        words[comptime!(BATCH_HEAD)] = batch_head as u32;
        words[comptime!(FIRST_BLOCK)] = first_block;
        words[comptime!(PER_HEAD)] = per_head;
        key_full.init_manual(1u32);
        value_full.init_manual(1u32);
        query_full_0.init_manual(1u32);
        query_full_1.init_manual(1u32);
        gradient_full_0.init_manual(1u32);
        gradient_full_1.init_manual(1u32);
    }
    sync_async_proxy_shared();
    sync_cube();

    if elected {
        if count > 0 {
            let walked = Walked {
                batch,
                head: group_head,
                block: first_block,
            };
            load_stage(
                &key_full,
                key,
                &mut tiles,
                0usize,
                batch as i32,
                kv_head as i32,
                first_kv,
                key_panels,
                owned_panel,
            );
            load_queries(
                &query_full_0,
                query,
                statistics,
                &mut tiles,
                &mut numbers,
                0usize,
                walked,
                geometry.heads,
                blueprint,
            );
            load_stage(
                &value_full,
                value,
                &mut tiles,
                comptime!(layout.value),
                batch as i32,
                kv_head as i32,
                first_kv,
                value_panels,
                owned_panel,
            );
            load_gradients(
                &gradient_full_0,
                output_gradient,
                &mut tiles,
                0usize,
                walked,
                blueprint,
            );
        }
        if count > 1 {
            let walked = Walked {
                batch,
                head: group_head + 1 / per_head,
                block: first_block + 1 % per_head,
            };
            load_queries(
                &query_full_1,
                query,
                statistics,
                &mut tiles,
                &mut numbers,
                1usize,
                walked,
                geometry.heads,
                blueprint,
            );
            load_gradients(
                &gradient_full_1,
                output_gradient,
                &mut tiles,
                1usize,
                walked,
                blueprint,
            );
        }
    }

    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let tile_address = shared_address::<E>(tiles.as_ptr());
    let number_address = shared_address::<f32>(numbers.as_ptr());
    let word_address = shared_address::<u32>(words.as_ptr());
    let always = comptime!(mask.is_some() || bias.is_some());
    let mut head = group_head;
    let mut block = first_block;

    if warpgroup == 0 {
        let dots_body = comptime!(held_scores(&blueprint, blueprint.head_dim));
        let sum_body = comptime!(blueprint.sums(blueprint.value_dim));
        let mut acc = Vector::<f32, V>::new(0.0f32);
        let mut held = Vector::<u32, H>::new(0u32);
        if count > 0 {
            key_full.wait_parity(0u32);
            held = held_rows::<H>(tile_address, blueprint.head_dim, blueprint);
        }
        for n in 0..count {
            let stage = n % 2;
            let phase = (n / 2) % 2;
            let more = n + 2 < count;
            let walked = Walked { batch, head, block };
            let query_at = stage_of(
                tile_address,
                layout.query * 2,
                layout.query_stage * 2,
                stage,
            );
            let gradient_at = stage_of(
                tile_address,
                layout.gradient * 2,
                layout.gradient_stage * 2,
                stage,
            );
            let statistics_at = stage_of(number_address, 0usize, blueprint.statistics() * 4, stage);
            let weights_at = stage_of(
                number_address,
                layout.weights * 4,
                blueprint.handed_over(),
                stage,
            );
            let first_query = (block * comptime!(block_q as u32)) as i32;
            if stage == 0 {
                query_full_0.wait_parity(phase);
            } else {
                query_full_1.wait_parity(phase);
            }
            let dots =
                held_product::<H, S>(tile_address, query_at, held, comptime!(dots_body.clone()));
            let edge =
                always || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
            if n >= 2 {
                wait_emptied(stage, units);
            }
            let mut rounded = Vector::<u32, P>::new(0u32);
            if edge {
                let unit = unit_again();
                rounded = hand_over::<E, M, S, P>(
                    dots,
                    weights_at,
                    statistics_at,
                    Position {
                        batch,
                        head: head as usize,
                        query: first_query + ((unit % 4) * 2) as i32,
                        key: first_kv + row_of(unit),
                    },
                    &mask,
                    &bias,
                    &geometry,
                    true,
                    blueprint,
                );
            } else {
                if comptime!(!always) {
                    rounded = hand_over::<E, M, S, P>(
                        dots,
                        weights_at,
                        statistics_at,
                        Position {
                            batch,
                            head: head as usize,
                            query: first_query,
                            key: first_kv,
                        },
                        &mask,
                        &bias,
                        &geometry,
                        false,
                        blueprint,
                    );
                }
            }
            arrive_filled(stage, units);
            if stage == 0 {
                gradient_full_0.wait_parity(phase);
            } else {
                gradient_full_1.wait_parity(phase);
            }
            let mut way = 0u32;
            if edge {
                way = non_finite(
                    gradient_at,
                    block_q,
                    blueprint.value_dim,
                    blueprint.warpgroups,
                    element,
                );
            }
            if way == 0 {
                acc = value_product::<P, V>(
                    acc,
                    rounded,
                    column_descriptor(gradient_at, comptime!(panel * 2)),
                    comptime!(sum_body.clone()),
                );
            } else {
                acc = add_careful::<P, V>(
                    acc,
                    rounded,
                    gradient_at,
                    unit_again() % 32,
                    0usize,
                    block_q,
                    blueprint.value_dim,
                    element,
                );
            }
            release_gradients(
                word_address,
                more,
                stage,
                walked,
                &gradient_full_0,
                &gradient_full_1,
                output_gradient,
                &mut tiles,
                blueprint,
            );
            release_queries(
                word_address,
                more,
                stage,
                walked,
                &query_full_0,
                &query_full_1,
                query,
                statistics,
                &mut tiles,
                &mut numbers,
                geometry.heads,
                blueprint,
            );
            block += 1;
            if block == end_block {
                block = word(word_address, FIRST_BLOCK);
                head += 1;
            }
        }
        let unit = unit_again();
        store_sums::<V>(
            acc,
            value_gradient,
            word(word_address, BATCH_HEAD) as usize,
            first_kv + row_of(unit),
            geometry.seq_kv,
            unit % 32,
            1.0f32,
            0usize,
            blueprint.value_dim,
            element,
        );
    } else {
        let value_address = tile_address + comptime!((layout.value * 2) as u32);
        let dots_body = comptime!(held_scores(&blueprint, blueprint.value_dim));
        let sum_body = comptime!(blueprint.sums(blueprint.head_dim));
        let mut acc = Vector::<f32, K>::new(0.0f32);
        let mut held = Vector::<u32, H>::new(0u32);
        if count > 0 {
            value_full.wait_parity(0u32);
            held = held_rows::<H>(value_address, blueprint.value_dim, blueprint);
        }
        for n in 0..count {
            let stage = n % 2;
            let phase = (n / 2) % 2;
            let more = n + 2 < count;
            let walked = Walked { batch, head, block };
            let query_at = stage_of(
                tile_address,
                layout.query * 2,
                layout.query_stage * 2,
                stage,
            );
            let gradient_at = stage_of(
                tile_address,
                layout.gradient * 2,
                layout.gradient_stage * 2,
                stage,
            );
            let statistics_at = stage_of(number_address, 0usize, blueprint.statistics() * 4, stage);
            let weights_at = stage_of(
                number_address,
                layout.weights * 4,
                blueprint.handed_over(),
                stage,
            );
            if stage == 0 {
                gradient_full_0.wait_parity(phase);
            } else {
                gradient_full_1.wait_parity(phase);
            }
            let products = held_product::<H, S>(
                value_address,
                gradient_at,
                held,
                comptime!(dots_body.clone()),
            );
            release_gradients(
                word_address,
                more,
                stage,
                walked,
                &gradient_full_0,
                &gradient_full_1,
                output_gradient,
                &mut tiles,
                blueprint,
            );
            // For the statistics.
            if stage == 0 {
                query_full_0.wait_parity(phase);
            } else {
                query_full_1.wait_parity(phase);
            }
            let first_query = (block * comptime!(block_q as u32)) as i32;
            let edge =
                always || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
            wait_filled(stage, units);
            let mut rounded = Vector::<u32, P>::new(0u32);
            if edge {
                rounded = take_over::<S, P>(products, weights_at, statistics_at, true, blueprint);
            } else {
                if comptime!(!always) {
                    rounded =
                        take_over::<S, P>(products, weights_at, statistics_at, false, blueprint);
                }
            }
            if more {
                arrive_emptied(stage, units);
            }
            let mut way = 0u32;
            if edge {
                way = non_finite(
                    query_at,
                    block_q,
                    blueprint.head_dim,
                    blueprint.warpgroups,
                    element,
                );
            }
            if way == 0 {
                acc = value_product::<P, K>(
                    acc,
                    rounded,
                    column_descriptor(query_at, comptime!(panel * 2)),
                    comptime!(sum_body.clone()),
                );
            } else {
                acc = add_careful::<P, K>(
                    acc,
                    rounded,
                    query_at,
                    unit_again() % 32,
                    0usize,
                    block_q,
                    blueprint.head_dim,
                    element,
                );
            }
            release_queries(
                word_address,
                more,
                stage,
                walked,
                &query_full_0,
                &query_full_1,
                query,
                statistics,
                &mut tiles,
                &mut numbers,
                geometry.heads,
                blueprint,
            );
            block += 1;
            if block == end_block {
                block = word(word_address, FIRST_BLOCK);
                head += 1;
            }
        }
        let unit = unit_again();
        store_sums::<K>(
            acc,
            key_gradient,
            word(word_address, BATCH_HEAD) as usize,
            first_kv + row_of(unit),
            geometry.seq_kv,
            unit % 32,
            geometry.scale,
            0usize,
            blueprint.head_dim,
            element,
        );
    }
}

/// Where a stage begins, in bytes: `bytes` each, from `first` after `address` on.
#[cube]
fn stage_of(address: u32, #[comptime] first: usize, #[comptime] bytes: usize, stage: u32) -> u32 {
    address + comptime!(first as u32) + stage * comptime!(bytes as u32)
}
