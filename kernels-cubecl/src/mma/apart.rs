//! Walked rows of `f32` in parts in shared memory, taken apart once for all warps of a cube.
//!
//! A warp that takes its right operands apart by itself repeats what every other warp of the cube does,
//! and repeats it for the product that sums over the rows. Here the rows land whole in one place, all
//! warps take them apart into another, and both products load the parts by `ldmatrix`, as they would
//! load rows of `bf16`, while the next rows land.
//!
//! A row in parts is `high` of all its features, then `middle`, then `low`, each padded with zeros to a
//! multiple of 16. Its features lie in their order, two to a register. The owned rows, left operands,
//! stay whole: what two neighbouring chunks have at the same place becomes a pair, so the even ones of
//! eight features are put into one chunk and the odd ones into the next, once.

use super::fragment::{Chunk, Pair, Place, Registers, chunks, load_by_assembly, pitch};
use super::instructions::by_value;
use super::split::{Right, parts};
use super::split_products::load_numbers;
use crate::unit::unit_again;
use cubecl::prelude::*;

/// Staged elements of a row of `dim` features in parts.
pub(crate) const fn in_parts(dim: usize) -> usize {
    3 * 16 * dim.div_ceil(16)
}

/// Takes the rows at `landing` of a tile apart, to its beginning. A `sync_cube` has to come before, and
/// another one to follow.
#[cube]
pub(crate) fn take_apart<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    #[comptime] landing: usize,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] units: usize,
) {
    let width = comptime!(chunks(dim));
    let whole = comptime!(chunks(2 * dim));
    // Neighbouring units have neighbouring rows: an odd pitch spreads them over the banks.
    let unit = unit_again() as usize;
    let row = unit % rows;
    let first_chunk = unit / rows;
    let step = comptime!(units / rows);
    #[unroll]
    for n in 0..comptime!(width.div_ceil(step)) {
        let chunk = first_chunk + n * step;
        if comptime!(width.is_multiple_of(step)) || chunk < width {
            let from = landing + row * comptime!(pitch(2 * dim)) + 2 * chunk;
            let mut first = Registers::new(0u32);
            let mut second = Registers::new(0u32);
            if comptime!(2 * width == whole) || 2 * chunk < whole {
                first = Registers::reinterpret(tile[from]);
                second = Registers::reinterpret(tile[from + 1]);
            }
            let mut high = Registers::new(0u32);
            let mut middle = Registers::new(0u32);
            let mut low = Registers::new(0u32);
            #[unroll]
            for pair in 0..4usize {
                let numbers = if comptime!(pair < 2) { first } else { second };
                let at = comptime!(2 * (pair % 2));
                let (h, m, l) = parts(numbers.extract(at), numbers.extract(comptime!(at + 1)));
                high.insert(pair, h);
                middle.insert(pair, m);
                low.insert(pair, l);
            }
            let to = row * comptime!(pitch(in_parts(dim))) + chunk;
            tile[to] = Chunk::<E>::reinterpret(high);
            tile[to + width] = Chunk::<E>::reinterpret(middle);
            tile[to + comptime!(2 * width)] = Chunk::<E>::reinterpret(low);
        }
    }
}

/// Puts the even ones of each eight features of whole rows into one chunk, and the odd ones into the next.
/// A `sync_cube` has to come before, and another one to follow.
#[cube]
pub(crate) fn pair_up<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] units: usize,
) {
    for index in range_stepped(UNIT_POS as usize, comptime!(rows * dim.div_ceil(8)), units) {
        let at = index % rows * comptime!(pitch(2 * dim)) + 2 * (index / rows);
        let first = Registers::reinterpret(tile[at]);
        let second = Registers::reinterpret(tile[at + 1]);
        let mut even = Registers::new(0u32);
        let mut odd = Registers::new(0u32);
        #[unroll]
        for n in 0..4usize {
            let numbers = if comptime!(n < 2) { first } else { second };
            even.insert(n, numbers.extract(comptime!(2 * (n % 2))));
            odd.insert(n, numbers.extract(comptime!(2 * (n % 2) + 1)));
        }
        tile[at] = Chunk::<E>::reinterpret(even);
        tile[at + 1] = Chunk::<E>::reinterpret(odd);
    }
}

