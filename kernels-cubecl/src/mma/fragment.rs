//! Register fragments of the `m16n8k16` product: how they are loaded from shared tiles and
//! multiplied, one block by another.
//!
//! A tile in shared memory is a row-major matrix of 16-byte chunks whose pitch is odd, so that the
//! eight rows which `ldmatrix` reads together always lie in eight different groups of banks.
//! Every offset but one base a lane and tile is a constant.

use super::instructions::{Instructions, by_value, shared_address};
use super::split_products::lane_along_split_columns;
use crate::unit::{lane, unit};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// Two neighbouring elements.
pub(crate) type Pair<E> = Vector<E, Const<2>>;
/// Eight neighbouring 16-bit elements: what one lane loads, and one row of an `ldmatrix` matrix.
pub(crate) type Chunk<E> = Vector<E, Const<8>>;
/// The four registers of an `A` fragment, or of two `B` fragments; a pair of elements each.
pub(crate) type Registers = Vector<u32, Const<4>>;
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
#[cube]
pub(crate) fn lane_along_rows(lane: usize) -> (usize, usize) {
    (lane % 16, lane / 16)
}

/// The row and chunk that a lane addresses in a 16 x 16 block of an operand whose rows are the
/// columns of `B`.
#[cube]
pub(crate) fn lane_along_columns(lane: usize) -> (usize, usize) {
    (lane % 8 + lane / 16 * 8, lane / 8 % 2)
}

/// A lane's place in a shared tile: by index, or by address where assembly text reads it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Place {
    pub index: usize,
    pub address: u32,
}

/// A lane's place at chunk `index` of a tile.
#[cube]
pub(crate) fn place<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    index: usize,
    #[comptime] instructions: Instructions,
) -> Place {
    let mut address = 0u32;
    if comptime!(instructions.assembly()) {
        address = shared_address::<Chunk<E>>(tile[index..index + 1].as_ptr());
    }
    Place { index, address }
}

/// The lane's place for [`lane_along_rows`], in a tile from row `first` on.
#[cube]
pub(crate) fn along_rows<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    first: usize,
    #[comptime] pitch: usize,
    #[comptime] again: bool,
    #[comptime] instructions: Instructions,
) -> Place {
    let (row, chunk) = lane_along_rows(lane(again) as usize);
    place(tile, (first + row) * pitch + chunk, instructions)
}

/// The lane's place for [`lane_along_columns`].
#[cube]
pub(crate) fn along_columns<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    #[comptime] pitch: usize,
    #[comptime] again: bool,
    #[comptime] instructions: Instructions,
) -> Place {
    let lane = lane(again) as usize;
    let (row, chunk) = if comptime!(instructions.whole_columns()) {
        lane_along_split_columns(lane)
    } else {
        lane_along_columns(lane)
    };
    place(tile, row * pitch + chunk, instructions)
}

/// The lane's place in a tile whose rows are summed over.
#[cube]
pub(crate) fn along_sums<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    #[comptime] pitch: usize,
    #[comptime] again: bool,
    #[comptime] instructions: Instructions,
) -> Place {
    if comptime!(instructions.whole_columns()) {
        // Rows `2 (l % 4)` and the next are those of the two columns that an accumulator has of a
        // row; features `l / 4` are the columns of `B`.
        let lane = lane(again);
        let place = place(tile, lane as usize % 4 * 2 * pitch, instructions);
        Place {
            index: place.index,
            address: place.address + lane / 4 * 4,
        }
    } else {
        along_rows(tile, 0usize, pitch, again, instructions)
    }
}

/// What a lane's place in a tile is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// [`along_rows`], from the first of so many rows of each warp on.
    Rows(usize),
    /// [`along_columns`].
    Columns,
    /// [`along_sums`].
    Sums,
}

/// `place`; where registers are scarce the same found out `again`, so that none holds it all along.
#[cube]
pub(crate) fn place_again<E: Float>(
    place: Place,
    tile: &Shared<[Chunk<E>]>,
    #[comptime] side: Side,
    #[comptime] pitch: usize,
    #[comptime] again: bool,
    #[comptime] instructions: Instructions,
) -> Place {
    if comptime!(again) {
        match comptime!(side) {
            Side::Rows(rows) => {
                let first = unit(true) as usize / 32 * rows;
                along_rows(tile, first, pitch, true, instructions)
            }
            Side::Columns => along_columns(tile, pitch, true, instructions),
            Side::Sums => along_sums(tile, pitch, true, instructions),
        }
    } else {
        place
    }
}

