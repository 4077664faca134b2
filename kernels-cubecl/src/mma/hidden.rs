//! Hidden rows that hold NaN or infinity: `0 * NaN` must not reach a sum.
//!
//! A product over rows multiplies every staged row, also by weights of exactly 0. Where a block has
//! hidden scores, its staged rows are looked through once; a row that is not finite is set to 0 in
//! shared memory, and added from global memory to those results alone whose weight is not 0.

use super::config::Config;
use super::fragment::{Accumulator, Chunk, Pair, chunks, pitch};
use super::softmax::{exponent, power};
use super::split::hold_loads;
use super::stage::{Rows, Staging};
use crate::unit::{lane, unit};
use cubecl::prelude::*;

/// Flags of a tile's rows, and one more: whether any is raised.
#[cube]
pub(crate) fn row_flags(#[comptime] rows: usize) -> Shared<[u32]> {
    Shared::<[u32]>::new_slice(comptime!(rows + 1))
}

/// Lowers every flag. A `sync_cube` has to come before [`flag_rows`].
#[cube]
pub(crate) fn lower_flags(flags: &mut Shared<[u32]>, #[comptime] staging: Staging) {
    let flags_of_all = comptime!(staging.rows + 1);
    #[unroll]
    for n in 0..comptime!(flags_of_all.div_ceil(staging.units)) {
        let at = n * staging.units + unit(staging.crowded) as usize;
        if at < flags_of_all {
            flags[at] = 0u32;
        }
    }
}

/// Raises the flags of the rows that are not finite. A `sync_cube` has to follow.
#[cube]
pub(crate) fn flag_rows<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    slot: usize,
    flags: &mut Shared<[u32]>,
    #[comptime] exponent: u32,
    #[comptime] staging: Staging,
) {
    let width = comptime!(chunks(staging.dim));
    // Of an unknown number of steps: compilers would unroll them, and keep every address.
    for index in range_stepped(
        unit(staging.crowded) as usize,
        staging.chunks(),
        staging.units,
    ) {
        let row = index / width;
        let chunk = tile[slot + row * comptime!(pitch(staging.dim)) + index % width];
        if has_non_finite(chunk, exponent) {
            flags[row] = 1u32;
            flags[staging.rows] = 1u32;
        }
    }
}

/// Sets the flagged rows to 0. A `sync_cube` has to follow.
#[cube]
pub(crate) fn clear_flagged_rows<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    slot: usize,
    flags: &Shared<[u32]>,
    #[comptime] staging: Staging,
) {
    let width = comptime!(chunks(staging.dim));
    for index in range_stepped(
        unit(staging.crowded) as usize,
        staging.chunks(),
        staging.units,
    ) {
        let row = index / width;
        if flags[row] != 0 {
            tile[slot + row * comptime!(pitch(staging.dim)) + index % width] =
                Chunk::new(E::from_int(0));
        }
    }
}

/// Adds the flagged rows, from global memory, to the results whose weight is not 0.
///
/// With `powers` the weights are values that the softmax compares, and their exponentials count.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_flagged_rows<E: Float, N: Size>(
    out: &mut Sequence<Accumulator>,
    weights: &Sequence<Accumulator>,
    reference: &Array<f32>,
    factor: f32,
    flags: &Shared<[u32]>,
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    #[comptime] row_tiles: usize,
    #[comptime] weight_tiles: usize,
    #[comptime] powers: Option<Config>,
    #[comptime] staging: Staging,
) {
    let tiles = comptime!(staging.tiles());
    for j in 0..comptime!(weight_tiles * 8) {
        if flags[j] != 0 {
            // The weights of row `j`, from the lane of the four that holds them.
            let owner = lane(staging.crowded) / 4 * 4 + (j as u32 % 8) / 2;
            let mut row_weights = Array::<f32>::new(comptime!(2 * row_tiles));
            #[unroll]
            for r in 0..row_tiles {
                #[unroll]
                for half in 0..2usize {
                    let mut own = 0.0f32;
                    #[unroll]
                    for n in 0..weight_tiles {
                        let pair = weights.index(comptime!(r * weight_tiles + n))[half];
                        let even = j % 2 == 0;
                        let either = select(even, pair.extract(0usize), pair.extract(1usize));
                        own = select(j / 8 == n, either, own);
                    }
                    let mut weight = plane_shuffle(own, owner);
                    if comptime!(powers.is_some()) {
                        let config = comptime!(powers.unwrap());
                        let reference = reference[comptime!(2 * r + half)];
                        let x = exponent(weight, reference, factor, config);
                        weight = power(x, config.assembly);
                    }
                    row_weights[comptime!(2 * r + half)] = weight;
                }
            }
            #[unroll]
            for n in 0..tiles {
                if comptime!(staging.halved && n % 4 == 0) {
                    hold_loads();
                }
                // Compilers would take the distances of features out of the loop over rows.
                let feature = comptime!(n * 8) + (lane(staging.crowded) % 4 * 2) as usize;
                let pair = load_pair(x, rows, first_row + j as i32, feature, staging);
                let (even, odd) = (pair.extract(0usize), pair.extract(1usize));
                #[unroll]
                for r in 0..row_tiles {
                    let tile = out.index_mut(comptime!(r * tiles + n));
                    #[unroll]
                    for half in 0..2usize {
                        let weight = row_weights[comptime!(2 * r + half)];
                        let counts = weight != 0.0f32;
                        let old = tile[half];
                        let mut new = Pair::<f32>::new(0.0f32);
                        // The choice comes before the product.
                        new.insert(
                            0usize,
                            fma(weight, select(counts, even, 0.0f32), old.extract(0usize)),
                        );
                        new.insert(
                            1usize,
                            fma(weight, select(counts, odd, 0.0f32), old.extract(1usize)),
                        );
                        tile[half] = new;
                    }
                }
            }
        }
    }
}

