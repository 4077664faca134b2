//! The forward kernel: a cube walks tiles of queries, one warpgroup 64 queries of each, and a plane of
//! its own asks for what they read.

use super::arrivals::{barrier_arrive, barrier_init, barrier_wait};
use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, non_finite};
use super::instructions::*;
use super::output::{Chunk, store_rows};
use super::pipeline::{load_stage, row_of};
use super::softmax::{RowPair, masked_scores, probabilities};
use super::tiles::*;
use crate::schedule::{Geometry, keys_of_all, keys_of_block};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]`, in chunks of eight features, and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
///
/// `S`, `P` and `O` are the registers of a unit for scores, probabilities and output. `section` heads
/// at a time have their tiles side by side, so that the cache keeps their keys and values.
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
    output: &mut [Chunk],
    statistics: &mut [f32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: ForwardBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let warpgroups = comptime!(blueprint.warpgroups);
    let stages = comptime!(blueprint.stages);
    let block_kv = comptime!(blueprint.block_kv);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let own_queries = comptime!(key_panels * QUERY_PANEL);
    let panel = comptime!(block_kv * 64);
    let key_stage = comptime!(key_panels * panel);
    let value_stage = comptime!(value_panels * panel);
    let element = comptime!(blueprint.element());
    let query_stages = comptime!(blueprint.query_stages);
    let guarded_queries = comptime!(query_stages * warpgroups);

    let mut query_tile = Shared::<[E]>::new_aligned_slice(
        comptime!(guarded_queries as usize * own_queries),
        1024usize,
    );
    let mut key_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * key_stage), 1024usize);
    let mut value_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * value_stage), 1024usize);
    // Of every warpgroup's queries, then of stages of keys, then of stages of values: that they are there,
    // and that every plane which reads them is done with them.
    let full = Shared::<[Barrier]>::new_slice(comptime!(blueprint.guarded() as usize));
    let free = Shared::<[Barrier]>::new_slice(comptime!(blueprint.guarded() as usize));
    let full_address = shared_address::<Barrier>(full.as_ptr());
    let free_address = shared_address::<Barrier>(free.as_ptr());
    let first_key = comptime!(guarded_queries);
    let first_value = comptime!(guarded_queries + stages);
    let section = section as u32;

    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..comptime!(blueprint.guarded()) {
            barrier_init(full_address + comptime!(8 * i), 1u32);
            barrier_init(
                free_address + comptime!(8 * i),
                comptime!(if i < guarded_queries {
                    4
                } else {
                    4 * warpgroups
                }),
            );
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let plane = agreed(UNIT_POS / 32);
    // Blocks of keys come and go in stages, across tiles.
    let mut walked = 0u32;
    let mut t = 0u32;
    let (few, many) = comptime!(blueprint.registers());
    if plane >= comptime!(warpgroups * 4) {
        give_registers(few);
        if UNIT_POS == comptime!(warpgroups * 128) {
            while is_tile(&geometry, t, blueprint) {
                let tile = tile_of(&geometry, t, section, blueprint);
                if comptime!(query_stages > 1) {
                    load_queries_of_tile(
                        free_address,
                        &full,
                        query,
                        &mut query_tile,
                        tile,
                        t,
                        blueprint,
                    );
                }
                for n in tile.first_block..tile.end_block {
                    let row = ((tile.end_block - 1 - (n - tile.first_block))
                        * comptime!(block_kv as u32)) as i32;
                    let stage = walked % stages;
                    // At first all are free.
                    let round = walked / stages + 1;
                    barrier_wait(free_address + (first_key + stage) * 8, round % 2);
                    load_stage(
                        &full[(first_key + stage) as usize],
                        key,
                        &mut key_tiles,
                        stage as usize * key_stage,
                        tile.batch as i32,
                        tile.kv_head as i32,
                        row,
                        key_panels,
                        panel,
                    );
                    // Queries have to wait for those of the tile before where there is no room for both.
                    if comptime!(query_stages == 1) {
                        if n == tile.first_block {
                            load_queries_of_tile(
                                free_address,
                                &full,
                                query,
                                &mut query_tile,
                                tile,
                                t,
                                blueprint,
                            );
                        }
                    }
                    barrier_wait(free_address + (first_value + stage) * 8, round % 2);
                    load_stage(
                        &full[(first_value + stage) as usize],
                        value,
                        &mut value_tiles,
                        stage as usize * value_stage,
                        tile.batch as i32,
                        tile.kv_head as i32,
                        row,
                        value_panels,
                        panel,
                    );
                    walked += 1;
                }
                t += 1;
            }
        }
    } else {
        take_registers(many);
        let warpgroup = plane / 4;
        // Speaks for its plane, whose products are done and whose reads are back. The planes of a
        // warpgroup do not run in step.
        let speaks = UNIT_POS % 32 == 0;
        let queries_address = shared_address::<E>(query_tile.as_ptr());
        let key_address = shared_address::<E>(key_tiles.as_ptr());
        let value_address = shared_address::<E>(value_tiles.as_ptr());
        let score_body = comptime!(blueprint.products().scores(blueprint.score_registers()));
        let value_body = comptime!(blueprint.products().values(
            blueprint.output_registers(),
            blueprint.probability_registers()
        ));
        while is_tile(&geometry, t, blueprint) {
            let tile = tile_of(&geometry, t, section, blueprint);
            let own_query = tile.first_query + (warpgroup * 64) as i32;
            // The blocks that some of the warpgroup's queries see, and those that all do. It passes by
            // the others.
            let some = keys_of_block(&geometry, own_query, 64usize);
            let some_first = some.first as u32 / comptime!(block_kv as u32);
            let mut some_end = (some.end as u32).div_ceil(comptime!(block_kv as u32));
            if own_query >= geometry.seq_q {
                some_end = 0u32;
            }
            let all = keys_of_all(&geometry, own_query, 64usize);
            let all_first = (all.first as u32).div_ceil(comptime!(block_kv as u32));
            let all_end = all.end as u32 / comptime!(block_kv as u32);

            let mut rows = RowPair::new(&geometry, blueprint);
            let mut acc = Vector::<f32, O>::new(0.0f32);
            let own = t % query_stages * warpgroups + warpgroup;
            barrier_wait(full_address + own * 8, t / query_stages % 2);
            let mut left = tile.end_block;
            while left > tile.first_block {
                let block = left - 1;
                let stage = walked % stages;
                let phase = walked / stages % 2;
                let mine = block >= some_first && block < some_end;
                let mut p = Vector::<u32, P>::new(0u32);

                barrier_wait(full_address + (first_key + stage) * 8, phase);
                // How to multiply: not at all (2), careful of what is not finite (1), or as it is (0).
                let mut way = 2u32;
                if mine {
                    let mut scores = dot_product::<S>(
                        row_descriptor(queries_address + own * comptime!((own_queries * 2) as u32)),
                        row_descriptor(key_address + stage * comptime!((key_stage * 2) as u32)),
                        comptime!(score_body.clone()),
                    );
                    done_with_scores(
                        speaks,
                        free_address + (first_key + stage) * 8,
                        free_address + own * 8,
                        block == tile.first_block,
                    );
                    let edge = comptime!(mask.is_some() || bias.is_some() || blueprint.capped)
                        || block < all_first
                        || block >= all_end;
                    if edge {
                        let unit = unit_again();
                        scores = masked_scores::<E, M, S>(
                            scores,
                            own_query + row_of(unit),
                            (block * comptime!(block_kv as u32) + (unit % 4) * 2) as i32,
                            tile.batch as usize,
                            tile.head as usize,
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
                    barrier_wait(full_address + (first_value + stage) * 8, phase);
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
                    done_with_scores(
                        speaks,
                        free_address + (first_key + stage) * 8,
                        free_address + own * 8,
                        block == tile.first_block,
                    );
                    barrier_wait(full_address + (first_value + stage) * 8, phase);
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
                            unit_again() % 32,
                            0usize,
                            block_kv,
                            blueprint.value_dim,
                            element,
                        );
                        sync_plane();
                    }
                }
                if speaks {
                    barrier_arrive(free_address + (first_value + stage) * 8);
                }
                walked += 1;
                left -= 1;
            }
            // Found out again, so that no register holds it all along.
            let tile = tile_of(&geometry, again(t), section, blueprint);
            store_rows::<O>(
                acc,
                &rows,
                (tile.batch * geometry.heads as u32 + tile.head) as usize,
                tile.first_query + (agreed(unit_again() / 32) / 4 * 64) as i32,
                output,
                statistics,
                &geometry,
                blueprint,
            );
            t += 1;
        }
    }
}

/// The plane is done with a block of keys and, at a tile's `last`, with its queries.
#[cube]
fn done_with_scores(speaks: bool, keys: u32, queries: u32, last: bool) {
    if speaks {
        barrier_arrive(keys);
        if last {
            barrier_arrive(queries);
        }
    }
}

/// Asks for every warpgroup's queries of tile `t` of the cube, each once the warpgroup is done with those
/// in their place.
#[cube]
fn load_queries_of_tile<E: Float>(
    free_address: u32,
    full: &Shared<[Barrier]>,
    query: &TensorMap<E, Tiled>,
    query_tile: &mut Shared<[E]>,
    tile: Tile,
    t: u32,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let query_stages = comptime!(blueprint.query_stages);
    let warpgroups = comptime!(blueprint.warpgroups);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    for w in 0..warpgroups {
        let own = t % query_stages * warpgroups + w;
        barrier_wait(free_address + own * 8, (t / query_stages + 1) % 2);
        load_stage(
            &full[own as usize],
            query,
            query_tile,
            own as usize * comptime!(key_panels * QUERY_PANEL),
            tile.batch as i32,
            tile.head as i32,
            tile.first_query + (w * 64) as i32,
            key_panels,
            QUERY_PANEL,
        );
    }
}
