//! One step of the pass over keys, product by product, for blocks with hidden keys and for scores that
//! are more than a product with the scale.

use super::careful::{add_rows, non_finite};
use super::gradient::{Position, gradients_by_key, probabilities_by_key};
use super::gradient_blueprint::GradientBlueprint;
use super::products::{dot_product, row_descriptor};
use super::step::{StepPlaces, store_scores};
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Adds a step to the sums; `dS` goes to its place if it is `stored`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step_by_parts<E: Float, M: Int, S: Size, P: Size, G: Size>(
    sums: Vector<f32, G>,
    at: StepPlaces,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] stored: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<f32, G> {
    let block_q = comptime!(blueprint.walked);
    let element = comptime!(blueprint.element());
    let key_first = comptime!(blueprint.key_sum());
    let key_dots = comptime!(blueprint.dots(blueprint.head_dim));
    let value_dots = comptime!(blueprint.dots(blueprint.value_dim));
    let key_sum = comptime!(blueprint.weighted_sum(key_first, blueprint.head_dim));
    let value_sum = comptime!(blueprint.weighted_sum(0, blueprint.value_dim));

    let dots = dot_product::<S>(row_descriptor(at.key), row_descriptor(at.query), key_dots);
    let (weights, probabilities) = probabilities_by_key::<E, M, S, P>(
        dots,
        at.statistics,
        position,
        mask,
        bias,
        geometry,
        tested,
        blueprint,
    );
    let mut acc = sums;
    let mut way = 0u32;
    if comptime!(tested) {
        way = non_finite(
            at.gradient,
            block_q,
            blueprint.value_dim,
            blueprint.warpgroups,
            element,
        );
    }
    add_rows::<P, G>(
        &mut acc,
        probabilities,
        at.gradient,
        way,
        value_sum,
        0usize,
        block_q,
        blueprint.value_dim,
        element,
    );
    let products = dot_product::<S>(
        row_descriptor(at.value),
        row_descriptor(at.gradient),
        value_dots,
    );
    let scores = gradients_by_key::<S, P>(weights, products, at.statistics, tested, blueprint);
    if comptime!(stored) {
        store_scores::<P>(scores, at.store, comptime!(blueprint.store_scores()));
    }
    if comptime!(tested) {
        way = non_finite(
            at.query,
            block_q,
            blueprint.head_dim,
            blueprint.warpgroups,
            element,
        );
    }
    add_rows::<P, G>(
        &mut acc,
        scores,
        at.query,
        way,
        key_sum,
        key_first,
        block_q,
        blueprint.head_dim,
        element,
    );
    acc
}
