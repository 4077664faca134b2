//! Products of `f32` operands on the matrix units, to the precision of `f32`.
//!
//! A number is the sum of three of `bf16`: its first 8 bits cut off (`high`), the next 8 of the rest
//! rounded (`middle`), and what is left (`low`), exactly. A product is that of the parts, but for
//! terms below 2^-25 of it:
//!
//! ```text
//! a b = mm + lh + hl + mh + hm + hh        of a = h + m + l and b = h + m + l
//! ```
//!
//! The units cut what does not fit the largest term of a sum, and always towards 0: over thousands of
//! keys a sum on them comes out too small by some 1e-5. So the products of 16 elements are summed
//! from 0, the small ones first, and then added to the sum of the block by an ordinary, rounded
//! addition. Two parts of TF32 would cost as much on the units, and lose a bit or two of each number.
//!
//! Numbers below 2^-110 lose what is below 2^-133, where `bf16` ends. A visible value of infinity gives
//! NaN, as its products with the parts of a weight have both signs; dot products that are not finite
//! are formed again from whole numbers.
//!
//! Tiles hold the numbers whole: staging moves their halves, two elements of 16 bits. An `ldmatrix` of
//! 8 x 8 halves is one of 8 x 4 numbers, of which a lane gets number `l % 4` of row `l / 4`. The
//! order of a sum is free: two such numbers, of neighbouring chunks, stand for the two elements of a
//! register. Where rows are summed over, `ldmatrix` would have to transpose numbers, and cannot; lanes
//! read them one by one.

use super::apart::{in_parts, load_columns, right_of, whole_numbers};
use super::fragment::{
    Accumulator, Chunk, Instructions, Pair, Place, Registers, at_address, by_value,
    lane_along_columns, lane_along_rows, load_block, pitch,
};
use super::softmax::in_any_lane;
use crate::unit::unit_again;
use cubecl::prelude::*;

/// Columns of a right operand that may be loaded ahead of the first product with them.
const TOGETHER: usize = 4;

/// The parts of a left operand over 16 elements: four registers each, of two `bf16`.
#[derive(CubeType)]
struct Left {
    high: Sequence<Registers>,
    middle: Sequence<Registers>,
    low: Sequence<Registers>,
}

/// The parts of a right operand over 16 elements: two registers each.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Right {
    pub high: Pair<u32>,
    pub middle: Pair<u32>,
    pub low: Pair<u32>,
}

/// No load moves up past this: compilers would load more ahead than there are registers.
#[cube]
pub(crate) fn hold_loads() {
    gpu_asm!("bar.warp.sync 0xffffffff;");
}

/// The upper halves of two words.
#[cube]
fn upper_halves(first: u32, second: u32) -> u32 {
    let first = by_value::<u32>(first);
    let second = by_value::<u32>(second);
    let halves: u32;
    gpu_asm!(
        "prmt.b32 {halves}, {first}, {second}, 0x7632;",
        first = in(_) first, second = in(_) second, halves = out(_) halves, options(pure, nomem)
    );
    by_value::<u32>(halves)
}

/// What is left of a number without its upper half.
#[cube]
fn rest(number: u32) -> f32 {
    f32::reinterpret(number) - f32::reinterpret(number & 0xFFFF_0000)
}

/// Two numbers rounded to `bf16`.
#[cube]
fn rounded(first: f32, second: f32) -> u32 {
    let first = by_value::<f32>(first);
    let second = by_value::<f32>(second);
    let pair: u32;
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {pair}, {second}, {first};",
        first = in(_) first, second = in(_) second, pair = out(_) pair, options(pure, nomem)
    );
    by_value::<u32>(pair)
}

/// The parts of two numbers, given by their bits: high, middle and low ones.
#[cube]
pub(crate) fn parts(first: u32, second: u32) -> (u32, u32, u32) {
    let first_rest = rest(first);
    let second_rest = rest(second);
    let middle = rounded(first_rest, second_rest);
    let first_low = first_rest - f32::reinterpret(middle << 16);
    let second_low = second_rest - f32::reinterpret(middle & 0xFFFF_0000);
    // Eight bits are left: the upper half is all of a number.
    let low = upper_halves(u32::reinterpret(first_low), u32::reinterpret(second_low));
    (upper_halves(first, second), middle, low)
}

