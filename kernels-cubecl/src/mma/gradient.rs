//! One block of scores in the backward pass: probabilities rebuilt, and their gradients.
//!
//! The query gradient has queries along the rows of a block, the key and value gradients have keys
//! there: `transposed`. Either way the sums of a product are what the next one is weighted by.

use super::config::Config;
use super::fragment::{Accumulator, Pair};
use super::scores::{Position, read_apart, rounded_score, visible_score};
use super::softmax::{natural_unit, power};
use crate::schedule::Geometry;
use crate::score::{counted_from, counts, is_visible, score_row, uncap};
use crate::unit::lane;
use cubecl::prelude::*;

/// The tiles of a block of scores, and which way round it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Block {
    pub row_tiles: usize,
    pub column_tiles: usize,
    pub transposed: bool,
    /// Rows of staged statistics.
    pub staged: usize,
}

impl Block {
    /// Elements of a lane along the queries.
    const fn queries(self) -> usize {
        2 * if self.transposed {
            self.column_tiles
        } else {
            self.row_tiles
        }
    }

    /// Elements of a lane along the keys.
    const fn keys(self) -> usize {
        2 * if self.transposed {
            self.row_tiles
        } else {
            self.column_tiles
        }
    }

    /// Tile, half and column of an element.
    const fn element(self, query: usize, key: usize) -> (usize, usize, usize) {
        let (row, column) = if self.transposed {
            (key, query)
        } else {
            (query, key)
        };
        (
            row / 2 * self.column_tiles + column / 2,
            row % 2,
            column % 2,
        )
    }
}

/// Place of a lane's element `nth` along one side of a block.
#[cube]
fn along(#[comptime] nth: usize, #[comptime] rows: bool, #[comptime] again: bool) -> usize {
    let lane = lane(again) as usize;
    if comptime!(rows) {
        lane / 4 + comptime!(distance(nth, rows))
    } else {
        lane % 4 * 2 + comptime!(distance(nth, rows))
    }
}

/// Distance of a lane's element `nth` from its first.
const fn distance(nth: usize, rows: bool) -> usize {
    if rows {
        nth / 2 * 16 + nth % 2 * 8
    } else {
        nth / 2 * 8 + nth % 2
    }
}

/// Reads the three statistics of query `i`: maximum, logarithm of the sum in exponents of the base,
/// and `D`.
#[cube]
pub(crate) fn load_statistics(
    row_statistics: &[f32],
    pending: &mut Array<f32>,
    batch: usize,
    head: usize,
    i: i32,
    geometry: &Geometry,
    #[comptime] config: Config,
) {
    pending[0] = 0.0f32;
    pending[1] = 0.0f32;
    pending[2] = 0.0f32;
    if i < geometry.seq_q {
        let rows = geometry.batch * geometry.heads * geometry.seq_q as usize;
        let at = (batch * geometry.heads + head) * geometry.seq_q as usize + i as usize;
        pending[0] = row_statistics[at];
        let log_sum = row_statistics[rows + at];
        // Of a row that sees nothing every probability is 0, also where no score is tested.
        let nothing = log_sum == geometry.negative_infinity;
        let log_sum = select(nothing, -geometry.negative_infinity, log_sum);
        pending[1] = log_sum * natural_unit(config.assembly);
        pending[2] = row_statistics[2 * rows + at];
    }
}

/// Stores what [`load_statistics`] read for row `row` of `staged`.
#[cube]
pub(crate) fn store_statistics(
    pending: &Array<f32>,
    statistics: &mut Shared<[f32]>,
    slot: usize,
    row: usize,
    #[comptime] staged: usize,
) {
    statistics[slot + row] = pending[0];
    statistics[slot + staged + row] = pending[1];
    statistics[slot + comptime!(2 * staged) + row] = pending[2];
}

