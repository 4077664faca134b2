//! Which tiles a cube works on, one after the other, and where the key blocks of later tiles lie.
//!
//! A tile is a block of queries of a head. Cubes stay for the whole launch: a cube takes every
//! [`CUBE_COUNT`]th unit of the list of heads, each with its blocks of queries from the last. Cubes that
//! run side by side so work on neighbouring heads, and the cache keeps their keys and values. Where the
//! first blocks see few keys and the last see many, a unit is a pair of them, and all units are alike.

use super::blueprint::ForwardBlueprint;
use crate::schedule::{Geometry, keys_of_block};
use cubecl::prelude::*;

/// A block of queries of a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    pub batch_head: usize,
    pub first_query: i32,
    /// The blocks of keys that some of its queries see, walked from the last.
    pub first_block: u32,
    pub end_block: u32,
}

/// A key block of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Place {
    /// Not past the cube's last tile.
    pub present: bool,
    pub batch: i32,
    pub head: i32,
    pub kv_head: i32,
    pub first_query: i32,
    pub first_kv: i32,
}

/// Units of a head, of `fold` blocks of queries.
#[cube]
fn units_of_head(
    geometry: &Geometry,
    fold: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> (u32, u32) {
    let blocks = (geometry.seq_q as u32).div_ceil(comptime!(blueprint.block_q() as u32));
    (blocks, blocks.div_ceil(fold))
}

/// How many tiles the cube works on.
#[cube]
pub(crate) fn tiles_of_cube(
    geometry: &Geometry,
    fold: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> u32 {
    let (_blocks, each) = units_of_head(geometry, fold, blueprint);
    let units = each * (geometry.batch * geometry.heads) as u32;
    let cube = CUBE_POS as u32;
    let mut count = 0u32;
    if cube < units {
        count = (units - cube).div_ceil(CUBE_COUNT as u32) * fold;
    }
    count
}

/// The cube's tile `t`, below [`tiles_of_cube`]. The middle of an odd number of blocks has no partner:
/// its place is taken by a tile past the last query, which walks nothing.
#[cube]
pub(crate) fn tile_of(
    geometry: &Geometry,
    t: u32,
    fold: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> Tile {
    let block_q = comptime!(blueprint.block_q() as u32);
    let block_kv = comptime!(blueprint.block_kv as u32);
    let (blocks, each) = units_of_head(geometry, fold, blueprint);
    let unit = CUBE_POS as u32 + t / fold * CUBE_COUNT as u32;
    let batch_head = unit / each;
    let low = unit % each;
    let high = blocks - 1 - low;
    let mut block = high;
    if t % fold == 1 {
        block = select(low == high, blocks, low);
    }
    let first_query = (block * block_q) as i32;
    let mut first_block = 0u32;
    let mut end_block = 0u32;
    if block < blocks {
        let keys = keys_of_block(geometry, first_query, comptime!(blueprint.block_q()));
        if keys.first < keys.end {
            first_block = keys.first as u32 / block_kv;
            end_block = (keys.end as u32).div_ceil(block_kv);
        }
    }
    Tile {
        batch_head: batch_head as usize,
        first_query,
        first_block,
        end_block,
    }
}

/// The key block `ahead` of the first one of tile `t`, in the order in which the cube walks all of its
/// tiles.
#[cube]
pub(crate) fn place_of(
    geometry: &Geometry,
    t: u32,
    ahead: u32,
    tiles: u32,
    fold: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> Place {
    let mut at = t;
    let mut left = ahead;
    let mut present = false;
    let mut batch_head = 0usize;
    let mut first_query = 0i32;
    let mut block = 0u32;
    while at < tiles {
        let tile = tile_of(geometry, at, fold, blueprint);
        let count = tile.end_block - tile.first_block;
        at += 1;
        if left < count {
            present = true;
            batch_head = tile.batch_head;
            first_query = tile.first_query;
            block = tile.end_block - 1 - left;
            at = tiles;
        } else {
            left -= count;
        }
    }
    let head = batch_head % geometry.heads;
    Place {
        present,
        batch: (batch_head / geometry.heads) as i32,
        head: head as i32,
        kv_head: (head / geometry.group) as i32,
        first_query,
        first_kv: (block * comptime!(blueprint.block_kv as u32)) as i32,
    }
}