#[cube]
fn no_left() -> Left {
    Left {
        high: Sequence::new(),
        middle: Sequence::new(),
        low: Sequence::new(),
    }
}

/// Takes a left operand apart: 16 rows of 8 elements, and of 8 more. Registers 0 and 2 of each are
/// of row `l / 4`, the others of row `l / 4 + 8`.
#[cube]
fn push_left(left: &mut Left, first: Registers, second: Registers) {
    let mut high = Registers::new(0u32);
    let mut middle = Registers::new(0u32);
    let mut low = Registers::new(0u32);
    #[unroll]
    for n in 0..4usize {
        let numbers = if comptime!(n < 2) { first } else { second };
        let row = comptime!(n % 2);
        let (h, m, l) = parts(numbers.extract(row), numbers.extract(comptime!(row + 2)));
        high.insert(n, h);
        middle.insert(n, m);
        low.insert(n, l);
    }
    left.high.push(by_value::<Registers>(high));
    left.middle.push(by_value::<Registers>(middle));
    left.low.push(by_value::<Registers>(low));
}

/// Takes a right operand apart, of one column: two of 8 elements, and two of 8 more.
#[cube]
fn right(numbers: Registers) -> Right {
    let mut high = Pair::<u32>::new(0u32);
    let mut middle = Pair::<u32>::new(0u32);
    let mut low = Pair::<u32>::new(0u32);
    #[unroll]
    for n in 0..2usize {
        let (h, m, l) = parts(
            numbers.extract(comptime!(2 * n)),
            numbers.extract(comptime!(2 * n + 1)),
        );
        high.insert(n, h);
        middle.insert(n, m);
        low.insert(n, l);
    }
    Right {
        high: by_value::<Pair<u32>>(high),
        middle: by_value::<Pair<u32>>(middle),
        low: by_value::<Pair<u32>>(low),
    }
}

/// The two halves of an accumulator in the order of a left operand's numbers.
#[cube]
pub(crate) fn as_left(upper: Pair<f32>, lower: Pair<f32>) -> Registers {
    let mut registers = Registers::new(0u32);
    #[unroll]
    for c in 0..2usize {
        registers.insert(comptime!(2 * c), u32::reinterpret(upper.extract(c)));
        registers.insert(comptime!(2 * c + 1), u32::reinterpret(lower.extract(c)));
    }
    by_value::<Registers>(registers)
}

/// The products over 16 elements, summed from 0.
#[cube]
fn products(
    high: Registers,
    middle: Registers,
    low: Registers,
    right: Right,
) -> Vector<f32, Const<4>> {
    let (h, m, l) = (right.high, right.middle, right.low);
    let sums: Vector<f32, Const<4>>;
    gpu_asm!(
        "{{ .reg .f32 z, t<4>; mov.f32 z, 0f00000000; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{t0, t1, t2, t3}}, {middle}, {m}, {{z, z, z, z}}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{t0, t1, t2, t3}}, {low}, {h}, {{t0, t1, t2, t3}}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{t0, t1, t2, t3}}, {high}, {l}, {{t0, t1, t2, t3}}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{t0, t1, t2, t3}}, {middle}, {h}, {{t0, t1, t2, t3}}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{t0, t1, t2, t3}}, {high}, {m}, {{t0, t1, t2, t3}}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {high}, {h}, {{t0, t1, t2, t3}}; }}",
        high = in(_) high, middle = in(_) middle, low = in(_) low,
        h = in(_) h, m = in(_) m, l = in(_) l,
        sums = out(_) sums, options(pure, nomem)
    );
    by_value::<Vector<f32, Const<4>>>(sums)
}

