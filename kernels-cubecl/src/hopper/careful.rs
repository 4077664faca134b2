//! Sums that a row of weight 0 leaves alone, whatever it holds: 0 times what is not finite is NaN.

use super::instructions::*;
use super::pipeline::row_of;
use super::products::{column_descriptor, value_product};
use cubecl::prelude::*;

/// Whether a tile of `rows` rows holds a number that is not finite; the same for a warpgroup's units.
#[cube]
pub(crate) fn non_finite(
    address: u32,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] warpgroups: u32,
    #[comptime] element: &'static str,
) -> u32 {
    let bytes = comptime!(dim.div_ceil(64) * rows * 128);
    let unit = unit_again();
    let mut sum = 0u32;
    #[unroll]
    for part in 0..comptime!(bytes / (128 * 16)) {
        sum = watch_finite(
            address + (unit % 128) * 16 + comptime!((part * 128 * 16) as u32),
            sum,
            element,
        );
    }
    let mut found = 0u32;
    #[unroll]
    for w in 0..warpgroups {
        if unit / 128 == w {
            found = warpgroup_any(sum, comptime!(8 + w));
        }
    }
    found
}

/// Whether a plane's sums of `dim` features hold a number that is not finite, or are about to.
#[cube]
pub(crate) fn unbounded<O: Size>(sums: Vector<f32, O>, #[comptime] dim: usize) -> bool {
    // Four sums at a time, so that none waits for the one before. Infinity stays, and so does NaN.
    let mut total = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for i in 0..comptime!(dim / 8) {
        #[unroll]
        for j in 0..4usize {
            total.insert(j, total.extract(j) + sums.extract(comptime!(4 * i + j)));
        }
    }
    let all = total.extract(0usize)
        + total.extract(1usize)
        + (total.extract(2usize) + total.extract(3usize));
    let bounded = all.abs() <= f32::MAX;
    plane_any(!bounded)
}

/// Adds `rows` rows at an address, by weights, to the sums from register `first` on: by the product `body`,
/// or without those of weight 0 where one may not be finite (`careful` is not 0).
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_rows<P: Size, O: Size>(
    sums: &mut Vector<f32, O>,
    weights: Vector<u32, P>,
    address: u32,
    careful: u32,
    #[comptime] body: String,
    #[comptime] first: usize,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] element: &'static str,
) {
    if careful == 0 {
        let columns = column_descriptor(address, comptime!(rows * 128));
        *sums = value_product::<P, O>(*sums, weights, columns, body);
    } else {
        let lane = unit_again() % 32;
        *sums = add_careful::<P, O>(*sums, weights, address, lane, first, rows, dim, element);
    }
}

/// [`value_product`](super::instructions::value_product) that leaves out the rows of weight 0,
/// whatever they hold. The sums are `output` from register `first` on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_careful<P: Size, O: Size>(
    output: Vector<f32, O>,
    weights: Vector<u32, P>,
    address: u32,
    lane: u32,
    #[comptime] first: usize,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] element: &'static str,
) -> Vector<f32, O> {
    let mut acc = output;
    for j in 0..comptime!(rows as u32) {
        let mut pair_0 = 0u32;
        let mut pair_1 = 0u32;
        #[unroll]
        for g in 0..comptime!(rows / 8) {
            let here = j / 8 == comptime!(g as u32);
            pair_0 = select(here, weights.extract(comptime!(2 * g)), pair_0);
            pair_1 = select(here, weights.extract(comptime!(2 * g + 1)), pair_1);
        }
        let owner = (lane / 4) * 4 + (j % 8) / 2;
        let p0 = unpack(plane_shuffle(pair_0, owner), j % 2, element);
        let p1 = unpack(plane_shuffle(pair_1, owner), j % 2, element);
        #[unroll]
        for n in 0..comptime!(dim / 8) {
            // 16-byte chunks of a row are swizzled by the row.
            let chunk = comptime!((n % 8) as u32) ^ (j % 8);
            let panel = comptime!((n / 8 * rows * 128) as u32);
            let pair = load_shared(address + panel + j * 128 + chunk * 16 + (lane % 4) * 4);
            let low = unpack(pair, 0u32, element);
            let high = unpack(pair, 1u32, element);
            let at = comptime!(first + 4 * n);
            let a = acc.extract(at);
            acc.insert(at, select(p0 != 0.0f32, fma(p0, low, a), a));
            let a = acc.extract(comptime!(at + 1));
            acc.insert(comptime!(at + 1), select(p0 != 0.0f32, fma(p0, high, a), a));
            let a = acc.extract(comptime!(at + 2));
            acc.insert(comptime!(at + 2), select(p1 != 0.0f32, fma(p1, low, a), a));
            let a = acc.extract(comptime!(at + 3));
            acc.insert(comptime!(at + 3), select(p1 != 0.0f32, fma(p1, high, a), a));
        }
    }
    acc
}

/// A warpgroup's tile of `dS K` that leaves out the keys of `dS` 0, whatever they hold. `scores` is
/// where the tile's queries begin, `keys` where its features do.
#[cube]
pub(crate) fn tile_careful(
    scores: u32,
    keys: u32,
    #[comptime] walked: usize,
    #[comptime] owned: usize,
    #[comptime] element: &'static str,
) -> Vector<f32, Const<32>> {
    let unit = unit_again();
    let lane = unit % 32;
    let row = row_of(unit) as u32;
    let mut acc = Vector::<f32, Const<32>>::new(0.0f32);
    for j in 0..comptime!(owned as u32) {
        // 16-byte chunks of a row are swizzled by the row.
        let chunk = (j % 64 / 8) ^ (row % 8);
        let at = scores
            + j / 64 * comptime!((walked * 128) as u32)
            + row * 128
            + chunk * 16
            + j % 8 / 2 * 4;
        let d0 = unpack(load_shared(at), j % 2, element);
        let d1 = unpack(load_shared(at + 1024), j % 2, element);
        #[unroll]
        for n in 0..8usize {
            let chunk = comptime!(n as u32) ^ (j % 8);
            let pair = load_shared(keys + j * 128 + chunk * 16 + (lane % 4) * 4);
            let low = unpack(pair, 0u32, element);
            let high = unpack(pair, 1u32, element);
            let at = comptime!(4 * n);
            let a = acc.extract(at);
            acc.insert(at, select(d0 != 0.0f32, fma(d0, low, a), a));
            let a = acc.extract(comptime!(at + 1));
            acc.insert(comptime!(at + 1), select(d0 != 0.0f32, fma(d0, high, a), a));
            let a = acc.extract(comptime!(at + 2));
            acc.insert(comptime!(at + 2), select(d1 != 0.0f32, fma(d1, low, a), a));
            let a = acc.extract(comptime!(at + 3));
            acc.insert(comptime!(at + 3), select(d1 != 0.0f32, fma(d1, high, a), a));
        }
    }
    acc
}
