//! The softmax of a block of scores, on the registers that the product left them in.
//!
//! Where a score is its dot product times the scale, the dot products themselves are compared, and
//! scale and subtraction are one fused operation. Other scores are subtracted as they are, for a bias
//! may be as low as numbers go: no factor would leave it finite. The exponent is taken to base 2 where
//! the device's own instruction is at hand, else to base e; the base never leaves this file.

use super::config::Config;
use super::fragment::{Accumulator, Pair, Registers};
use super::instructions::{by_value, round_pair};
use super::tf32::as_operand;
use crate::schedule::Geometry;
use crate::score::lowest;
use cubecl::prelude::*;
use std::f32::consts::{LN_2, LOG2_E};

/// Running statistics of a lane's rows, two a row tile.
#[derive(CubeType)]
pub(crate) struct Statistics {
    /// The largest value: of the dot products in the direction of the scale, or of the scores.
    pub maximum: Array<f32>,
    /// The lane's part of the sum.
    pub sum: Array<f32>,
}

/// The statistics of rows that have seen nothing.
#[cube]
pub(crate) fn no_statistics(#[comptime] row_tiles: usize) -> Statistics {
    let mut maximum = Array::<f32>::new(comptime!(2 * row_tiles));
    let mut sum = Array::<f32>::new(comptime!(2 * row_tiles));
    #[unroll]
    for r in 0..comptime!(2 * row_tiles) {
        maximum[r] = lowest();
        sum[r] = 0.0f32;
    }
    Statistics { maximum, sum }
}

/// The base to the power of `x`.
#[cube]
pub(crate) fn power(x: f32, #[comptime] assembly: bool) -> f32 {
    if comptime!(assembly) {
        let x = by_value::<f32>(x);
        let y: f32;
        gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", x = in(_) x, y = out(_) y, options(pure, nomem));
        by_value::<f32>(y)
    } else {
        x.exp()
    }
}

/// `x` of the lane whose number differs in the bits of `lanes`. Every lane of the warp takes part;
/// the generator would ask which do, and keep instructions from moving past the question.
#[cube]
fn from_lane(x: f32, #[comptime] lanes: u32, #[comptime] assembly: bool) -> f32 {
    if comptime!(assembly) {
        let x = by_value::<f32>(x);
        let y: f32;
        gpu_asm!(
            "shfl.sync.bfly.b32 {y}, {x}, {lanes}, 31, 0xffffffff;",
            x = in(_) x, y = out(_) y, options(nomem)
        );
        by_value::<f32>(y)
    } else {
        plane_shuffle_xor(x, lanes)
    }
}

/// Whether `x` holds in any lane of the warp.
#[cube]
pub(crate) fn in_any_lane(x: bool, #[comptime] assembly: bool) -> bool {
    if comptime!(assembly) {
        let x = by_value::<u32>(select(x, 1u32, 0u32));
        let y: u32;
        gpu_asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {x}, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 {y}, 1, 0, p; }}",
            x = in(_) x, y = out(_) y, options(nomem)
        );
        by_value::<u32>(y) != 0
    } else {
        plane_any(x)
    }
}

/// Exponents of the base in one unit of the natural exponent.
#[cube]
pub(crate) fn natural_unit(#[comptime] assembly: bool) -> f32 {
    if comptime!(assembly) {
        LOG2_E.runtime()
    } else {
        1.0f32.runtime()
    }
}

/// The size of what a value is multiplied by to become an exponent.
#[cube]
fn magnitude(geometry: &Geometry, #[comptime] config: Config) -> f32 {
    let unit = natural_unit(config.assembly);
    if comptime!(config.plain()) {
        geometry.scale.abs() * unit
    } else {
        unit
    }
}

/// Takes in the maximum of a block, and brings sums and outputs to it.
#[cube]
pub(crate) fn raise_maximum(
    scores: &Sequence<Accumulator>,
    out: &mut Sequence<Accumulator>,
    statistics: &mut Statistics,
    geometry: &Geometry,
    #[comptime] column_tiles: usize,
    #[comptime] out_tiles: usize,
    #[comptime] config: Config,
) {
    let row_tiles = comptime!(config.blocks.row_tiles);
    let magnitude = magnitude(geometry, config);
    let mut rescale = Array::<f32>::new(comptime!(2 * row_tiles));
    let mut changed = false;
    #[unroll]
    for row in 0..comptime!(2 * row_tiles) {
        let (r, half) = comptime!((row / 2, row % 2));
        let mut highest = statistics.maximum[row];
        #[unroll]
        for n in 0..column_tiles {
            let pair = scores.index(comptime!(r * column_tiles + n))[half];
            #[unroll]
            for c in 0..2usize {
                if comptime!(config.descending()) {
                    highest = max(highest, -pair.extract(c));
                } else {
                    highest = max(highest, pair.extract(c));
                }
            }
        }
        highest = max(highest, from_lane(highest, 1u32, config.assembly));
        highest = max(highest, from_lane(highest, 2u32, config.assembly));
        let mut rise = reference(statistics.maximum[row], magnitude, config)
            - reference(highest, magnitude, config);
        if comptime!(!config.plain()) {
            rise *= magnitude;
        }
        let alpha = power(rise, config.assembly);
        statistics.maximum[row] = highest;
        statistics.sum[row] *= alpha;
        rescale[row] = alpha;
        changed = changed || alpha != 1.0f32;
    }
    // After the first few blocks the maximum seldom moves.
    if in_any_lane(changed, config.assembly) {
        #[unroll]
        for r in 0..row_tiles {
            #[unroll]
            for n in 0..out_tiles {
                let tile = out.index_mut(comptime!(r * out_tiles + n));
                tile[0] *= Pair::new(rescale[comptime!(2 * r)]);
                tile[1] *= Pair::new(rescale[comptime!(2 * r + 1)]);
            }
        }
    }
}