/// Adds the products of left operand `row_tile` and a right one to an accumulator.
#[cube]
fn add_products(
    out: &mut Sequence<Accumulator>,
    left: &Left,
    right: Right,
    #[comptime] row_tile: usize,
    #[comptime] index: usize,
) {
    let sums = products(
        *left.high.index(row_tile),
        *left.middle.index(row_tile),
        *left.low.index(row_tile),
        right,
    );
    let tile = out.index_mut(index);
    #[unroll]
    for half in 0..2usize {
        let mut pair = Pair::<f32>::new(0.0f32);
        pair.insert(0usize, sums.extract(comptime!(2 * half)));
        pair.insert(1usize, sums.extract(comptime!(2 * half + 1)));
        tile[half] += pair;
    }
}

/// [`dot_products`](super::fragment::dot_products) of operands in parts, added to `out`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn split_dot_products<E: Float>(
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
    let products = comptime!((eights / 2) as u32);
    let b_step = comptime!(if instructions.apart() { 32u32 } else { 64u32 });
    // A loop at run time: unrolled, it would be a long way without a place to keep sums back at, and
    // compilers load more of it ahead than there are registers. It moves the addresses along, and the
    // first ones need none.
    let mut a_address = by_value::<u32>(a_place.address);
    let mut b_address = by_value::<u32>(b_place.address);
    for _ in 0..products {
        add_dot_products(
            out,
            a,
            at_address(a_place, a_address),
            at_address(b_place, b_address),
            row_tiles,
            column_tiles,
            dim,
            true,
            instructions,
        );
        a_address += 64u32;
        b_address += b_step;
    }
    if comptime!(eights % 2 == 1) {
        add_dot_products(
            out,
            a,
            at_address(a_place, a_address),
            at_address(b_place, b_address),
            row_tiles,
            column_tiles,
            dim,
            false,
            instructions,
        );
    }
    mend_dot_products(
        out,
        a_address - comptime!(64 * products),
        b_address - comptime!(b_step * products),
        row_tiles,
        column_tiles,
        dim,
        instructions,
    );
}

/// Adds the products of 16 features; of 8, with zeros beside them, where there are not `both` eights.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_dot_products<E: Float>(
    out: &mut Sequence<Accumulator>,
    a: &Shared<[Chunk<E>]>,
    a_place: Place,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] both: bool,
    #[comptime] instructions: Instructions,
) {
    let whole_pitch = comptime!(pitch(2 * dim));
    let mut left = no_left();
    #[unroll]
    for r in 0..row_tiles {
        let offset = comptime!(r * 16 * whole_pitch);
        let first = load_block(a, a_place, offset, false, instructions);
        let second = if both {
            load_block(a, a_place, comptime!(offset + 2), false, instructions)
        } else {
            Registers::new(0u32)
        };
        push_left(&mut left, first, second);
    }
    if comptime!(instructions.apart()) {
        #[unroll]
        for n in 0..comptime!(column_tiles / 2) {
            let rows = comptime!(16 * n * pitch(in_parts(dim)));
            let columns = load_columns(b_place, rows, false, dim);
            #[unroll]
            for side in 0..2usize {
                let columns = right_of(columns, side);
                #[unroll]
                for r in 0..row_tiles {
                    let index = comptime!(r * column_tiles + 2 * n + side);
                    add_products(out, &left, columns, r, index);
                }
            }
        }
    } else {
        #[unroll]
        for n in 0..column_tiles {
            hold_loads();
            let columns = right(load_column_tile(
                b_place,
                comptime!(16 * n * 8 * whole_pitch),
                both,
            ));
            #[unroll]
            for r in 0..row_tiles {
                add_products(out, &left, columns, r, comptime!(r * column_tiles + n));
            }
        }
    }
}