/// Two neighbouring features of a row: what a lane's accumulators have of it.
#[cube]
fn load_pair<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    row: i32,
    feature: usize,
    #[comptime] staging: Staging,
) -> Pair<f32> {
    let mut pair = Pair::<f32>::new(0.0f32);
    if row < rows.count && feature < comptime!(staging.features()) {
        let at = rows.base + row as usize * rows.stride;
        if comptime!(staging.halved) {
            let numbers = x.as_slice().with_vector_size::<Const<2>>();
            let first = numbers[(at + feature * rows.step) / 2];
            pair.insert(0usize, f32::reinterpret(first));
            if feature + 1 < comptime!(staging.features()) {
                let second = numbers[(at + (feature + 1) * rows.step) / 2];
                pair.insert(1usize, f32::reinterpret(second));
            }
        } else if comptime!(staging.vector == 1) {
            let first = x[at + feature * rows.step].extract(0usize);
            pair.insert(0usize, f32::cast_from(first));
            if feature + 1 < staging.dim {
                let second = x[at + (feature + 1) * rows.step].extract(0usize);
                pair.insert(1usize, f32::cast_from(second));
            }
        } else {
            let pairs = x.as_slice().with_vector_size::<Const<2>>();
            pair = Pair::cast_from(pairs[(at + feature) / 2]);
        }
    }
    pair
}

/// Whether the size of an element is at least that of `exponent`, which holds the bits of infinity, or of
/// what is rounded to it, for both halves of a word or for a word that is one number.
#[cube]
fn has_non_finite<E: Float>(chunk: Chunk<E>, #[comptime] exponent: u32) -> bool {
    let words = Vector::<u32, Const<4>>::reinterpret(chunk);
    let low = comptime!(exponent & 0xFFFF);
    let high = comptime!(exponent & 0xFFFF_0000);
    let mut found = false;
    #[unroll]
    for e in 0..4usize {
        let word = words.extract(e);
        found = found || (word & 0x7FFF_0000) >= high;
        if comptime!(low != 0) {
            found = found || (word & 0x7FFF) >= low;
        }
    }
    found
}

/// Whether a chunk of a tile that is the unit's to look at holds what is not finite, of 16-bit numbers. In
/// fewer operations than [`has_non_finite`], for no row is told from another and all bits of `exponent` are
/// those of infinity.
#[cube]
pub(crate) fn finds_non_finite<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    slot: usize,
    #[comptime] exponent: u32,
    #[comptime] staging: Staging,
) -> bool {
    let width = comptime!(chunks(staging.dim));
    // Exponent bits that are all set carry into the bit above them, which is the sign's and was cleared.
    let carry = comptime!(0x8000_8000 - exponent);
    let mut carried = 0u32;
    #[unroll]
    for n in 0..comptime!(staging.steps()) {
        let index = n * staging.units + unit(staging.crowded) as usize;
        if comptime!((n + 1) * staging.units <= staging.chunks()) || index < staging.chunks() {
            let at = slot + index / width * comptime!(pitch(staging.dim)) + index % width;
            let words = Vector::<u32, Const<4>>::reinterpret(tile[at]);
            #[unroll]
            for e in 0..4usize {
                carried |= (words.extract(e) & exponent) + carry;
            }
        }
    }
    carried & 0x8000_8000 != 0
}
