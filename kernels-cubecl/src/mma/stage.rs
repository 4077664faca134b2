//! Rows of an operand from global to shared memory, 16 bytes a lane and step.
//!
//! Three ways, one interface: [`issue`] starts a tile on its way and [`land`] completes it.
//! With asynchronous copies the tile goes straight to shared memory; with `prefetch` it waits in
//! registers until its place is free; else [`land`] does all of it.
//!
//! Where a tile of `f32` is rounded to TF32, each unit rounds the chunks that it has copied, before others
//! read them.

use super::fragment::{CHUNK, Chunk, Registers, chunks, pitch};
use super::instructions::{by_value, shared_address};
use super::tf32::{Ties, rounded_numbers};
use crate::unit::unit;
use cubecl::prelude::*;

/// Rows of one head of a `[batch, heads, rows, features]` operand.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rows {
    /// Offset of the head's first element.
    pub base: usize,
    /// Distance of two rows.
    pub stride: usize,
    /// Distance of two features.
    pub step: usize,
    /// Rows it has.
    pub count: i32,
}

/// The rows of `batch`, `head`.
#[cube]
pub(crate) fn rows_of<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    batch: usize,
    head: usize,
    count: i32,
) -> Rows {
    Rows {
        base: batch * x.stride(0) + head * x.stride(1),
        stride: x.stride(2),
        step: x.stride(3),
        count,
    }
}

/// How a tile of rows is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Staging {
    /// Rows of the tile.
    pub rows: usize,
    /// Features of a row.
    pub dim: usize,
    /// Units that stage it.
    pub units: usize,
    /// Elements of a load.
    pub vector: usize,
    /// Whether elements are the halves of `f32` numbers, which stay together.
    pub halved: bool,
    /// Whether registers are scarce.
    pub crowded: bool,
    /// Whether, and how, `f32` numbers are rounded to TF32.
    pub tf32: Option<Ties>,
    /// By asynchronous copies.
    pub asynchronous: bool,
    /// Through registers, ahead of time.
    pub prefetch: bool,
}

impl Staging {
    /// The same, without a stop in registers: for a tile that is staged once.
    const fn direct(mut self) -> Self {
        self.prefetch = false;
        self
    }

    /// The same, where registers are scarce: rows that are no power of two of chunks take more of them.
    pub(crate) const fn crowded(mut self, assembly: bool) -> Self {
        self.crowded |= assembly;
        self.prefetch &= chunks(self.dim).is_power_of_two();
        self
    }

    /// The same, for numbers that are rounded later.
    pub(crate) const fn unrounded(mut self) -> Self {
        self.tf32 = None;
        self
    }

    /// Chunks of the tile.
    pub(crate) const fn chunks(&self) -> usize {
        self.rows * chunks(self.dim)
    }

    /// Features of a row, whole.
    pub(crate) const fn features(&self) -> usize {
        if self.halved { self.dim / 2 } else { self.dim }
    }

    /// Tiles of eight features that the sums over its rows have.
    pub(crate) const fn tiles(&self) -> usize {
        if self.halved {
            self.features().div_ceil(8)
        } else {
            chunks(self.dim)
        }
    }

    /// Chunks of a unit.
    pub(crate) const fn steps(&self) -> usize {
        self.chunks().div_ceil(self.units)
    }

    /// Chunks that wait in registers.
    pub(crate) const fn pending(&self) -> usize {
        if self.prefetch && !self.asynchronous {
            self.steps()
        } else {
            1
        }
    }
}

/// Eight features of a row; 0 past the last row and past the last feature, so that memory outside
/// the operand is never read.
#[cube]
fn load_chunk<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    row: i32,
    chunk: usize,
    #[comptime] staging: Staging,
) -> Chunk<E> {
    let dim = comptime!(staging.dim);
    let vector = comptime!(staging.vector);
    let mut loaded = Chunk::<E>::new(E::from_int(0));
    let first = chunk * CHUNK;
    if row < rows.count && first < dim {
        let at = rows.base + row as usize * rows.stride;
        #[unroll]
        for part in 0..comptime!(CHUNK / vector) {
            let feature = first + comptime!(part * vector);
            // A whole number of vectors is checked by the first test already.
            if comptime!(vector == CHUNK) || feature < dim {
                if comptime!(vector == 1) {
                    loaded.insert(part, x[at + feature * rows.step].extract(0usize));
                } else {
                    let mut place = feature;
                    if comptime!(staging.halved && vector == 2) {
                        place = feature / 2 * rows.step;
                    }
                    let read = x[(at + place) / vector];
                    #[unroll]
                    for e in 0..vector {
                        loaded.insert(comptime!(part * vector + e), read.extract(e));
                    }
                }
            }
        }
    }
    loaded
}