/// The parts of two right operands side by side, over 16 elements.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Columns {
    high: Registers,
    middle: Registers,
    low: Registers,
}

/// The right operands `offset` chunks from the place: eight rows and the next eight are the columns, or
/// with `transpose` eight features and the next eight.
#[cube]
pub(crate) fn load_columns(
    place: Place,
    #[comptime] offset: usize,
    #[comptime] transpose: bool,
    #[comptime] dim: usize,
) -> Columns {
    let width = comptime!(chunks(dim));
    Columns {
        high: load_by_assembly(place, offset, transpose),
        middle: load_by_assembly(place, comptime!(offset + width), transpose),
        low: load_by_assembly(place, comptime!(offset + 2 * width), transpose),
    }
}

/// One of two right operands.
#[cube]
pub(crate) fn right_of(columns: Columns, #[comptime] side: usize) -> Right {
    Right {
        high: pair_of(columns.high, side),
        middle: pair_of(columns.middle, side),
        low: pair_of(columns.low, side),
    }
}

/// One of two pairs of registers.
#[cube]
pub(crate) fn pair_of(registers: Registers, #[comptime] side: usize) -> Pair<u32> {
    let mut pair = Pair::<u32>::new(0u32);
    pair.insert(0usize, registers.extract(comptime!(2 * side)));
    pair.insert(1usize, registers.extract(comptime!(2 * side + 1)));
    by_value::<Pair<u32>>(pair)
}

/// Four numbers of the row at an address, put together again: those that a chunk of a row has after
/// [`pair_up`].
#[cube]
pub(crate) fn whole_numbers(row: u32, chunk: u32, #[comptime] dim: usize) -> Registers {
    let part = comptime!(16 * chunks(dim) as u32);
    let first = row + 16 * (chunk / 2);
    let high = load_numbers(first);
    let middle = load_numbers(first + part);
    let low = load_numbers(first + comptime!(2 * part));
    // Even features are in the lower halves.
    let shift = (1 - chunk % 2) * 16;
    let mut numbers = Registers::new(0u32);
    #[unroll]
    for n in 0..4usize {
        let high = (high.extract(n) << shift) & 0xFFFF_0000;
        let middle = (middle.extract(n) << shift) & 0xFFFF_0000;
        let low = (low.extract(n) << shift) & 0xFFFF_0000;
        // From the small ones on every sum is exact, and none is past the largest number.
        let rest = f32::reinterpret(middle) + f32::reinterpret(low);
        let whole = u32::reinterpret(f32::reinterpret(high) + rest);
        // What is left of infinity is NaN.
        let finite = (high & 0x7F80_0000) != 0x7F80_0000;
        numbers.insert(n, select(finite, whole, high));
    }
    by_value::<Registers>(numbers)
}

#[cfg(test)]
mod tests {
    use super::super::fragment::{chunks, pitch};
    use super::in_parts;
    use half::bf16;

    /// Catches padding that cuts a part off, and rows in parts whose neighbours share banks.
    #[test]
    fn rows_hold_three_parts_at_an_odd_pitch() {
        for dim in 1..=256 {
            assert_eq!(chunks(in_parts(dim)), 3 * chunks(dim));
            assert!(pitch(in_parts(dim)) % 2 == 1);
        }
    }

    /// The order of additions in `whole_numbers`, on the host: nothing is lost, and the largest number
    /// does not overflow on the way.
    #[test]
    fn parts_are_put_together_exactly() {
        let mut bits = 0x3F80_0001_u32;
        for n in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = if n == 0 {
                f32::MAX
            } else {
                f32::from_bits(bits)
            };
            // The lowest part of smaller numbers is below the smallest of all.
            if !number.is_finite() || number.abs() < 1e-30 {
                continue;
            }
            let high = f32::from_bits(number.to_bits() & 0xFFFF_0000);
            let middle = bf16::from_f32(number - high).to_f32();
            let low = number - high - middle;
            assert_eq!(high + (middle + low), number, "{number:e}");
        }
    }
}
