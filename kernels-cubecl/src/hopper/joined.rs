//! A warpgroup's way through the tiles of a cube where heads are wide: the scores of a block and the
//! output with the values of the block before are one run of products, with one wait, and the two
//! warpgroups of a cube take turns at it.
//!
//! ```text
//! for each block n of keys of each tile
//!     wait for K of n, V of n - 1, and the turn
//!     S = Q K^T; O += P V          P and V of n - 1, which may be the last of the tile before
//!     the other warpgroup's turn
//!     wait for the products
//!     at a tile's first block: O of the tile before to global memory
//!     P = 2^(S - m)                while the other warpgroup's products run
//! O += P V, and O of the last tile to global memory
//! ```
//!
//! Both warpgroups walk the same blocks and have a turn at each, even where one sees nothing.

use super::arrivals::{barrier_wait, done_with};
use super::block::{Places, Sight, add_careful_values, column_of, non_finite_values};
use super::blueprint::ForwardBlueprint;
use super::careful::unbounded;
use super::instructions::*;
use super::output::{Chunk, store_tile};
use super::pipeline::row_of;
use super::products::{
    FIRST_TURN, column_descriptor, dot_product_in_turn, give_first_turn, joined_product, pass_turn,
    row_descriptor, value_product, value_product_in_turn,
};
use super::softmax::{RowPair, banded_scores, probabilities};
use super::tiles::*;
use crate::schedule::Geometry;
use crate::score::band_row;
use cubecl::prelude::*;

/// What the sums need beyond a product with a block's values as they are: nothing.
const NOTHING: u32 = 0;
/// A look at them: they began at 0, and if they are not finite they begin once more, key by key.
const WATCH: u32 = 1;
/// To be added key by key instead, for some value that has no weight is not finite.
const CARE: u32 = 2;

/// The probabilities of a block, and what the sums need beyond a product.
#[derive(CubeType)]
struct Weights<P: Size, O: Size> {
    p: Vector<u32, P>,
    need: u32,
    /// The output, in what the rows are relative to now.
    output: Vector<f32, O>,
}

/// Walks the tiles of the cube, of which there is one at least, and writes their rows.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn walk_joined<S: Size, P: Size, O: Size>(
    warpgroup: u32,
    section: u32,
    places: Places,
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
    let (s, p_length, o) = comptime!((
        blueprint.score_registers(),
        blueprint.probability_registers(),
        blueprint.output_registers()
    ));
    let score_body = comptime!(blueprint.products().scores_in_turn(s));
    let value_body = comptime!(blueprint.products().values_in_turn(o, p_length));
    let joined_body = comptime!(blueprint.products().joined(o, p_length));
    let turn = comptime!(FIRST_TURN) + warpgroup;
    if warpgroup == 1 {
        give_first_turn();
    }
    let mut rows = RowPair::new(geometry, blueprint);
    let mut acc = Vector::<f32, O>::new(0.0f32);
    let mut p = Vector::<u32, P>::new(0u32);
    // What becomes of the values of the block before.
    let mut need = comptime!(NOTHING).runtime();
    let mut adds = false;
    let mut walked = 0u32;
    let mut t = 0u32;
    while is_tile(geometry, t, blueprint) {
        let tile = tile_of(geometry, t, section, blueprint);
        let own_query = tile.first_query + (warpgroup * 64) as i32;
        let sight = Sight::new(geometry, own_query, blueprint);
        let own = t % query_stages * warpgroups + warpgroup;
        barrier_wait(places.full + own * 8, t / query_stages % 2);
        let mut left = tile.end_block;
        while left > tile.first_block {
            let block = left - 1;
            let stage = walked % stages;
            let phase = walked / stages % 2;
            let behind = walked - 1;
            let stage_behind = behind % stages;
            let values_behind = places.values_at(stage_behind, blueprint);
            let mine = sight.reaches(block);
            barrier_wait(places.full + (first_key + stage) * 8, phase);
            if walked > 0 {
                barrier_wait(
                    places.full + (first_value + stage_behind) * 8,
                    behind / stages % 2,
                );
            }
            let queries = row_descriptor(places.queries_at(own, blueprint));
            let keys = row_descriptor(places.keys_at(stage, blueprint));
            let mut scores = Vector::<f32, S>::new(0.0f32);
            if mine {
                if adds {
                    let both = joined_product::<P, O>(
                        acc,
                        p,
                        queries,
                        keys,
                        column_descriptor(values_behind, comptime!(blueprint.panel())),
                        turn,
                        comptime!(joined_body.clone()),
                    );
                    #[unroll]
                    for i in 0..comptime!(blueprint.value_dim / 2) {
                        acc.insert(i, both.extract(i));
                    }
                    #[unroll]
                    for i in 0..comptime!(blueprint.block_kv / 2) {
                        scores.insert(i, both.extract(comptime!(blueprint.value_dim / 2 + i)));
                    }
                } else {
                    scores = dot_product_in_turn::<S>(
                        queries,
                        keys,
                        turn,
                        comptime!(score_body.clone()),
                    );
                }
            } else if adds {
                acc = value_product_in_turn::<P, O>(
                    acc,
                    p,
                    column_descriptor(values_behind, comptime!(blueprint.panel())),
                    turn,
                    comptime!(value_body.clone()),
                );
            } else {
                pass_turn(turn);
            }
            done_with(places.free + (first_key + stage) * 8);
            if block == tile.first_block {
                done_with(places.free + own * 8);
            }
            acc = mended::<P, O>(acc, p, need, values_behind, blueprint);
            if walked > 0 {
                done_with(places.free + (first_value + stage_behind) * 8);
                if left == tile.end_block {
                    store_tile::<O>(
                        acc,
                        &rows,
                        t - 1,
                        section,
                        output,
                        statistics,
                        geometry,
                        blueprint,
                    );
                    acc = Vector::<f32, O>::new(0.0f32);
                    rows.reset();
                }
            }
            need = comptime!(NOTHING).runtime();
            adds = false;
            if mine {
                let weights = weights::<S, P, O>(
                    scores,
                    acc,
                    &mut rows,
                    sight,
                    tile,
                    own_query,
                    block,
                    places.full + (first_value + stage) * 8,
                    phase,
                    places.values_at(stage, blueprint),
                    geometry,
                    blueprint,
                );
                p = weights.p;
                need = weights.need;
                adds = need < CARE;
                acc = weights.output;
            }
            walked += 1;
            left -= 1;
        }
        t += 1;
    }
    let behind = walked - 1;
    let stage = behind % stages;
    let values = places.values_at(stage, blueprint);
    barrier_wait(places.full + (first_value + stage) * 8, behind / stages % 2);
    if adds {
        acc = value_product::<P, O>(
            acc,
            p,
            column_descriptor(values, comptime!(blueprint.panel())),
            comptime!(blueprint.products().values(o, p_length)),
        );
    }
    acc = mended::<P, O>(acc, p, need, values, blueprint);
    store_tile::<O>(
        acc,
        &rows,
        t - 1,
        section,
        output,
        statistics,
        geometry,
        blueprint,
    );
}

