//! Register fragments of the `m16n8k16` product: how they are loaded from shared tiles and
//! multiplied.
//!
//! A tile in shared memory is a row-major matrix of 16-byte chunks whose pitch is odd, so that the
//! eight rows which `ldmatrix` reads together always lie in eight different groups of banks.
//! Every offset but one base a lane and tile is a constant.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// Two neighbouring elements, one register of a 16-bit operand.
pub(crate) type Pair<E> = Vector<E, Const<2>>;
/// Eight neighbouring 16-bit elements: what one lane loads, and one row of an `ldmatrix` matrix.
pub(crate) type Chunk<E> = Vector<E, Const<8>>;
/// A 16 x 8 tile of sums: lane `l` holds columns `2 (l % 4)` and the next, of rows `l / 4` (first
/// pair) and `l / 4 + 8` (second pair).
pub(crate) type Accumulator = Array<Pair<f32>>;

/// Elements of a chunk.
pub(crate) const CHUNK: usize = 8;

/// Chunks of a row of `dim` features, padded to whole products.
pub(crate) const fn chunks(dim: usize) -> usize {
    2 * dim.div_ceil(16)
}

/// Distance of two rows of a shared tile, in chunks; odd.
pub(crate) const fn pitch(dim: usize) -> usize {
    chunks(dim) + 1
}

/// The row and chunk that a lane addresses in a 16 x 16 block, for an operand whose rows are the
/// rows of `A`, or the rows summed over in `B` (loaded transposed).
pub(crate) const fn lane_along_rows(lane: usize) -> (usize, usize) {
    (lane % 16, lane / 16)
}

/// The row and chunk that a lane addresses in a 16 x 16 block of an operand whose rows are the
/// columns of `B`.
pub(crate) const fn lane_along_columns(lane: usize) -> (usize, usize) {
    (lane % 8 + lane / 16 * 8, lane / 8 % 2)
}

/// Base of a lane for [`lane_along_rows`], in a tile from row `first` on.
#[cube]
pub(crate) fn base_along_rows(first: usize, #[comptime] pitch: usize) -> usize {
    let lane = UNIT_POS_PLANE as usize;
    (first + lane % 16) * pitch + lane / 16
}

/// Base of a lane for [`lane_along_columns`].
#[cube]
pub(crate) fn base_along_columns(first: usize, #[comptime] pitch: usize) -> usize {
    let lane = UNIT_POS_PLANE as usize;
    (first + lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2
}

/// A 16 x 16 block: the four registers of an `A` fragment, or of two `B` fragments side by side.
#[cube]
pub(crate) fn load_block<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    base: usize,
    #[comptime] offset: usize,
    #[comptime] transpose: bool,
) -> Array<Pair<E>> {
    let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let at = base + offset;
    definition.load_matrix::<Chunk<E>, Const<2>>(
        &tile[at..at + 1],
        MatrixIdent::A,
        4usize,
        transpose,
    )
}

/// Adds `a b` to two neighbouring accumulators; `b` holds two `B` fragments.
#[cube]
fn multiply_block<E: Float>(
    out: &mut Sequence<Accumulator>,
    a: &Array<Pair<E>>,
    b: &Array<Pair<E>>,
    #[comptime] index: usize,
) {
    let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let mut left = Array::<Pair<E>>::new(2usize);
    left[0] = b[0];
    left[1] = b[1];
    let mut right = Array::<Pair<E>>::new(2usize);
    right[0] = b[2];
    right[1] = b[3];
    definition.execute_inplace(a, &left, out.index_mut(index));
    definition.execute_inplace(a, &right, out.index_mut(comptime!(index + 1)));
}

/// `count` accumulators of 0.
#[cube]
pub(crate) fn zeros(#[comptime] count: usize) -> Sequence<Accumulator> {
    let mut out = Sequence::<Accumulator>::new();
    #[unroll]
    for _ in 0..count {
        let mut tile = Array::<Pair<f32>>::new(2usize);
        tile[0] = Pair::new(0.0f32);
        tile[1] = Pair::new(0.0f32);
        out.push(tile);
    }
    out
}

/// `A B^T` over features: rows of both operands lie in shared memory. The result is
/// `row_tiles x column_tiles` accumulators.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn dot_products<E: Float>(
    a: &Shared<[Chunk<E>]>,
    a_base: usize,
    b: &Shared<[Chunk<E>]>,
    b_base: usize,
    #[comptime] row_tiles: usize,
    #[comptime] column_tiles: usize,
    #[comptime] dim: usize,
) -> Sequence<Accumulator> {
    let mut out = zeros(comptime!(row_tiles * column_tiles));
    let pitch = comptime!(pitch(dim));
    #[unroll]
    for k in 0..comptime!(dim.div_ceil(16)) {
        let mut rows = Sequence::<Array<Pair<E>>>::new();
        #[unroll]
        for r in 0..row_tiles {
            rows.push(load_block(
                a,
                a_base,
                comptime!(r * 16 * pitch + 2 * k),
                false,
            ));
        }
        #[unroll]
        for n in 0..comptime!(column_tiles / 2) {
            let columns = load_block(b, b_base, comptime!(n * 16 * pitch + 2 * k), false);
            #[unroll]
            for r in 0..row_tiles {
                multiply_block(
                    &mut out,
                    rows.index(r),
                    &columns,
                    comptime!(r * column_tiles + 2 * n),
                );
            }
        }
    }
    out
}

