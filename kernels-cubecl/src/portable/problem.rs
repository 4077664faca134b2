//! A problem as kernels see it: run-time numbers, comptime choices, and the score of one element.

use super::tile::Tile;
use cubecl::prelude::*;
use flash_attention_spec::score::{soft_cap, soft_cap_derivative};
use flash_attention_spec::visibility::{end_key, first_key};

/// Run-time numbers of a problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Geometry {
    pub batch: usize,
    pub heads: usize,
    /// Query heads that read one key head.
    pub group: usize,
    pub seq_q: i32,
    pub seq_kv: i32,
    /// The band of `causal` and `window`.
    pub offset: i32,
    pub left: i32,
    pub right: i32,
    pub scale: f32,
    /// 1 where there is no cap.
    pub softcap: f32,
    /// Some shading languages have no literal for it.
    pub negative_infinity: f32,
}

/// Comptime choices: one compiled kernel for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    pub tile: Tile,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Rows are read in fours; else by their stride, one element at a time.
    pub vectorized: bool,
    pub capped: bool,
}

/// Stands for "no key seen yet" in running maxima, and marks hidden scores. Every finite score is
/// at least this, so unlike an arbitrary large negative number it changes no result.
#[cube]
pub(crate) fn lowest() -> f32 {
    f32::min_value()
}

/// Keys that a block of queries can see.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct KeyRange {
    pub first: i32,
    pub end: i32,
}

/// The keys that some query of `first_query .. first_query + block_q` sees through the band.
#[cube]
pub(crate) fn keys_of_block(
    geometry: &Geometry,
    first_query: i32,
    #[comptime] block_q: usize,
) -> KeyRange {
    let mut last_query = first_query + comptime!(block_q as i32) - 1;
    if last_query >= geometry.seq_q {
        last_query = geometry.seq_q - 1;
    }
    let mut first = first_key(first_query, geometry.offset, geometry.left);
    first = select(first < 0, 0i32, first);
    let mut end = end_key(last_query, geometry.offset, geometry.right);
    if end > geometry.seq_kv {
        end = geometry.seq_kv;
    }
    if end < first {
        end = first;
    }
    KeyRange { first, end }
}

/// Whether every query of the block sees every key of the block, mask aside.
#[cube]
pub(crate) fn wholly_visible(
    geometry: &Geometry,
    first_query: i32,
    first_kv: i32,
    #[comptime] tile: Tile,
) -> bool {
    let last_query = first_query + comptime!(tile.block_q() as i32) - 1;
    let end_kv = first_kv + comptime!(tile.block_kv() as i32);
    last_query < geometry.seq_q
        && end_kv <= geometry.seq_kv
        && first_key(last_query, geometry.offset, geometry.left) <= first_kv
        && end_key(first_query, geometry.offset, geometry.right) >= end_kv
}

/// Whether some query of the block sees some key of the block, mask aside.
#[cube]
pub(crate) fn partly_visible(
    geometry: &Geometry,
    first_query: i32,
    first_kv: i32,
    #[comptime] tile: Tile,
) -> bool {
    let keys = keys_of_block(geometry, first_query, comptime!(tile.block_q()));
    keys.first < first_kv + comptime!(tile.block_kv() as i32) && keys.end > first_kv
}

/// What the scores of one query have in common.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreRow {
    /// The keys that the band leaves visible; none for a row past the last query.
    pub first: i32,
    pub end: i32,
    /// Offsets of the row in mask and bias.
    pub mask_base: usize,
    pub bias_base: usize,
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
    let first = first_key(i, geometry.offset, geometry.left);
    let mut end = end_key(i, geometry.offset, geometry.right);
    end = select(end > geometry.seq_kv, geometry.seq_kv, end);
    end = select(i < geometry.seq_q, end, first);
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
        first,
        end,
        mask_base,
        bias_base,
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
    #[comptime] config: Config,
) -> f32 {
    let mut score = capped_score(dot, geometry, config);
    let mut visible = j >= row.first && j < row.end;
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            if visible {
                visible = mask[row.mask_base + j as usize * mask.stride(3)] == M::from_int(0);
            }
        }
        ComptimeOption::None => {}
    }
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if visible {
                score += f32::cast_from(bias[row.bias_base + j as usize * bias.stride(3)]);
            }
        }
        ComptimeOption::None => {}
    }
    select(visible, score, lowest())
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
pub(crate) fn capped_score(dot: f32, geometry: &Geometry, #[comptime] config: Config) -> f32 {
    let mut score = dot * geometry.scale;
    if comptime!(config.capped) {
        score = soft_cap(score, geometry.softcap);
    }
    score
}

/// The gradient of the uncapped score from that of the capped one; 0 stays 0 whatever `dot` holds.
#[cube]
pub(crate) fn uncap(
    gradient: f32,
    dot: f32,
    geometry: &Geometry,
    #[comptime] config: Config,
) -> f32 {
    let mut result = gradient;
    if comptime!(config.capped) {
        // Chosen before the product: a driver that takes every number for finite may turn a choice
        // between a product with 0 and 0 into the product.
        let finite = select(gradient != 0.0f32, dot, 0.0f32);
        let capped = capped_score(finite, geometry, config);
        result = gradient * soft_cap_derivative(capped, geometry.softcap);
    }
    result
}
