//! All gradients in one pass over the scores: one cube for each block of keys of a key head, one
//! warpgroup for 64 of them.
//!
//! Scores are computed transposed, keys along the rows, so that probabilities and their gradients are
//! in the layout of the next products' operands. The queries of every head of the group are walked one
//! after the other, from the last.
//!
//! ```text
//! step n of a warpgroup
//!     wait for Q, dO, statistics of n
//!     S, P, dP, dS of n; dS to stage n % 2
//!     dV, dK
//!     done with Q, dO            the last plane of the cube asks for those of n + 2
//!     wait for the other warpgroup's dS of n - 1
//!     dQ tile of n - 1 = dS K    64 queries by 64 features, over the keys of both
//!     wait until the copy engine has read the tile of n - 2
//!     tile to shared memory; the copy engine adds it to the sums in global memory
//! ```
//!
//! The query gradient is a step behind, so that no warpgroup waits for the other. Its sums are tiles as
//! units hold them, four registers of each after the other; a kernel afterwards puts them in rows.
//!
//! No plane of its own runs the copy engine's errands: a ninth plane would leave each of the others a third
//! of a quarter of the registers instead of half of it.

use super::arrivals::*;
use super::careful::{non_finite, tile_careful};
use super::gradient::{Position, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::parts::step_by_parts;
use super::pipeline::{load_queries, load_rows, retire, row_of};
use super::step::*;
use super::turns::*;
use crate::schedule::{Geometry, keys_of_block, queries_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;
use flash_attention_spec::Summation;

/// The blocks of queries that a cube walks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Walk {
    /// Where the first head of all batches' lies in shared memory.
    first_head: u32,
    /// Past the first block that is walked.
    end_block: u32,
    per_head: u32,
}

/// The place of a step's tile among all.
#[cube]
fn tile_place(
    step: u32,
    warpgroup: u32,
    walk: Walk,
    query_blocks: usize,
    #[comptime] tiles: usize,
) -> usize {
    let head = load_shared(walk.first_head) + step / walk.per_head;
    let block = walk.end_block - 1 - step % walk.per_head;
    (head as usize * query_blocks + block as usize) * tiles + warpgroup as usize
}

/// Writes the gradients of key and value, packed, in pairs, and adds to the sums of the query's.
///
/// `statistics` is what `statistics_kernel` wrote. `S`, `P` and `G` are the registers of a unit for
/// scores, rounded weights and the two gradients. `section` heads at a time have their cubes run side by
/// side, so that the cache keeps their queries and output gradients. `query_sums` starts as zeros, as
/// does `turns`: a counter for each tile of them, and one for the cubes. Without `summation` the
/// query's gradient is left out.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn one_pass_kernel<E: Float, M: Int, S: Size, P: Size, G: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    key_gradient: &mut [u32],
    value_gradient: &mut [u32],
    query_sums: &mut [f32],
    turns: &mut [u32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: GradientBlueprint,
    #[comptime] summation: Option<Summation>,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let with_query = comptime!(summation.is_some());
    let ordered = comptime!(summation == Some(Summation::Reproducible));
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let owned_panel = comptime!(block_kv * 64);
    let panel = comptime!(block_q * 64);
    let query_stage = comptime!(key_panels * panel);
    let gradient_stage = comptime!(value_panels * panel);
    let score_stage = comptime!(if with_query {
        blueprint.score_stage()
    } else {
        8
    });
    let tiles = comptime!(blueprint.query_tiles());
    let tile_length = comptime!(if with_query { tiles * 4096 } else { 4 });
    let element = comptime!(blueprint.element());

    let mut key_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(key_panels * owned_panel), 1024usize);
    let mut value_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(value_panels * owned_panel), 1024usize);
    let mut query_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * query_stage), 1024usize);
    let mut gradient_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(2 * gradient_stage), 1024usize);
    let score_tiles = Shared::<[E]>::new_aligned_slice(score_stage, 1024usize);
    let sum_tiles = Shared::<[f32]>::new_aligned_slice(tile_length, 1024usize);
    let mut statistic_tiles =
        Shared::<[f32]>::new_aligned_slice(comptime!(2 * blueprint.statistics()), 128usize);
    // Two of `dS` written, two of `dS` read.
    let barriers = Shared::<[u64]>::new_slice(4usize);
    // How many planes are done with a stage.
    let mut done = Shared::<[u32]>::new_slice(2usize);
    // The cube's number, its head and the first query head: no register holds them all along.
    let mut stash = Shared::<[u32]>::new_slice(3usize);
    let scores_full = shared_address::<u64>(barriers.as_ptr());
    let scores_free = scores_full + 16;
    let done_address = shared_address::<u32>(done.as_ptr());
    let stash_address = shared_address::<u32>(stash.as_ptr());
    // Of each warpgroup, what `turns` says.
    let errand_numbers = Shared::<[u64]>::new_slice(comptime!(3 * blueprint.warpgroups as usize));
    let owned_full = Barrier::shared_uninit();
    let full_0 = Barrier::shared_uninit();
    let full_1 = Barrier::shared_uninit();

    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let heads = geometry.batch * kv_heads;
    let elected = UNIT_POS == 0;
    if UNIT_POS < 2 {
        done[UNIT_POS as usize] = 0u32;
    }
    if elected {
        if comptime!(ordered) {
            let counters = geometry.batch * geometry.heads * query_blocks * tiles;
            stash[0] = draw_number(turns.as_ptr(), counters as u64 * 4);
        }
        owned_full.init_manual(1u32);
        full_0.init_manual(1u32);
        full_1.init_manual(1u32);
        #[unroll]
        for b in 0..4u32 {
            barrier_init(
                scores_full + comptime!(b * 8),
                comptime!(blueprint.warpgroups * 4),
            );
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    // Which keys: heads in sections, the first block of keys first, for the most queries see it.
    let mut number = CUBE_POS;
    if comptime!(ordered) {
        number = stash[0] as usize;
    }
    if number >= blocks * heads {
        terminate!();
    }
    let first_head = number / (blocks * section) * section;
    let width = select(heads - first_head < section, heads - first_head, section);
    let place = number - first_head * blocks;
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
    // The tiles of a step are added in the step after it.
    let mut steps = count;
    if comptime!(with_query) {
        steps = select(count > 0, count + 1, 0u32);
    }

    if elected {
        stash[1] = batch_head as u32;
        stash[2] = (batch * geometry.heads) as u32 + group_head;
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
            load_queries(
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
                end_block - 1,
                &geometry,
                blueprint,
            );
        }
        if count > 1 {
            load_queries(
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
                end_block - 1 - 1 % per_head,
                &geometry,
                blueprint,
            );
        }
    }

    sync_cube();

    let lane = UNIT_POS % 32;
    let tile_address = shared_address::<f32>(sum_tiles.as_ptr());
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let own_kv = first_kv + (warpgroup * 64) as i32;
    let key_address = shared_address::<E>(key_tile.as_ptr());
    let own_key = key_address + warpgroup * 8192;
    let own_value = shared_address::<E>(value_tile.as_ptr()) + warpgroup * 8192;
    let query_address = shared_address::<E>(query_tiles.as_ptr());
    let gradient_address = shared_address::<E>(gradient_tiles.as_ptr());
    let statistic_address = shared_address::<f32>(statistic_tiles.as_ptr());
    let score_address = shared_address::<E>(score_tiles.as_ptr());
    let errands = shared_address::<u64>(errand_numbers.as_ptr()) + warpgroup * 24;
    let step = comptime!(blueprint.step(with_query, ordered));
    let query_body = comptime!(blueprint.query_product());
    let always = comptime!(mask.is_some() || bias.is_some());

    let walk = Walk {
        first_head: stash_address + 8,
        end_block,
        per_head,
    };
    let mut sums = Vector::<f32, G>::new(0.0f32);
    if count > 0 {
        owned_full.wait_parity(0u32);
    }
    if comptime!(ordered) {
        let unit = UNIT_POS % 128;
        if unit == 0 {
            store_shared_wide(errands, 0u64);
        }
        if unit == 32 && count > 0 {
            let at = tile_place(0u32, warpgroup, walk, query_blocks, tiles);
            store_shared_wide(errands + 8, counter(turns.as_ptr(), at as u64 * 4));
        }
    }
    let mut head = group_head;
    let mut block = end_block;
    // Whether the step before had hidden keys, and one that is not finite.
    let mut before = 0u32;
    for n in 0..steps {
        let stage = n % 2;
        let phase = (n / 2) % 2;
        let mut way = 0u32;
        if n < count {
            block -= 1;
            let first_query = (block * comptime!(block_q as u32)) as i32;
            let query_at = query_address + stage * comptime!((query_stage * 2) as u32);
            let gradient_at = gradient_address + stage * comptime!((gradient_stage * 2) as u32);
            let statistics_at = statistic_address
                + stage * comptime!((blueprint.statistics() * 4) as u32)
                + (lane % 4) * 8;
            let store = score_address
                + stage * comptime!(blueprint.score_stage() as u32)
                + score_place(UNIT_POS, block_q);
            if stage == 0 {
                full_0.wait_parity(phase);
            } else {
                full_1.wait_parity(phase);
            }
            if comptime!(with_query) {
                if n >= 2 {
                    barrier_wait(scores_free + stage * 8, (n / 2 + 1) % 2);
                }
            }
            let edge =
                always || !wholly_visible(&geometry, first_query, first_kv, block_q, block_kv);
            if edge {
                let unit = unit_again();
                sums = step_by_parts::<E, M, S, P, G>(
                    sums,
                    own_key,
                    own_value,
                    query_at,
                    gradient_at,
                    statistics_at,
                    store,
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
                    with_query,
                    blueprint,
                );
                if comptime!(ordered) {
                    run_errands(errands, UNIT_POS % 128);
                }
                if comptime!(with_query) {
                    way = non_finite(
                        key_address,
                        block_kv,
                        blueprint.head_dim,
                        blueprint.warpgroups,
                        element,
                    );
                }
            } else {
                if comptime!(!always) {
                    if comptime!(blueprint.plain()) {
                        sums = step_product::<G>(
                            sums,
                            row_descriptor(own_key),
                            row_descriptor(own_value),
                            row_descriptor(query_at),
                            column_descriptor(query_at, comptime!(panel * 2)),
                            row_descriptor(gradient_at),
                            column_descriptor(gradient_at, comptime!(panel * 2)),
                            statistics_at,
                            store,
                            geometry.scale,
                            errands,
                            comptime!(step.clone()),
                        );
                    } else {
                        sums = step_by_parts::<E, M, S, P, G>(
                            sums,
                            own_key,
                            own_value,
                            query_at,
                            gradient_at,
                            statistics_at,
                            store,
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
                            with_query,
                            blueprint,
                        );
                        if comptime!(ordered) {
                            run_errands(errands, UNIT_POS % 128);
                        }
                    }
                }
            }
            if comptime!(with_query) {
                publish();
                plane_arrive(scores_full + stage * 8, lane);
            }
            if retire(done_address + stage * 4, lane, n + 2 < count, last_plane) {
                let ahead = end_block - 1 - block + 2;
                let next_head = head + ahead / per_head;
                let next_block = end_block - 1 - ahead % per_head;
                if stage == 0 {
                    load_queries(
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
                    load_queries(
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
            if block == first_block {
                block = end_block;
                head += 1;
            }
        } else {
            if comptime!(ordered) {
                run_errands(errands, UNIT_POS % 128);
            }
        }
        if comptime!(with_query) {
            if n > 0 {
                let other = 1 - stage;
                barrier_wait(scores_full + other * 8, (n.div_ceil(2) + 1) % 2);
                if warpgroup < comptime!(tiles as u32) {
                    let scores = score_address
                        + other * comptime!(blueprint.score_stage() as u32)
                        + warpgroup * comptime!(if key_panels == 1 { 8192u32 } else { 0u32 });
                    let keys = key_address
                        + warpgroup
                            * comptime!(if key_panels == 1 {
                                0u32
                            } else {
                                owned_panel as u32 * 2
                            });
                    let mut tile = Vector::<f32, Const<32>>::new(0.0f32);
                    if before != 0 {
                        tile = tile_careful(scores, keys, block_q, block_kv, element);
                    }
                    if before == 0 {
                        tile = dot_product::<Const<32>>(
                            row_descriptor(scores),
                            column_descriptor(keys, comptime!(owned_panel * 2)),
                            comptime!(query_body.clone()),
                        );
                    }
                    plane_arrive(scores_free + other * 8, lane);
                    // One unit has the tiles of a warpgroup added, another waits for the turn.
                    let unit = UNIT_POS % 128;
                    let m = n - 1;
                    if comptime!(ordered) {
                        if unit == 32 {
                            let block = end_block - 1 - m % per_head;
                            let first_query = (block * comptime!(block_q as u32)) as i32;
                            let keys = keys_of_block(&geometry, first_query, block_q, true);
                            let turn = first_kv as u32 / comptime!(block_kv as u32)
                                - keys.first as u32 / comptime!(block_kv as u32);
                            if load_shared(errands + 16) != turn {
                                wait_turn(load_shared_wide(errands + 8), turn);
                            }
                        }
                    } else {
                        if unit == 0 {
                            tiles_read();
                        }
                    }
                    warpgroup_sync(warpgroup, blueprint.warpgroups);
                    let here = tile_address + warpgroup * 16384;
                    store_tile(tile, here + unit * 16);
                    publish();
                    warpgroup_sync(warpgroup, blueprint.warpgroups);
                    if unit == 0 {
                        let at = tile_place(m, warpgroup, walk, query_blocks, tiles);
                        add_tile(query_sums.as_ptr(), at as u64 * 16384, here);
                        if comptime!(ordered) {
                            store_shared_wide(errands, counter(turns.as_ptr(), at as u64 * 4));
                        }
                    }
                    if comptime!(ordered) {
                        if unit == 32 && n < count {
                            let at = tile_place(n, warpgroup, walk, query_blocks, tiles);
                            store_shared_wide(errands + 8, counter(turns.as_ptr(), at as u64 * 4));
                        }
                    }
                } else {
                    plane_arrive(scores_free + other * 8, lane);
                }
                before = way;
            } else {
                before = way;
            }
        }
    }

    if comptime!(with_query) {
        if UNIT_POS % 128 == 0 && count > 0 {
            if comptime!(ordered) {
                run_errands(errands, 0u32);
            } else {
                tiles_read();
            }
        }
    }
    let batch_head = load_shared(stash_address + 4) as usize;
    let unit = unit_again();
    let row = own_kv + row_of(unit);
    store_sums::<G>(
        sums,
        key_gradient,
        batch_head,
        row,
        geometry.seq_kv,
        unit % 32,
        geometry.scale,
        comptime!(blueprint.key_sum()),
        blueprint.head_dim,
        element,
    );
    store_sums::<G>(
        sums,
        value_gradient,
        batch_head,
        row,
        geometry.seq_kv,
        unit % 32,
        1.0f32,
        0usize,
        blueprint.value_dim,
        element,
    );
}
