//! Weights on their way from the units of one warpgroup to those of another, by two buffers in shared
//! memory. Named barriers of all units of both say that a buffer was filled or emptied.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use cubecl::prelude::*;

/// The named barriers at which buffer 0 is waited for, and buffer 1.
const FILLED: [u32; 2] = [1, 2];
const EMPTIED: [u32; 2] = [3, 4];

/// Fills buffer `stage`, at `address`; `used` if what was in it has to be taken over first.
#[cube]
pub(crate) fn hand_over<S: Size>(
    weights: Vector<f32, S>,
    address: u32,
    stage: u32,
    used: bool,
    #[comptime] blueprint: GradientBlueprint,
) {
    let units = comptime!(blueprint.units());
    if used {
        if stage == 0 {
            barrier_wait(comptime!(EMPTIED[0]), units);
        } else {
            barrier_wait(comptime!(EMPTIED[1]), units);
        }
    }
    let at = address + (unit_again() % 128) * 16;
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        store_shared_quad(
            at + comptime!((j * 128 * 16) as u32),
            weights.extract(comptime!(4 * j)),
            weights.extract(comptime!(4 * j + 1)),
            weights.extract(comptime!(4 * j + 2)),
            weights.extract(comptime!(4 * j + 3)),
        );
    }
    if stage == 0 {
        barrier_arrive(comptime!(FILLED[0]), units);
    } else {
        barrier_arrive(comptime!(FILLED[1]), units);
    }
}

/// Waits for buffer `stage`, at `address`, and empties it; `more` if it will be filled again.
#[cube]
pub(crate) fn take_over<S: Size>(
    address: u32,
    stage: u32,
    more: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<f32, S> {
    let units = comptime!(blueprint.units());
    if stage == 0 {
        barrier_wait(comptime!(FILLED[0]), units);
    } else {
        barrier_wait(comptime!(FILLED[1]), units);
    }
    let at = address + (unit_again() % 128) * 16;
    let mut weights = Vector::<f32, S>::new(0.0f32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        let quad = load_shared_quad(at + comptime!((j * 128 * 16) as u32));
        #[unroll]
        for n in 0..4usize {
            weights.insert(comptime!(4 * j + n), quad.extract(n));
        }
    }
    if more {
        if stage == 0 {
            barrier_arrive(comptime!(EMPTIED[0]), units);
        } else {
            barrier_arrive(comptime!(EMPTIED[1]), units);
        }
    }
    weights
}