/// `out += W B`: the weights are accumulators of an earlier product, rounded to the input type
/// here, and the rows of `b` are summed over.
///
/// Two accumulators side by side hold what four registers of an `A` fragment hold: weights never
/// leave the registers.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn weighted_sum<E: Float>(
    out: &mut Sequence<Accumulator>,
    weights: &Sequence<Accumulator>,
    b: &Shared<[Chunk<E>]>,
    b_base: usize,
    #[comptime] row_tiles: usize,
    #[comptime] weight_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] rounding: Rounding,
) {
    let pitch = comptime!(pitch(dim));
    let column_tiles = comptime!(chunks(dim));
    #[unroll]
    for k in 0..comptime!(weight_tiles / 2) {
        let mut rows = Sequence::<Array<Pair<E>>>::new();
        #[unroll]
        for r in 0..row_tiles {
            let left = weights.index(comptime!(r * weight_tiles + 2 * k));
            let right = weights.index(comptime!(r * weight_tiles + 2 * k + 1));
            let mut fragment = Array::<Pair<E>>::new(4usize);
            fragment[0] = round_pair::<E>(left[0], rounding);
            fragment[1] = round_pair::<E>(left[1], rounding);
            fragment[2] = round_pair::<E>(right[0], rounding);
            fragment[3] = round_pair::<E>(right[1], rounding);
            rows.push(fragment);
        }
        #[unroll]
        for n in 0..comptime!(column_tiles / 2) {
            let columns = load_block(b, b_base, comptime!(k * 16 * pitch + 2 * n), true);
            #[unroll]
            for r in 0..row_tiles {
                multiply_block(
                    out,
                    rows.index(r),
                    &columns,
                    comptime!(r * column_tiles + 2 * n),
                );
            }
        }
    }
}

/// How two `f32` become a pair of the input type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Rounding {
    /// The generator's own conversion.
    Cast,
    /// One instruction for both, to `f16`.
    PackedF16,
    /// One instruction for both, to `bf16`.
    PackedBF16,
}

impl Rounding {
    const fn instruction(self) -> &'static str {
        match self {
            Rounding::PackedF16 => "cvt.rn.f16x2.f32",
            Rounding::PackedBF16 | Rounding::Cast => "cvt.rn.bf16x2.f32",
        }
    }
}

/// Rounds to the nearest pair of the input type.
#[cube]
pub(crate) fn round_pair<E: Float>(x: Pair<f32>, #[comptime] rounding: Rounding) -> Pair<E> {
    if comptime!(rounding == Rounding::Cast) {
        Pair::<E>::cast_from(x)
    } else {
        let instruction = comptime!(rounding.instruction());
        let low = by_value::<f32>(x.extract(0usize));
        let high = by_value::<f32>(x.extract(1usize));
        let packed: u32;
        gpu_asm!(
            "{instruction} {packed}, {high}, {low};",
            low = in(_) low, high = in(_) high, packed = out(_) packed, options(pure, nomem)
        );
        Pair::<E>::reinterpret(by_value::<u32>(packed))
    }
}

/// The value of a variable: assembly text takes a mutable variable by its address.
#[cube]
pub(crate) fn by_value<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| x.read_value(scope).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of 16 bytes that a phase of eight lanes touches, of the eight that the banks have.
    fn groups(lanes: std::ops::Range<usize>, pitch: usize, at: fn(usize) -> (usize, usize)) -> u32 {
        lanes.fold(0, |seen, lane| {
            let (row, chunk) = at(lane);
            seen | 1 << ((row * pitch + chunk) % 8)
        })
    }

    /// `ldmatrix` reads eight rows at a time: a conflict would halve its rate.
    #[test]
    fn no_two_rows_of_a_matrix_share_banks() {
        for dim in 1..=256 {
            for first in [0, 8, 16, 24] {
                let lanes = first..first + 8;
                assert_eq!(groups(lanes.clone(), pitch(dim), lane_along_rows), 0xFF);
                assert_eq!(groups(lanes, pitch(dim), lane_along_columns), 0xFF);
            }
        }
    }

    /// Each of the 16 rows and both chunks of a block are addressed exactly once.
    #[test]
    fn the_lanes_address_a_whole_block() {
        for at in [lane_along_rows, lane_along_columns] {
            let mut seen = [[false; 2]; 16];
            for lane in 0..32 {
                let (row, chunk) = at(lane);
                assert!(!seen[row][chunk]);
                seen[row][chunk] = true;
            }
        }
    }

    /// Matrix `m` of four goes to register `m` of every lane. An `A` fragment wants rows 0..8 and
    /// 8..16 of the first eight features, then of the next; two `B` fragments want both halves of
    /// the features of columns 0..8, then of columns 8..16.
    #[test]
    fn matrices_come_in_the_order_of_the_registers() {
        let a = [(0, 0), (8, 0), (0, 1), (8, 1)];
        let b = [(0, 0), (0, 1), (8, 0), (8, 1)];
        for matrix in 0..4 {
            assert_eq!(lane_along_rows(8 * matrix), a[matrix]);
            assert_eq!(lane_along_columns(8 * matrix), b[matrix]);
        }
    }
}
