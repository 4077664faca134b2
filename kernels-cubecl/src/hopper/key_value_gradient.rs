//! The key and value gradients: one cube for each block of keys of a key head, one warpgroup for 64
//! of them.
//!
//! Scores are computed transposed, keys along the rows, so that probabilities and their gradients are
//! in the layout of the next products' operands. The queries of every head of the group are walked one
//! after the other: no atomics, so the sums are reproducible.

use super::careful::{add_careful, non_finite};
use super::gradient::{Position, gradients_by_key, probabilities_by_key, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::pipeline::{load_rows, retire, row_of};
use crate::schedule::{Geometry, queries_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the gradients of key and value, packed, in pairs.
///
/// `statistics` is what `statistics_kernel` wrote. `S`, `P`, `K` and `V` are the registers of a
/// unit for scores, rounded weights and the two gradients. `section` heads at a time have their cubes
/// run side by side, so that the cache keeps their queries and output gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn key_value_gradient_kernel<E: Float, M: Int, S: Size, P: Size, K: Size, V: Size>(
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
    let mut statistic_tiles =
        Shared::<[f32]>::new_aligned_slice(comptime!(2 * blueprint.statistics()), 128usize);
    // How many planes are done with a stage.
    let mut done = Shared::<[u32]>::new_slice(2usize);
    // Waits here for the end, so that no register holds it all along.
    let mut stash = Shared::<[u32]>::new_slice(1usize);
    let elected = UNIT_POS == 0;
    if UNIT_POS < 2 {
        done[UNIT_POS as usize] = 0u32;
    }
    let owned_full = Barrier::shared_uninit();
    let full_0 = Barrier::shared_uninit();
    let full_1 = Barrier::shared_uninit();
    if elected {
        stash[0] = batch_head as u32;
        owned_full.init_manual(1u32);
        full_0.init_manual(1u32);
        full_1.init_manual(1u32);
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

    // Those that see this warpgroup's own keys. The others it passes by.
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let own_kv = first_kv + (warpgroup * 64) as i32;
    let own_queries = queries_of_block(&geometry, own_kv, 64usize);
    let own_first = own_queries.first as u32 / comptime!(block_q as u32);
    let mut own_end = (own_queries.end as u32).div_ceil(comptime!(block_q as u32));
    if own_kv >= geometry.seq_kv {
        own_end = own_first;
    }

    if elected {
        if count > 0 {
            owned_full.arrive_and_expect_tx(
                1,
                comptime!(((key_panels + value_panels) * owned_panel * 2) as u32),
            );
            load_rows(
                &owned_full,
                key,
                &mut key_tile,
                0usize,
                batch as i32,
                kv_head as i32,
                first_kv,
                key_panels,
                owned_panel,
            );
            load_rows(
                &owned_full,
                value,
                &mut value_tile,
                0usize,
                batch as i32,
                kv_head as i32,
                first_kv,
                value_panels,
                owned_panel,
            );
            load_walked(
                &full_0,
                query,
                output_gradient,
                statistics,
                &mut query_tiles,
                &mut gradient_tiles,
                &mut statistic_tiles,
                0usize,
                batch,
                group_head,
                first_block,
                &geometry,
                blueprint,
            );
        }
        if count > 1 {
            load_walked(
                &full_1,
                query,
                output_gradient,
                statistics,
                &mut query_tiles,
                &mut gradient_tiles,
                &mut statistic_tiles,
                1usize,
                batch,
                group_head + 1 / per_head,
                first_block + 1 % per_head,
                &geometry,
                blueprint,
            );
        }
    }

    let lane = UNIT_POS % 32;
    let key_address = shared_address::<E>(key_tile.as_ptr()) + warpgroup * 8192;
    let value_address = shared_address::<E>(value_tile.as_ptr()) + warpgroup * 8192;
    let query_address = shared_address::<E>(query_tiles.as_ptr());
    let gradient_address = shared_address::<E>(gradient_tiles.as_ptr());
    let statistic_address = shared_address::<f32>(statistic_tiles.as_ptr());
    let done_address = shared_address::<u32>(done.as_ptr());
    let stash_address = shared_address::<u32>(stash.as_ptr());
    let key_dots = comptime!(blueprint.dots(blueprint.head_dim));
    let value_dots = comptime!(blueprint.dots(blueprint.value_dim));
    let key_sum = comptime!(blueprint.sums(blueprint.head_dim));
    let value_sum = comptime!(blueprint.sums(blueprint.value_dim));
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);

    let mut key_acc = Vector::<f32, K>::new(0.0f32);
    let mut value_acc = Vector::<f32, V>::new(0.0f32);
    if count > 0 {
        owned_full.wait_parity(0u32);
    }
    let mut head = group_head;
    let mut block = first_block;
    for n in 0..count {
        let stage = n % 2;
        let phase = (n / 2) % 2;
        if stage == 0 {
            full_0.wait_parity(phase);
        } else {
            full_1.wait_parity(phase);
        }
        if block >= own_first && block < own_end {
            let query_at = query_address + stage * comptime!((query_stage * 2) as u32);
            let gradient_at = gradient_address + stage * comptime!((gradient_stage * 2) as u32);
            let statistics_at = statistic_address
                + stage * comptime!((blueprint.statistics() * 4) as u32)
                + (lane % 4) * 8;
            let first_query = (block * comptime!(block_q as u32)) as i32;
            let dots = dot_product::<S>(
                row_descriptor(key_address),
                row_descriptor(query_at),
                comptime!(key_dots.clone()),
            );
            let always = comptime!(mask.is_some() || bias.is_some());
            let edge = always || !wholly_visible(&geometry, first_query, own_kv, block_q, 64usize);
            let mut weights = Vector::<f32, S>::new(0.0f32);
            let mut rounded = Vector::<u32, P>::new(0u32);
            let mut way = 0u32;
            if edge {
                let unit = unit_again();
                let (w, p) = probabilities_by_key::<E, M, S, P>(
                    dots,
                    statistics_at,
                    Position {
                        batch,
                        head: head as usize,
                        query: first_query + ((unit % 4) * 2) as i32,
                        key: own_kv + row_of(unit),
                    },
                    &mask,
                    &bias,
                    &geometry,
                    true,
                    blueprint,
                );
                weights = w;
                rounded = p;
                way = non_finite(
                    gradient_at,
                    block_q,
                    blueprint.value_dim,
                    blueprint.warpgroups,
                    element,
                );
            } else {
                if comptime!(!always) {
                    let (w, p) = probabilities_by_key::<E, M, S, P>(
                        dots,
                        statistics_at,
                        Position {
                            batch,
                            head: head as usize,
                            query: first_query,
                            key: own_kv,
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
            if way == 0 {
                value_acc = value_product::<P, V>(
                    value_acc,
                    rounded,
                    column_descriptor(gradient_at, comptime!(panel * 2)),
                    comptime!(value_sum.clone()),
                );
            } else {
                value_acc = add_careful::<P, V>(
                    value_acc,
                    rounded,
                    gradient_at,
                    lane,
                    block_q,
                    blueprint.value_dim,
                    element,
                );
            }
            let products = dot_product::<S>(
                row_descriptor(value_address),
                row_descriptor(gradient_at),
                comptime!(value_dots.clone()),
            );
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
                key_acc = value_product::<P, K>(
                    key_acc,
                    rounded,
                    column_descriptor(query_at, comptime!(panel * 2)),
                    comptime!(key_sum.clone()),
                );
            } else {
                key_acc = add_careful::<P, K>(
                    key_acc,
                    rounded,
                    query_at,
                    lane,
                    block_q,
                    blueprint.head_dim,
                    element,
                );
            }
        }
        if retire(done_address + stage * 4, lane, n + 2 < count, last_plane) {
            let ahead = block - first_block + 2;
            let next_head = head + ahead / per_head;
            let next_block = first_block + ahead % per_head;
            if stage == 0 {
                load_walked(
                    &full_0,
                    query,
                    output_gradient,
                    statistics,
                    &mut query_tiles,
                    &mut gradient_tiles,
                    &mut statistic_tiles,
                    0usize,
                    batch,
                    next_head,
                    next_block,
                    &geometry,
                    blueprint,
                );
            } else {
                load_walked(
                    &full_1,
                    query,
                    output_gradient,
                    statistics,
                    &mut query_tiles,
                    &mut gradient_tiles,
                    &mut statistic_tiles,
                    1usize,
                    batch,
                    next_head,
                    next_block,
                    &geometry,
                    blueprint,
                );
            }
        }
        sync_plane();
        block += 1;
        if block == end_block {
            block = first_block;
            head += 1;
        }
    }

    let batch_head = load_shared(stash_address) as usize;
    let unit = unit_again();
    let row = own_kv + row_of(unit);
    store_sums::<K>(
        key_acc,
        key_gradient,
        batch_head,
        row,
        geometry.seq_kv,
        unit % 32,
        geometry.scale,
        blueprint.head_dim,
        element,
    );
    store_sums::<V>(
        value_acc,
        value_gradient,
        batch_head,
        row,
        geometry.seq_kv,
        unit % 32,
        1.0f32,
        blueprint.value_dim,
        element,
    );
}

/// Asks for a block of queries of a head, with output gradients and statistics, to `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_walked<E: Float>(
    full: &Shared<Barrier>,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    query_tiles: &mut Shared<[E]>,
    gradient_tiles: &mut Shared<[E]>,
    statistic_tiles: &mut Shared<[f32]>,
    #[comptime] stage: usize,
    batch: usize,
    head: u32,
    block: u32,
    geometry: &Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let panel = comptime!(block_q * 64);
    let row = (block * comptime!(block_q as u32)) as i32;
    full.arrive_and_expect_tx(
        1,
        comptime!(((key_panels + value_panels) * panel * 2 + 3 * block_q * 4) as u32),
    );
    load_rows(
        full,
        query,
        query_tiles,
        comptime!(stage * key_panels * panel).runtime(),
        batch as i32,
        head as i32,
        row,
        key_panels,
        panel,
    );
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
        output_gradient,
        gradient_tiles,
        comptime!(stage * value_panels * panel).runtime(),
        batch as i32,
        head as i32,
        row,
        value_panels,
        panel,
    );
}
