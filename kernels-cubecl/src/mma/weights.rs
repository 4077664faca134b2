//! Weights of a block of scores in shared memory, keys along the rows: what one warp computes and others
//! multiply by.

use super::fragment::{Accumulator, Chunk, Pair, Place, Registers, along_rows, pitch, place};
use super::instructions::{Instructions, by_value};
use crate::unit::lane;
use cubecl::prelude::*;

/// The lane's place where it stores fragments of weights, from row `first` on.
#[cube]
pub(crate) fn along_weights<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    first: usize,
    #[comptime] pitch: usize,
    #[comptime] wide: bool,
    #[comptime] again: bool,
    #[comptime] instructions: Instructions,
) -> Place {
    if comptime!(wide) {
        along_rows(tile, first, pitch, again, instructions)
    } else {
        let lane = lane(again);
        let place = place(tile, (first + lane as usize / 4) * pitch, instructions);
        Place {
            index: place.index,
            address: place.address + lane % 4 * 4,
        }
    }
}

/// Stores fragments of `row_tiles` by `column_tiles / 2`, from chunk `first` of the rows on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn store_weights<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    to: Place,
    weights: &Sequence<Registers>,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] pitch: usize,
    #[comptime] wide: bool,
    #[comptime] instructions: Instructions,
) {
    let address = by_value::<u32>(to.address);
    #[unroll]
    for r in 0..row_tiles {
        #[unroll]
        for k in 0..comptime!(column_tiles / 2) {
            let fragment = *weights.index(comptime!(r * (column_tiles / 2) + k));
            let block = comptime!(16 * r * pitch + 2 * k);
            if comptime!(wide) {
                let fragment = by_value::<Registers>(fragment);
                let bytes = comptime!(16 * block);
                gpu_asm!(
                    "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [{address} + {bytes}], {fragment};",
                    address = in(_) address, fragment = in(_) fragment
                );
            } else {
                #[unroll]
                for n in 0..4usize {
                    let word = by_value::<u32>(fragment.extract(n));
                    let chunk = comptime!(block + n % 2 * 8 * pitch + n / 2);
                    if comptime!(instructions.assembly()) {
                        let bytes = comptime!(16 * chunk);
                        gpu_asm!(
                            "st.shared::cta.b32 [{address} + {bytes}], {word};",
                            address = in(_) address, word = in(_) word
                        );
                    } else {
                        let pairs = tile.as_mut_slice().with_vector_size_mut::<Const<2>>();
                        let at = (to.index + chunk) * 4 + UNIT_POS_PLANE as usize % 4;
                        pairs[at] = Pair::<E>::reinterpret(word);
                    }
                }
            }
        }
    }
}

/// How far apart weights lie in shared memory, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Steps {
    /// From a row of the sums to the next.
    pub row: usize,
    /// From a summed row to the next.
    pub summed: usize,
}

/// The same as the products of weights with `count` rows of `x`, but one row after the other, and no row
/// of weight 0: such a one may hold what is not finite.
///
/// `first_weight` is the element of the weights of the lane's first row of sums, `first_chunk` the chunk
/// of the first row's first feature.
#[cube]
#[allow(clippy::too_many_arguments, clippy::manual_is_multiple_of)]
pub(crate) fn add_row_by_row<E: Float>(
    out: &mut Sequence<Accumulator>,
    weights: &Shared<[Chunk<E>]>,
    first_weight: usize,
    x: &Shared<[Chunk<E>]>,
    first_chunk: usize,
    #[comptime] steps: Steps,
    #[comptime] count: usize,
    #[comptime] dim: usize,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
) {
    let weights = weights.as_slice().with_vector_size::<Const<2>>();
    let x = x.as_slice().with_vector_size::<Const<2>>();
    let first = first_chunk * 4 + UNIT_POS_PLANE as usize % 4;
    for j in 0..count {
        let mut row_weights = Array::<f32>::new(comptime!(2 * row_tiles));
        #[unroll]
        for row in 0..comptime!(2 * row_tiles) {
            let at = first_weight + comptime!(8 * row * steps.row) + j * steps.summed;
            let pair = Pair::<f32>::cast_from(weights[at / 2]);
            row_weights[row] = select(at % 2 == 0, pair.extract(0usize), pair.extract(1usize));
        }
        #[unroll]
        for n in 0..column_tiles {
            let pair = Pair::<f32>::cast_from(x[first + j * comptime!(4 * pitch(dim)) + 4 * n]);
            #[unroll]
            for r in 0..row_tiles {
                let tile = out.index_mut(comptime!(r * column_tiles + n));
                #[unroll]
                for half in 0..2usize {
                    let weight = row_weights[comptime!(2 * r + half)];
                    let counts = weight != 0.0f32;
                    let old = tile[half];
                    let mut new = Pair::<f32>::new(0.0f32);
                    #[unroll]
                    for c in 0..2usize {
                        // The choice comes before the product.
                        let number = select(counts, pair.extract(c), 0.0f32);
                        new.insert(c, fma(weight, number, old.extract(c)));
                    }
                    tile[half] = new;
                }
            }
        }
    }
}
