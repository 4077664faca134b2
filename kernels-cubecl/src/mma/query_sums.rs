//! The query gradient on its way through global memory: sums of `f32` that every cube of a head adds to,
//! in the order in which warps hold them, and rows of the operands' type in the end.

use super::config::Config;
use super::fragment::Accumulator;
use super::fragment::Pair;
use super::instructions::{by_value, round_pair};
use super::one_pass_blueprint::OnePass;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Numbers of a tile of sums.
const TILE: usize = 16 * 8;

/// Adds a warp's tiles, of which `first` is the first number.
///
/// A tile lies as lanes hold it: four numbers of each lane together where four are added at once, else
/// one number of every lane together, so that each addition of a warp covers whole lines.
#[cube]
pub(crate) fn add_to_sums(
    sums: &[Atomic<f32>],
    first: usize,
    tiles: &Sequence<Accumulator>,
    #[comptime] count: usize,
    #[comptime] wide: bool,
    #[comptime] assembly: bool,
) {
    let lane = UNIT_POS_PLANE as usize;
    let own = first + lane * comptime!(if wide { 4usize } else { 1usize });
    let mut address = 0u64;
    if comptime!(assembly) {
        address = global_address::<Atomic<f32>>(sums[own..own + 1].as_ptr());
    }
    #[unroll]
    for t in 0..count {
        let tile = tiles.index(t);
        let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for n in 0..4usize {
            numbers.insert(n, tile[comptime!(n / 2)].extract(comptime!(n % 2)));
        }
        if comptime!(wide) {
            let address = by_value::<u64>(address);
            let numbers = by_value::<Vector<f32, Const<4>>>(numbers);
            let bytes = comptime!(4 * t * TILE);
            gpu_asm!(
                "red.relaxed.gpu.global.add.v4.f32 [{address} + {bytes}], {numbers};",
                address = in(_) address, numbers = in(_) numbers
            );
        } else {
            #[unroll]
            for n in 0..4usize {
                let number = by_value::<f32>(numbers.extract(n));
                let offset = comptime!(t * TILE + 32 * n);
                if comptime!(assembly) {
                    let address = by_value::<u64>(address);
                    let bytes = comptime!(4 * offset);
                    gpu_asm!(
                        "red.relaxed.gpu.global.add.f32 [{address} + {bytes}], {number};",
                        address = in(_) address, number = in(_) number
                    );
                } else {
                    sums[own + offset].fetch_add(number);
                }
            }
        }
    }
}

/// The address of a place in global memory.
#[cube]
fn global_address<T: CubePrimitive>(pointer: *const T) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {address}, {pointer};",
        pointer = in(_) pointer, address = out(_) address, options(pure, nomem)
    );
    by_value::<u64>(address)
}

/// Writes the zeros that sums and turns start from.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn clear_sums_kernel<F: Size>(
    query_sums: &mut [Vector<f32, F>],
    turns: &mut [u32],
    sums: usize,
    counters: usize,
) {
    let at = ABSOLUTE_POS;
    if at < sums {
        query_sums[at] = Vector::new(0.0f32);
    }
    if at < counters {
        turns[at] = 0u32;
    }
}

/// Writes the gradient of the query, packed. A unit takes eight features of two rows, eight apart: four
/// neighbouring lanes' part of a tile.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn query_rows_kernel<E: Float, F: Size, N: Size>(
    query_sums: &[Vector<f32, F>],
    query_gradient: &mut [Vector<E, N>],
    geometry: Geometry,
    #[comptime] one_pass: OnePass,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
) {
    let head_dim = comptime!(config.head_dim);
    let walked = comptime!(one_pass.walked);
    let (row_tiles, features) = comptime!(one_pass.query_tile(config.head_dim));
    let columns = comptime!(features / 8);
    let warp_columns = comptime!(head_dim / features);
    let instructions = comptime!(config.instructions());
    let blocks = (geometry.seq_q as usize).div_ceil(walked);

    // Neighbouring units write neighbouring features.
    let column = ABSOLUTE_POS % columns;
    let quad = ABSOLUTE_POS / columns % 8;
    let row_tile = ABSOLUTE_POS / comptime!(8 * columns) % row_tiles;
    let warp = ABSOLUTE_POS / comptime!(8 * columns * row_tiles) % one_pass.warps;
    let block = ABSOLUTE_POS / comptime!(8 * columns * row_tiles * one_pass.warps);
    let batch_head = block / blocks;
    if batch_head < geometry.batch * geometry.heads {
        let tile = ((block * one_pass.warps + warp) * row_tiles + row_tile) * columns + column;
        let row = block % blocks * walked
            + warp / warp_columns * comptime!(16 * row_tiles)
            + row_tile * 16
            + quad;
        let mut upper = Vector::<E, N>::new(E::from_int(0));
        let mut lower = Vector::<E, N>::new(E::from_int(0));
        #[unroll]
        for n in 0..4usize {
            // Of lane `n` of the four: both features of both rows.
            let mut own = Vector::<f32, Const<4>>::new(0.0f32);
            if comptime!(one_pass.wide) {
                let read = query_sums[tile * 32 + quad * 4 + n];
                #[unroll]
                for m in 0..4usize {
                    own.insert(m, read.extract(m));
                }
            } else {
                #[unroll]
                for m in 0..4usize {
                    own.insert(
                        m,
                        query_sums[tile * 32 + comptime!(m * 8) + quad].extract(n),
                    );
                }
            }
            #[unroll]
            for half in 0..2usize {
                let mut pair = Pair::<f32>::new(0.0f32);
                pair.insert(0usize, own.extract(comptime!(2 * half)) * geometry.scale);
                pair.insert(
                    1usize,
                    own.extract(comptime!(2 * half + 1)) * geometry.scale,
                );
                let rounded = Pair::<E>::reinterpret(round_pair::<E>(pair, instructions));
                #[unroll]
                for c in 0..2usize {
                    if comptime!(half == 0) {
                        upper.insert(comptime!(2 * n + c), rounded.extract(c));
                    } else {
                        lower.insert(comptime!(2 * n + c), rounded.extract(c));
                    }
                }
            }
        }
        let chunks = comptime!(head_dim / 8);
        let chunk = warp % warp_columns * columns + column;
        let at = (batch_head * geometry.seq_q as usize + row) * chunks + chunk;
        if row < geometry.seq_q as usize {
            query_gradient[at] = upper;
        }
        if row + 8 < geometry.seq_q as usize {
            query_gradient[at + 8 * chunks] = lower;
        }
    }
}
