//! Products of blocks whose operands lie in shared memory, and of weights in registers: of 16-bit numbers by
//! the `m16n8k16` product, of `f32` by what [`super::split`] or [`super::tf32`] makes of it.

use super::fragment::{
    Accumulator, Chunk, Place, Registers, chunks, load_block, multiply_block, pitch, zeros,
};
use super::instructions::{Instructions, by_value, round_pair};
use super::split_products::{add_split_rows, split_dot_products};
use super::tf32::{add_tf32_rows, as_operand, tf32_dot_products};
use cubecl::prelude::*;

/// `A B^T` over features: rows of both operands lie in shared memory. The result is
/// `row_tiles x column_tiles` accumulators.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn dot_products<E: Float>(
    a: &Shared<[Chunk<E>]>,
    a_place: Place,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) -> Sequence<Accumulator> {
    let mut out = zeros(comptime!(row_tiles * column_tiles));
    let pitch = comptime!(pitch(dim));
    let steps = comptime!(if instructions.numbers() {
        0
    } else {
        dim.div_ceil(16)
    });
    if comptime!(instructions.splits()) {
        split_dot_products(
            &mut out,
            a,
            a_place,
            b_place,
            row_tiles,
            column_tiles,
            dim,
            instructions,
        );
    } else if comptime!(instructions.numbers()) {
        tf32_dot_products(
            &mut out,
            a,
            a_place,
            b_place,
            row_tiles,
            column_tiles,
            dim,
            instructions,
        );
    }
    #[unroll]
    for k in 0..steps {
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..row_tiles {
            rows.push(load_block(
                a,
                a_place,
                comptime!(r * 16 * pitch + 2 * k),
                false,
                instructions,
            ));
        }
        #[unroll]
        for n in 0..comptime!(column_tiles / 2) {
            let columns = load_block(
                b,
                b_place,
                comptime!(n * 16 * pitch + 2 * k),
                false,
                instructions,
            );
            #[unroll]
            for r in 0..row_tiles {
                multiply_block::<E>(
                    &mut out,
                    *rows.index(r),
                    columns,
                    comptime!(r * column_tiles + 2 * n),
                    instructions,
                );
            }
        }
    }
    out
}

/// Sums of an earlier product as the left operand of the next, rounded to the input type:
/// `row_tiles x weight_tiles / 2` fragments, or one of each accumulator where operands are `f32`.
///
/// Two accumulators side by side hold what the four registers of an `A` fragment hold: nothing
/// moves between lanes.
#[cube]
pub(crate) fn as_weights<E: Float>(
    sums: &Sequence<Accumulator>,
    #[comptime] row_tiles: usize,
    #[comptime] weight_tiles: usize,
    #[comptime] instructions: Instructions,
) -> Sequence<Registers> {
    let mut weights = Sequence::<Registers>::new();
    #[unroll]
    for r in 0..row_tiles {
        #[unroll]
        for k in 0..comptime!(weight_tiles / 2) {
            if comptime!(instructions.numbers()) {
                #[unroll]
                for step in 0..2usize {
                    let tile = sums.index(comptime!(r * weight_tiles + 2 * k + step));
                    weights.push(as_operand(tile[0], tile[1], instructions));
                }
            } else {
                let mut registers = Registers::new(0u32);
                #[unroll]
                for n in 0..4usize {
                    let tile = sums.index(comptime!(r * weight_tiles + 2 * k + n / 2));
                    registers.insert(n, round_pair::<E>(tile[comptime!(n % 2)], instructions));
                }
                weights.push(by_value::<Registers>(registers));
            }
        }
    }
    weights
}

/// `out += W B`: the weights are [`as_weights`], the rows of `b` are summed over.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn weighted_sum<E: Float>(
    out: &mut Sequence<Accumulator>,
    weights: &Sequence<Registers>,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] weight_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) {
    #[unroll]
    for k in 0..comptime!(weight_tiles / 2) {
        let mut rows = Sequence::<Registers>::new();
        #[unroll]
        for r in 0..row_tiles {
            let each = comptime!(instructions.fragments());
            #[unroll]
            for step in 0..each {
                let at = comptime!((r * (weight_tiles / 2) + k) * each + step);
                rows.push(*weights.index(at));
            }
        }
        add_weighted_rows(out, &rows, b, b_place, row_tiles, k, dim, instructions);
    }
}

/// The part of [`weighted_sum`] of rows `16 k .. 16 k + 16`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_weighted_rows<E: Float>(
    out: &mut Sequence<Accumulator>,
    rows: &Sequence<Registers>,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] row_tiles: usize,
    #[comptime] k: usize,
    #[comptime] dim: usize,
    #[comptime] instructions: Instructions,
) {
    if comptime!(instructions.splits()) {
        add_split_rows(out, rows, b_place, row_tiles, k, dim, instructions);
    } else if comptime!(instructions.numbers()) {
        add_tf32_rows(out, rows, b_place, row_tiles, k, dim, instructions);
    } else {
        add_columns::<E>(
            out,
            rows,
            b,
            b_place,
            comptime!(k * 16 * pitch(dim)),
            row_tiles,
            comptime!(chunks(dim)),
            instructions,
        );
    }
}

/// `out += W B` for 16 rows of `b`, `first` chunks from the lane's place: the first `column_tiles` tiles
/// of their features from there.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_columns<E: Float>(
    out: &mut Sequence<Accumulator>,
    rows: &Sequence<Registers>,
    b: &Shared<[Chunk<E>]>,
    b_place: Place,
    #[comptime] first: usize,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] instructions: Instructions,
) {
    #[unroll]
    for n in 0..comptime!(column_tiles / 2) {
        let columns = load_block(b, b_place, comptime!(first + 2 * n), true, instructions);
        #[unroll]
        for r in 0..row_tiles {
            multiply_block::<E>(
                out,
                *rows.index(r),
                columns,
                comptime!(r * column_tiles + 2 * n),
                instructions,
            );
        }
    }
}
