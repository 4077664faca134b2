//! Softmax on the registers of a product: a unit holds columns `8 j + 2 (lane % 4)` and the next of two
//! rows, eight apart.
//!
//! Exponents are of base two, of scores in units that a factor turns into its logarithm: dot products
//! as they are, or, where cap or bias change them, finished scores. Finished scores are subtracted before
//! they meet the factor, for a bias may be as low as numbers go.

use super::blueprint::ForwardBlueprint;
use super::instructions::{exp2, minus_infinity, pack, product, reciprocal};
use crate::rounding::unscaled;
use crate::schedule::Geometry;
use crate::score::{ScoreRow, counted_from, counts, finish_score, is_visible, lowest, score_row};
use cubecl::prelude::*;

/// The running statistics of two rows.
#[derive(CubeType)]
pub(crate) struct RowPair {
    /// Highest score so far.
    top_0: f32,
    top_1: f32,
    /// The score that probabilities are relative to: `top`, or a little behind it.
    base_0: f32,
    base_1: f32,
    /// The unit's part of the sum of probabilities.
    sum_0: f32,
    sum_1: f32,
    /// From scores to exponents of two; not negative.
    factor: f32,
}

/// What is stored of a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowEnd {
    pub maximum: f32,
    pub log_sum: f32,
    pub inverse: f32,
}

/// Rows are rescaled once a probability would pass 2 to this: no more, for `f16`.
const SLACK: f32 = 8.0;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
const LN_2: f32 = std::f32::consts::LN_2;

#[cube]
impl RowPair {
    pub fn new(geometry: &Geometry, #[comptime] blueprint: ForwardBlueprint) -> RowPair {
        let mut factor = LOG2_E.runtime();
        if comptime!(blueprint.plain()) {
            factor = geometry.scale.abs() * LOG2_E;
        }
        RowPair {
            top_0: lowest(),
            top_1: lowest(),
            base_0: lowest(),
            base_1: lowest(),
            sum_0: 0.0f32,
            sum_1: 0.0f32,
            factor,
        }
    }

    /// Begins anew.
    pub fn reset(&mut self) {
        self.top_0 = lowest();
        self.top_1 = lowest();
        self.base_0 = lowest();
        self.base_1 = lowest();
        self.sum_0 = 0.0f32;
        self.sum_1 = 0.0f32;
    }

    /// Takes in the maxima of a block. Where a row outgrew its base, bases, sums and output are brought up
    /// to the maxima.
    pub fn take_in<S: Size, O: Size>(
        &mut self,
        scores: Vector<f32, S>,
        output: &mut Vector<f32, O>,
        #[comptime] blueprint: ForwardBlueprint,
    ) {
        let growth = self.grow::<S>(scores, blueprint);
        if plane_any(growth) {
            let (a0, a1) = self.rescale();
            #[unroll]
            for j in 0..comptime!(blueprint.value_dim / 8) {
                output.insert(4 * j, output.extract(4 * j) * a0);
                output.insert(4 * j + 1, output.extract(4 * j + 1) * a0);
                output.insert(4 * j + 2, output.extract(4 * j + 2) * a1);
                output.insert(4 * j + 3, output.extract(4 * j + 3) * a1);
            }
        }
    }

    /// Takes the maxima of a block in. Whether a row outgrew its base: probabilities would pass
    /// 2^[`SLACK`].
    fn grow<S: Size>(
        &mut self,
        scores: Vector<f32, S>,
        #[comptime] blueprint: ForwardBlueprint,
    ) -> bool {
        let mut high_0 = self.top_0;
        let mut high_1 = self.top_1;
        #[unroll]
        for j in 0..comptime!(blueprint.block_kv / 8) {
            high_0 = max(
                high_0,
                max(scores.extract(4 * j), scores.extract(4 * j + 1)),
            );
            high_1 = max(
                high_1,
                max(scores.extract(4 * j + 2), scores.extract(4 * j + 3)),
            );
        }
        high_0 = max(high_0, plane_shuffle_xor(high_0, 1u32));
        high_1 = max(high_1, plane_shuffle_xor(high_1, 1u32));
        high_0 = max(high_0, plane_shuffle_xor(high_0, 2u32));
        high_1 = max(high_1, plane_shuffle_xor(high_1, 2u32));
        self.top_0 = high_0;
        self.top_1 = high_1;
        (high_0 - self.base_0) * self.factor > SLACK || (high_1 - self.base_1) * self.factor > SLACK
    }