/// A 16 x 16 block, `offset` chunks from the lane's place: the four registers of an `A` fragment,
/// or of two `B` fragments side by side.
#[cube]
pub(crate) fn load_block<E: Float>(
    tile: &Shared<[Chunk<E>]>,
    place: Place,
    #[comptime] offset: usize,
    #[comptime] transpose: bool,
    #[comptime] instructions: Instructions,
) -> Registers {
    if comptime!(instructions.assembly()) {
        load_by_assembly(place, offset, transpose)
    } else {
        let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
        let at = place.index + offset;
        let pairs = definition.load_matrix::<Chunk<E>, Const<2>>(
            &tile[at..at + 1],
            MatrixIdent::A,
            4usize,
            transpose,
        );
        let mut registers = Registers::new(0u32);
        #[unroll]
        for n in 0..4usize {
            registers.insert(n, u32::reinterpret(pairs[n]));
        }
        registers
    }
}

/// [`load_block`] by assembly text.
#[cube]
pub(crate) fn load_by_assembly(
    place: Place,
    #[comptime] offset: usize,
    #[comptime] transpose: bool,
) -> Registers {
    let address = by_value::<u32>(place.address);
    let bytes = comptime!(16 * offset);
    let order = comptime!(if transpose { ".trans" } else { "" });
    let registers: Registers;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{order}.shared::cta.b16 {registers}, [{address} + {bytes}];",
        address = in(_) address, registers = out(_) registers
    );
    by_value::<Registers>(registers)
}

/// The place at an address.
#[cube]
pub(crate) fn at_address(place: Place, address: u32) -> Place {
    Place {
        index: place.index,
        address: by_value::<u32>(address),
    }
}

/// The place `chunks` further on.
#[cube]
pub(crate) fn further(place: Place, chunks: usize) -> Place {
    Place {
        index: place.index + chunks,
        address: place.address + 16u32 * chunks as u32,
    }
}

/// Adds `a b` to two neighbouring accumulators; `b` holds two `B` fragments.
#[cube]
pub(crate) fn multiply_block<E: Float>(
    out: &mut Sequence<Accumulator>,
    a: Registers,
    b: Registers,
    #[comptime] index: usize,
    #[comptime] instructions: Instructions,
) {
    #[unroll]
    for side in 0..2usize {
        let tile = out.index_mut(comptime!(index + side));
        let low = b.extract(comptime!(2 * side));
        let high = b.extract(comptime!(2 * side + 1));
        if comptime!(instructions.assembly()) {
            let products = multiply_by_assembly(
                by_value::<Registers>(a),
                by_value::<u32>(low),
                by_value::<u32>(high),
                sums_of(tile[0], tile[1]),
                comptime!(instructions.element()),
            );
            set_sums(tile, products);
        } else {
            let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
            let mut left = Array::<Pair<E>>::new(4usize);
            #[unroll]
            for n in 0..4usize {
                left[n] = Pair::<E>::reinterpret(a.extract(n));
            }
            let mut right = Array::<Pair<E>>::new(2usize);
            right[0] = Pair::<E>::reinterpret(low);
            right[1] = Pair::<E>::reinterpret(high);
            definition.execute_inplace(&left, &right, tile);
        }
    }
}

/// The four sums of a lane.
#[cube]
pub(crate) fn sums_of(upper: Pair<f32>, lower: Pair<f32>) -> Vector<f32, Const<4>> {
    let mut sums = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for n in 0..4usize {
        let half = if comptime!(n < 2) { upper } else { lower };
        sums.insert(n, half.extract(comptime!(n % 2)));
    }
    by_value::<Vector<f32, Const<4>>>(sums)
}

/// Replaces the four sums of a lane.
#[cube]
pub(crate) fn set_sums(tile: &mut Accumulator, sums: Vector<f32, Const<4>>) {
    #[unroll]
    for half in 0..2usize {
        tile[half] = half_of(sums, half);
    }
}

/// One half of the four sums of a lane.
#[cube]
pub(crate) fn half_of(sums: Vector<f32, Const<4>>, #[comptime] half: usize) -> Pair<f32> {
    let mut pair = Pair::<f32>::new(0.0f32);
    pair.insert(0usize, sums.extract(comptime!(2 * half)));
    pair.insert(1usize, sums.extract(comptime!(2 * half + 1)));
    pair
}

#[cube]
fn multiply_by_assembly(
    a: Registers,
    low: u32,
    high: u32,
    sums: Vector<f32, Const<4>>,
    #[comptime] element: &str,
) -> Vector<f32, Const<4>> {
    let products: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {products}, {a}, {{{low}, {high}}}, {sums};",
        a = in(_) a, low = in(_) low, high = in(_) high, sums = in(_) sums,
        products = out(_) products, options(pure, nomem)
    );
    by_value::<Vector<f32, Const<4>>>(products)
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
