//! A warpgroup's way through the tiles of a cube: of each block of keys the scores, then the output with
//! its values, then the next block.

use super::arrivals::{barrier_arrive, barrier_wait};
use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, non_finite};
use super::instructions::*;
use super::output::{Chunk, store_rows};
use super::pipeline::row_of;
use super::softmax::{RowPair, banded_scores, masked_scores, probabilities};
use super::tiles::*;
use crate::schedule::{Geometry, keys_of_all, keys_of_block};
use crate::score::band_row;
use cubecl::prelude::*;

/// Where a cube's tiles and barriers lie in shared memory. Barriers are those of every warpgroup's queries,
/// then of stages of keys, then of stages of values: that they are there (`full`), and that every plane
/// which reads them is done with them (`free`).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Places {
    pub full: u32,
    pub free: u32,
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
}

/// The blocks of keys that some of a warpgroup's queries see, and those that all do.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sight {
    some_first: u32,
    pub some_end: u32,
    all_first: u32,
    all_end: u32,
}

#[cube]
impl Sight {
    pub fn new(
        geometry: &Geometry,
        first_query: i32,
        #[comptime] blueprint: ForwardBlueprint,
    ) -> Sight {
        let block_kv = comptime!(blueprint.block_kv as u32);
        let some = keys_of_block(geometry, first_query, 64usize, true);
        let mut some_end = (some.end as u32).div_ceil(block_kv);
        if first_query >= geometry.seq_q {
            some_end = 0u32;
        }
        let all = keys_of_all(geometry, first_query, 64usize);
        Sight {
            some_first: some.first as u32 / block_kv,
            some_end,
            all_first: (all.first as u32).div_ceil(block_kv),
            all_end: all.end as u32 / block_kv,
        }
    }

    /// Whether some query sees some key of the block.
    pub fn reaches(&self, block: u32) -> bool {
        block >= self.some_first && block < self.some_end
    }

    /// Whether some of the queries do not see a key of the block because it lies before those that they
    /// see, or because it lies behind.
    pub fn edges(&self, block: u32) -> (bool, bool) {
        (block < self.all_first, block >= self.all_end)
    }
}

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
    let first_key = comptime!(query_stages * warpgroups);
    let first_value = comptime!(first_key + stages);
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
                    row_descriptor(places.queries + own * comptime!(blueprint.own_queries())),
                    row_descriptor(places.keys + stage * comptime!(blueprint.key_stage())),
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
                    let column =
                        (block * comptime!(blueprint.block_kv as u32) + (unit % 4) * 2) as i32;
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
                let growth = rows.grow::<S>(scores, blueprint);
                if plane_any(growth) {
                    let (a0, a1) = rows.rescale();
                    #[unroll]
                    for j in 0..comptime!(blueprint.value_dim / 8) {
                        acc.insert(4 * j, acc.extract(4 * j) * a0);
                        acc.insert(4 * j + 1, acc.extract(4 * j + 1) * a0);
                        acc.insert(4 * j + 2, acc.extract(4 * j + 2) * a1);
                        acc.insert(4 * j + 3, acc.extract(4 * j + 3) * a1);
                    }
                }
                p = probabilities::<S, P>(scores, &mut rows, blueprint);
                barrier_wait(places.full + (first_value + stage) * 8, phase);
                way = 0u32;
                if edge {
                    way = non_finite(
                        places.values + stage * comptime!(blueprint.value_stage()),
                        blueprint.block_kv,
                        blueprint.value_dim,
                        blueprint.warpgroups,
                        comptime!(blueprint.element()),
                    );
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
                            places.values + stage * comptime!(blueprint.value_stage()),
                            comptime!(blueprint.panel()),
                        ),
                        comptime!(value_body.clone()),
                    );
                } else {
                    acc = add_careful::<P, O>(
                        acc,
                        p,
                        places.values + stage * comptime!(blueprint.value_stage()),
                        unit_again() % 32,
                        0usize,
                        blueprint.block_kv,
                        blueprint.value_dim,
                        comptime!(blueprint.element()),
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
        // Found out again, so that no register holds it all along.
        let tile = tile_of(geometry, again(t), section, blueprint);
        store_rows::<O>(
            acc,
            &rows,
            (tile.batch * geometry.heads as u32 + tile.head) as usize,
            tile.first_query + (agreed(unit_again() / 32) / 4 * 64) as i32,
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
