//! A step's part of the query gradient in the pass over keys: a tile of 64 queries by 64 features for each
//! warpgroup, over the keys of all, on its way from the score gradients in shared memory to the sums in
//! global memory.
//!
//! ```text
//! wait for every warpgroup's dS of the step before
//! tile = dS K
//! wait until the copy engine has read the last tile; in a fixed order, until it is the tile's turn
//! tile to shared memory; the copy engine adds it to the sums in global memory
//! ```

use super::arrivals::*;
use super::careful::tile_careful;
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::products::{column_descriptor, dot_product, row_descriptor};
use super::step::store_tile;
use super::turns::*;
use crate::schedule::Geometry;
use crate::turns::turn_at;
use cubecl::prelude::*;

/// The blocks of queries that a cube walks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Walk {
    /// Where the first head of all batches' lies in shared memory.
    pub first_head: u32,
    /// Past the first block that is walked.
    pub end_block: u32,
    pub per_head: u32,
    /// Blocks in all heads.
    pub count: u32,
}

/// Where a warpgroup finds in shared memory what its tiles come from.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TilePlaces {
    /// Barriers of two stages of `dS`: written, and read.
    pub full: u32,
    pub free: u32,
    /// The stages, and the cube's keys.
    pub scores: u32,
    pub keys: u32,
    /// Tiles of all warpgroups.
    pub tiles: u32,
    /// The warpgroup's numbers for [`run_errands`].
    pub errands: u32,
}

/// The place of a step's tile among all.
#[cube]
pub(crate) fn tile_place(
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

/// Adds the warpgroup's tile of the step before step `n`; `careful` where a key that is not finite has to
/// be left out.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn add_tile_before(
    n: u32,
    warpgroup: u32,
    careful: u32,
    first_kv: i32,
    places: TilePlaces,
    walk: Walk,
    query_blocks: usize,
    query_sums: &mut [f32],
    turns: &mut [u32],
    geometry: &Geometry,
    #[comptime] ordered: bool,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let owned_panel = comptime!(block_kv * 64);
    let tiles = comptime!(blueprint.query_tiles());
    let element = comptime!(blueprint.element());
    let other = 1 - n % 2;
    let lane = UNIT_POS % 32;
    barrier_wait(places.full + other * 8, (n.div_ceil(2) + 1) % 2);
    if warpgroup < comptime!(tiles as u32) {
        let scores = places.scores
            + other * comptime!(blueprint.score_stage() as u32)
            + warpgroup * comptime!(if key_panels == 1 { 8192u32 } else { 0u32 });
        let keys = places.keys
            + warpgroup
                * comptime!(if key_panels == 1 {
                    0u32
                } else {
                    owned_panel as u32 * 2
                });
        let mut tile = Vector::<f32, Const<32>>::new(0.0f32);
        if careful != 0 {
            tile = tile_careful(scores, keys, block_q, block_kv, element);
        }
        if careful == 0 {
            tile = dot_product::<Const<32>>(
                row_descriptor(scores),
                column_descriptor(keys, comptime!(owned_panel * 2)),
                comptime!(blueprint.query_product()),
            );
        }
        plane_arrive(places.free + other * 8, lane);
        // One unit has the tiles of a warpgroup added, another waits for the turn.
        let unit = UNIT_POS % 128;
        let m = n - 1;
        if comptime!(ordered) {
            if unit == 32 {
                let block = walk.end_block - 1 - m % walk.per_head;
                let first_query = (block * comptime!(block_q as u32)) as i32;
                let turn = turn_at(first_query, first_kv, geometry, block_q, block_kv);
                if load_shared(places.errands + 16) != turn {
                    wait_turn(load_shared_wide(places.errands + 8), turn);
                }
            }
        } else {
            if unit == 0 {
                tiles_read();
            }
        }
        warpgroup_sync(warpgroup, blueprint.warpgroups);
        let here = places.tiles + warpgroup * 16384;
        store_tile(tile, here + unit * 16);
        publish();
        warpgroup_sync(warpgroup, blueprint.warpgroups);
        if unit == 0 {
            let at = tile_place(m, warpgroup, walk, query_blocks, tiles);
            add_tile(query_sums.as_ptr(), at as u64 * 16384, here);
            if comptime!(ordered) {
                store_shared_wide(places.errands, counter(turns.as_ptr(), at as u64 * 4));
            }
        }
        if comptime!(ordered) {
            if unit == 32 && n < walk.count {
                let at = tile_place(n, warpgroup, walk, query_blocks, tiles);
                store_shared_wide(places.errands + 8, counter(turns.as_ptr(), at as u64 * 4));
            }
        }
    } else {
        plane_arrive(places.free + other * 8, lane);
    }
}
