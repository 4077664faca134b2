//! The counters that tell the turn of a block of queries to be added to ([`crate::turns`]).
//!
//! With assembly text one unit asks and tells, between barriers of the cube that carry its fences to the
//! others and theirs to it. Without, a fence of all units is part of the barrier.

use cubecl::prelude::*;

/// Waits until a counter says that it is the cube's `turn`. Reads and additions that have to come after need
/// a fence between.
#[cube]
pub(crate) fn wait_turn(turns: &[Atomic<u32>], counter: usize, turn: u32) {
    loop {
        if turns[counter].load() == turn {
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
