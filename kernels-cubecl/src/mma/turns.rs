//! The order in which cubes add to the sums of the query gradient.
//!
//! Sums of floats depend on their order. Where they have to be the same every time, every block of
//! queries counts the blocks of keys that have been added to its sums, and a cube adds its own when the
//! count says that those before are in.
//!
//! No cube waits for one that may never start, whatever order the device starts cubes in. Cubes draw their
//! numbers when they start. Numbers give the blocks of keys of a head in ascending order, and a cube waits
//! for blocks before its own only: for lower numbers, whose cubes have started. They add to every block
//! that both add to, for the keys that a block of queries sees lie without gaps. So the cube of the lowest
//! number at work waits for nobody and comes to its end.
//!
//! Nor do cubes wait long: all walk the queries from the last block to the first, so that a cube which
//! starts later, or has waited once, stays behind those before.
//!
//! With assembly text one unit does all of this, between barriers of the cube that carry its fences to
//! the others and theirs to it. Without, a fence of all units is part of the barrier.

use crate::schedule::{Geometry, keys_of_block};
use cubecl::prelude::*;

/// What a cube's blocks of keys add to: a block of queries of a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Turn {
    /// The block's counter.
    pub counter: usize,
    /// What it says when it is the cube's turn.
    pub count: u32,
}

/// The turn of the keys from `first_kv` on at a block of queries.
#[cube]
pub(crate) fn turn_at(
    counter: usize,
    first_query: i32,
    first_kv: i32,
    geometry: &Geometry,
    #[comptime] block_q: usize,
    #[comptime] block_kv: usize,
) -> Turn {
    let keys = keys_of_block(geometry, first_query, block_q, true);
    let before = first_kv as u32 / comptime!(block_kv as u32)
        - keys.first as u32 / comptime!(block_kv as u32);
    Turn {
        counter,
        count: before,
    }
}

/// Waits until it is the cube's turn. Reads and additions that have to come after need a fence between.
#[cube]
pub(crate) fn wait_turn(turns: &[Atomic<u32>], turn: Turn) {
    loop {
        if turns[turn.counter].load() == turn.count {
            break;
        }
    }
}

/// Lets the next cube add. The additions that have to come before need a fence between.
#[cube]
pub(crate) fn pass_turn(turns: &[Atomic<u32>], counter: usize) {
    turns[counter].fetch_add(1u32);
}

/// A fence of one unit, for its own accesses and for those it knows of through barriers.
#[cube]
pub(crate) fn fence() {
    gpu_asm!("fence.acq_rel.gpu;");
}