/// Turns `q . k` into the probability `exp((s - m) - ln l)`, exactly 0 where the key is hidden.
/// `first` is the place of the block's first query in the statistics.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn rebuild_probabilities<E: Float, M: Int>(
    scores: &mut Sequence<Accumulator>,
    statistics: &Shared<[f32]>,
    first: usize,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    edge: bool,
    #[comptime] block: Block,
    #[comptime] config: Config,
) {
    if comptime!(config.biased) || edge {
        form_probabilities::<E, M>(
            scores, statistics, first, position, mask, bias, geometry, true, block, config,
        );
    } else {
        form_probabilities::<E, M>(
            scores, statistics, first, position, mask, bias, geometry, false, block, config,
        );
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn form_probabilities<E: Float, M: Int>(
    scores: &mut Sequence<Accumulator>,
    statistics: &Shared<[f32]>,
    first: usize,
    position: Position,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] block: Block,
    #[comptime] config: Config,
) {
    let unit = natural_unit(config.assembly);
    #[unroll]
    for q in 0..comptime!(block.queries()) {
        let query = along(q, comptime!(!block.transposed), config.crowded());
        let maximum = statistics[first + query];
        let log_sum = statistics[first + block.staged + query];
        let i = position.first_query + query as i32;
        let view = score_row::<E, M>(i, position.batch, position.head, mask, bias, geometry);
        let view = counted_from(
            view,
            position.first_kv + along(0usize, block.transposed, config.crowded()) as i32,
        );
        #[unroll]
        for k in 0..comptime!(block.keys()) {
            let (n, half, c) = comptime!(block.element(q, k));
            let tile = scores.index_mut(n);
            let mut pair = tile[half];
            let dot = pair.extract(c);
            let j = comptime!(distance(k, block.transposed) as i32).runtime();
            if comptime!(tested && config.plain()) {
                let score = visible_score(dot, geometry, config);
                let p = power(fma(score - maximum, unit, -log_sum), config.assembly);
                pair.insert(c, select(is_visible::<M>(view, j, mask), p, 0.0f32));
            } else if comptime!(tested) {
                let score = rounded_score::<E, M>(dot, view, j, mask, bias, geometry, config);
                let p = power(fma(score - maximum, unit, -log_sum), config.assembly);
                pair.insert(c, select(counts(score), p, 0.0f32));
            } else {
                let score = visible_score(dot, geometry, config);
                let p = power(fma(score - maximum, unit, -log_sum), config.assembly);
                pair.insert(c, p);
            }
            tile[half] = pair;
        }
        // Sixteen elements at a time.
        let row = comptime!(tested && (mask.is_some() || config.biased) && config.assembly);
        read_apart(comptime!(
            row && ((q + 1) * block.keys()).is_multiple_of(16)
        ));
    }
}

/// Turns `dP = dO V^T` into `dS = P (dP - D)`, and that into the gradient of the uncapped score;
/// 0 where `P` is 0, whatever `dP` holds. `dots` is empty where there is no cap.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn score_gradients(
    gradients: &mut Sequence<Accumulator>,
    probabilities: &Sequence<Accumulator>,
    dots: &Sequence<Accumulator>,
    statistics: &Shared<[f32]>,
    first: usize,
    geometry: &Geometry,
    edge: bool,
    #[comptime] block: Block,
    #[comptime] config: Config,
) {
    if comptime!(config.biased) || edge {
        form_gradients(
            gradients,
            probabilities,
            dots,
            statistics,
            first,
            geometry,
            true,
            block,
            config,
        );
    } else {
        form_gradients(
            gradients,
            probabilities,
            dots,
            statistics,
            first,
            geometry,
            false,
            block,
            config,
        );
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn form_gradients(
    gradients: &mut Sequence<Accumulator>,
    probabilities: &Sequence<Accumulator>,
    dots: &Sequence<Accumulator>,
    statistics: &Shared<[f32]>,
    first: usize,
    geometry: &Geometry,
    #[comptime] tested: bool,
    #[comptime] block: Block,
    #[comptime] config: Config,
) {
    #[unroll]
    for q in 0..comptime!(block.queries()) {
        let query = along(q, comptime!(!block.transposed), config.crowded());
        let delta = statistics[first + comptime!(2 * block.staged) + query];
        #[unroll]
        for k in 0..comptime!(block.keys()) {
            let (n, half, c) = comptime!(block.element(q, k));
            let p = probabilities.index(n)[half].extract(c);
            let tile = gradients.index_mut(n);
            let mut pair = tile[half];
            let mut difference = pair.extract(c) - delta;
            if comptime!(tested) {
                // As in `uncap`, the choice comes before the product.
                difference = select(p != 0.0f32, difference, 0.0f32);
            }
            let mut gradient = p * difference;
            if comptime!(config.capped) {
                let dot = dots.index(n)[half].extract(c);
                gradient = uncap(gradient, dot, geometry, config.capped);
            }
            pair.insert(c, gradient);
            tile[half] = pair;
        }
    }
}

/// A copy of the dot products, where the cap's derivative needs them.
#[cube]
pub(crate) fn keep_dots(
    dots: &Sequence<Accumulator>,
    #[comptime] count: usize,
    #[comptime] config: Config,
) -> Sequence<Accumulator> {
    let mut kept = Sequence::<Accumulator>::new();
    if comptime!(config.capped) {
        #[unroll]
        for n in 0..count {
            let mut tile = Array::<Pair<f32>>::new(2usize);
            tile[0] = dots.index(n)[0];
            tile[1] = dots.index(n)[1];
            kept.push(tile);
        }
    }
    kept
}

/// Multiplies every sum by `factor`.
#[cube]
pub(crate) fn scale_all(sums: &mut Sequence<Accumulator>, factor: f32, #[comptime] count: usize) {
    #[unroll]
    for n in 0..count {
        let tile = sums.index_mut(n);
        tile[0] *= Pair::new(factor);
        tile[1] *= Pair::new(factor);
    }
}
