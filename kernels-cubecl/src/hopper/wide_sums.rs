//! What the two warpgroups of the wide key and value gradients do, side by side: one has the scores and sums
//! the gradient of the values, the other has `dP` and sums that of the keys.

use super::careful::{add_rows, non_finite};
use super::gradient::{Position, store_sums};
use super::gradient_blueprint::GradientBlueprint;
use super::handover::*;
use super::instructions::*;
use super::pipeline::{Walked, row_of, wait_stage};
use super::wide_instructions::{held_product, held_rows, held_scores};
use super::wide_pipeline::*;
use crate::schedule::{Geometry, wholly_visible};
use cubecl::prelude::*;

/// The keys of a cube and the blocks of queries that it walks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Walk {
    pub batch: usize,
    pub first_kv: i32,
    /// The first head of the group.
    pub head: u32,
    pub first_block: u32,
    pub end_block: u32,
    /// Blocks in all heads of the group.
    pub count: u32,
}

/// Where a cube's shared memory lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Addresses {
    pub tiles: u32,
    pub numbers: u32,
    pub words: u32,
}

/// Where a stage begins, in bytes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct StagePlaces {
    query: u32,
    gradient: u32,
    statistics: u32,
    weights: u32,
}

/// Where `stage` begins.
#[cube]
fn places_of(
    memory: Addresses,
    stage: u32,
    #[comptime] blueprint: GradientBlueprint,
) -> StagePlaces {
    let layout = comptime!(Layout::new(&blueprint));
    StagePlaces {
        query: stage_of(
            memory.tiles,
            layout.query * 2,
            layout.query_stage * 2,
            stage,
        ),
        gradient: stage_of(
            memory.tiles,
            layout.gradient * 2,
            layout.gradient_stage * 2,
            stage,
        ),
        statistics: stage_of(memory.numbers, 0usize, blueprint.statistics() * 4, stage),
        weights: stage_of(
            memory.numbers,
            layout.weights * 4,
            blueprint.handed_over(),
            stage,
        ),
    }
}

/// Where a stage begins, in bytes: `bytes` each, from `first` after `address` on.
#[cube]
fn stage_of(address: u32, #[comptime] first: usize, #[comptime] bytes: usize, stage: u32) -> u32 {
    address + comptime!(first as u32) + stage * comptime!(bytes as u32)
}

/// Sums the gradient of the values, and hands the weights over.
#[cube]
#[allow(clippy::too_many_arguments, clippy::manual_is_multiple_of)]
pub(crate) fn sum_values<E: Float, M: Int, S: Size, P: Size, V: Size, H: Size>(
    memory: &mut Memory<E>,
    addresses: Addresses,
    walk: Walk,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    value_gradient: &mut [u32],
    geometry: &Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let element = comptime!(blueprint.element());
    let units = comptime!(blueprint.units());
    let always = comptime!(mask.is_some() || bias.is_some());
    let mut head = walk.head;
    let mut block = walk.first_block;
    let dots_body = comptime!(held_scores(&blueprint, blueprint.head_dim));
    let sum_body = comptime!(blueprint.sums(blueprint.value_dim));
    let mut acc = Vector::<f32, V>::new(0.0f32);
    let mut held = Vector::<u32, H>::new(0u32);
    if walk.count > 0 {
        memory.key_full.wait_parity(0u32);
        held = held_rows::<H>(addresses.tiles, blueprint.head_dim, blueprint);
    }
    for n in 0..walk.count {
        let stage = n % 2;
        let phase = (n / 2) % 2;
        let more = n + 2 < walk.count;
        let walked = Walked {
            batch: walk.batch,
            head,
            block,
        };
        let at = places_of(addresses, stage, blueprint);
        let first_query = (block * comptime!(block_q as u32)) as i32;
        wait_stage(stage, phase, &memory.query_full_0, &memory.query_full_1);
        let dots = held_product::<H, S>(
            addresses.tiles,
            at.query,
            held,
            comptime!(dots_body.clone()),
        );
        let edge =
            always || !wholly_visible(geometry, first_query, walk.first_kv, block_q, block_kv);
        if n >= 2 {
            wait_emptied(stage, units);
        }
        let mut rounded = Vector::<u32, P>::new(0u32);
        if edge {
            let unit = unit_again();
            rounded = hand_over::<E, M, S, P>(
                dots,
                at.weights,
                at.statistics,
                Position {
                    batch: walk.batch,
                    head: head as usize,
                    query: first_query + ((unit % 4) * 2) as i32,
                    key: walk.first_kv + row_of(unit),
                },
                mask,
                bias,
                geometry,
                true,
                blueprint,
            );
        } else {
            if comptime!(!always) {
                rounded = hand_over::<E, M, S, P>(
                    dots,
                    at.weights,
                    at.statistics,
                    Position {
                        batch: walk.batch,
                        head: head as usize,
                        query: first_query,
                        key: walk.first_kv,
                    },
                    mask,
                    bias,
                    geometry,
                    false,
                    blueprint,
                );
            }
        }
        arrive_filled(stage, units);
        wait_stage(
            stage,
            phase,
            &memory.gradient_full_0,
            &memory.gradient_full_1,
        );
        let mut way = 0u32;
        if edge {
            way = non_finite(
                at.gradient,
                block_q,
                blueprint.value_dim,
                blueprint.warpgroups,
                element,
            );
        }
        add_rows::<P, V>(
            &mut acc,
            rounded,
            at.gradient,
            way,
            comptime!(sum_body.clone()),
            0usize,
            block_q,
            blueprint.value_dim,
            element,
        );
        release_gradients(
            memory,
            addresses.words,
            more,
            stage,
            walked,
            output_gradient,
            blueprint,
        );
        release_queries(
            memory,
            addresses.words,
            more,
            stage,
            walked,
            query,
            statistics,
            geometry.heads,
            blueprint,
        );
        block += 1;
        if block == walk.end_block {
            block = word(addresses.words, FIRST_BLOCK);
            head += 1;
        }
    }
    let unit = unit_again();
    store_sums::<V>(
        acc,
        value_gradient,
        word(addresses.words, BATCH_HEAD) as usize,
        walk.first_kv + row_of(unit),
        geometry.seq_kv,
        unit % 32,
        1.0f32,
        0usize,
        blueprint.value_dim,
        element,
    );
}

