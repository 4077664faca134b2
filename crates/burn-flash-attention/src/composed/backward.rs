//! The backward recurrence.

use super::gradients::{Sums, zeros};
use super::guard::{Guard, product};
use super::tile::Tiles;
use super::{Blocks, Operands, cut, reshape, slice};
use crate::ops::OperandGradients;
use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use flash_attention_spec::{Problem, Wanted};
use std::ops::Range;

/// The wanted gradients, in the shapes and element type of the operands.
///
/// `statistics` are those of [`forward`](super::forward()); `lse_gradient` is `[batch, heads, seq_q]`.
pub(crate) fn backward<B: Backend>(
    operands: Operands<B>,
    output: FloatTensor<B>,
    statistics: FloatTensor<B>,
    output_gradient: FloatTensor<B>,
    lse_gradient: Option<FloatTensor<B>>,
    problem: &Problem,
    wanted: Wanted,
) -> OperandGradients<B> {
    let saved = Saved {
        output,
        statistics,
        output_gradient,
        lse_gradient,
    };
    backward_in_blocks(operands, saved, problem, wanted, Blocks::of(problem))
}

/// What backward reads besides the operands.
pub(super) struct Saved<B: Backend> {
    pub output: FloatTensor<B>,
    pub statistics: FloatTensor<B>,
    pub output_gradient: FloatTensor<B>,
    pub lse_gradient: Option<FloatTensor<B>>,
}

pub(super) fn backward_in_blocks<B: Backend>(
    operands: Operands<B>,
    saved: Saved<B>,
    problem: &Problem,
    wanted: Wanted,
    sizes: Blocks,
) -> OperandGradients<B> {
    if problem.score_shape().contains(&0) {
        return zeros(problem, wanted, &operands.query);
    }
    let mut sums = Sums::new(problem, wanted, sizes, &operands.query);
    let statistics = RowTensors::new(saved, problem);
    let suspects: Vec<_> = [&operands.query, &operands.key, &operands.value]
        .into_iter()
        .chain([&statistics.output_gradient, &statistics.maximum])
        // NaN in the rows that see one in the bias.
        .chain([&statistics.output])
        .chain(&statistics.lse_gradient)
        .cloned()
        .collect();
    let mut tiles = Tiles::new(problem, operands, sizes, suspects);
    for rows in cut(problem.seq_q, sizes.query) {
        let block = statistics.block(&tiles, &rows);
        for (n, keys) in tiles.keys(&rows) {
            block.meet(&mut tiles, &mut sums, &keys, n);
        }
        sums.end_rows(rows.len());
    }
    sums.finish()
}

/// Tensors with a row for each query, `[batch, heads, seq_q, 1 or value_dim]`.
struct RowTensors<B: Backend> {
    output: FloatTensor<B>,
    output_gradient: FloatTensor<B>,
    maximum: FloatTensor<B>,
    reciprocal: FloatTensor<B>,
    lse_gradient: Option<FloatTensor<B>>,
}

impl<B: Backend> RowTensors<B> {
    fn new(saved: Saved<B>, problem: &Problem) -> Self {
        let [batch, heads, seq_q] = problem.lse_shape();
        let column = |tensor| reshape::<B, 4>(tensor, [batch, heads, seq_q, 1]);
        Self {
            output: saved.output,
            output_gradient: saved.output_gradient,
            maximum: column(slice::<B>(saved.statistics.clone(), 0, 0..1)),
            reciprocal: column(slice::<B>(saved.statistics, 0, 2..3)),
            lse_gradient: saved.lse_gradient.map(column),
        }
    }

    fn block<'a>(&self, tiles: &Tiles<'_, B>, rows: &'a Range<usize>) -> RowBlock<'a, B> {
        let part = |tensor: &FloatTensor<B>| tiles.rows(tensor.clone(), rows);
        // 0 where a row sees nothing: its gradients stay 0.
        let reciprocal = part(&self.reciprocal);
        let gradient = part(&self.output_gradient);
        let delta = B::float_sum_dim(B::float_mul(part(&self.output), gradient.clone()), 3);
        let delta = match &self.lse_gradient {
            Some(lse_gradient) => B::float_sub(delta, part(lse_gradient)),
            None => delta,
        };
        RowBlock {
            rows,
            query: tiles.query(rows),
            maximum: part(&self.maximum),
            gradient: B::float_mul(gradient, reciprocal.clone()),
            delta: B::float_mul(delta, reciprocal),
        }
    }
}

/// A block of query rows, stacked as [`Tiles::rows`] does.
struct RowBlock<'a, B: Backend> {
    rows: &'a Range<usize>,
    query: FloatTensor<B>,
    maximum: FloatTensor<B>,
    /// Gradient of the output, over the denominator.
    gradient: FloatTensor<B>,
    /// `rowsum(output * gradient)` less the gradient of `lse`, over the denominator.
    delta: FloatTensor<B>,
}

impl<B: Backend> RowBlock<'_, B> {
    /// Adds what these rows and key block `n` give to the gradients of each other.
    fn meet(
        &self,
        tiles: &mut Tiles<'_, B>,
        sums: &mut Sums<'_, B>,
        keys: &Range<usize>,
        n: usize,
    ) {
        let wanted = sums.wanted;
        let key = tiles.key(keys);
        let of_scores = wanted.query || wanted.key || wanted.bias;
        let slope = wanted.query || wanted.key;
        let tile = tiles.scores(self.query.clone(), key.clone(), self.rows, keys, slope);
        let guard = tile.guard.as_ref();
        let transposed = guard.map(Guard::transposed);
        let clear = |weights| match guard {
            Some(guard) => guard.clear(weights),
            None => weights,
        };
        let exponentials = clear(B::float_exp(B::float_sub(
            tile.scores,
            self.maximum.clone(),
        )));
        if wanted.value {
            let weights = B::float_swap_dims(exponentials.clone(), 2, 3);
            let term = product(transposed.as_ref(), weights, self.gradient.clone());
            sums.add_value(n, term);
        }
        if !of_scores {
            return;
        }
        let value = B::float_swap_dims(tiles.value(keys), 2, 3);
        let weights = B::float_matmul(self.gradient.clone(), value);
        let weights = B::float_sub(weights, self.delta.clone());
        let mut weights = clear(B::float_mul(weights, exponentials));
        if wanted.bias {
            sums.add_bias(n, tiles.heads(weights.clone()));
        }
        if let Some(slope) = tile.slope {
            weights = B::float_mul(weights, slope);
        }
        if wanted.query {
            sums.add_query(tiles.heads(product(guard, weights.clone(), key)));
        }
        if wanted.key {
            let weights = B::float_swap_dims(weights, 2, 3);
            sums.add_key(n, product(transposed.as_ref(), weights, self.query.clone()));
        }
    }
}
