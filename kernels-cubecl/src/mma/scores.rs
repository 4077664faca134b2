//! Scores of a block, on the registers that the product left them in: scale, cap, bias and visibility.

use super::config::Config;
use super::fragment::{Accumulator, Pair};
use super::instructions::by_value;
use crate::rounding::{separate, unscaled};
use crate::schedule::Geometry;
use crate::score::{
    ScoreRow, capped_score, counted_from, counts, finish_score, is_visible, score_row,
};
use crate::unit::lane;
use cubecl::prelude::*;

/// Where a block of scores lies: the warp's first row and the block's first column.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Position {
    pub batch: usize,
    pub head: usize,
    pub first_query: i32,
    pub first_kv: i32,
}

/// Keeps the reads of masks and biases on either side apart: compilers would have all of a block on
/// their way at once, and a register or three for each.
#[cube]
pub(crate) fn read_apart(#[comptime] apart: bool) {
    if apart {
        gpu_asm!("bar.warp.sync 0xffffffff;");
    }
}

/// A dot product times the scale, rounded before anything else happens to it.
#[cube]
fn rounded_product(dot: f32, geometry: &Geometry, #[comptime] assembly: bool) -> f32 {
    if comptime!(assembly) {
        let x = by_value::<f32>(dot);
        let scale = by_value::<f32>(geometry.scale);
        let y: f32;
        gpu_asm!(
            "mul.rn.f32 {y}, {x}, {scale};",
            x = in(_) x, scale = in(_) scale, y = out(_) y, options(pure, nomem)
        );
        by_value::<f32>(y)
    } else {
        separate(dot * geometry.scale, geometry)
    }
}

/// [`finish_score`] of the rounded product.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rounded_score<E: Float, M: Int>(
    dot: f32,
    row: ScoreRow,
    j: i32,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] config: Config,
) -> f32 {
    let product = rounded_product(dot, geometry, config.assembly);
    let geometry = unscaled(geometry);
    finish_score::<E, M>(product, row, j, mask, bias, &geometry, config.capped)
}

/// The score of a visible key where there is no bias, rounded.
#[cube]
pub(crate) fn visible_score(dot: f32, geometry: &Geometry, #[comptime] config: Config) -> f32 {
    let mut score = rounded_product(dot, geometry, config.assembly);
    if comptime!(config.capped) {
        score = separate(
            capped_score(score, &unscaled(geometry), config.capped),
            geometry,
        );
    }
    score
}

/// Turns dot products into the values that the softmax compares, hidden ones into infinity
/// against the direction of the scale.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn finish_scores<E: Float, M: Int>(
    scores: &mut Sequence<Accumulator>,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    edge: bool,
    #[comptime] column_tiles: usize,
    #[comptime] config: Config,
) {
    if comptime!(config.biased) || edge {
        let lane = lane(config.crowded());
        let mut hidden = geometry.negative_infinity;
        if comptime!(config.descending()) {
            hidden = -geometry.negative_infinity;
        }
        #[unroll]
        for r in 0..config.blocks.row_tiles {
            #[unroll]
            for half in 0..2usize {
                let i = position.first_query
                    + comptime!((16 * r + 8 * half) as i32)
                    + (lane / 4) as i32;
                let view =
                    score_row::<E, M>(i, position.batch, position.head, mask, bias, geometry);
                let view = counted_from(view, position.first_kv + (lane % 4 * 2) as i32);
                #[unroll]
                for n in 0..column_tiles {
                    let tile = scores.index_mut(comptime!(r * column_tiles + n));
                    let old = tile[half];
                    let mut new = Pair::<f32>::new(0.0f32);
                    #[unroll]
                    for c in 0..2usize {
                        let j = comptime!((8 * n + c) as i32).runtime();
                        let dot = old.extract(c);
                        // Of dot products infinity stands for itself, here as in a block that is
                        // wholly visible.
                        if comptime!(config.plain()) {
                            new.insert(c, select(is_visible::<M>(view, j, mask), dot, hidden));
                        } else {
                            let score =
                                rounded_score::<E, M>(dot, view, j, mask, bias, geometry, config);
                            new.insert(c, select(counts(score), score, hidden));
                        }
                    }
                    tile[half] = new;
                }
                read_apart(comptime!(
                    config.assembly && (mask.is_some() || config.biased)
                ));
            }
        }
    } else if comptime!(config.capped) {
        #[unroll]
        for n in 0..comptime!(config.blocks.row_tiles * column_tiles) {
            let tile = scores.index_mut(n);
            #[unroll]
            for half in 0..2usize {
                let old = tile[half];
                let mut new = Pair::<f32>::new(0.0f32);
                #[unroll]
                for c in 0..2usize {
                    new.insert(c, visible_score(old.extract(c), geometry, config));
                }
                tile[half] = new;
            }
        }
    }
}
