//! One block of queries in the pass that computes all gradients: the part of it whose scores a warp computes.

use super::config::Config;
use super::fragment::{Accumulator, Chunk, Place, Registers, further};
use super::gradient::{Block, keep_dots, rebuild_probabilities, score_gradients};
use super::instructions::Instructions;
use super::one_pass_blueprint::{KEYS, OnePass};
use super::one_pass_tiles::{ROW_TILES, Slots, Step, Tiles, Work, by_key, key_weight, slots, work};
use super::one_pass_walk::step_again;
use super::products::{add_columns, as_weights, dot_products};
use super::scores::Position;
use super::weights::{add_row_by_row, store_weights};
use crate::schedule::{Geometry, partly_visible};
use cubecl::prelude::*;

/// The warp's part of the queries: their weights, which go to shared memory, and what they add to the
/// warp's sums. Not `tested`: code for blocks off the edge alone, which are never careful.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_own_part<E: Float, B: Float, M: Int>(
    tiles: &mut Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    step: Step,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<B>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let chunk = comptime!(one_pass.chunk());
    let column_tiles = comptime!(chunk / 8);
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    #[unroll]
    for c in 0..comptime!(one_pass.part() / chunk) {
        let work = work(&*tiles, one_pass, config);
        // Of the three distances none waits in a register while the chunk before is summed.
        let slots = slots(
            step_again(step.stage, config.assembly) as usize,
            one_pass,
            config,
        );
        let first = comptime!(c * chunk);
        let mut hidden = false;
        if comptime!(tested) {
            let first_query = step.first_query + (work.own_query + first) as i32;
            let first_kv = step.first_kv + work.row as i32;
            hidden = !partly_visible(geometry, first_query, first_kv, chunk, KEYS, true);
            if hidden {
                let mut weights = Sequence::<Registers>::new();
                #[unroll]
                for _ in 0..comptime!(ROW_TILES * column_tiles / 2) {
                    weights.push(Registers::new(0u32));
                }
                store_weights(
                    &mut tiles.score_weights,
                    further(work.score_store, comptime!(first / 8)),
                    &weights,
                    ROW_TILES,
                    column_tiles,
                    weight_pitch,
                    one_pass.wide,
                    config.instructions(),
                );
                if comptime!(one_pass.shares_probabilities()) {
                    store_weights(
                        &mut tiles.value_weights,
                        further(work.value_store, comptime!(first / 8)),
                        &weights,
                        ROW_TILES,
                        column_tiles,
                        weight_pitch,
                        one_pass.wide,
                        config.instructions(),
                    );
                }
            }
        }
        if !hidden {
            add_chunk::<E, B, M>(
                tiles, key_sums, value_sums, work, step, slots, mask, bias, geometry, first,
                tested, one_pass, config,
            );
        }
    }
}

