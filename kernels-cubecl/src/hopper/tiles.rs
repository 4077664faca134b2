//! Which tiles a cube works on, one after the other, and where the key blocks of later tiles lie.
//!
//! A tile is a block of queries of a head. One list has them all, in sections of heads, the last block of
//! queries of every head first, for it sees the most keys. Cubes stay for the whole launch and deal the
//! list out among themselves, every second round backwards, so that a cube which had the longest tile of a
//! round has the shortest of the next.
//!
//! Every tile walks at least one block of keys, even where its queries see none. So the next blocks are
//! never further away than as many tiles.
//!
//! What a plane knows of its tile and the next lies in words of its own in shared memory: they are rarely
//! needed, and no register holds them all along.

use super::blueprint::ForwardBlueprint;
use super::instructions::{load_shared, store_shared};
use crate::schedule::{Geometry, keys_of_block};
use cubecl::prelude::*;

/// Elements of 64 features of a warpgroup's queries.
pub(crate) const QUERY_PANEL: usize = 64 * 64;
/// Bytes of four words, the unit of what follows.
pub(crate) const ENTRY: u32 = 16;
/// The entry of the tile: the warpgroup's first query, the blocks of keys that its queries see from the
/// first to the end, and the first block that the tile walks.
pub(crate) const OWN: u32 = 0;
/// The entry of the queries that come next: batch, head, the warpgroup's first, and the
/// number of their tile, or 0 where there is none.
pub(crate) const NEXT: u32 = 1;
/// The entry of the tile's keys: batch, head of keys, 0 and head of queries. After it, for each stage, that
/// of a block that comes after the tile's last: batch, head of keys, and the first key, or [`NOTHING`].
pub(crate) const KEYS: u32 = 2;
/// Stands for a row of what is not there.
pub(crate) const NOTHING: u32 = u32::MAX;

/// A block of queries of a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Tile {
    batch: u32,
    head: u32,
    kv_head: u32,
    first_query: i32,
    /// The blocks of keys that it walks, from the last.
    first_block: u32,
    end_block: u32,
}

/// Entries of a plane.
pub(crate) const fn entries(stages: u32) -> u32 {
    3 + stages
}

/// The word `n` of an entry.
#[cube]
pub(crate) fn word(words: u32, #[comptime] entry: u32, #[comptime] n: u32) -> u32 {
    load_shared(words + comptime!(entry * ENTRY + n * 4))
}

/// The first key of the block with which `left` blocks of the tile are left.
#[cube]
pub(crate) fn first_key_of(words: u32, left: u32, #[comptime] block_kv: usize) -> i32 {
    ((word(words, OWN, 3u32) + left - 1) * comptime!(block_kv as u32)) as i32
}

#[cube]
fn put(words: u32, a: u32, b: u32, c: u32, d: u32) {
    store_shared(words, a);
    store_shared(words + 4, b);
    store_shared(words + 8, c);
    store_shared(words + 12, d);
}

/// The place in the list of the cube's tile `t`.
#[cube]
fn place(t: u32) -> u32 {
    let first = t * CUBE_COUNT_X;
    let forwards = first + CUBE_POS_X;
    let backwards = first + (CUBE_COUNT_X - 1) - CUBE_POS_X;
    select(t % 2 == 0, forwards, backwards)
}

/// Whether the cube has a tile `t`.
#[cube]
fn is_tile(geometry: &Geometry, t: u32, #[comptime] blueprint: ForwardBlueprint) -> bool {
    let blocks = (geometry.seq_q as u32).div_ceil(comptime!(blueprint.block_q() as u32));
    place(t) < blocks * (geometry.batch * geometry.heads) as u32
}

/// The cube's tile `t`, of which there [is one](is_tile).
#[cube]
fn tile_of(
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
    let keys = keys_of_block(geometry, first_query, comptime!(blueprint.block_q()));
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

/// Writes down the cube's tile `t`, if there is one, and what comes after it; the plane is of warpgroup
/// `warpgroup`. How many blocks of keys the tile walks.
///
/// `before` is for the start, where tile 0 is what comes next.
#[cube]
pub(crate) fn look_ahead(
    geometry: &Geometry,
    words: u32,
    t: u32,
    section: u32,
    warpgroup: u32,
    #[comptime] before: bool,
    #[comptime] blueprint: ForwardBlueprint,
) -> u32 {
    let stages = comptime!(blueprint.stages);
    let block_kv = comptime!(blueprint.block_kv as u32);
    let ahead = words + comptime!((KEYS + 1) * ENTRY);
    let mut count = 0u32;
    let mut found = 0u32;
    let mut at = t;
    let next = if comptime!(before) { t } else { t + 1 };
    while found < stages {
        if is_tile(geometry, at, blueprint) {
            let tile = tile_of(geometry, at, section, blueprint);
            let own_query = tile.first_query + (warpgroup * 64) as i32;
            if at == next {
                put(
                    words + comptime!(NEXT * ENTRY),
                    tile.batch,
                    tile.head,
                    own_query as u32,
                    at,
                );
            }
            if at < next {
                count = tile.end_block - tile.first_block;
                let keys = keys_of_block(geometry, own_query, 64usize);
                let mut end = (keys.end as u32).div_ceil(block_kv);
                if own_query >= geometry.seq_q {
                    end = 0u32;
                }
                put(
                    words + comptime!(OWN * ENTRY),
                    own_query as u32,
                    keys.first as u32 / block_kv,
                    end,
                    tile.first_block,
                );
                put(
                    words + comptime!(KEYS * ENTRY),
                    tile.batch,
                    tile.kv_head,
                    0u32,
                    tile.head,
                );
            } else {
                let mut block = tile.end_block;
                while block > tile.first_block && found < stages {
                    block -= 1;
                    put(
                        ahead + found * ENTRY,
                        tile.batch,
                        tile.kv_head,
                        block * block_kv,
                        tile.head,
                    );
                    found += 1;
                }
            }
        } else {
            if at == next {
                put(words + comptime!(NEXT * ENTRY), 0u32, 0u32, 0u32, 0u32);
            }
            put(ahead + found * ENTRY, 0u32, 0u32, NOTHING, 0u32);
            found += 1;
        }
        at += 1;
    }
    count
}
