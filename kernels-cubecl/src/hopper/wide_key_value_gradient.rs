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
use super::gradient::{Position, gradients_by_key, probabilities_by_key, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::handover::{hand_over, take_over};
use super::instructions::*;
use super::pipeline::{load_rows, load_stage, release, retire, row_of};
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
    let query_stage = comptime!(key_panels * panel);
    let gradient_stage = comptime!(value_panels * panel);
    let element = comptime!(blueprint.element());

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

    let mut key_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(key_panels * owned_panel), 1024usize);
    let mut value_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(value_panels * owned_panel), 1024usize);
    let mut query_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * query_stage), 1024usize);
    let mut gradient_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(2 * gradient_stage), 1024usize);
    let weights =
        Shared::<[f32]>::new_aligned_slice(comptime!(2 * blueprint.handed_over() / 4), 128usize);
    let mut statistic_tiles =
        Shared::<[f32]>::new_aligned_slice(comptime!(2 * blueprint.statistics()), 128usize);
    // How many planes are done with a stage of queries (0, 1) and of output gradients (2, 3).
    let mut done = Shared::<[u32]>::new_slice(4usize);
    // Waits here for the end, so that no register holds it all along.
    let mut stash = Shared::<[u32]>::new_slice(1usize);
    let elected = UNIT_POS == 0;
    if UNIT_POS < 4 {
        done[UNIT_POS as usize] = 0u32;
    }
    let key_full = Barrier::shared_uninit();
    let value_full = Barrier::shared_uninit();
    let query_full_0 = Barrier::shared_uninit();
    let query_full_1 = Barrier::shared_uninit();
    let gradient_full_0 = Barrier::shared_uninit();
    let gradient_full_1 = Barrier::shared_uninit();
    if elected {
        stash[0] = batch_head as u32;
        key_full.init_manual(1u32);
        value_full.init_manual(1u32);
        query_full_0.init_manual(1u32);
        query_full_1.init_manual(1u32);
        gradient_full_0.init_manual(1u32);
        gradient_full_1.init_manual(1u32);
    }
    sync_async_proxy_shared();
    sync_cube();

    // The blocks of queries that the cube walks, once for each head of the group.
    let queries = queries_of_block(&geometry, first_kv, block_kv);
    let first_block = queries.first as u32 / comptime!(block_q as u32);
    let end_block = (queries.end as u32).div_ceil(comptime!(block_q as u32));
    let per_head = select(end_block > first_block, end_block - first_block, 0u32);
    let count = per_head * geometry.group as u32;
    let group_head = (kv_head * geometry.group) as u32;

    if elected {
        if count > 0 {
            load_stage(
                &key_full,
                key,
                &mut key_tile,
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
                &mut query_tiles,
                &mut statistic_tiles,
                0usize,
                batch,
                group_head,
                first_block,
                &geometry,
                blueprint,
            );
            load_stage(
                &value_full,
                value,
                &mut value_tile,
                0usize,
                batch as i32,
                kv_head as i32,
                first_kv,
                value_panels,
                owned_panel,
            );
            load_stage(
                &gradient_full_0,
                output_gradient,
                &mut gradient_tiles,
                0usize,
                batch as i32,
                group_head as i32,
                (first_block * comptime!(block_q as u32)) as i32,
                value_panels,
                panel,
            );
        }
        if count > 1 {
            let head = group_head + 1 / per_head;
            let block = first_block + 1 % per_head;
            load_queries(
                &query_full_1,
                query,
                statistics,
                &mut query_tiles,
                &mut statistic_tiles,
                1usize,
                batch,
                head,
                block,
                &geometry,
                blueprint,
            );
            load_stage(
                &gradient_full_1,
                output_gradient,
                &mut gradient_tiles,
                gradient_stage,
                batch as i32,
                head as i32,
                (block * comptime!(block_q as u32)) as i32,
                value_panels,
                panel,
            );
        }
    }

    let lane = UNIT_POS % 32;
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let query_address = shared_address::<E>(query_tiles.as_ptr());
    let gradient_address = shared_address::<E>(gradient_tiles.as_ptr());
    let statistic_address = shared_address::<f32>(statistic_tiles.as_ptr());
    let weight_address = shared_address::<f32>(weights.as_ptr());
    let done_address = shared_address::<u32>(done.as_ptr());
    let stash_address = shared_address::<u32>(stash.as_ptr());
    let always = comptime!(mask.is_some() || bias.is_some());
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    let mut head = group_head;
    let mut block = first_block;

    if warpgroup == 0 {
        let key_address = shared_address::<E>(key_tile.as_ptr());
        let dots_body = comptime!(blueprint.dots(blueprint.head_dim));
        let sum_body = comptime!(blueprint.sums(blueprint.value_dim));
        let mut acc = Vector::<f32, V>::new(0.0f32);
        let mut held = Vector::<u32, H>::new(0u32);
        if count > 0 {
            key_full.wait_parity(0u32);
            held = owned_fragments::<H>(key_address, blueprint.head_dim, blueprint);
        }
        for n in 0..count {
            let stage = n % 2;
            let phase = (n / 2) % 2;
            let query_at = query_address + stage * comptime!((query_stage * 2) as u32);
            let gradient_at = gradient_address + stage * comptime!((gradient_stage * 2) as u32);
            let statistics_at = statistic_address
                + stage * comptime!((blueprint.statistics() * 4) as u32)
                + (lane % 4) * 8;
            let weights_at = weight_address + stage * comptime!(blueprint.handed_over() as u32);
            let first_query = (block * comptime!(block_q as u32)) as i32;
            if stage == 0 {
                query_full_0.wait_parity(phase);
            } else {
                query_full_1.wait_parity(phase);
            }
            let dots = owned_product::<H, S>(
                key_address,
                query_at,
                held,
                comptime!(dots_body.clone()),
                blueprint,
            );
            let edge =
                always || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
            let mut weights = Vector::<f32, S>::new(0.0f32);
            let mut rounded = Vector::<u32, P>::new(0u32);
            if edge {
                let unit = unit_again();
                let (w, p) = probabilities_by_key::<E, M, S, P>(
                    dots,
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
                weights = w;
                rounded = p;
            } else {
                if comptime!(!always) {
                    let (w, p) = probabilities_by_key::<E, M, S, P>(
                        dots,
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
                    weights = w;
                    rounded = p;
                }
            }
            hand_over::<S>(weights, weights_at, stage, n >= 2, blueprint);
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
                    lane,
                    block_q,
                    blueprint.value_dim,
                    element,
                );
            }
            let more = n + 2 < count;
            let ahead = block - first_block + 2;
            let next_head = head + ahead / per_head;
            let next_block = first_block + ahead % per_head;
            release(
                done_address + 8 + stage * 4,
                lane,
                more,
                last_plane,
                stage,
                &gradient_full_0,
                &gradient_full_1,
                output_gradient,
                &mut gradient_tiles,
                batch as i32,
                next_head as i32,
                (next_block * comptime!(block_q as u32)) as i32,
                value_panels,
                panel,
            );
            release_queries(
                done_address + stage * 4,
                lane,
                more,
                stage,
                &query_full_0,
                &query_full_1,
                query,
                statistics,
                &mut query_tiles,
                &mut statistic_tiles,
                batch,
                next_head,
                next_block,
                &geometry,
                blueprint,
            );
            block += 1;
            if block == end_block {
                block = first_block;
                head += 1;
            }
        }
        let unit = unit_again();
        store_sums::<V>(
            acc,
            value_gradient,
            load_shared(stash_address) as usize,
            first_kv + row_of(unit),
            geometry.seq_kv,
            unit % 32,
            1.0f32,
            blueprint.value_dim,
            element,
        );
    } else {
        let value_address = shared_address::<E>(value_tile.as_ptr());
        let dots_body = comptime!(blueprint.dots(blueprint.value_dim));
        let sum_body = comptime!(blueprint.sums(blueprint.head_dim));
        let mut acc = Vector::<f32, K>::new(0.0f32);
        let mut held = Vector::<u32, H>::new(0u32);
        if count > 0 {
            value_full.wait_parity(0u32);
            held = owned_fragments::<H>(value_address, blueprint.value_dim, blueprint);
        }
        for n in 0..count {
            let stage = n % 2;
            let phase = (n / 2) % 2;
            let query_at = query_address + stage * comptime!((query_stage * 2) as u32);
            let gradient_at = gradient_address + stage * comptime!((gradient_stage * 2) as u32);
            let statistics_at = statistic_address
                + stage * comptime!((blueprint.statistics() * 4) as u32)
                + (lane % 4) * 8;
            let weights_at = weight_address + stage * comptime!(blueprint.handed_over() as u32);
            let first_query = (block * comptime!(block_q as u32)) as i32;
            let more = n + 2 < count;
            let ahead = block - first_block + 2;
            let next_head = head + ahead / per_head;
            let next_block = first_block + ahead % per_head;
            if stage == 0 {
                gradient_full_0.wait_parity(phase);
            } else {
                gradient_full_1.wait_parity(phase);
            }
            let products = owned_product::<H, S>(
                value_address,
                gradient_at,
                held,
                comptime!(dots_body.clone()),
                blueprint,
            );
            release(
                done_address + 8 + stage * 4,
                lane,
                more,
                last_plane,
                stage,
                &gradient_full_0,
                &gradient_full_1,
                output_gradient,
                &mut gradient_tiles,
                batch as i32,
                next_head as i32,
                (next_block * comptime!(block_q as u32)) as i32,
                value_panels,
                panel,
            );
            // For the statistics.
            if stage == 0 {
                query_full_0.wait_parity(phase);
            } else {
                query_full_1.wait_parity(phase);
            }
            let weights = take_over::<S>(weights_at, stage, more, blueprint);
            let edge =
                always || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
            let mut rounded = Vector::<u32, P>::new(0u32);
            let mut way = 0u32;
            if edge {
                rounded =
                    gradients_by_key::<S, P>(weights, products, statistics_at, true, blueprint);
                way = non_finite(
                    query_at,
                    block_q,
                    blueprint.head_dim,
                    blueprint.warpgroups,
                    element,
                );
            } else {
                if comptime!(!always) {
                    rounded = gradients_by_key::<S, P>(
                        weights,
                        products,
                        statistics_at,
                        false,
                        blueprint,
                    );
                }
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
                    lane,
                    block_q,
                    blueprint.head_dim,
                    element,
                );
            }
            release_queries(
                done_address + stage * 4,
                lane,
                more,
                stage,
                &query_full_0,
                &query_full_1,
                query,
                statistics,
                &mut query_tiles,
                &mut statistic_tiles,
                batch,
                next_head,
                next_block,
                &geometry,
                blueprint,
            );
            block += 1;
            if block == end_block {
                block = first_block;
                head += 1;
            }
        }
        let unit = unit_again();
        store_sums::<K>(
            acc,
            key_gradient,
            load_shared(stash_address) as usize,
            first_kv + row_of(unit),
            geometry.seq_kv,
            unit % 32,
            geometry.scale,
            blueprint.head_dim,
            element,
        );
    }
}