/// The same for some queries of the part, `first` of them on.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn add_chunk<E: Float, B: Float, M: Int>(
    tiles: &mut Tiles<E>,
    key_sums: &mut Sequence<Accumulator>,
    value_sums: &mut Sequence<Accumulator>,
    work: Work,
    step: Step,
    slots: Slots,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<B>>,
    geometry: &Geometry,
    #[comptime] first: usize,
    #[comptime] tested: bool,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
) {
    let instructions = comptime!(config.instructions());
    let wide = one_pass.wide;
    let key_pitch = comptime!(config.pitch(config.head_dim));
    let value_pitch = comptime!(config.pitch(config.value_dim));
    let weight_pitch = comptime!(config.pitch(one_pass.walked));
    let key_columns = comptime!(config.head_dim / one_pass.sides / 8);
    let value_columns = comptime!(config.value_dim / one_pass.sides / 8);
    let chunk = comptime!(one_pass.chunk());
    let column_tiles = comptime!(chunk / 8);
    let block_of_scores = comptime!(Block {
        row_tiles: ROW_TILES,
        column_tiles,
        transposed: true,
        staged: one_pass.walked,
    });
    let mut edge = step.edge;
    if comptime!(!tested) {
        edge = false.runtime();
    }
    let row = work.own_query + first;
    let at_row = slots.statistics + row;
    let query_row = slots.query + row * key_pitch;
    let gradient_row = slots.gradient + row * value_pitch;
    let mut probabilities = dot_products::<E>(
        &tiles.keys,
        work.key,
        &tiles.queries,
        further(work.query, slots.query + comptime!(first * key_pitch)),
        ROW_TILES,
        column_tiles,
        config.head_dim,
        instructions,
    );
    let dots = keep_dots(&probabilities, comptime!(ROW_TILES * column_tiles), config);
    let position = Position {
        batch: step.batch,
        head: step.head,
        first_query: step.first_query + row as i32,
        first_kv: step.first_kv + work.row as i32,
    };
    rebuild_probabilities::<B, M>(
        &mut probabilities,
        &tiles.statistics,
        at_row,
        position,
        mask,
        bias,
        geometry,
        edge,
        block_of_scores,
        config,
    );
    let weights = as_weights::<E>(&probabilities, ROW_TILES, column_tiles, instructions);
    if comptime!(one_pass.shares_probabilities()) {
        store_weights(
            &mut tiles.value_weights,
            further(work.value_store, comptime!(first / 8)),
            &weights,
            ROW_TILES,
            column_tiles,
            weight_pitch,
            wide,
            instructions,
        );
    }
    let mut row_by_row = false;
    if comptime!(tested) {
        row_by_row = step.careful;
        if row_by_row {
            // Where nobody else needs them they stand in the place of their gradients for a while.
            if comptime!(!one_pass.shares_probabilities()) {
                store_weights(
                    &mut tiles.score_weights,
                    further(work.score_store, comptime!(first / 8)),
                    &weights,
                    ROW_TILES,
                    column_tiles,
                    weight_pitch,
                    wide,
                    instructions,
                );
            }
            sync_plane();
            let lent = if comptime!(one_pass.shares_probabilities()) {
                &tiles.value_weights
            } else {
                &tiles.score_weights
            };
            add_row_by_row(
                value_sums,
                lent,
                key_weight(work.row, row, weight_pitch),
                &tiles.gradients,
                gradient_row + work.value_chunk,
                comptime!(by_key(weight_pitch)),
                chunk,
                config.value_dim,
                ROW_TILES,
                value_columns,
            );
            sync_plane();
        }
    }
    if !row_by_row {
        add_fragments::<E>(
            value_sums,
            &weights,
            &tiles.gradients,
            further(work.gradient_sum, gradient_row),
            column_tiles,
            value_columns,
            value_pitch,
            instructions,
        );
    }
    let mut score_gradient = dot_products::<E>(
        &tiles.values,
        work.value,
        &tiles.gradients,
        further(
            work.gradient,
            slots.gradient + comptime!(first * value_pitch),
        ),
        ROW_TILES,
        column_tiles,
        config.value_dim,
        instructions,
    );
    score_gradients(
        &mut score_gradient,
        &probabilities,
        &dots,
        &tiles.statistics,
        at_row,
        geometry,
        edge,
        block_of_scores,
        config,
    );
    let weights = as_weights::<E>(&score_gradient, ROW_TILES, column_tiles, instructions);
    store_weights(
        &mut tiles.score_weights,
        further(work.score_store, comptime!(first / 8)),
        &weights,
        ROW_TILES,
        column_tiles,
        weight_pitch,
        wide,
        instructions,
    );
    if comptime!(tested) {
        if row_by_row {
            sync_plane();
            add_row_by_row(
                key_sums,
                &tiles.score_weights,
                key_weight(work.row, row, weight_pitch),
                &tiles.queries,
                query_row + work.key_chunk,
                comptime!(by_key(weight_pitch)),
                chunk,
                config.head_dim,
                ROW_TILES,
                key_columns,
            );
        }
    }
    if !row_by_row {
        add_fragments::<E>(
            key_sums,
            &weights,
            &tiles.queries,
            further(work.query_sum, query_row),
            column_tiles,
            key_columns,
            key_pitch,
            instructions,
        );
    }
}

/// Adds the products of weights in registers.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_fragments<E: Float>(
    sums: &mut Sequence<Accumulator>,
    weights: &Sequence<Registers>,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] weight_tiles: usize,
    #[comptime] columns: usize,
    #[comptime] pitch: usize,
    #[comptime] instructions: Instructions,
) {
    #[unroll]
    for k in 0..comptime!(weight_tiles / 2) {
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..ROW_TILES {
            rows.push(*weights.index(comptime!(r * (weight_tiles / 2) + k)));
        }
        add_columns::<E>(
            sums,
            &rows,
            b,
            b_place,
            comptime!(16 * k * pitch),
            ROW_TILES,
            columns,
            instructions,
        );
    }
}
