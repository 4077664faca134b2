//! Products of `f32` operands rounded to TF32: the sign, 8 bits of exponent and 11 of the number.
//!
//! Tiles hold whole numbers, staged as halves like those that [`super::split`] takes apart, and lanes
//! read them in the same way: an `ldmatrix` gives lane `l` number `l % 4` of row `l / 4`, which is what the
//! `m16n8k8` product wants of either operand. Where rows are summed over, the order of the sum is free: a
//! lane's accumulator has columns `2 c` and the next, which stand for elements `c` and `c + 4` of the left
//! operand, and the right one is read from the same rows.
//!
//! Numbers of a tile are rounded once, by the unit that has copied them and before anybody else reads them
//! ([`super::stage`]), so that no warp repeats it; weights are rounded in their registers, and so are the
//! keys and values of the forward pass: a warp reads them once a block, and shared memory is what it waits
//! for. Infinity stays infinity and NaN stays NaN, and numbers from 3.4e38 on become infinity.
//!
//! Unlike parts of numbers, products are added to the sums of a block on the units, which cut what does
//! not fit: some 1e-5 of a sum over thousands of rows, where rounding operands costs 1e-4.

use super::apart::pair_of;
use super::fragment::{
    Accumulator, Chunk, Pair, Place, Registers, load_block, pitch, set_sums, sums_of,
};
use super::instructions::{Instructions, by_value};
use super::split::{as_left, hold_loads};
use super::split_products::{load_column, load_column_tile};
use cubecl::prelude::*;

/// Which of two TF32 numbers a number half way between them is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ties {
    /// To the larger one in size.
    Away,
    /// To the even one, by a single instruction from compute capability 9.0 on.
    Even,
}

/// Numbers rounded to TF32, by their bits.
#[cube]
pub(crate) fn rounded_numbers(numbers: Registers, #[comptime] ties: Ties) -> Registers {
    let mode = comptime!(match ties {
        Ties::Away => "rna",
        Ties::Even => "rn",
    });
    let mut results = Registers::new(0u32);
    #[unroll]
    for n in 0..4usize {
        let number = by_value::<f32>(f32::reinterpret(numbers.extract(n)));
        let result: u32;
        gpu_asm!(
            "cvt.{mode}.tf32.f32 {result}, {number};",
            number = in(_) number, result = out(_) result, options(pure, nomem)
        );
        results.insert(n, by_value::<u32>(result));
    }
    by_value::<Registers>(results)
}

/// The two halves of an accumulator as a left operand: whole, or rounded to TF32.
#[cube]
pub(crate) fn as_operand(
    upper: Pair<f32>,
    lower: Pair<f32>,
    #[comptime] instructions: Instructions,
) -> Registers {
    let numbers = as_left(upper, lower);
    if comptime!(instructions.ties().is_some()) {
        rounded_numbers(numbers, comptime!(instructions.ties().unwrap()))
    } else {
        numbers
    }
}

/// [`dot_products`](super::products::dot_products) of rounded operands, added to `out`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn tf32_dot_products<E: Float>(
    out: &mut Sequence<Accumulator>,
    a: &Shared<[Chunk<E>]>,
    a_place: Place,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) {
    let eights = comptime!(dim.div_ceil(8));
    // Beside the sums of a gradient there are few registers.
    let crowded = comptime!(!instructions.rounds_columns() && row_tiles > 1);
    let pitch = comptime!(pitch(2 * dim));
    #[unroll]
    for k in 0..comptime!(eights.div_ceil(2)) {
        let steps = comptime!(Ord::min(eights - 2 * k, 2));
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..row_tiles {
            #[unroll]
            for step in 0..steps {
                let offset = comptime!(r * 16 * pitch + 4 * k + 2 * step);
                rows.push(load_block(a, a_place, offset, false, instructions));
            }
        }
        #[unroll]
        for n in 0..column_tiles {
            if comptime!(crowded && n % 2 == 0) {
                hold_loads();
            }
            let offset = comptime!(16 * (n * 8 * pitch + 4 * k));
            let columns = load_column_tile(b_place, offset, comptime!(steps == 2));
            let columns = rounded_columns(columns, instructions);
            #[unroll]
            for step in 0..steps {
                #[unroll]
                for r in 0..row_tiles {
                    add_product(
                        out.index_mut(comptime!(r * column_tiles + n)),
                        *rows.index(comptime!(r * steps + step)),
                        pair_of(columns, step),
                    );
                }
            }
        }
    }
}

