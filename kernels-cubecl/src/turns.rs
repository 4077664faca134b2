//! The order in which cubes that own keys add to the sums of the query gradient.
//!
//! Sums of floats depend on their order. Where they have to be the same every time, every part of the sums
//! that is added to at once has a counter of the blocks of keys that have been added to it, and a cube adds
//! its own when the count says that those before are in.
//!
//! No cube waits for one that may never start, whatever order the device starts cubes in. Cubes draw their
//! numbers when they start. Numbers give the blocks of keys of a head in ascending order, and a cube waits
//! for blocks before its own only: for lower numbers, whose cubes have started. They add to every part that
//! both add to, for the keys that a block of queries sees lie without gaps. So the cube of the lowest
//! number at work waits for nobody and comes to its end.
//!
//! Nor do cubes wait long: all walk the queries from the last block to the first, so that a cube which
//! starts later, or has waited once, stays behind those before.

use crate::schedule::{Geometry, keys_of_block};
use cubecl::prelude::*;

/// What the counter of a block of queries, or of a part of it, says when it is the turn of the keys from
/// `first_kv` on.
#[cube]
pub(crate) fn turn_at(
    first_query: i32,
    first_kv: i32,
    geometry: &Geometry,
    #[comptime] block_q: usize,
    #[comptime] block_kv: usize,
) -> u32 {
    let keys = keys_of_block(geometry, first_query, block_q, true);
    first_kv as u32 / comptime!(block_kv as u32) - keys.first as u32 / comptime!(block_kv as u32)
}