/// Takes the weights over, and sums the gradient of the keys. Where scores are `always` tested there is no
/// code for those that are wholly visible.
#[cube]
#[allow(clippy::too_many_arguments, clippy::manual_is_multiple_of)]
pub(crate) fn sum_keys<E: Float, S: Size, P: Size, K: Size, H: Size>(
    memory: &mut Memory<E>,
    addresses: Addresses,
    walk: Walk,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    key_gradient: &mut [u32],
    geometry: &Geometry,
    #[comptime] always: bool,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let element = comptime!(blueprint.element());
    let units = comptime!(blueprint.units());
    let layout = comptime!(Layout::new(&blueprint));
    let mut head = walk.head;
    let mut block = walk.first_block;
    let value_address = addresses.tiles + comptime!((layout.value * 2) as u32);
    let dots_body = comptime!(held_scores(&blueprint, blueprint.value_dim));
    let sum_body = comptime!(blueprint.sums(blueprint.head_dim));
    let mut acc = Vector::<f32, K>::new(0.0f32);
    let mut held = Vector::<u32, H>::new(0u32);
    if walk.count > 0 {
        memory.value_full.wait_parity(0u32);
        held = held_rows::<H>(value_address, blueprint.value_dim, blueprint);
    }
    for n in 0..walk.count {
        let stage = n % 2;
        let phase = (n / 2) % 2;
        let more = n + 2 < walk.count;
        let walked = Walked {
            batch: walk.batch,
            head,
            block,
        };
        let at = places_of(addresses, stage, blueprint);
        wait_stage(
            stage,
            phase,
            &memory.gradient_full_0,
            &memory.gradient_full_1,
        );
        let products = held_product::<H, S>(
            value_address,
            at.gradient,
            held,
            comptime!(dots_body.clone()),
        );
        release_gradients(
            memory,
            addresses.words,
            more,
            stage,
            walked,
            output_gradient,
            blueprint,
        );
        // For the statistics.
        wait_stage(stage, phase, &memory.query_full_0, &memory.query_full_1);
        let first_query = (block * comptime!(block_q as u32)) as i32;
        let edge =
            always || !wholly_visible(geometry, first_query, walk.first_kv, block_q, block_kv);
        wait_filled(stage, units);
        let mut rounded = Vector::<u32, P>::new(0u32);
        if edge {
            rounded = take_over::<S, P>(products, at.weights, at.statistics, true, blueprint);
        } else {
            if comptime!(!always) {
                rounded = take_over::<S, P>(products, at.weights, at.statistics, false, blueprint);
            }
        }
        if more {
            arrive_emptied(stage, units);
        }
        let mut way = 0u32;
        if edge {
            way = non_finite(
                at.query,
                block_q,
                blueprint.head_dim,
                blueprint.warpgroups,
                element,
            );
        }
        add_rows::<P, K>(
            &mut acc,
            rounded,
            at.query,
            way,
            comptime!(sum_body.clone()),
            0usize,
            block_q,
            blueprint.head_dim,
            element,
        );
        release_queries(
            memory,
            addresses.words,
            more,
            stage,
            walked,
            query,
            statistics,
            geometry.heads,
            blueprint,
        );
        block += 1;
        if block == walk.end_block {
            block = word(addresses.words, FIRST_BLOCK);
            head += 1;
        }
    }
    let unit = unit_again();
    store_sums::<K>(
        acc,
        key_gradient,
        word(addresses.words, BATCH_HEAD) as usize,
        walk.first_kv + row_of(unit),
        geometry.seq_kv,
        unit % 32,
        geometry.scale,
        0usize,
        blueprint.head_dim,
        element,
    );
}
