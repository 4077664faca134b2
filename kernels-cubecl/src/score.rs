//! The score of one element: scale, soft cap, bias and visibility, in the order of the specification.

use crate::schedule::Geometry;
use cubecl::prelude::*;
use flash_attention_spec::score::{soft_cap, soft_cap_derivative};
use flash_attention_spec::visibility::{end_key, first_key};

/// Stands for "no key seen yet" in running maxima, and marks hidden scores. Every finite score is
/// at least this, so unlike an arbitrary large negative number it changes no result.
#[cube]
pub(crate) fn lowest() -> f32 {
    f32::min_value()
}

/// The smallest `f32` above [`lowest`].
#[cube]
fn above_lowest() -> f32 {
    -3.402_823_3e38f32
}

/// What the scores of one query have in common.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreRow {
    /// The keys that the band leaves visible, from `origin` on; none for a row past the last query.
    pub first: i32,
    pub end: i32,
    /// Where keys are counted from.
    pub origin: i32,
    /// Offsets of the row in mask and bias.
    pub mask_base: usize,
    pub bias_base: usize,
}

/// The row of query `i` where there is no mask and no bias.
#[cube]
pub(crate) fn band_row(i: i32, geometry: &Geometry) -> ScoreRow {
    let first = first_key(i, geometry.offset, geometry.left);
    let mut end = end_key(i, geometry.offset, geometry.right);
    end = select(end > geometry.seq_kv, geometry.seq_kv, end);
    end = select(i < geometry.seq_q, end, first);
    ScoreRow {
        first,
        end,
        origin: 0i32,
        mask_base: 0usize,
        bias_base: 0usize,
    }
}

/// The row of query `i`.
#[cube]
pub(crate) fn score_row<E: Float, M: Int>(
    i: i32,
    batch: usize,
    head: usize,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
) -> ScoreRow {
    let band = band_row(i, geometry);
    let mut mask_base = 0usize;
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            mask_base =
                batch * mask.stride(0) + head * mask.stride(1) + i as usize * mask.stride(2);
        }
        ComptimeOption::None => {}
    }
    let mut bias_base = 0usize;
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            bias_base =
                batch * bias.stride(0) + head * bias.stride(1) + i as usize * bias.stride(2);
        }
        ComptimeOption::None => {}
    }
    ScoreRow {
        first: band.first,
        end: band.end,
        origin: 0i32,
        mask_base,
        bias_base,
    }
}

/// The row with keys counted from `origin` on: where they lie at constant distances from it, a test
/// takes no register for the key.
#[cube]
pub(crate) fn counted_from(row: ScoreRow, origin: i32) -> ScoreRow {
    ScoreRow {
        first: row.first - origin,
        end: row.end - origin,
        origin: row.origin + origin,
        mask_base: row.mask_base,
        bias_base: row.bias_base,
    }
}

/// The score of a row and key `j`, [`lowest`] where the key is hidden.
#[cube]
pub(crate) fn finish_score<E: Float, M: Int>(
    dot: f32,
    row: ScoreRow,
    j: i32,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] capped: bool,
) -> f32 {
    let mut score = capped_score(dot, geometry, capped);
    let visible = is_visible::<M>(row, j, mask);
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if visible {
                score += f32::cast_from(
                    bias[row.bias_base + (row.origin + j) as usize * bias.stride(3)],
                );
            }
        }
        ComptimeOption::None => {}
    }
    // A visible score of exactly `lowest` would pass for a hidden one; its neighbour differs by less
    // than a rounding.
    score = select(score == lowest(), above_lowest(), score);
    select(visible, score, lowest())
}

/// Whether a row sees key `j`.
#[cube]
pub(crate) fn is_visible<M: Int>(row: ScoreRow, j: i32, mask: &ComptimeOption<&Tensor<M>>) -> bool {
    let mut visible = j >= row.first && j < row.end;
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            if visible {
                let at = row.mask_base + (row.origin + j) as usize * mask.stride(3);
                visible = mask[at] == M::from_int(0);
            }
        }
        ComptimeOption::None => {}
    }
    visible
}

/// Whether a score of [`finish_score`] is visible and above minus infinity; true for NaN, which
/// has to propagate.
#[cube]
#[allow(clippy::neg_cmp_op_on_partial_ord)]
pub(crate) fn counts(score: f32) -> bool {
    !(score <= lowest())
}

/// Scale and soft cap.
#[cube]
pub(crate) fn capped_score(dot: f32, geometry: &Geometry, #[comptime] capped: bool) -> f32 {
    let mut score = dot * geometry.scale;
    if capped {
        score = soft_cap(score, geometry.softcap);
    }
    score
}

/// The gradient of the uncapped score from that of the capped one; 0 stays 0 whatever `dot` holds.
#[cube]
pub(crate) fn uncap(gradient: f32, dot: f32, geometry: &Geometry, #[comptime] capped: bool) -> f32 {
    let mut result = gradient;
    if capped {
        // Chosen before the product: a driver that takes every number for finite may turn a choice
        // between a product with 0 and 0 into the product.
        let finite = select(gradient != 0.0f32, dot, 0.0f32);
        let capped = capped_score(finite, geometry, capped);
        result = gradient * soft_cap_derivative(capped, geometry.softcap);
    }
    result
}
