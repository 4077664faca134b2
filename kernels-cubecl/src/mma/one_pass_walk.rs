//! Which block of queries each step of the pass for all gradients takes.
//!
//! Sums and scores fill the registers. What is the same in all steps waits in shared memory, in a list of
//! notes, and what follows from the number of the step is found out where it is needed.

use super::instructions::by_value;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// The cube's number.
const NUMBER: usize = 0;
/// Whether there are keys that are not finite.
pub(crate) const KEYS_CAREFUL: usize = 1;
/// Whether there are queries and output gradients of even, and of odd steps that are not finite.
pub(crate) const STEP_CAREFUL: usize = 2;
/// The head of keys, counted through the batch, and the cube's first key.
pub(crate) const BATCH_HEAD: usize = 4;
pub(crate) const FIRST_KV: usize = 5;
/// What the counter of the step's sums said early, and the counter itself, for the step after.
pub(crate) const SEEN: usize = 6;
pub(crate) const COUNTER: usize = 7;
/// The number of steps.
pub(crate) const STEPS: usize = 8;
/// Blocks of queries of a head, and the last of them, where each head begins.
pub(crate) const PER_HEAD: usize = 9;
pub(crate) const LAST_OF_HEAD: usize = 10;
/// The batch, and the first head of queries.
pub(crate) const BATCH: usize = 11;
pub(crate) const FIRST_HEAD: usize = 12;
/// Numbers of the list.
pub(crate) const NOTES: usize = 13;

/// The cube's number; where additions are `ordered` it draws one, from the counter behind those of
/// `query_blocks` of each head. Its notes so far are 0 but for that.
#[cube]
#[allow(clippy::collapsible_if)]
pub(crate) fn draw_number(
    notes: &mut Shared<[u32]>,
    turns: &[Atomic<u32>],
    query_blocks: usize,
    geometry: &Geometry,
    #[comptime] ordered: bool,
) -> usize {
    if UNIT_POS < 4 {
        let mut note = 0u32;
        if comptime!(ordered) {
            if UNIT_POS == 0 {
                note = turns[geometry.batch * geometry.heads * query_blocks].fetch_add(1u32);
            }
        }
        notes[UNIT_POS as usize] = note;
    }
    sync_cube();
    let mut number = CUBE_POS;
    if comptime!(ordered) {
        number = notes[NUMBER] as usize;
    }
    number
}

/// A step's block of queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Walked {
    pub batch: usize,
    pub head: usize,
    pub first_query: i32,
    /// The block's number among those of all heads.
    pub counter: usize,
}

/// The block of queries of step `step`; one past the last may be of no head.
#[cube]
pub(crate) fn walked(
    notes: &Shared<[u32]>,
    step: u32,
    geometry: &Geometry,
    #[comptime] block_q: usize,
) -> Walked {
    let per_head = notes[PER_HEAD];
    let batch = notes[BATCH] as usize;
    let head = (notes[FIRST_HEAD] + step / per_head) as usize;
    let block = (notes[LAST_OF_HEAD] - step % per_head) as usize;
    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    Walked {
        batch,
        head,
        first_query: (block * block_q) as i32,
        counter: (batch * geometry.heads + head) * query_blocks + block,
    }
}

/// `step`, of which compilers do not know that it is the same: they keep nothing that follows from it.
#[cube]
pub(crate) fn step_again(step: u32, #[comptime] assembly: bool) -> u32 {
    if comptime!(assembly) {
        let step = by_value::<u32>(step);
        let again: u32;
        gpu_asm!("mov.u32 {again}, {step};", step = in(_) step, again = out(_) again);
        by_value::<u32>(again)
    } else {
        step
    }
}
