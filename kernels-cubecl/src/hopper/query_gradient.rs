//! The query gradient: one cube for each block of queries of a head, one warpgroup for 64 of them.
//!
//! Keys are in use from the first product to the last, values in the middle one alone: where wide heads
//! leave no room for two stages of both, values have one, refilled while the keys' products run.

use super::careful::{add_careful, non_finite};
use super::gradient::{Position, gradients_by_query, probabilities_by_query, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::pipeline::{load_owned, load_stage, release, row_of, wait_stage};
use super::products::{column_descriptor, dot_product, row_descriptor, value_product};
use super::statistics::load_statistics;
use crate::schedule::{Geometry, Seat, keys_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the gradient of the query, packed, in pairs.
///
/// `statistics` is what `statistics_kernel` wrote. `S`, `P` and `O` are the registers of a unit for scores,
/// rounded weights and the gradient. `section` heads at a time have their cubes run side by side, so
/// that the cache keeps their keys and values.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn query_gradient_kernel<E: Float, M: Int, S: Size, P: Size, O: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    statistics: &[f32],
    query_gradient: &mut [u32],
    geometry: Geometry,
    padded: usize,
    section: usize,
    #[comptime] blueprint: GradientBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let block_q = comptime!(blueprint.owned());
    let block_kv = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let owned_panel = comptime!(block_q * 64);
    let panel = comptime!(block_kv * 64);
    let key_stage = comptime!(key_panels * panel);
    let value_stage = comptime!(value_panels * panel);
    let value_stages = comptime!(blueprint.value_stages());
    let element = comptime!(blueprint.element());

    // Which queries: heads in sections, the last block of queries first, for it sees the most keys.
    let blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let heads = geometry.batch * geometry.heads;
    if CUBE_POS >= blocks * heads {
        terminate!();
    }
    let seat = Seat::of(CUBE_POS, blocks, heads, section);
    let batch_head = seat.batch_head;
    let first_query = ((blocks - 1 - seat.block()) * block_q) as i32;
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    let kv_head = (head / geometry.group) as i32;

    let mut query_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(key_panels * owned_panel), 1024usize);
    let mut gradient_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(value_panels * owned_panel), 1024usize);
    let mut key_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * key_stage), 1024usize);
    let mut value_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(value_stages * value_stage), 1024usize);
    // How many planes are done with a stage of keys (0, 1) and of values (2, 3).
    let mut done = Shared::<[u32]>::new_slice(4usize);
    // Waits here for the end, so that no register holds it all along.
    let mut stash = Shared::<[u32]>::new_slice(1usize);
    let elected = UNIT_POS == 0;
    if UNIT_POS < 4 {
        done[UNIT_POS as usize] = 0u32;
    }
    let owned_full = Barrier::shared_uninit();
    let key_full_0 = Barrier::shared_uninit();
    let key_full_1 = Barrier::shared_uninit();
    let value_full_0 = Barrier::shared_uninit();
    let value_full_1 = Barrier::shared_uninit();
    if elected {
        stash[0] = batch_head as u32;
        owned_full.init_manual(1u32);
        key_full_0.init_manual(1u32);
        key_full_1.init_manual(1u32);
        value_full_0.init_manual(1u32);
        value_full_1.init_manual(1u32);
    }
    sync_async_proxy_shared();
    sync_cube();

    // The blocks of keys that the cube walks, from the last.
    let keys = keys_of_block(&geometry, first_query, block_q, true);
    let first_block = keys.first as u32 / comptime!(block_kv as u32);
    let end_block = (keys.end as u32).div_ceil(comptime!(block_kv as u32));
    let count = select(end_block > first_block, end_block - first_block, 0u32);

    // Those that this warpgroup's own queries see. The others it passes by.
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let own_query = first_query + (warpgroup * 64) as i32;
    let own_keys = keys_of_block(&geometry, own_query, 64usize, true);
    let own_first = own_keys.first as u32 / comptime!(block_kv as u32);
    let mut own_end = (own_keys.end as u32).div_ceil(comptime!(block_kv as u32));
    if own_query >= geometry.seq_q {
        own_end = own_first;
    }

    if elected {
        if count > 0 {
            load_owned(
                &owned_full,
                query,
                output_gradient,
                &mut query_tile,
                &mut gradient_tile,
                batch,
                head,
                first_query,
                blueprint,
            );
            let row = ((end_block - 1) * comptime!(block_kv as u32)) as i32;
            load_stage(
                &key_full_0,
                key,
                &mut key_tiles,
                0usize,
                batch as i32,
                kv_head,
                row,
                key_panels,
                panel,
            );
            load_stage(
                &value_full_0,
                value,
                &mut value_tiles,
                0usize,
                batch as i32,
                kv_head,
                row,
                value_panels,
                panel,
            );
        }
        if count > 1 {
            let row = ((end_block - 2) * comptime!(block_kv as u32)) as i32;
            load_stage(
                &key_full_1,
                key,
                &mut key_tiles,
                key_stage,
                batch as i32,
                kv_head,
                row,
                key_panels,
                panel,
            );
            if comptime!(value_stages == 2) {
                load_stage(
                    &value_full_1,
                    value,
                    &mut value_tiles,
                    value_stage,
                    batch as i32,
                    kv_head,
                    row,
                    value_panels,
                    panel,
                );
            }
        }
    }

    let lane = UNIT_POS % 32;
    let query_address = shared_address::<E>(query_tile.as_ptr()) + warpgroup * 8192;
    let gradient_address = shared_address::<E>(gradient_tile.as_ptr()) + warpgroup * 8192;
    let key_address = shared_address::<E>(key_tiles.as_ptr());
    let value_address = shared_address::<E>(value_tiles.as_ptr());
    let done_address = shared_address::<u32>(done.as_ptr());
    let stash_address = shared_address::<u32>(stash.as_ptr());
    let key_dots = comptime!(blueprint.dots(blueprint.head_dim));
    let value_dots = comptime!(blueprint.dots(blueprint.value_dim));
    let key_sum = comptime!(blueprint.sums(blueprint.head_dim));
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);

    let row = own_query + row_of(UNIT_POS);
    let row_0 = load_statistics(statistics, batch_head, row, padded, &geometry);
    let row_1 = load_statistics(statistics, batch_head, row + 8, padded, &geometry);

    let mut acc = Vector::<f32, O>::new(0.0f32);
    if count > 0 {
        owned_full.wait_parity(0u32);
    }
    for n in 0..count {
        let block = end_block - 1 - n;
        let stage = n % 2;
        let phase = (n / 2) % 2;
        let value_turn = n % comptime!(value_stages as u32);
        let value_phase = (n / comptime!(value_stages as u32)) % 2;
        let key_at = key_address + stage * comptime!((key_stage * 2) as u32);
        let first_kv = (block * comptime!(block_kv as u32)) as i32;
        let next_value = first_kv - comptime!((value_stages * block_kv) as i32);
        let more_values = n + comptime!(value_stages as u32) < count;
        wait_stage(stage, phase, &key_full_0, &key_full_1);
        if block >= own_first && block < own_end {
            let value_at = value_address + value_turn * comptime!((value_stage * 2) as u32);
            let dots = dot_product::<S>(
                row_descriptor(query_address),
                row_descriptor(key_at),
                comptime!(key_dots.clone()),
            );
            let always = comptime!(mask.is_some() || bias.is_some());
            let edge = always || !wholly_visible(&geometry, own_query, first_kv, 64usize, block_kv);
            let mut weights = Vector::<f32, S>::new(0.0f32);
            if edge {
                let unit = unit_again();
                weights = probabilities_by_query::<E, M, S>(
                    dots,
                    row_0,
                    row_1,
                    Position {
                        batch,
                        head,
                        query: own_query + row_of(unit),
                        key: first_kv + ((unit % 4) * 2) as i32,
                    },
                    &mask,
                    &bias,
                    &geometry,
                    true,
                    blueprint,
                );
            } else {
                if comptime!(!always) {
                    weights = probabilities_by_query::<E, M, S>(
                        dots,
                        row_0,
                        row_1,
                        Position {
                            batch,
                            head,
                            query: own_query,
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
            wait_stage(value_turn, value_phase, &value_full_0, &value_full_1);
            let products = dot_product::<S>(
                row_descriptor(gradient_address),
                row_descriptor(value_at),
                comptime!(value_dots.clone()),
            );
            release(
                done_address + 8 + value_turn * 4,
                lane,
                more_values,
                last_plane,
                value_turn,
                &value_full_0,
                &value_full_1,
                value,
                &mut value_tiles,
                batch as i32,
                kv_head,
                next_value,
                value_panels,
                panel,
            );
            let mut rounded = Vector::<u32, P>::new(0u32);
            let mut way = 0u32;
            if edge {
                rounded =
                    gradients_by_query::<S, P>(weights, products, row_0, row_1, true, blueprint);
                way = non_finite(
                    key_at,
                    block_kv,
                    blueprint.head_dim,
                    blueprint.warpgroups,
                    element,
                );
            } else {
                if comptime!(!always) {
                    rounded = gradients_by_query::<S, P>(
                        weights, products, row_0, row_1, false, blueprint,
                    );
                }
            }
            if way == 0 {
                acc = value_product::<P, O>(
                    acc,
                    rounded,
                    column_descriptor(key_at, comptime!(panel * 2)),
                    comptime!(key_sum.clone()),
                );
            } else {
                acc = add_careful::<P, O>(
                    acc,
                    rounded,
                    key_at,
                    lane,
                    0usize,
                    block_kv,
                    blueprint.head_dim,
                    element,
                );
            }
        } else {
            wait_stage(value_turn, value_phase, &value_full_0, &value_full_1);
            release(
                done_address + 8 + value_turn * 4,
                lane,
                more_values,
                last_plane,
                value_turn,
                &value_full_0,
                &value_full_1,
                value,
                &mut value_tiles,
                batch as i32,
                kv_head,
                next_value,
                value_panels,
                panel,
            );
        }
        release(
            done_address + stage * 4,
            lane,
            n + 2 < count,
            last_plane,
            stage,
            &key_full_0,
            &key_full_1,
            key,
            &mut key_tiles,
            batch as i32,
            kv_head,
            first_kv - comptime!(2 * block_kv as i32),
            key_panels,
            panel,
        );
    }

    let batch_head = load_shared(stash_address) as usize;
    let unit = unit_again();
    store_sums::<O>(
        acc,
        query_gradient,
        batch_head,
        own_query + row_of(unit),
        geometry.seq_q,
        unit % 32,
        geometry.scale,
        0usize,
        blueprint.head_dim,
        element,
    );
}
