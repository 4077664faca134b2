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

use super::fragment::{Accumulator, Pair, Registers, half_of};
use super::instructions::by_value;
use cubecl::prelude::*;

/// The parts of a left operand over 16 elements: four registers each, of two `bf16`.
#[derive(CubeType)]
pub(super) struct Left {
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
pub(super) fn no_left() -> Left {
    Left {
        high: Sequence::new(),
        middle: Sequence::new(),
        low: Sequence::new(),
    }
}

/// Takes a left operand apart: 16 rows of 8 elements, and of 8 more. Registers 0 and 2 of each are
/// of row `l / 4`, the others of row `l / 4 + 8`.
#[cube]
pub(super) fn push_left(left: &mut Left, first: Registers, second: Registers) {
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
pub(super) fn right(numbers: Registers) -> Right {
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
pub(super) fn add_products(
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
        tile[half] += half_of(sums, half);
    }
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