/// Forms dot products again that are not finite, from whole numbers: infinity times the parts of a
/// number, which have either sign, is no infinity.
#[cube]
fn mend_dot_products(
    out: &mut Sequence<Accumulator>,
    a_address: u32,
    b_address: u32,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) {
    let tiles = comptime!(row_tiles * column_tiles);
    let mut check = 0.0f32;
    #[unroll]
    for n in 0..tiles {
        #[unroll]
        for half in 0..2usize {
            let pair = out.index(n)[half];
            check = fma(pair.extract(0usize), 0.0f32, check);
            check = fma(pair.extract(1usize), 0.0f32, check);
        }
    }
    // 0 times what is not finite is NaN.
    if in_any_lane(check != 0.0f32, true) {
        let lane = (unit_again() % 32) as usize;
        let a_pitch = comptime!(pitch(2 * dim));
        let (a_row, a_chunk) = lane_along_rows(lane);
        let (b_row, b_chunk) = if comptime!(instructions.apart()) {
            lane_along_columns(lane)
        } else {
            lane_along_split_columns(lane)
        };
        let b_pitch = comptime!(if instructions.apart() {
            pitch(in_parts(dim))
        } else {
            a_pitch
        });
        let a_first = a_address - 16 * (a_row * a_pitch + a_chunk) as u32;
        let b_first = b_address - 16 * (b_row * b_pitch + b_chunk) as u32;
        for element in 0..comptime!(4 * tiles) {
            let tile = element / 4;
            let row = tile / column_tiles * 16 + element / 2 % 2 * 8 + lane / 4;
            let column = tile % column_tiles * 8 + lane % 4 * 2 + element % 2;
            let a = a_first + 16 * (row * a_pitch) as u32;
            let b = b_first + 16 * (column * b_pitch) as u32;
            let mut dot = 0.0f32;
            // Whole chunks: there are zeros past the last feature.
            for chunk in 0..comptime!(2 * dim.div_ceil(8) as u32) {
                hold_loads();
                let a = load_numbers(a + 16 * chunk);
                let b = if comptime!(instructions.apart()) {
                    whole_numbers(b, chunk, dim)
                } else {
                    load_numbers(b + 16 * chunk)
                };
                #[unroll]
                for n in 0..4usize {
                    let (x, y) = (a.extract(n), b.extract(n));
                    dot = fma(f32::reinterpret(x), f32::reinterpret(y), dot);
                }
            }
            #[unroll]
            for n in 0..tiles {
                let accumulator = out.index_mut(n);
                #[unroll]
                for half in 0..2usize {
                    let old = accumulator[half];
                    let mut new = Pair::<f32>::new(0.0f32);
                    #[unroll]
                    for c in 0..2usize {
                        let here = element == comptime!(4 * n + 2 * half + c);
                        new.insert(c, select(here, dot, old.extract(c)));
                    }
                    accumulator[half] = new;
                }
            }
        }
    }
}

/// The four numbers of a chunk in shared memory.
#[cube]
pub(crate) fn load_numbers(address: u32) -> Registers {
    let address = by_value::<u32>(address);
    let numbers: Registers;
    gpu_asm!(
        "ld.shared.v4.b32 {numbers}, [{address}];",
        address = in(_) address, numbers = out(_) numbers
    );
    by_value::<Registers>(numbers)
}

/// [`add_weighted_rows`](super::fragment::add_weighted_rows) of operands in parts: `rows` holds two
/// accumulators of each row tile, [`as_left`].
#[cube]
pub(crate) fn add_split_rows(
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
    let mut left = no_left();
    #[unroll]
    for r in 0..row_tiles {
        push_left(
            &mut left,
            *rows.index(comptime!(2 * r)),
            *rows.index(comptime!(2 * r + 1)),
        );
    }
    if comptime!(instructions.apart()) {
        #[unroll]
        for n in 0..comptime!(column_tiles.div_ceil(2)) {
            if comptime!(2 * n % TOGETHER == 0) {
                hold_loads();
            }
            let chunk = comptime!(16 * k * pitch(in_parts(dim)) + 2 * n);
            let columns = load_columns(b_place, chunk, true, dim);
            #[unroll]
            for side in 0..comptime!(if 2 * n + 1 < column_tiles { 2 } else { 1 }) {
                let columns = right_of(columns, side);
                #[unroll]
                for r in 0..row_tiles {
                    let index = comptime!(r * column_tiles + 2 * n + side);
                    add_products(out, &left, columns, r, index);
                }
            }
        }
    } else {
        #[unroll]
        for n in 0..column_tiles {
            if comptime!(n % TOGETHER == 0) {
                hold_loads();
            }
            let offset = comptime!(16 * k * row_bytes + 32 * n);
            let columns = right(load_column(b_place, offset, row_bytes));
            #[unroll]
            for r in 0..row_tiles {
                add_products(out, &left, columns, r, comptime!(r * column_tiles + n));
            }
        }
    }
}

