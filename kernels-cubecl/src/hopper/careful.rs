//! Sums that a row of weight 0 leaves alone, whatever it holds: 0 times what is not finite is NaN.

use super::instructions::*;
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
    any_in_warpgroup(sum, warpgroups)
}

/// Waits for the warpgroup's other units. Whether `x` is not 0 in any of them.
#[cube]
pub(crate) fn any_in_warpgroup(x: u32, #[comptime] warpgroups: u32) -> u32 {
    let unit = unit_again();
    let mut found = 0u32;
    #[unroll]
    for w in 0..warpgroups {
        if unit / 128 == w {
            found = warpgroup_any(x, comptime!(8 + w));
        }
    }
    found
}

/// [`value_product`](super::instructions::value_product) that leaves out the rows of weight 0,
/// whatever they hold.
#[cube]
pub(crate) fn add_careful<P: Size, O: Size>(
    output: Vector<f32, O>,
    weights: Vector<u32, P>,
    address: u32,
    lane: u32,
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
            let at = comptime!(4 * n);
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
