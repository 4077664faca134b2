//! The forward kernel: one cube for each block of queries of a head, one warpgroup for 64 of them.

use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, non_finite};
use super::instructions::*;
use super::pipeline::{load_stage, release, row_of};
use super::softmax::{RowPair, masked_scores, probabilities};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]`, in pairs, and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
///
/// `S`, `P` and `O` are the registers of a unit for scores, probabilities and output. `section` heads
/// at a time have their cubes run side by side, so that the cache keeps their keys and values.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn forward_kernel<E: Float, M: Int, S: Size, P: Size, O: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output: &mut [u32],
    statistics: &mut [f32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: ForwardBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let block_q = comptime!(blueprint.block_q());
    let block_kv = comptime!(blueprint.block_kv);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let query_panel = comptime!(block_q * 64);
    let panel = comptime!(block_kv * 64);
    let key_stage = comptime!(key_panels * panel);
    let value_stage = comptime!(value_panels * panel);
    let element = comptime!(blueprint.element());

    // Which queries: heads in sections, the last block of queries first, for it sees the most keys.
    let blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let heads = geometry.batch * geometry.heads;
    if CUBE_POS >= blocks * heads {
        terminate!();
    }
    let first_head = CUBE_POS / (blocks * section) * section;
    let width = select(heads - first_head < section, heads - first_head, section);
    let place = CUBE_POS - first_head * blocks;
    let batch_head = first_head + place % width;
    let first_query = ((blocks - 1 - place / width) * block_q) as i32;
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    let kv_head = (head / geometry.group) as i32;

    let mut query_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(key_panels * query_panel), 1024usize);
    let mut key_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * key_stage), 1024usize);
    let mut value_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * value_stage), 1024usize);
    // How many planes are done with a stage of keys (0, 1) and of values (2, 3).
    let mut done = Shared::<[u32]>::new_slice(4usize);
    // Waits here for the end, so that no register holds it all along.
    let mut stash = Shared::<[u32]>::new_slice(1usize);
    let elected = UNIT_POS == 0;
    if UNIT_POS < 4 {
        done[UNIT_POS as usize] = 0u32;
    }
    let query_full = Barrier::shared_uninit();
    let key_full_0 = Barrier::shared_uninit();
    let key_full_1 = Barrier::shared_uninit();
    let value_full_0 = Barrier::shared_uninit();
    let value_full_1 = Barrier::shared_uninit();
    if elected {
        stash[0] = batch_head as u32;
        query_full.init_manual(1u32);
        key_full_0.init_manual(1u32);
        key_full_1.init_manual(1u32);
        value_full_0.init_manual(1u32);
        value_full_1.init_manual(1u32);
    }
    sync_async_proxy_shared();
    sync_cube();

    // The blocks of keys that the cube walks, from the last.
    let keys = keys_of_block(&geometry, first_query, block_q);
    let first_block = keys.first as u32 / comptime!(block_kv as u32);
    let end_block = (keys.end as u32).div_ceil(comptime!(block_kv as u32));
    let count = end_block - first_block;

    // Those that this warpgroup's own queries see. The others it passes by.
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let own_query = first_query + (warpgroup * 64) as i32;
    let own_keys = keys_of_block(&geometry, own_query, 64usize);
    let own_first = own_keys.first as u32 / comptime!(block_kv as u32);
    let mut own_end = (own_keys.end as u32).div_ceil(comptime!(block_kv as u32));
    if own_query >= geometry.seq_q {
        own_end = own_first;
    }

    if elected {
        #[unroll]
        for p in 0..key_panels {
            query_full.tma_load_4d(
                query,
                &mut query_tile[p * query_panel..(p + 1) * query_panel],
                batch as i32,
                head as i32,
                first_query,
                comptime!(p as i32 * 64),
            );
        }
        query_full.arrive_and_expect_tx(1, comptime!((key_panels * query_panel * 2) as u32));
    }
    if elected {
        if count > 0 {
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

    let lane = UNIT_POS % 32;
    let query_address = shared_address::<E>(query_tile.as_ptr()) + warpgroup * 8192;
    let key_address = shared_address::<E>(key_tiles.as_ptr());
    let value_address = shared_address::<E>(value_tiles.as_ptr());
    let done_address = shared_address::<u32>(done.as_ptr());
    let score_body = comptime!(blueprint.products().scores(blueprint.score_registers()));
    let value_body = comptime!(blueprint.products().values(
        blueprint.output_registers(),
        blueprint.probability_registers()
    ));
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);

    let stash_address = shared_address::<u32>(stash.as_ptr());
    let mut rows = RowPair::new(&geometry, blueprint);
    let mut acc = Vector::<f32, O>::new(0.0f32);
    query_full.wait_parity(0u32);

    for n in 0..count {
        let block = end_block - 1 - n;
        let stage = n % 2;
        let phase = (n / 2) % 2;
        let first_kv = (block * comptime!(block_kv as u32)) as i32;
        let next_row = first_kv - comptime!(2 * block_kv as i32);
        let mine = block >= own_first && block < own_end;
        let more = n + 2 < count;
        let mut p = Vector::<u32, P>::new(0u32);

        if stage == 0 {
            key_full_0.wait_parity(phase);
        } else {
            key_full_1.wait_parity(phase);
        }
        // How to multiply: not at all (2), careful of what is not finite (1), or as it is (0).
        let mut way = 2u32;
        if mine {
            let mut scores = dot_product::<S>(
                row_descriptor(query_address),
                row_descriptor(key_address + stage * comptime!((key_stage * 2) as u32)),
                comptime!(score_body.clone()),
            );
            release(
                done_address + stage * 4,
                lane,
                more,
                last_plane,
                stage,
                &key_full_0,
                &key_full_1,
                key,
                &mut key_tiles,
                batch as i32,
                kv_head,
                next_row,
                key_panels,
                panel,
            );
            let edge = comptime!(mask.is_some() || bias.is_some() || blueprint.capped)
                || !wholly_visible(&geometry, own_query, first_kv, 64usize, block_kv);
            if edge {
                let unit = unit_again();
                scores = masked_scores::<E, M, S>(
                    scores,
                    own_query + row_of(unit),
                    first_kv + ((unit % 4) * 2) as i32,
                    batch,
                    head,
                    &mask,
                    &bias,
                    &geometry,
                    blueprint,
                );
            }
            let growth = rows.grow::<S>(scores, blueprint);
            if plane_any(growth) {
                let (a0, a1) = rows.rescale();
                #[unroll]
                for j in 0..comptime!(blueprint.value_dim / 8) {
                    acc.insert(4 * j, acc.extract(4 * j) * a0);
                    acc.insert(4 * j + 1, acc.extract(4 * j + 1) * a0);
                    acc.insert(4 * j + 2, acc.extract(4 * j + 2) * a1);
                    acc.insert(4 * j + 3, acc.extract(4 * j + 3) * a1);
                }
            }
            p = probabilities::<S, P>(scores, &mut rows, blueprint);
            if stage == 0 {
                value_full_0.wait_parity(phase);
            } else {
                value_full_1.wait_parity(phase);
            }
            way = 0u32;
            if edge {
                way = non_finite(
                    value_address + stage * comptime!((value_stage * 2) as u32),
                    block_kv,
                    blueprint.value_dim,
                    blueprint.warpgroups,
                    element,
                );
            }
        } else {
            release(
                done_address + stage * 4,
                lane,
                more,
                last_plane,
                stage,
                &key_full_0,
                &key_full_1,
                key,
                &mut key_tiles,
                batch as i32,
                kv_head,
                next_row,
                key_panels,
                panel,
            );
            if stage == 0 {
                value_full_0.wait_parity(phase);
            } else {
                value_full_1.wait_parity(phase);
            }
        }
        if way < 2 {
            if way == 0 {
                acc = value_product::<P, O>(
                    acc,
                    p,
                    column_descriptor(
                        value_address + stage * comptime!((value_stage * 2) as u32),
                        comptime!(panel * 2),
                    ),
                    comptime!(value_body.clone()),
                );
            } else {
                acc = add_careful::<P, O>(
                    acc,
                    p,
                    value_address + stage * comptime!((value_stage * 2) as u32),
                    lane,
                    0usize,
                    block_kv,
                    blueprint.value_dim,
                    element,
                );
            }
        }
        release(
            done_address + 8 + stage * 4,
            lane,
            more,
            last_plane,
            stage,
            &value_full_0,
            &value_full_1,
            value,
            &mut value_tiles,
            batch as i32,
            kv_head,
            next_row,
            value_panels,
            panel,
        );
    }

    let batch_head = load_shared(stash_address) as usize;
    let unit = unit_again();
    let lane = unit % 32;
    let row = own_query + row_of(unit);
    let half = heads * geometry.seq_q as usize;
    let pitch = comptime!(blueprint.value_dim / 2);
    #[unroll]
    for r in 0..2usize {
        let i = row + comptime!(r as i32 * 8);
        let end = rows.finish(&geometry, comptime!(r == 1), blueprint);
        if i < geometry.seq_q {
            let at = batch_head * geometry.seq_q as usize + i as usize;
            if lane % 4 == 0 {
                statistics[at] = end.maximum;
                statistics[half + at] = end.log_sum;
            }
            #[unroll]
            for j in 0..comptime!(blueprint.value_dim / 8) {
                output[at * pitch + (comptime!(j * 4) + (lane % 4) as usize)] = pack(
                    acc.extract(comptime!(4 * j + 2 * r)) * end.inverse,
                    acc.extract(comptime!(4 * j + 2 * r + 1)) * end.inverse,
                    element,
                );
            }
        }
    }
}
