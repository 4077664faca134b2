//! Scores are rounded products, in every kernel.
//!
//! The forward pass saves the largest score of a row. At large scores the last place of an `f32` is no
//! small exponent: were the backward pass to subtract the maximum in one operation with the product,
//! its probabilities would differ from those of the forward pass by as much.

use crate::schedule::Geometry;
use cubecl::prelude::*;

/// `x`, rounded: compilers do not join the operation that it comes from with what follows.
#[cube]
pub(crate) fn separate(x: f32, geometry: &Geometry) -> f32 {
    // Infinity has no mantissa, but only the launch knows that this is infinity.
    let zero = u32::reinterpret(geometry.negative_infinity) & 0x007F_FFFF;
    f32::reinterpret(u32::reinterpret(x) ^ zero)
}

/// The geometry for dot products that have been scaled already.
#[cube]
pub(crate) fn unscaled(geometry: &Geometry) -> Geometry {
    Geometry {
        batch: geometry.batch,
        heads: geometry.heads,
        group: geometry.group,
        seq_q: geometry.seq_q,
        seq_kv: geometry.seq_kv,
        offset: geometry.offset,
        left: geometry.left,
        right: geometry.right,
        scale: 1.0f32.runtime(),
        softcap: geometry.softcap,
        negative_infinity: geometry.negative_infinity,
    }
}