/// What every exponential is taken relative to: of dot products the maximum as an exponent, rounded,
/// else the maximum.
#[cube]
fn reference(maximum: f32, magnitude: f32, #[comptime] config: Config) -> f32 {
    if comptime!(config.plain()) {
        max(maximum * magnitude, lowest())
    } else {
        maximum
    }
}

/// The references of the rows.
#[cube]
pub(crate) fn references(
    statistics: &Statistics,
    geometry: &Geometry,
    #[comptime] config: Config,
) -> Array<f32> {
    let magnitude = magnitude(geometry, config);
    let mut references = Array::<f32>::new(comptime!(2 * config.blocks.row_tiles));
    #[unroll]
    for row in 0..comptime!(2 * config.blocks.row_tiles) {
        references[row] = reference(statistics.maximum[row], magnitude, config);
    }
    references
}

/// What a value is multiplied by to become an exponent.
#[cube]
pub(crate) fn exponent_factor(geometry: &Geometry, #[comptime] config: Config) -> f32 {
    let mut factor = magnitude(geometry, config);
    if comptime!(config.descending()) {
        factor = -factor;
    }
    factor
}

/// The exponent of a value relative to its row's reference.
#[cube]
pub(crate) fn exponent(value: f32, reference: f32, factor: f32, #[comptime] config: Config) -> f32 {
    if comptime!(config.plain()) {
        fma(value, factor, -reference)
    } else {
        (value - reference) * factor
    }
}

/// Pushes the probabilities of two neighbouring column tiles against the maximum, unscaled, as the
/// weights of a row tile; their sum goes into the statistics before they are rounded.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn exponentials<E: Float>(
    weights: &mut Sequence<Registers>,
    scores: &Sequence<Accumulator>,
    references: &Array<f32>,
    sums: &mut Array<f32>,
    factor: f32,
    #[comptime] row_tile: usize,
    #[comptime] first_tile: usize,
    #[comptime] config: Config,
) {
    let mut registers = Registers::new(0u32);
    let mut pairs = Sequence::<Pair<f32>>::new();
    #[unroll]
    for n in 0..4usize {
        let row = comptime!(2 * row_tile + n % 2);
        let values = scores.index(comptime!(first_tile + n / 2))[comptime!(n % 2)];
        let mut pair = Pair::<f32>::new(0.0f32);
        #[unroll]
        for c in 0..2usize {
            let x = exponent(values.extract(c), references[row], factor, config);
            pair.insert(c, power(x, config.assembly));
        }
        // In pairs first: a shorter chain of sums.
        sums[row] += pair.extract(0usize) + pair.extract(1usize);
        if comptime!(config.halved()) {
            pairs.push(by_value::<Pair<f32>>(pair));
        } else {
            registers.insert(n, round_pair::<E>(pair, config.instructions()));
        }
    }
    if comptime!(config.halved()) {
        #[unroll]
        for step in 0..2usize {
            weights.push(as_operand(
                *pairs.index(comptime!(2 * step)),
                *pairs.index(comptime!(2 * step + 1)),
                config.instructions(),
            ));
        }
    } else {
        weights.push(by_value::<Registers>(registers));
    }
}

/// What a row's statistics come to.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowResult {
    /// The maximum score; 0 where the row sees nothing.
    pub maximum: f32,
    /// Logarithm of the sum of `exp(score - maximum)`.
    pub log_sum: f32,
    /// What the sum of weighted values is multiplied by.
    pub inverse: f32,
}

/// The result of row `row` of the lane, the same in the four lanes that share it.
#[cube]
pub(crate) fn row_result(
    statistics: &Statistics,
    geometry: &Geometry,
    #[comptime] row: usize,
    #[comptime] config: Config,
) -> RowResult {
    let mut total = statistics.sum[row];
    total += from_lane(total, 1u32, config.assembly);
    total += from_lane(total, 2u32, config.assembly);
    let mut inverse = 0.0f32;
    let mut log_sum = geometry.negative_infinity;
    let mut maximum = 0.0f32;
    if total != 0.0f32 {
        inverse = 1.0f32 / total;
        let highest = statistics.maximum[row];
        log_sum = total.ln();
        maximum = highest;
        if comptime!(config.plain()) {
            // The sum is relative to the rounded exponent of the maximum, not to the maximum. What the
            // product below rounds away stays away: the backward pass rounds its products too.
            let magnitude = magnitude(geometry, config);
            let rest = fma(highest, magnitude, -reference(highest, magnitude, config));
            if comptime!(config.assembly) {
                log_sum -= rest * LN_2;
            } else {
                log_sum -= rest;
            }
            maximum = highest * geometry.scale.abs();
        }
    }
    RowResult {
        maximum,
        log_sum,
        inverse,
    }
}