/// Right operands, rounded where shared memory has them as they are.
#[cube]
fn rounded_columns(columns: Registers, #[comptime] instructions: Instructions) -> Registers {
    if comptime!(instructions.rounds_columns()) {
        rounded_numbers(columns, comptime!(instructions.ties().unwrap()))
    } else {
        columns
    }
}

/// [`add_weighted_rows`](super::products::add_weighted_rows) of rounded operands: `rows` holds two
/// accumulators of each row tile, [`as_operand`].
#[cube]
pub(crate) fn add_tf32_rows(
    out: &mut Sequence<Accumulator>,
    rows: &Sequence<Registers>,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] k: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) {
    let column_tiles = comptime!(dim.div_ceil(8));
    let row_bytes = comptime!(16 * pitch(2 * dim));
    #[unroll]
    for n in 0..column_tiles {
        let columns = load_column(b_place, comptime!(16 * k * row_bytes + 32 * n), row_bytes);
        let columns = rounded_columns(columns, instructions);
        #[unroll]
        for step in 0..2usize {
            #[unroll]
            for r in 0..row_tiles {
                add_product(
                    out.index_mut(comptime!(r * column_tiles + n)),
                    *rows.index(comptime!(2 * r + step)),
                    pair_of(columns, step),
                );
            }
        }
    }
}

/// Adds the product over eight elements to an accumulator.
#[cube]
fn add_product(tile: &mut Accumulator, left: Registers, right: Pair<u32>) {
    let sums = sums_of(tile[0], tile[1]);
    let products: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {products}, {left}, {right}, {sums};",
        left = in(_) left, right = in(_) right, sums = in(_) sums,
        products = out(_) products, options(pure, nomem)
    );
    set_sums(tile, by_value::<Vector<f32, Const<4>>>(products));
}

#[cfg(test)]
mod tests {
    use super::super::fragment::lane_along_rows;
    use super::super::split_products::lane_along_split_columns;

    /// Where a lane's registers of an `ldmatrix` come from, whose lanes address rows and chunks by `at`:
    /// row and number of each.
    fn loaded(lane: usize, at: fn(usize) -> (usize, usize)) -> [(usize, usize); 4] {
        std::array::from_fn(|matrix| {
            let (row, chunk) = at(8 * matrix + lane / 4);
            (row, 4 * chunk + lane % 4)
        })
    }

    /// Catches operands that are not where the product wants them: the left one has rows `l / 4` and 8
    /// further on, of elements `l % 4` and then 4 further on; the right one has column `l / 4` of the same
    /// elements, here of two products.
    #[test]
    fn numbers_are_loaded_to_where_the_product_wants_them() {
        for lane in 0..32 {
            let (row, element) = (lane / 4, lane % 4);
            let left = [0, 1, 2, 3].map(|n| (row + n % 2 * 8, element + n / 2 * 4));
            assert_eq!(loaded(lane, lane_along_rows), left);
            let right = [0, 4, 8, 12].map(|further| (row, element + further));
            assert_eq!(loaded(lane, lane_along_split_columns), right);
        }
    }

    /// Catches weights that are multiplied by another row than theirs: element `e` of the product is `c` of
    /// column pair `e % 4` on the left, and the row of that number on the right.
    #[test]
    fn weights_meet_their_rows() {
        // As `as_left` and `load_column` order them: upper and lower half of the first column, then of
        // the second; rows `2 (l % 4)` and the next.
        let mut rows = [usize::MAX; 8];
        for pair in 0..4 {
            for register in 0..4 {
                let (column, element) = (2 * pair + register / 2, pair + register / 2 * 4);
                assert!(rows[element] == usize::MAX || rows[element] == column);
                rows[element] = column;
            }
            for register in 0..2 {
                assert_eq!(rows[pair + 4 * register], 2 * pair + register);
            }
        }
        rows.sort_unstable();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    /// Catches numbers that are rounded to infinity and not looked for among hidden ones.
    #[test]
    fn what_may_become_infinite_is_looked_for() {
        let largest = f32::from_bits(0x7F7F_E000);
        let half = f32::from_bits(0x7F7F_F000);
        assert_eq!(f64::from(largest), 2.0_f64.powi(128) - 2.0_f64.powi(117));
        assert!(half.to_bits() & 0x7FFF_0000 >= 0x7F7F_0000);
    }
}
