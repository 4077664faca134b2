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
use super::careful::non_finite;
use super::gradient::{Position, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::one_pass_pipeline::{Memory, load_first, load_stage};
use super::parts::step_by_parts;
use super::pipeline::{Walked, retire, row_of, wait_stage};
use super::query_tile::{TilePlaces, Walk, add_tile_before, tile_place};
use super::step::{StepPlaces, score_place, step_product};
use super::turns::{counter, draw_number, run_errands, tiles_read};
use crate::schedule::{Geometry, Seat, queries_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;
use flash_attention_spec::Summation;

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

    let key_tile = Shared::<[E]>::new_aligned_slice(comptime!(key_panels * owned_panel), 1024usize);
    let value_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(value_panels * owned_panel), 1024usize);
    let query_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * query_stage), 1024usize);
    let gradient_tiles = Shared::<[E]>::new_aligned_slice(comptime!(2 * gradient_stage), 1024usize);
    let score_tiles = Shared::<[E]>::new_aligned_slice(score_stage, 1024usize);
    let sum_tiles = Shared::<[f32]>::new_aligned_slice(tile_length, 1024usize);
    let statistic_tiles =
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
    let mut memory = Memory::<E> {
        keys: key_tile,
        values: value_tile,
        queries: query_tiles,
        gradients: gradient_tiles,
        statistics: statistic_tiles,
        owned_full,
        full_0,
        full_1,
    };

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
        memory.owned_full.init_manual(1u32);
        memory.full_0.init_manual(1u32);
        memory.full_1.init_manual(1u32);
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
    let seat = Seat::of(number, blocks, heads, section);
    let batch_head = seat.batch_head;
    let first_kv = (seat.block() * block_kv) as i32;
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
        load_first(
            &mut memory,
            kv_head,
            first_kv,
            Walked {
                batch,
                head: group_head,
                block: end_block,
            },
            per_head,
            count,
            query,
            key,
            value,
            output_gradient,
            statistics,
            geometry.heads,
            blueprint,
        );
    }

    sync_cube();

    let lane = UNIT_POS % 32;
    let tile_address = shared_address::<f32>(sum_tiles.as_ptr());
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let own_kv = first_kv + (warpgroup * 64) as i32;
    let key_address = shared_address::<E>(memory.keys.as_ptr());
    let own_key = key_address + warpgroup * 8192;
    let own_value = shared_address::<E>(memory.values.as_ptr()) + warpgroup * 8192;
    let query_address = shared_address::<E>(memory.queries.as_ptr());
    let gradient_address = shared_address::<E>(memory.gradients.as_ptr());
    let statistic_address = shared_address::<f32>(memory.statistics.as_ptr());
    let score_address = shared_address::<E>(score_tiles.as_ptr());
    let errands = shared_address::<u64>(errand_numbers.as_ptr()) + warpgroup * 24;
    let step = comptime!(blueprint.step(with_query, ordered));
    let always = comptime!(mask.is_some() || bias.is_some());

    let walk = Walk {
        first_head: stash_address + 8,
        end_block,
        per_head,
        count,
    };
    let places = TilePlaces {
        full: scores_full,
        free: scores_free,
        scores: score_address,
        keys: key_address,
        tiles: tile_address,
        errands,
    };
    let mut sums = Vector::<f32, G>::new(0.0f32);
    if count > 0 {
        memory.owned_full.wait_parity(0u32);
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
            let at = StepPlaces {
                key: own_key,
                value: own_value,
                query: query_address + stage * comptime!((query_stage * 2) as u32),
                gradient: gradient_address + stage * comptime!((gradient_stage * 2) as u32),
                statistics: statistic_address
                    + stage * comptime!((blueprint.statistics() * 4) as u32)
                    + (lane % 4) * 8,
                store: score_address
                    + stage * comptime!(blueprint.score_stage() as u32)
                    + score_place(UNIT_POS, block_q),
            };
            wait_stage(stage, phase, &memory.full_0, &memory.full_1);
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
                    at,
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
                            at,
                            geometry.scale,
                            errands,
                            comptime!(panel * 2),
                            comptime!(step.clone()),
                        );
                    } else {
                        sums = step_by_parts::<E, M, S, P, G>(
                            sums,
                            at,
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
                load_stage(
                    &mut memory,
                    stage,
                    Walked {
                        batch,
                        head: head + ahead / per_head,
                        block: end_block - 1 - ahead % per_head,
                    },
                    query,
                    output_gradient,
                    statistics,
                    geometry.heads,
                    blueprint,
                );
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
                add_tile_before(
                    n,
                    warpgroup,
                    before,
                    first_kv,
                    places,
                    walk,
                    query_blocks,
                    query_sums,
                    turns,
                    &geometry,
                    ordered,
                    blueprint,
                );
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