/// Starts rows `first_row ..` on their way to `tile`, from its chunk `slot` on.
#[cube]
pub(crate) fn issue<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    tile: &mut Shared<[Chunk<E>]>,
    slot: usize,
    pending: &mut Array<Chunk<E>>,
    #[comptime] staging: Staging,
) {
    if comptime!(staging.asynchronous) {
        // A unit keeps its column: one address, and constant distances from it. Where rows are no
        // power of two of chunks, the last units have none.
        let width = comptime!(chunks(staging.dim));
        let step = comptime!(staging.units / width);
        let unit = unit(staging.crowded) as usize;
        let row = unit / width;
        let chunk = unit % width;
        if comptime!(staging.units.is_multiple_of(width)) || row < step {
            let in_row = comptime!(staging.dim.is_multiple_of(16)) || chunk * CHUNK < staging.dim;
            let first = first_row + row as i32;
            let from = rows.base + chunk * CHUNK;
            let to = slot + row * comptime!(pitch(staging.dim)) + chunk;
            let to = shared_address::<Chunk<E>>(tile[to..to + 1].as_ptr());
            #[unroll]
            for n in 0..comptime!(staging.rows.div_ceil(step)) {
                if comptime!((n + 1) * step <= staging.rows)
                    || row < comptime!(staging.rows - n * step)
                {
                    let i = first + comptime!((n * step) as i32);
                    let inside = in_row && i < rows.count;
                    // The choice comes before the product, or compilers take the products of stride
                    // and distance out of the loop over blocks, and keep a register for each.
                    let i = select(inside, i, 0i32) as usize;
                    copy_chunk::<E, N>(
                        x,
                        select(in_row, from + i * rows.stride, rows.base),
                        to,
                        comptime!(n * step * pitch(staging.dim) * 16),
                        inside,
                    );
                }
            }
        }
        gpu_asm!("cp.async.commit_group;");
    } else if comptime!(staging.prefetch) {
        #[unroll]
        for n in 0..comptime!(staging.steps()) {
            pending[n] = own_chunk(x, rows, first_row, n, staging);
        }
    }
}

/// Completes what [`issue`] started. The tile has to be free, and a `sync_cube` has to follow before it
/// is read.
#[cube]
pub(crate) fn land<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    tile: &mut Shared<[Chunk<E>]>,
    slot: usize,
    pending: &Array<Chunk<E>>,
    #[comptime] staging: Staging,
) {
    if comptime!(staging.asynchronous) {
        gpu_asm!("cp.async.wait_group 0;");
        round_landed(tile, slot, staging);
    } else if comptime!(staging.vector < CHUNK) {
        let width = comptime!(chunks(staging.dim));
        // Of an unknown number of steps: compilers would unroll them, and have the elements of all chunks on
        // their way at once.
        for index in range_stepped(UNIT_POS as usize, staging.chunks(), staging.units) {
            let (row, chunk) = (index / width, index % width);
            let to = slot + row * comptime!(pitch(staging.dim)) + chunk;
            let loaded = load_chunk(x, rows, first_row + row as i32, chunk, staging);
            tile[to] = round_chunk(loaded, staging.tf32);
        }
    } else {
        let width = comptime!(chunks(staging.dim));
        #[unroll]
        for n in 0..comptime!(staging.steps()) {
            let index = n * staging.units + UNIT_POS as usize;
            if comptime!(staging.chunks().is_multiple_of(staging.units))
                || index < comptime!(staging.chunks())
            {
                let to = slot + index / width * comptime!(pitch(staging.dim)) + index % width;
                let chunk = if comptime!(staging.prefetch) {
                    pending[n]
                } else {
                    own_chunk(x, rows, first_row, n, staging)
                };
                tile[to] = round_chunk(chunk, staging.tf32);
            }
        }
    }
}

/// Stages a tile whose place is free from the start: asynchronous copies complete with the next
/// [`land`] or [`await_copies`].
#[cube]
pub(crate) fn stage_first<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    tile: &mut Shared<[Chunk<E>]>,
    pending: &mut Array<Chunk<E>>,
    #[comptime] staging: Staging,
) {
    let direct = comptime!(staging.direct());
    issue(x, rows, first_row, tile, 0usize, pending, direct);
    if comptime!(!staging.asynchronous) {
        land(x, rows, first_row, tile, 0usize, &*pending, direct);
    }
}

