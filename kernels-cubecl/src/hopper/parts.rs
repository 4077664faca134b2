//! One step of the pass over keys, product by product, for blocks with hidden keys and for scores that
//! are more than a product with the scale.

use super::careful::{add_careful, non_finite};
use super::gradient::{Position, gradients_by_key, probabilities_by_key};
use super::gradient_blueprint::GradientBlueprint;
use super::instructions::*;
use super::step::store_scores;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Adds a step to the sums. Keys, values, queries and output gradients are addresses of tiles; `store`
/// is where `dS` goes, if it is `stored`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step_by_parts<E: Float, M: Int, S: Size, P: Size, G: Size>(
    sums: Vector<f32, G>,
    key: u32,
    value: u32,
    query: u32,
    output_gradient: u32,
    statistics: u32,
    store: u32,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] stored: bool,
    #[comptime] blueprint: GradientBlueprint,
) -> Vector<f32, G> {
    let block_q = comptime!(blueprint.walked);
    let panel = comptime!(block_q * 128);
    let element = comptime!(blueprint.element());
    let key_first = comptime!(blueprint.key_sum());
    let key_dots = comptime!(blueprint.dots(blueprint.head_dim));
    let value_dots = comptime!(blueprint.dots(blueprint.value_dim));
    let key_sum = comptime!(blueprint.weighted_sum(key_first, blueprint.head_dim));
    let value_sum = comptime!(blueprint.weighted_sum(0, blueprint.value_dim));

    let dots = dot_product::<S>(row_descriptor(key), row_descriptor(query), key_dots);
    let (weights, probabilities) = probabilities_by_key::<E, M, S, P>(
        dots, statistics, position, mask, bias, geometry, tested, blueprint,
    );
    let mut acc = sums;
    let mut way = 0u32;
    if comptime!(tested) {
        way = non_finite(
            output_gradient,
            block_q,
            blueprint.value_dim,
            blueprint.warpgroups,
            element,
        );
    }
    if way == 0 {
        acc = value_product::<P, G>(
            acc,
            probabilities,
            column_descriptor(output_gradient, panel),
            value_sum,
        );
    } else {
        acc = add_careful::<P, G>(
            acc,
            probabilities,
            output_gradient,
            unit_again() % 32,
            0usize,
            block_q,
            blueprint.value_dim,
            element,
        );
    }
    let products = dot_product::<S>(
        row_descriptor(value),
        row_descriptor(output_gradient),
        value_dots,
    );
    let scores = gradients_by_key::<S, P>(weights, products, statistics, tested, blueprint);
    if comptime!(stored) {
        store_scores::<P>(scores, store, comptime!(blueprint.store_scores()));
    }
    if comptime!(tested) {
        way = non_finite(
            query,
            block_q,
            blueprint.head_dim,
            blueprint.warpgroups,
            element,
        );
    }
    if way == 0 {
        acc = value_product::<P, G>(acc, scores, column_descriptor(query, panel), key_sum);
    } else {
        acc = add_careful::<P, G>(
            acc,
            scores,
            query,
            unit_again() % 32,
            key_first,
            block_q,
            blueprint.head_dim,
            element,
        );
    }
    acc
}
