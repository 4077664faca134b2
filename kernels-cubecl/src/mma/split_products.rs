//! Products of `f32` operands in parts ([`super::split`]): how the numbers are read from shared tiles, block by
//! block, and dot products that are not finite formed again.

use super::apart::{in_parts, load_columns, right_of, whole_numbers};
use super::fragment::{
    Accumulator, Chunk, Pair, Place, Registers, at_address, lane_along_columns, lane_along_rows,
    load_block, pitch,
};
use super::instructions::{Instructions, by_value};
use super::softmax::in_any_lane;
use super::split::{add_products, hold_loads, no_left, push_left, right};
use crate::unit::unit_again;
use cubecl::prelude::*;

/// Columns of a right operand that may be loaded ahead of the first product with them.
const TOGETHER: usize = 4;

/// [`dot_products`](super::products::dot_products) of operands in parts, added to `out`.
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

/// [`add_weighted_rows`](super::products::add_weighted_rows) of operands in parts: `rows` holds two
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
