//! Weights on their way from the units of one warpgroup to those of another, by two buffers in shared
//! memory. Named barriers of all units of both say that a buffer was filled or emptied.
//!
//! Weights are handed over as they come up and used as they are taken over, four at a time: no unit has
//! registers for a block of them.

use super::gradient::{Position, quad_by_key, quad_gradient_by_key};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::unit_again;
use super::wide_instructions::*;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// The named barriers at which buffer 0 is waited for, and buffer 1.
const FILLED: [u32; 2] = [1, 2];
const EMPTIED: [u32; 2] = [3, 4];

/// Bytes from a unit's four weights to its next.
const PITCH: usize = 128 * 16;

/// Waits until buffer `stage` was filled.
#[cube]
pub(crate) fn wait_filled(stage: u32, #[comptime] units: u32) {
    if stage == 0 {
        named_wait(comptime!(FILLED[0]), units);
    } else {
        named_wait(comptime!(FILLED[1]), units);
    }
}

/// Says that buffer `stage` was filled.
#[cube]
pub(crate) fn arrive_filled(stage: u32, #[comptime] units: u32) {
    if stage == 0 {
        named_arrive(comptime!(FILLED[0]), units);
    } else {
        named_arrive(comptime!(FILLED[1]), units);
    }
}

/// Waits until buffer `stage` was emptied.
#[cube]
pub(crate) fn wait_emptied(stage: u32, #[comptime] units: u32) {
    if stage == 0 {
        named_wait(comptime!(EMPTIED[0]), units);
    } else {
        named_wait(comptime!(EMPTIED[1]), units);
    }
}

/// Says that buffer `stage` was emptied.
#[cube]
pub(crate) fn arrive_emptied(stage: u32, #[comptime] units: u32) {
    if stage == 0 {
        named_arrive(comptime!(EMPTIED[0]), units);
    } else {
        named_arrive(comptime!(EMPTIED[1]), units);
    }
}

/// [`probabilities_by_key`](super::gradient::probabilities_by_key) with the weights in the buffer at
/// `buffer`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn hand_over<E: Float, M: Int, S: Size, P: Size>(
    dots: Vector<f32, S>,
    buffer: u32,
    statistics: u32,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, P> {
    let unit = unit_again();
    let at = buffer + (unit % 128) * 16;
    let statistics = statistics + (unit % 4) * 8;
    let mut rounded = Vector::<u32, P>::new(0u32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        let (weights, low, high) = quad_by_key::<E, M, S>(
            dots, j, statistics, position, mask, bias, geometry, tested, blueprint,
        );
        store_shared_quad(at + comptime!((j * PITCH) as u32), weights);
        rounded.insert(2 * j, low);
        rounded.insert(2 * j + 1, high);
    }
    rounded
}

/// [`gradients_by_key`](super::gradient::gradients_by_key) with the weights of the buffer at `buffer`.
#[cube]
pub(crate) fn take_over<S: Size, P: Size>(
    products: Vector<f32, S>,
    buffer: u32,
    statistics: u32,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, P> {
    let unit = unit_again();
    let at = buffer + (unit % 128) * 16;
    let statistics = statistics + (unit % 4) * 8;
    let mut rounded = Vector::<u32, P>::new(0u32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        let weights = load_shared_quad(at + comptime!((j * PITCH) as u32));
        let (low, high) =
            quad_gradient_by_key::<S>(weights, products, j, statistics, tested, blueprint);
        rounded.insert(2 * j, low);
        rounded.insert(2 * j + 1, high);
    }
    rounded
}
