//! The forward kernel: a cube walks tiles of queries, one warpgroup 64 queries of each, and a plane of
//! its own asks for what they read.

use super::arrivals::{barrier_init, barrier_wait};
use super::block::Places;
use super::blueprint::ForwardBlueprint;
use super::instructions::*;
use super::joined::walk_joined;
use super::output::Chunk;
use super::pipeline::load_stage;
use super::tiles::*;
use super::walk::walk;
use crate::schedule::Geometry;
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
    let query_stages = comptime!(blueprint.query_stages);
    let first_key = comptime!(blueprint.first_key());
    let first_value = comptime!(blueprint.first_value());

    let mut query_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(first_key as usize * own_queries), 1024usize);
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
    let section = section as u32;

    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..comptime!(blueprint.guarded()) {
            barrier_init(full_address + comptime!(8 * i), 1u32);
            barrier_init(
                free_address + comptime!(8 * i),
                comptime!(if i < first_key { 4 } else { 4 * warpgroups }),
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
        let places = Places {
            full: full_address,
            free: free_address,
            queries: shared_address::<E>(query_tile.as_ptr()),
            keys: shared_address::<E>(key_tiles.as_ptr()),
            values: shared_address::<E>(value_tiles.as_ptr()),
        };
        if comptime!(blueprint.joined) {
            walk_joined::<S, P, O>(
                warpgroup, section, places, output, statistics, &geometry, blueprint,
            );
        } else {
            walk::<E, M, S, P, O>(
                warpgroup, section, places, &mask, &bias, output, statistics, &geometry, blueprint,
            );
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
