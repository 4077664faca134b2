//! A block of scores in the backward pass, on the registers of a product: a unit holds columns
//! `8 j + 2 (lane % 4)` and the next of two rows, eight apart. Keys are columns for the query
//! gradient, and rows for the key and value gradients.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::{exp2, load_shared_pair, pack, product};
use super::statistics::RowStatistics;
use crate::rounding::{separate, unscaled};
use crate::schedule::Geometry;
use crate::score::{ScoreRow, capped_score, counts, finish_score, is_visible, score_row, uncap};
use cubecl::prelude::*;

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// A unit's first query and key of a block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Position {
    pub batch: usize,
    pub head: usize,
    pub query: i32,
    pub key: i32,
}

/// The probability that belongs to a dot product, exactly 0 where the key is hidden.
#[cube]
#[allow(clippy::too_many_arguments)]
fn probability<E: Float, M: Int>(
    dot: f32,
    view: ScoreRow,
    key: i32,
    maximum: f32,
    log_sum: f32,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> f32 {
    // Rounded, for the saved maximum is.
    let score = product(dot, geometry.scale);
    if comptime!(blueprint.plain()) {
        let p = exp2(fma(score - maximum, LOG2_E, -log_sum));
        if comptime!(tested) {
            select(is_visible::<M>(view, key, mask), p, 0.0f32)
        } else {
            p
        }
    } else if comptime!(tested) {
        let score = finish_score::<E, M>(
            score,
            view,
            key,
            mask,
            bias,
            &unscaled(geometry),
            blueprint.capped,
        );
        let p = exp2(fma(score - maximum, LOG2_E, -log_sum));
        select(counts(score), p, 0.0f32)
    } else {
        let score = capped_score(score, &unscaled(geometry), blueprint.capped);
        let score = separate(score, geometry);
        exp2(fma(score - maximum, LOG2_E, -log_sum))
    }
}

/// Keys along the columns: probabilities, times the derivative of the cap.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn probabilities_by_query<E: Float, M: Int, S: Size>(
    dots: Vector<f32, S>,
    row_0: RowStatistics,
    row_1: RowStatistics,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<f32, S> {
    let mut weights = dots;
    let view_0 = score_row::<E, M>(
        position.query,
        position.batch,
        position.head,
        mask,
        bias,
        geometry,
    );
    let view_1 = score_row::<E, M>(
        position.query + 8,
        position.batch,
        position.head,
        mask,
        bias,
        geometry,
    );
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        #[unroll]
        for c in 0..2usize {
            let key = position.key + comptime!((8 * j + c) as i32);
            #[unroll]
            for r in 0..2usize {
                let view = if comptime!(r == 0) { view_0 } else { view_1 };
                let row = if comptime!(r == 0) { row_0 } else { row_1 };
                let at = comptime!(4 * j + 2 * r + c);
                let dot = weights.extract(at);
                let p = probability::<E, M>(
                    dot,
                    view,
                    key,
                    row.maximum,
                    row.log_sum,
                    mask,
                    bias,
                    geometry,
                    tested,
                    blueprint,
                );
                weights.insert(at, uncap(p, dot, geometry, blueprint.capped));
            }
        }
    }
    weights
}

/// Queries along the columns, with their statistics in shared memory: probabilities, times the
/// derivative of the cap; and probabilities alone, rounded in pairs.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn probabilities_by_key<E: Float, M: Int, S: Size, P: Size>(
    dots: Vector<f32, S>,
    statistics: u32,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> (Vector<f32, S>, Vector<u32, P>) {
    let mut weights = dots;
    let mut rounded = Vector::<u32, P>::new(0u32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        let (w, low, high) = quad_by_key::<E, M, S>(
            weights, j, statistics, position, mask, bias, geometry, tested, blueprint,
        );
        #[unroll]
        for n in 0..4usize {
            weights.insert(comptime!(4 * j + n), w.extract(n));
        }
        rounded.insert(2 * j, low);
        rounded.insert(2 * j + 1, high);
    }
    (weights, rounded)
}

