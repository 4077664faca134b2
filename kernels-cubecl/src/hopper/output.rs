//! The end of a tile: from a warpgroup's registers to rows of the output.

use super::blueprint::ForwardBlueprint;
use super::instructions::{agreed, pack, unit_again};
use super::pipeline::row_of;
use super::softmax::RowPair;
use super::tiles::tile_of;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Eight features of a row.
pub(crate) type Chunk = Vector<u32, Const<4>>;

/// Writes a warpgroup's rows of the cube's tile `t`, and their statistics.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn store_tile<O: Size>(
    acc: Vector<f32, O>,
    rows: &RowPair,
    t: u32,
    section: u32,
    output: &mut [Chunk],
    statistics: &mut [f32],
    geometry: &Geometry,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let tile = tile_of(geometry, t, section, blueprint);
    store_rows::<O>(
        acc,
        rows,
        (tile.batch * geometry.heads as u32 + tile.head) as usize,
        tile.first_query + (agreed(unit_again() / 32) / 4 * 64) as i32,
        output,
        statistics,
        geometry,
        blueprint,
    );
}

/// Writes 64 rows from `first_query` on, and their statistics.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn store_rows<O: Size>(
    acc: Vector<f32, O>,
    rows: &RowPair,
    batch_head: usize,
    first_query: i32,
    output: &mut [Chunk],
    statistics: &mut [f32],
    geometry: &Geometry,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let element = comptime!(blueprint.element());
    let chunks = comptime!(blueprint.value_dim / 8);
    let unit = unit_again();
    let column = unit % 4;
    let row = first_query + row_of(unit);
    let half = geometry.batch * geometry.heads * geometry.seq_q as usize;
    #[unroll]
    for r in 0..2usize {
        let i = row + comptime!(r as i32 * 8);
        let present = i < geometry.seq_q;
        let at = batch_head * geometry.seq_q as usize + i as usize;
        let end = rows.finish(geometry, comptime!(r == 1), blueprint);
        if present {
            if column == 0 {
                statistics[at] = end.maximum;
                statistics[half + at] = end.log_sum;
            }
        }
        // A unit has two features of every chunk of eight: four units exchange those of four chunks.
        #[unroll]
        for group in 0..comptime!(chunks.div_ceil(4)) {
            let held = comptime!(if chunks < 4 * group + 4 {
                chunks - 4 * group
            } else {
                4
            });
            let mut pairs = Chunk::new(0u32);
            #[unroll]
            for n in 0..held {
                let from = comptime!(16 * group + 4 * n + 2 * r);
                pairs.insert(
                    n,
                    pack(
                        acc.extract(from) * end.inverse,
                        acc.extract(comptime!(from + 1)) * end.inverse,
                        element,
                    ),
                );
            }
            let chunk = transposed(pairs, column);
            let mut wanted = present;
            if comptime!(held < 4) {
                wanted = present && column < comptime!(held as u32);
            }
            if wanted {
                output[at * chunks + (comptime!(4 * group) + column as usize)] = chunk;
            }
        }
    }
}

/// What four neighbouring units hold, transposed: unit `column` of them gets that word of each.
#[cube]
fn transposed(words: Chunk, column: u32) -> Chunk {
    let mut x = words;
    let odd = column % 2 == 1;
    let upper = column >= 2;
    #[unroll]
    for n in 0..2usize {
        let a = x.extract(comptime!(2 * n));
        let b = x.extract(comptime!(2 * n + 1));
        let got = plane_shuffle_xor(select(odd, a, b), 1u32);
        x.insert(comptime!(2 * n), select(odd, got, a));
        x.insert(comptime!(2 * n + 1), select(odd, b, got));
    }
    #[unroll]
    for n in 0..2usize {
        let a = x.extract(n);
        let b = x.extract(comptime!(n + 2));
        let got = plane_shuffle_xor(select(upper, a, b), 2u32);
        x.insert(n, select(upper, got, a));
        x.insert(comptime!(n + 2), select(upper, b, got));
    }
    x
}
