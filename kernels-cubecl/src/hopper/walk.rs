//! A warpgroup's way through the tiles of a cube: of each block of keys the scores, then the output with
//! its values, then the next block.

use super::arrivals::{barrier_arrive, barrier_wait};
use super::block::{Places, Sight, add_careful_values, column_of, non_finite_values};
use super::blueprint::ForwardBlueprint;
use super::instructions::*;
use super::output::{Chunk, store_tile};
use super::pipeline::row_of;
use super::products::{column_descriptor, dot_product, row_descriptor, value_product};
use super::softmax::{RowPair, banded_scores, masked_scores, probabilities};
use super::tiles::*;
use crate::schedule::Geometry;
use crate::score::band_row;
use cubecl::prelude::*;

/// Walks the tiles of the cube and writes their rows.
#[cube]
#[allow(clippy::too_many_arguments, clippy::manual_is_multiple_of)]
pub(crate) fn walk<E: Float, M: Int, S: Size, P: Size, O: Size>(
    warpgroup: u32,
    section: u32,
    places: Places,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    output: &mut [Chunk],
    statistics: &mut [f32],
    geometry: &Geometry,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let warpgroups = comptime!(blueprint.warpgroups);
    let stages = comptime!(blueprint.stages);
    let query_stages = comptime!(blueprint.query_stages);
    let first_key = comptime!(blueprint.first_key());
    let first_value = comptime!(blueprint.first_value());
    let score_body = comptime!(blueprint.products().scores(blueprint.score_registers()));
    let value_body = comptime!(blueprint.products().values(
        blueprint.output_registers(),
        blueprint.probability_registers()
    ));
    // Speaks for its plane, whose products are done and whose reads are back. The planes of a
    // warpgroup do not run in step.
    let speaks = UNIT_POS % 32 == 0;
    let mut walked = 0u32;
    let mut t = 0u32;
    while is_tile(geometry, t, blueprint) {
        let tile = tile_of(geometry, t, section, blueprint);
        let own_query = tile.first_query + (warpgroup * 64) as i32;
        let sight = Sight::new(geometry, own_query, blueprint);
        let mut rows = RowPair::new(geometry, blueprint);
        let mut acc = Vector::<f32, O>::new(0.0f32);
        let own = t % query_stages * warpgroups + warpgroup;
        barrier_wait(places.full + own * 8, t / query_stages % 2);
        let mut left = tile.end_block;
        while left > tile.first_block {
            let block = left - 1;
            let stage = walked % stages;
            let phase = walked / stages % 2;
            let mine = sight.reaches(block);
            let mut p = Vector::<u32, P>::new(0u32);

            barrier_wait(places.full + (first_key + stage) * 8, phase);
            // How to multiply: not at all (2), careful of what is not finite (1), or as it is (0).
            let mut way = 2u32;
            if mine {
                let mut scores = dot_product::<S>(
                    row_descriptor(places.queries_at(own, blueprint)),
                    row_descriptor(places.keys_at(stage, blueprint)),
                    comptime!(score_body.clone()),
                );
                done_with_scores(
                    speaks,
                    places.free + (first_key + stage) * 8,
                    places.free + own * 8,
                    block == tile.first_block,
                );
                let (before, behind) = sight.edges(block);
                let banded = comptime!(blueprint.plain() && mask.is_none());
                let edge = comptime!(!banded) || before || behind;
                if edge {
                    let unit = unit_again();
                    let row = own_query + row_of(unit);
                    let column = column_of(unit, block, blueprint);
                    if banded {
                        scores = banded_scores::<S>(
                            scores,
                            band_row(row, geometry),
                            band_row(row + 8, geometry),
                            column,
                            before,
                            behind,
                            blueprint.block_kv,
                        );
                    } else {
                        scores = masked_scores::<E, M, S>(
                            scores,
                            row,
                            column,
                            tile.batch as usize,
                            tile.head as usize,
                            mask,
                            bias,
                            geometry,
                            blueprint,
                        );
                    }
                }
                rows.take_in::<S, O>(scores, &mut acc, blueprint);
                p = probabilities::<S, P>(scores, &mut rows, blueprint);
                barrier_wait(places.full + (first_value + stage) * 8, phase);
                way = 0u32;
                if edge {
                    way = non_finite_values(places.values_at(stage, blueprint), blueprint);
                }
            } else {
                done_with_scores(
                    speaks,
                    places.free + (first_key + stage) * 8,
                    places.free + own * 8,
                    block == tile.first_block,
                );
                barrier_wait(places.full + (first_value + stage) * 8, phase);
            }
            if way < 2 {
                if way == 0 {
                    acc = value_product::<P, O>(
                        acc,
                        p,
                        column_descriptor(
                            places.values_at(stage, blueprint),
                            comptime!(blueprint.panel()),
                        ),
                        comptime!(value_body.clone()),
                    );
                } else {
                    acc = add_careful_values::<P, O>(
                        acc,
                        p,
                        places.values_at(stage, blueprint),
                        blueprint,
                    );
                    sync_plane();
                }
            }
            if speaks {
                barrier_arrive(places.free + (first_value + stage) * 8);
            }
            walked += 1;
            left -= 1;
        }
        // The tile is found out again, so that no register holds it all along.
        store_tile::<O>(
            acc,
            &rows,
            again(t),
            section,
            output,
            statistics,
            geometry,
            blueprint,
        );
        t += 1;
    }
}

/// The plane is done with a block of keys and, at a tile's `last`, with its queries.
#[cube]
fn done_with_scores(speaks: bool, keys: u32, queries: u32, last: bool) {
    if speaks {
        barrier_arrive(keys);
        if last {
            barrier_arrive(queries);
        }
    }
}