/// The row and chunk that a lane addresses of eight rows, the columns of a right operand over 16
/// elements.
#[cube]
pub(crate) fn lane_along_split_columns(lane: usize) -> (usize, usize) {
    (lane % 8, lane / 8)
}

/// A right operand over 16 features of the eight rows `offset` bytes from the place; over 8, with
/// zeros beside them, where there are not `both` eights.
#[cube]
pub(crate) fn load_column_tile(
    place: Place,
    #[comptime] offset: usize,
    #[comptime] both: bool,
) -> Registers {
    let address = by_value::<u32>(place.address);
    if both {
        let numbers: Registers;
        gpu_asm!(
            "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {numbers}, [{address} + {offset}];",
            address = in(_) address, numbers = out(_) numbers
        );
        by_value::<Registers>(numbers)
    } else {
        let pair: Pair<u32>;
        gpu_asm!(
            "ldmatrix.sync.aligned.m8n8.x2.shared::cta.b16 {pair}, [{address} + {offset}];",
            address = in(_) address, pair = out(_) pair
        );
        let pair = by_value::<Pair<u32>>(pair);
        let mut numbers = Registers::new(0u32);
        numbers.insert(0usize, pair.extract(0usize));
        numbers.insert(1usize, pair.extract(1usize));
        by_value::<Registers>(numbers)
    }
}

/// One column of the rows that a lane sums over, of 16: `2 (l % 4)`, the next, and 8 further on.
#[cube]
pub(crate) fn load_column(
    place: Place,
    #[comptime] offset: usize,
    #[comptime] row_bytes: usize,
) -> Registers {
    let address = by_value::<u32>(place.address);
    let second = comptime!(offset + row_bytes);
    let third = comptime!(offset + 8 * row_bytes);
    let fourth = comptime!(offset + 9 * row_bytes);
    let numbers: Registers;
    // Results come first in the count of operands.
    gpu_asm!(
        "/* {numbers} */ ld.shared.b32 %0, [{address} + {offset}]; ld.shared.b32 %1, [{address} + {second}]; ld.shared.b32 %2, [{address} + {third}]; ld.shared.b32 %3, [{address} + {fourth}];",
        address = in(_) address, numbers = out(_) numbers
    );
    by_value::<Registers>(numbers)
}

#[cfg(test)]
mod tests {
    use super::super::fragment::pitch;
    use half::bf16;

    /// Lanes that read rows `2 (l % 4)` and columns `l / 4` touch every bank once.
    #[test]
    fn no_two_numbers_of_a_load_share_a_bank() {
        for dim in 1..=256 {
            let banks = (0..32).fold(0_u32, |seen, lane| {
                let word = lane % 4 * 2 * 4 * pitch(2 * dim) + lane / 4;
                seen | 1 << (word % 32)
            });
            assert_eq!(banks, u32::MAX, "{dim}");
        }
    }

    /// The arithmetic of `parts`, on the host: nothing of a number is lost.
    #[test]
    fn three_parts_are_the_whole_number() {
        let mut bits = 0x3F80_0001_u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = f32::from_bits(bits);
            // The lowest part of smaller numbers is below the smallest of all.
            if !number.is_finite() || number.abs() < 1e-30 {
                continue;
            }
            let high = f32::from_bits(bits & 0xFFFF_0000);
            let rest = number - high;
            let middle = bf16::from_f32(rest).to_f32();
            let low = rest - middle;
            assert_eq!(low.to_bits() & 0xFFFF, 0, "{number:e}");
            assert_eq!(
                f64::from(high) + f64::from(middle) + f64::from(low),
                f64::from(number)
            );
        }
    }
}
