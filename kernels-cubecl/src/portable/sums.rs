//! Long sums in two levels: a running sum is folded into a total every [`SPAN`] terms, so that the
//! rounding errors of a long sequence stay close to those of a short one. A single `f32` sum over
//! 100,000 keys is off by some 1e-5.

use super::tile::Quad;
use cubecl::prelude::*;

/// Terms of a running sum.
pub(crate) const SPAN: usize = 4096;

/// Whether a sum of so many terms is worth a second set of accumulators.
pub(crate) const fn is_long(terms: usize) -> bool {
    terms > 2 * SPAN
}

/// Totals for `count` running sums; one that nothing uses where sums are not `long`.
#[cube]
pub(crate) fn zero_totals(#[comptime] long: bool, #[comptime] count: usize) -> Array<Quad> {
    let length = comptime!(if long { count } else { 1 });
    let mut totals = Array::<Quad>::new(length);
    #[unroll]
    for n in 0..length {
        totals[n] = Quad::new(0.0);
    }
    totals
}

/// `totals = totals * rescale + sums` for `count` of them from `first` on; the sums start again.
#[cube]
pub(crate) fn fold(
    sums: &mut Array<Quad>,
    totals: &mut Array<Quad>,
    rescale: f32,
    #[comptime] first: usize,
    #[comptime] count: usize,
) {
    #[unroll]
    for n in first..comptime!(first + count) {
        totals[n] = fma(totals[n], Quad::new(rescale), sums[n]);
        sums[n] = Quad::new(0.0);
    }
}

/// The sum number `index`, of both levels.
#[cube]
pub(crate) fn both_levels(
    sums: &Array<Quad>,
    totals: &Array<Quad>,
    #[comptime] index: usize,
    #[comptime] long: bool,
) -> Quad {
    let mut total = sums[index];
    if comptime!(long) {
        total += totals[index];
    }
    total
}