/// From the scores of a block to what multiplies its values, which are in `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn weights<S: Size, P: Size, O: Size>(
    dots: Vector<f32, S>,
    output: Vector<f32, O>,
    rows: &mut RowPair,
    sight: Sight,
    tile: Tile,
    own_query: i32,
    block: u32,
    value_arrival: u32,
    phase: u32,
    value_tile: u32,
    geometry: &Geometry,
    #[comptime] blueprint: ForwardBlueprint,
) -> Weights<P, O> {
    let mut scores = dots;
    let mut acc = output;
    let (before, behind) = sight.edges(block);
    let edge = before || behind;
    if edge {
        let unit = unit_again();
        scores = banded_scores::<S>(
            scores,
            band_row(own_query + row_of(unit), geometry),
            band_row(own_query + row_of(unit) + 8, geometry),
            column_of(unit, block, blueprint),
            before,
            behind,
            blueprint.block_kv,
        );
    }
    rows.take_in::<S, O>(scores, &mut acc, blueprint);
    let p = probabilities::<S, P>(scores, rows, blueprint);
    let mut need = comptime!(NOTHING).runtime();
    if edge {
        if block + 1 == min(sight.some_end, tile.end_block) {
            need = comptime!(WATCH).runtime();
        } else {
            barrier_wait(value_arrival, phase);
            need = CARE * non_finite_values(value_tile, blueprint);
        }
    }
    Weights::<P, O> {
        p,
        need,
        output: acc,
    }
}

/// What products of values as they are have left to do.
#[cube]
fn mended<P: Size, O: Size>(
    output: Vector<f32, O>,
    p: Vector<u32, P>,
    need: u32,
    value_tile: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> Vector<f32, O> {
    let mut acc = output;
    if need != NOTHING {
        let mut careful = true;
        if need == WATCH {
            careful = unbounded::<O>(acc, blueprint.value_dim);
            if careful {
                acc = Vector::<f32, O>::new(0.0f32);
            }
        }
        if careful {
            acc = add_careful_values::<P, O>(acc, p, value_tile, blueprint);
            sync_plane();
        }
    }
    acc
}