/// The product of the cube's own rows, partly in registers, with those of a block.
#[cube]
fn owned_product<H: Size, S: Size>(
    owned: u32,
    walked: u32,
    held: Vector<u32, H>,
    #[comptime] body: String,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<f32, S> {
    if comptime!(blueprint.held() == 0) {
        dot_product::<S>(row_descriptor(owned), row_descriptor(walked), body)
    } else {
        held_product::<H, S>(row_descriptor(owned), row_descriptor(walked), held, body)
    }
}

/// What a unit holds of the cube's own 64 rows as a product's operand.
#[cube]
fn owned_fragments<H: Size>(
    address: u32,
    #[comptime] dim: usize,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, H> {
    let unit = unit_again();
    let row = row_of(unit) as u32;
    let mut fragments = Vector::<u32, H>::new(0u32);
    #[unroll]
    for step in 0..comptime!(usize::min(blueprint.held(), dim.div_ceil(16))) {
        #[unroll]
        for n in 0..4usize {
            // Rows eight apart, then features; 16-byte chunks of a row are swizzled by the row.
            let at = address + comptime!((step / 4 * 8192 + n % 2 * 1024) as u32) + row * 128;
            let chunk = comptime!((step % 4 * 2 + n / 2) as u32) ^ (row % 8);
            fragments.insert(
                comptime!(4 * step + n),
                load_shared(at + chunk * 16 + (unit % 4) * 4),
            );
        }
    }
    fragments
}

