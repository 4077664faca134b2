//! Which tiles a cube works on, one after the other.
//!
//! A tile is a block of queries of a head. One list has them all, in sections of heads, the last block of
//! queries of every head first, for it sees the most keys. Cubes stay for the whole launch and deal the
//! list out among themselves, every second round backwards, so that a cube which had the longest tile of a
//! round has the shortest of the next.
//!
//! Every tile walks at least one block of keys, even where its queries see none.

use super::blueprint::ForwardBlueprint;
use crate::schedule::{Geometry, keys_of_block};
use cubecl::prelude::*;

/// Elements of 64 features of a warpgroup's queries.
pub(crate) const QUERY_PANEL: usize = 64 * 64;

/// A block of queries of a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    pub batch: u32,
    pub head: u32,
    pub kv_head: u32,
    pub first_query: i32,
    /// The blocks of keys that it walks, from the last.
    pub first_block: u32,
    pub end_block: u32,
}

/// The place in the list of the cube's tile `t`.
#[cube]
#[allow(clippy::manual_is_multiple_of)]
fn place(t: u32) -> u32 {
    let first = t * CUBE_COUNT_X;
    let forwards = first + CUBE_POS_X;
    let backwards = first + (CUBE_COUNT_X - 1) - CUBE_POS_X;
    select(t % 2 == 0, forwards, backwards)
}

/// Whether the cube has a tile `t`.
#[cube]
pub(crate) fn is_tile(
    geometry: &Geometry,
    t: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> bool {
    let blocks = (geometry.seq_q as u32).div_ceil(comptime!(blueprint.block_q() as u32));
    place(t) < blocks * (geometry.batch * geometry.heads) as u32
}

/// The cube's tile `t`, of which there [is one](is_tile).
#[cube]
pub(crate) fn tile_of(
    geometry: &Geometry,
    t: u32,
    section: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> Tile {
    let block_q = comptime!(blueprint.block_q() as u32);
    let block_kv = comptime!(blueprint.block_kv as u32);
    let blocks = (geometry.seq_q as u32).div_ceil(block_q);
    let heads = (geometry.batch * geometry.heads) as u32;
    let at = place(t);
    let first_head = at / (blocks * section) * section;
    let width = select(heads - first_head < section, heads - first_head, section);
    let within = at - first_head * blocks;
    let batch_head = first_head + within % width;
    let first_query = ((blocks - 1 - within / width) * block_q) as i32;
    let head = batch_head % geometry.heads as u32;
    let keys = keys_of_block(geometry, first_query, comptime!(blueprint.block_q()), true);
    let mut first_block = keys.first as u32 / block_kv;
    let mut end_block = (keys.end as u32).div_ceil(block_kv);
    if end_block <= first_block {
        first_block = 0u32;
        end_block = 1u32;
    }
    Tile {
        batch: batch_head / geometry.heads as u32,
        head,
        kv_head: head / geometry.group as u32,
        first_query,
        first_block,
        end_block,
    }
}
