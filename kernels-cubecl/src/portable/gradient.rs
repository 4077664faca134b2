//! One block of scores in the backward pass: probabilities rebuilt, and their gradients.

use super::stage::{Rows, rows_of, stage_features};
use super::tile::{Config, Quad, accumulate_dots, key_of};
use crate::schedule::Geometry;
use crate::score::{counts, finish_score, score_row, uncap};
use cubecl::prelude::*;

/// Where a block of scores lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BlockPosition {
    pub batch: usize,
    pub head: usize,
    pub first_query: i32,
    pub first_kv: i32,
    pub unit_x: usize,
    pub unit_y: usize,
}

/// `dots = A B^T` of a block of `a` rows against a block of `b` rows.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn block_dots<E: Float, N: Size>(
    a: &Tensor<Vector<E, N>>,
    a_rows: Rows,
    b: &Tensor<Vector<E, N>>,
    b_rows: Rows,
    position: BlockPosition,
    stage: &mut Shared<[Quad]>,
    dots: &mut Array<Quad>,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    #[unroll]
    for n in 0..comptime!(tile.rows * tile.columns) {
        dots[n] = Quad::new(0.0);
    }
    for chunk in 0..comptime!(dim.div_ceil(4).div_ceil(tile.depth)) {
        let quad = chunk * tile.depth;
        sync_cube();
        stage_features(
            a,
            a_rows,
            position.first_query,
            quad,
            stage,
            0usize,
            block_q,
            false,
            dim,
            config,
        );
        stage_features(
            b,
            b_rows,
            position.first_kv,
            quad,
            stage,
            comptime!(block_q * tile.pitch()),
            comptime!(tile.block_kv()),
            true,
            dim,
            config,
        );
        sync_cube();
        accumulate_dots(&*stage, dots, position.unit_x, position.unit_y, tile);
    }
}

/// `dP = dO V^T` of a block. Without `value`, its rows lie behind those of `key`, feature
/// `head_dim` and on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn value_dots<E: Float, N: Size>(
    output_gradient: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: ComptimeOption<&Tensor<Vector<E, N>>>,
    position: BlockPosition,
    stage: &mut Shared<[Quad]>,
    dots: &mut Array<Quad>,
    geometry: &Geometry,
    #[comptime] config: Config,
) {
    let kv_head = position.head / geometry.group;
    let gradient_rows = rows_of(
        output_gradient,
        position.batch,
        position.head,
        geometry.seq_q,
    );
    #[comptime]
    match value {
        ComptimeOption::Some(value) => {
            let value_rows = rows_of(value, position.batch, kv_head, geometry.seq_kv);
            block_dots(
                output_gradient,
                gradient_rows,
                value,
                value_rows,
                position,
                stage,
                dots,
                config.value_dim,
                config,
            );
        }
        ComptimeOption::None => {
            let key_rows = rows_of(key, position.batch, kv_head, geometry.seq_kv);
            let value_rows = Rows {
                base: key_rows.base + comptime!(config.head_dim),
                count: key_rows.count,
            };
            block_dots(
                output_gradient,
                gradient_rows,
                key,
                value_rows,
                position,
                stage,
                dots,
                config.value_dim,
                config,
            );
        }
    }
}

/// Turns `q . k` into the probability `exp((s - m) - ln l)`, exactly 0 where the key is hidden.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rebuild_probabilities<E: Float, M: Int>(
    dots: &Array<Quad>,
    probabilities: &mut Array<Quad>,
    row_statistics: &[f32],
    position: BlockPosition,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let rows = geometry.batch * geometry.heads * geometry.seq_q as usize;
    #[unroll]
    for r in 0..tile.rows {
        let i = position.first_query + (position.unit_y + r * tile.units_y) as i32;
        let mut maximum = 0.0f32;
        let mut log_sum = 0.0f32;
        if i < geometry.seq_q {
            let at = statistics_row(position, i, geometry);
            maximum = row_statistics[at];
            log_sum = row_statistics[rows + at];
        }
        let view = score_row::<E, M>(i, position.batch, position.head, mask, bias, geometry);
        #[unroll]
        for c in 0..tile.columns {
            let quad = dots[comptime!(r * tile.columns + c)];
            let mut rebuilt = Quad::new(0.0);
            #[unroll]
            for e in 0..4usize {
                let score = finish_score::<E, M>(
                    quad.extract(e),
                    view,
                    position.first_kv + key_of(position.unit_x, c, e, tile),
                    mask,
                    bias,
                    geometry,
                    config.capped,
                );
                let mut p = 0.0f32;
                if counts(score) {
                    p = ((score - maximum) - log_sum).exp();
                }
                rebuilt.insert(e, p);
            }
            probabilities[comptime!(r * tile.columns + c)] = rebuilt;
        }
    }
}

/// Turns `dP = dO V^T` into `dS = P (dP - D)`; 0 where `P` is 0, whatever `dP` holds.
#[cube]
pub(crate) fn score_gradients(
    probabilities: &Array<Quad>,
    gradients: &mut Array<Quad>,
    row_statistics: &[f32],
    position: BlockPosition,
    geometry: &Geometry,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let rows = geometry.batch * geometry.heads * geometry.seq_q as usize;
    #[unroll]
    for r in 0..tile.rows {
        let i = position.first_query + (position.unit_y + r * tile.units_y) as i32;
        let mut delta = 0.0f32;
        if i < geometry.seq_q {
            delta = row_statistics[2 * rows + statistics_row(position, i, geometry)];
        }
        #[unroll]
        for c in 0..tile.columns {
            let index = comptime!(r * tile.columns + c);
            let (p, dp) = (probabilities[index], gradients[index]);
            let mut quad = Quad::new(0.0);
            #[unroll]
            for e in 0..4usize {
                let p = p.extract(e);
                // As in `uncap`, the choice comes before the product.
                quad.insert(e, p * select(p != 0.0f32, dp.extract(e) - delta, 0.0f32));
            }
            gradients[index] = quad;
        }
    }
}

#[cube]
fn statistics_row(position: BlockPosition, i: i32, geometry: &Geometry) -> usize {
    (position.batch * geometry.heads + position.head) * geometry.seq_q as usize + i as usize
}

/// Turns gradients of capped scores into gradients of the plain ones.
#[cube]
pub(crate) fn uncap_gradients(
    dots: &Array<Quad>,
    gradients: &mut Array<Quad>,
    geometry: &Geometry,
    #[comptime] config: Config,
) {
    if comptime!(config.capped) {
        #[unroll]
        for n in 0..comptime!(config.tile.rows * config.tile.columns) {
            let (gradient, dot) = (gradients[n], dots[n]);
            let mut quad = Quad::new(0.0);
            #[unroll]
            for e in 0..4usize {
                quad.insert(
                    e,
                    uncap(gradient.extract(e), dot.extract(e), geometry, config.capped),
                );
            }
            gradients[n] = quad;
        }
    }
}

/// Writes the unit's part of a block of scores to the shared tile.
#[cube]
pub(crate) fn share_scores(
    values: &Array<Quad>,
    shared: &mut Shared<[Quad]>,
    position: BlockPosition,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    #[unroll]
    for r in 0..tile.rows {
        let row = position.unit_y + r * tile.units_y;
        #[unroll]
        for c in 0..tile.columns {
            shared[row * comptime!(tile.score_pitch())
                + comptime!(c * tile.units_x)
                + position.unit_x] = values[comptime!(r * tile.columns + c)];
        }
    }
}