/// The same for the columns from `8 j` on: four weights, and four probabilities rounded in pairs.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn quad_by_key<E: Float, M: Int, S: Size>(
    dots: Vector<f32, S>,
    #[comptime] j: usize,
    statistics: u32,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> (Vector<f32, Const<4>>, u32, u32) {
    let element = comptime!(blueprint.element());
    let at = statistics + comptime!((32 * j) as u32);
    let maximum = load_shared_pair(at);
    let log_sum = load_shared_pair(at + comptime!((blueprint.walked * 4) as u32));
    let mut weights = Vector::<f32, Const<4>>::new(0.0f32);
    let mut p = Array::<f32>::new(4usize);
    #[unroll]
    for c in 0..2usize {
        let view = score_row::<E, M>(
            position.query + comptime!((8 * j + c) as i32),
            position.batch,
            position.head,
            mask,
            bias,
            geometry,
        );
        #[unroll]
        for r in 0..2usize {
            let n = comptime!(2 * r + c);
            let dot = dots.extract(comptime!(4 * j + n));
            let probability = probability::<E, M>(
                dot,
                view,
                position.key + comptime!(8 * r as i32),
                maximum.extract(c),
                log_sum.extract(c),
                mask,
                bias,
                geometry,
                tested,
                blueprint,
            );
            p[n] = probability;
            weights.insert(n, uncap(probability, dot, geometry, blueprint.capped));
        }
    }
    (
        weights,
        pack(p[0], p[1], element),
        pack(p[2], p[3], element),
    )
}

/// `dS = P (dP - D)`: 0 where `P` is 0, whatever `dP` holds.
#[cube]
fn score_gradient(weight: f32, product: f32, delta: f32, #[comptime] tested: bool) -> f32 {
    let mut difference = product - delta;
    if comptime!(tested) {
        // Chosen before the product, which would be NaN.
        difference = select(weight != 0.0f32, difference, 0.0f32);
    }
    weight * difference
}

/// Gradients of dot products but for the scale, rounded in pairs; keys along the columns.
#[cube]
pub(crate) fn gradients_by_query<S: Size, P: Size>(
    weights: Vector<f32, S>,
    products: Vector<f32, S>,
    row_0: RowStatistics,
    row_1: RowStatistics,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, P> {
    let element = comptime!(blueprint.element());
    let mut rounded = Vector::<u32, P>::new(0u32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        #[unroll]
        for r in 0..2usize {
            let delta = if comptime!(r == 0) {
                row_0.delta
            } else {
                row_1.delta
            };
            let n = comptime!(4 * j + 2 * r);
            let low = score_gradient(weights.extract(n), products.extract(n), delta, tested);
            let m = comptime!(4 * j + 2 * r + 1);
            let high = score_gradient(weights.extract(m), products.extract(m), delta, tested);
            rounded.insert(comptime!(2 * j + r), pack(low, high, element));
        }
    }
    rounded
}

/// Gradients of dot products but for the scale, rounded in pairs; queries along the columns.
#[cube]
pub(crate) fn gradients_by_key<S: Size, P: Size>(
    weights: Vector<f32, S>,
    products: Vector<f32, S>,
    statistics: u32,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<u32, P> {
    let mut rounded = Vector::<u32, P>::new(0u32);
    #[unroll]
    for j in 0..comptime!(blueprint.walked / 8) {
        let mut quad = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for n in 0..4usize {
            quad.insert(n, weights.extract(comptime!(4 * j + n)));
        }
        let (low, high) =
            quad_gradient_by_key::<S>(quad, products, j, statistics, tested, blueprint);
        rounded.insert(2 * j, low);
        rounded.insert(2 * j + 1, high);
    }
    rounded
}

/// The same for the columns from `8 j` on, whose four weights are given.
#[cube]
pub(crate) fn quad_gradient_by_key<S: Size>(
    weights: Vector<f32, Const<4>>,
    products: Vector<f32, S>,
    #[comptime] j: usize,
    statistics: u32,
    #[comptime] tested: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> (u32, u32) {
    let element = comptime!(blueprint.element());
    let delta = load_shared_pair(statistics + comptime!((blueprint.walked * 8 + 32 * j) as u32));
    let mut gradients = Array::<f32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        gradients[n] = score_gradient(
            weights.extract(n),
            products.extract(comptime!(4 * j + n)),
            delta.extract(comptime!(n % 2)),
            tested,
        );
    }
    (
        pack(gradients[0], gradients[1], element),
        pack(gradients[2], gradients[3], element),
    )
}

/// Writes a unit's sums, times `factor`, to rows `row` and `row + 8` of a head's `rows`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn store_sums<O: Size>(
    sums: Vector<f32, O>,
    gradient: &mut [u32],
    batch_head: usize,
    row: i32,
    rows: i32,
    lane: u32,
    factor: f32,
    #[comptime] dim: usize,
    #[comptime] element: &'static str,
) {
    #[unroll]
    for r in 0..2usize {
        let i = row + comptime!(r as i32 * 8);
        if i < rows {
            let at = (batch_head * rows as usize + i as usize) * comptime!(dim / 2)
                + (lane % 4) as usize;
            #[unroll]
            for j in 0..comptime!(dim / 8) {
                gradient[at + comptime!(j * 4)] = pack(
                    sums.extract(comptime!(4 * j + 2 * r)) * factor,
                    sums.extract(comptime!(4 * j + 2 * r + 1)) * factor,
                    element,
                );
            }
        }
    }
}