/// The plane is done with a stage of queries; the last of the cube's planes refills it. Nobody waits.
#[cube]
#[allow(clippy::too_many_arguments)]
fn release_queries<E: Float>(
    counter: u32,
    lane: u32,
    more: bool,
    stage: u32,
    full_0: &Shared<Barrier>,
    full_1: &Shared<Barrier>,
    query: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    query_tiles: &mut Shared<[E]>,
    statistic_tiles: &mut Shared<[f32]>,
    batch: usize,
    head: u32,
    block: u32,
    geometry: &Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    if retire(counter, lane, more, comptime!(blueprint.warpgroups * 4 - 1)) {
        if stage == 0 {
            load_queries(
                full_0,
                query,
                statistics,
                query_tiles,
                statistic_tiles,
                0usize,
                batch,
                head,
                block,
                geometry,
                blueprint,
            );
        } else {
            load_queries(
                full_1,
                query,
                statistics,
                query_tiles,
                statistic_tiles,
                1usize,
                batch,
                head,
                block,
                geometry,
                blueprint,
            );
        }
    }
    sync_plane();
}

/// Asks for a block of queries of a head, with their statistics, to `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_queries<E: Float>(
    full: &Shared<Barrier>,
    query: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    query_tiles: &mut Shared<[E]>,
    statistic_tiles: &mut Shared<[f32]>,
    #[comptime] stage: usize,
    batch: usize,
    head: u32,
    block: u32,
    geometry: &Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_q = comptime!(blueprint.walked);
    let panels = comptime!(blueprint.head_dim.div_ceil(64));
    let panel = comptime!(block_q * 64);
    let row = (block * comptime!(block_q as u32)) as i32;
    full.arrive_and_expect_tx(1, comptime!((panels * panel * 2 + 3 * block_q * 4) as u32));
    full.tma_load_3d(
        statistics,
        &mut statistic_tiles[comptime!(stage * blueprint.statistics())
            ..comptime!((stage + 1) * blueprint.statistics())],
        (batch * geometry.heads) as i32 + head as i32,
        0i32,
        row,
    );
    load_rows(
        full,
        query,
        query_tiles,
        comptime!(stage * panels * panel).runtime(),
        batch as i32,
        head as i32,
        row,
        panels,
        panel,
    );
}