    /// Moves the bases up to the maxima; what earlier sums are worth now.
    fn rescale(&mut self) -> (f32, f32) {
        // The difference of a first maximum may overflow, and infinity times a factor of 0 is NaN.
        let a0 = exp2(max(self.base_0 - self.top_0, lowest()) * self.factor);
        let a1 = exp2(max(self.base_1 - self.top_1, lowest()) * self.factor);
        self.base_0 = self.top_0;
        self.base_1 = self.top_1;
        self.sum_0 *= a0;
        self.sum_1 *= a1;
        (a0, a1)
    }

    /// Sums over the four units of the first or second row, and what is stored.
    pub fn finish(
        &self,
        geometry: &Geometry,
        #[comptime] second: bool,
        #[comptime] blueprint: ForwardBlueprint,
    ) -> RowEnd {
        let unit = geometry.scale.abs();
        let plain = comptime!(blueprint.plain());
        if comptime!(second) {
            row_end(
                self.top_1,
                self.base_1,
                self.sum_1,
                self.factor,
                unit,
                plain,
            )
        } else {
            row_end(
                self.top_0,
                self.base_0,
                self.sum_0,
                self.factor,
                unit,
                plain,
            )
        }
    }
}

#[cube]
fn row_end(
    top: f32,
    base: f32,
    sum: f32,
    factor: f32,
    unit: f32,
    #[comptime] plain: bool,
) -> RowEnd {
    let pair = sum + plane_shuffle_xor(sum, 1u32);
    let total = pair + plane_shuffle_xor(pair, 2u32);
    // A row that sees nothing: o = 0, lse = 0 + -inf.
    let mut maximum = 0.0f32;
    let mut log_sum = minus_infinity();
    let mut inverse = 0.0f32;
    if total != 0.0f32 {
        inverse = reciprocal(total);
        if comptime!(plain) {
            // Probabilities were relative to the rounded base: back to the maximum without rounding.
            log_sum = total.ln() - LN_2 * fma(top, factor, -max(base * factor, lowest()));
            // What this product rounds away stays away: the backward pass rounds its products too.
            maximum = top * unit;
        } else {
            log_sum = total.ln() - (top - base);
            maximum = top;
        }
    }
    RowEnd {
        maximum,
        log_sum,
        inverse,
    }
}

/// The scores of a block with a mask or that are not plain; minus infinity where hidden.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn masked_scores<E: Float, M: Int, S: Size>(
    dots: Vector<f32, S>,
    row: i32,
    column: i32,
    batch: usize,
    head: usize,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] blueprint: ForwardBlueprint,
) -> Vector<f32, S> {
    let mut scores = dots;
    let hidden = minus_infinity();
    let view_0 = score_row::<E, M>(row, batch, head, mask, bias, geometry);
    let view_1 = score_row::<E, M>(row + 8, batch, head, mask, bias, geometry);
    // Key by key, so that a key's number serves both rows and is forgotten.
    #[unroll]
    for j in 0..comptime!(blueprint.block_kv / 8) {
        #[unroll]
        for c in 0..2usize {
            let key = column + comptime!((8 * j + c) as i32);
            #[unroll]
            for r in 0..2usize {
                let view = if comptime!(r == 0) { view_0 } else { view_1 };
                let at = comptime!(4 * j + 2 * r + c);
                if comptime!(blueprint.plain()) {
                    // Below every dot product, so that no base makes a probability of it.
                    let visible = is_visible::<M>(view, key, mask);
                    scores.insert(at, select(visible, scores.extract(at), hidden));
                } else {
                    let score = finish_score::<E, M>(
                        product(scores.extract(at), geometry.scale),
                        view,
                        key,
                        mask,
                        bias,
                        &unscaled(geometry),
                        blueprint.capped,
                    );
                    scores.insert(at, select(counts(score), score, hidden));
                }
            }
        }
    }
    scores
}