/// Waits for the unit's asynchronous copies, if any are still on their way.
#[cube]
pub(crate) fn await_copies(#[comptime] staging: Staging) {
    if comptime!(staging.asynchronous) {
        gpu_asm!("cp.async.wait_group 0;");
    }
}

/// Completes what [`stage_first`] started where its numbers are rounded; a `sync_cube` has to follow.
#[cube]
pub(crate) fn round_first<E: Float>(tile: &mut Shared<[Chunk<E>]>, #[comptime] staging: Staging) {
    if comptime!(staging.asynchronous && staging.tf32.is_some()) {
        await_copies(staging);
        round_landed(tile, 0usize, staging);
    }
}

/// Rounds the numbers that the unit has copied to a tile from its chunk `slot` on, if they are to be
/// rounded. They have landed; a `sync_cube` has to follow.
#[cube]
fn round_landed<E: Float>(
    tile: &mut Shared<[Chunk<E>]>,
    slot: usize,
    #[comptime] staging: Staging,
) {
    if comptime!(staging.asynchronous && staging.tf32.is_some()) {
        // The chunks of `issue`.
        let width = comptime!(chunks(staging.dim));
        let step = comptime!(staging.units / width);
        let distance = comptime!(step * pitch(staging.dim));
        let whole = comptime!(staging.rows.is_multiple_of(AT_ONCE * step));
        let row = UNIT_POS as usize / width;
        let chunk = UNIT_POS as usize % width;
        let first = slot + row * comptime!(pitch(staging.dim)) + chunk;
        let end = slot + comptime!(staging.rows * pitch(staging.dim));
        if comptime!(staging.units.is_multiple_of(width)) || row < step {
            // Some loads on their way at once, and of an unknown number of steps: compilers would
            // unroll all of them.
            for at in range_stepped(first, end, comptime!(AT_ONCE * distance)) {
                let mut loaded = Sequence::<Chunk<E>>::new();
                #[unroll]
                for n in 0..AT_ONCE {
                    let mut at = at + comptime!(n * distance);
                    if comptime!(!whole && n > 0) {
                        at = select(at < end, at, first);
                    }
                    loaded.push(tile[at]);
                }
                #[unroll]
                for n in 0..AT_ONCE {
                    let at = at + comptime!(n * distance);
                    if comptime!(whole || n == 0) || at < end {
                        tile[at] = round_chunk(*loaded.index(n), staging.tf32);
                    }
                }
            }
        }
    }
}

/// Chunks that a unit rounds at once.
const AT_ONCE: usize = 4;

/// Four numbers rounded to TF32, or a chunk as it is.
#[cube]
fn round_chunk<E: Float>(chunk: Chunk<E>, #[comptime] tf32: Option<Ties>) -> Chunk<E> {
    if comptime!(tf32.is_some()) {
        let numbers = Registers::reinterpret(chunk);
        Chunk::<E>::reinterpret(rounded_numbers(numbers, comptime!(tf32.unwrap())))
    } else {
        chunk
    }
}

/// The unit's chunk `n` of a tile; 0 where the unit has none.
#[cube]
fn own_chunk<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    #[comptime] n: usize,
    #[comptime] staging: Staging,
) -> Chunk<E> {
    let width = comptime!(chunks(staging.dim));
    let index = comptime!(n * staging.units) + UNIT_POS as usize;
    load_chunk(
        x,
        rows,
        first_row + (index / width) as i32,
        index % width,
        staging,
    )
}

/// Copies the chunk at `from` without waiting, or 0 where it is not inside: then nothing is read, and
/// the address only has to lie in the operand.
#[cube]
fn copy_chunk<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    from: usize,
    to: u32,
    #[comptime] offset: usize,
    inside: bool,
) {
    let at = from / CHUNK;
    let from = x.as_slice()[at..at + 1].as_ptr();
    let to = by_value::<u32>(to);
    let bytes = by_value::<u32>(select(inside, 16u32, 0u32));
    gpu_asm!(
        "cp.async.cg.shared::cta.global [{to} + {offset}], [{from}], 16, {bytes};",
        to = in(_) to, from = in(_) from, bytes = in(_) bytes
    );
}
