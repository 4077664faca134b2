//! From a warp's registers to rows of a packed result, through shared memory.

use super::config::Config;
use super::fragment::{Accumulator, CHUNK, Chunk, Pair, pitch};
use super::instructions::round_pair;
use cubecl::prelude::*;

/// Writes the warp's accumulators to a shared tile, in the input type.
#[cube]
pub(crate) fn share_rows<E: Float>(
    out: &Sequence<Accumulator>,
    tile: &mut Shared<[Chunk<E>]>,
    first: usize,
    #[comptime] row_tiles: usize,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let lane = UNIT_POS_PLANE as usize;
    let pairs = tile.as_mut_slice().with_vector_size_mut::<Const<2>>();
    let tiles = comptime!(config.tiles(dim));
    #[unroll]
    for r in 0..row_tiles {
        #[unroll]
        for half in 0..2usize {
            let row = first + comptime!(16 * r + 8 * half) + lane / 4;
            let at = row * comptime!(4 * config.pitch(dim));
            #[unroll]
            for n in 0..tiles {
                let pair = out.index(comptime!(r * tiles + n))[half];
                if comptime!(config.halved()) {
                    #[unroll]
                    for c in 0..2usize {
                        let word = u32::reinterpret(pair.extract(c));
                        pairs[at + lane % 4 * 2 + comptime!(8 * n + c)] =
                            Pair::<E>::reinterpret(word);
                    }
                } else {
                    pairs[at + lane % 4 + comptime!(4 * n)] =
                        Pair::<E>::reinterpret(round_pair::<E>(pair, config.instructions()));
                }
            }
        }
    }
}

/// Writes the rows of a shared tile to a packed result, as far as there are rows and features.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn store_rows<E: Float, N: Size>(
    tile: &Shared<[Chunk<E>]>,
    result: &mut [Vector<E, N>],
    first_row: usize,
    first: i32,
    count: i32,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let dim = comptime!(config.staged(dim));
    let width = comptime!(dim.div_ceil(CHUNK));
    let units = comptime!(config.blocks.units());
    let vector = comptime!(config.vector);
    for n in 0..comptime!((rows * width).div_ceil(units)) {
        let index = n * units + UNIT_POS as usize;
        let row = index / width;
        let chunk = index % width;
        let i = first + row as i32;
        if index < comptime!(rows * width) && i < count {
            let read = tile[row * comptime!(pitch(dim)) + chunk];
            let at = (first_row + i as usize) * dim + chunk * CHUNK;
            #[unroll]
            for part in 0..comptime!(CHUNK / vector) {
                if comptime!(vector == CHUNK) || chunk * CHUNK + comptime!(part * vector) < dim {
                    let mut written = Vector::<E, N>::new(E::from_int(0));
                    #[unroll]
                    for e in 0..vector {
                        written.insert(e, read.extract(comptime!(part * vector + e)));
                    }
                    result[at / vector + part] = written;
                }
            }
        }
    }
}