/// The dot products of a block, minus infinity where the band hides a key: those `before` the keys that
/// some row sees and those `behind` them, if the block has such keys. `column` is the unit's first key.
#[cube]
pub(crate) fn banded_scores<S: Size>(
    dots: Vector<f32, S>,
    view_0: ScoreRow,
    view_1: ScoreRow,
    column: i32,
    before: bool,
    behind: bool,
    #[comptime] block_kv: usize,
) -> Vector<f32, S> {
    let mut scores = dots;
    let hidden = minus_infinity();
    // Counted from the unit's first key the others are constants.
    let view_0 = counted_from(view_0, column);
    let view_1 = counted_from(view_1, column);
    if behind {
        #[unroll]
        for at in 0..comptime!(block_kv / 2) {
            let end = if comptime!(at / 2 % 2 == 0) {
                view_0.end
            } else {
                view_1.end
            };
            let visible = comptime!((at / 4 * 8 + at % 2) as i32) < end;
            scores.insert(at, select(visible, scores.extract(at), hidden));
        }
    }
    if before {
        #[unroll]
        for at in 0..comptime!(block_kv / 2) {
            let first = if comptime!(at / 2 % 2 == 0) {
                view_0.first
            } else {
                view_1.first
            };
            let visible = comptime!((at / 4 * 8 + at % 2) as i32) >= first;
            scores.insert(at, select(visible, scores.extract(at), hidden));
        }
    }
    scores
}

/// The exponent of a score; `base` is an exponent too where scores are plain, else a score.
#[cube]
fn exponent(score: f32, base: f32, factor: f32, #[comptime] plain: bool) -> f32 {
    if comptime!(plain) {
        fma(score, factor, -base)
    } else {
        (score - base) * factor
    }
}

/// Probabilities relative to the bases, rounded in pairs; their sums are of the unrounded.
#[cube]
pub(crate) fn probabilities<S: Size, P: Size>(
    scores: Vector<f32, S>,
    rows: &mut RowPair,
    #[comptime] blueprint: ForwardBlueprint,
) -> Vector<u32, P> {
    let element = comptime!(blueprint.element());
    let factor = rows.factor;
    let plain = comptime!(blueprint.plain());
    let mut base_0 = rows.base_0;
    let mut base_1 = rows.base_1;
    if comptime!(plain) {
        // Finite, so that minus infinity stays that.
        base_0 = max(base_0 * factor, lowest());
        base_1 = max(base_1 * factor, lowest());
    }
    let mut p = Vector::<u32, P>::new(0u32);
    let mut sum_0 = 0.0f32;
    let mut sum_1 = 0.0f32;
    #[unroll]
    for j in 0..comptime!(blueprint.block_kv / 8) {
        let a = exp2(exponent(scores.extract(4 * j), base_0, factor, plain));
        let b = exp2(exponent(scores.extract(4 * j + 1), base_0, factor, plain));
        let c = exp2(exponent(scores.extract(4 * j + 2), base_1, factor, plain));
        let d = exp2(exponent(scores.extract(4 * j + 3), base_1, factor, plain));
        sum_0 += a + b;
        sum_1 += c + d;
        p.insert(2 * j, pack(a, b, element));
        p.insert(2 * j + 1, pack(c, d, element));
    }
    rows.sum_0 += sum_0;
    rows.sum_1 += sum_1;
    p
}
