//! Sums of what the blocks give to the gradients of the operands.

use super::tile::{Scale, scaled};
use super::{Blocks, cast, cut};
use crate::ops::{MaybeFloat, OperandGradients};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::FloatDType;
use flash_attention_spec::{Problem, Wanted};

/// A sum that no term may ever reach.
type Sum<B> = Option<FloatTensor<B>>;

/// The gradients part of the way through the blocks, in `f32`; query blocks come one after the
/// other, key blocks in any order within each.
pub(super) struct Sums<'a, B: Backend> {
    pub wanted: Wanted,
    problem: &'a Problem,
    sizes: Blocks,
    dtype: FloatDType,
    device: Device<B>,
    /// Of the present block of queries, then of all blocks before it.
    query: (Sum<B>, Vec<FloatTensor<B>>),
    /// One for each block of keys.
    key: Vec<Sum<B>>,
    /// One for each block of keys.
    value: Vec<Sum<B>>,
    /// One for each block of keys, or one where the bias has one column for all keys; then of all
    /// blocks of queries before the present one.
    bias: (Vec<Sum<B>>, Vec<FloatTensor<B>>),
}

impl<'a, B: Backend> Sums<'a, B> {
    /// `like` gives the element type and device of the gradients.
    pub fn new(problem: &'a Problem, wanted: Wanted, sizes: Blocks, like: &FloatTensor<B>) -> Self {
        let key_blocks = problem.seq_kv.div_ceil(sizes.key);
        Self {
            wanted,
            problem,
            sizes,
            dtype: like.dtype().into(),
            device: like.device(),
            query: (None, Vec::new()),
            key: vec![None; key_blocks],
            value: vec![None; key_blocks],
            bias: (vec![None; key_blocks], Vec::new()),
        }
    }

    /// Adds `[batch, heads, rows, head_dim]`, before the scale, to the present rows.
    pub fn add_query(&mut self, term: FloatTensor<B>) {
        add::<B>(&mut self.query.0, term);
    }

    /// Adds `[batch, kv_heads, keys, head_dim]`, of queries times [`Scale::query`], to key block `n`.
    pub fn add_key(&mut self, n: usize, term: FloatTensor<B>) {
        add::<B>(&mut self.key[n], term);
    }

    /// Adds `[batch, kv_heads, keys, value_dim]` to key block `n`.
    pub fn add_value(&mut self, n: usize, term: FloatTensor<B>) {
        add::<B>(&mut self.value[n], term);
    }

    /// Adds gradients of scores `[batch, heads, rows, keys]` of the present rows and key block `n`.
    pub fn add_bias(&mut self, n: usize, mut term: FloatTensor<B>) {
        let Some(shape) = self.problem.bias else {
            return;
        };
        for (dim, size) in shape.into_iter().enumerate() {
            if size < term.shape()[dim] {
                term = B::float_sum_dim(term, dim);
            }
        }
        add::<B>(&mut self.bias.0[if shape[3] == 1 { 0 } else { n }], term);
    }

    /// Ends a block of query rows.
    pub fn end_rows(&mut self, rows: usize) {
        let Problem {
            batch,
            heads,
            head_dim,
            scale,
            ..
        } = *self.problem;
        if self.wanted.query {
            let sum = self.query.0.take();
            let sum = sum.map(|sum| B::float_mul_scalar(sum, scale.into()));
            let block = self.block(sum, [batch, heads, rows, head_dim]);
            self.query.1.push(block);
        }
        if self.wanted.bias && self.problem.bias.is_some_and(|shape| shape[2] > 1) {
            self.end_bias_rows(rows);
        }
    }

    /// Ends the rows of the bias that the present block of queries has met.
    fn end_bias_rows(&mut self, rows: usize) {
        let Some([batch, heads, _, keys]) = self.problem.bias else {
            return;
        };
        let strip = cut(keys, self.sizes.key)
            .enumerate()
            .map(|(n, keys)| {
                let sum = self.bias.0[n].take();
                self.block(sum, [batch, heads, rows, keys.len()])
            })
            .collect();
        self.bias.1.push(B::float_cat(strip, 3));
    }

    /// The wanted gradients.
    pub fn finish(mut self) -> OperandGradients<B> {
        let Problem {
            batch,
            kv_heads,
            seq_kv,
            head_dim,
            value_dim,
            ..
        } = *self.problem;
        let wanted = self.wanted;
        let query = wanted
            .query
            .then(|| B::float_cat(std::mem::take(&mut self.query.1), 2));
        let key = wanted.key.then(|| {
            let factor = Scale::of(self.problem).product;
            let sums = std::mem::take(&mut self.key).into_iter();
            let sums = sums.map(|sum| sum.map(|sum| scaled::<B>(sum, factor)));
            self.key_rows(sums, [batch, kv_heads, seq_kv, head_dim])
        });
        let value = wanted.value.then(|| {
            let sums = std::mem::take(&mut self.value).into_iter();
            self.key_rows(sums, [batch, kv_heads, seq_kv, value_dim])
        });
        let bias = (wanted.bias && self.problem.bias.is_some()).then(|| {
            if self.problem.bias.is_some_and(|shape| shape[2] == 1) {
                self.end_bias_rows(1);
            }
            B::float_cat(std::mem::take(&mut self.bias.1), 2)
        });
        OperandGradients {
            query: query.into(),
            key: key.into(),
            value: value.into(),
            bias: bias.into(),
        }
    }

    /// Puts the sums of the key blocks together.
    fn key_rows(
        &self,
        sums: impl Iterator<Item = Sum<B>>,
        [batch, heads, seq_kv, dim]: [usize; 4],
    ) -> FloatTensor<B> {
        let parts = sums
            .zip(cut(seq_kv, self.sizes.key))
            .map(|(sum, keys)| self.block(sum, [batch, heads, keys.len(), dim]))
            .collect();
        B::float_cat(parts, 2)
    }

    /// A sum in the element type of the operands; zeros where no term has reached it.
    fn block(&self, sum: Sum<B>, shape: [usize; 4]) -> FloatTensor<B> {
        match sum {
            Some(sum) => cast::<B>(sum, self.dtype),
            None => B::float_zeros(shape.into(), &self.device, self.dtype),
        }
    }
}

/// Gradients where there is not one score.
pub(super) fn zeros<B: Backend>(
    problem: &Problem,
    wanted: Wanted,
    like: &FloatTensor<B>,
) -> OperandGradients<B> {
    let Problem {
        batch,
        heads,
        kv_heads,
        seq_q,
        seq_kv,
        head_dim,
        value_dim,
        bias,
        ..
    } = *problem;
    let zeros = |wanted: bool, shape: [usize; 4]| {
        let dtype = like.dtype().into();
        MaybeFloat::from(wanted.then(|| B::float_zeros(shape.into(), &like.device(), dtype)))
    };
    OperandGradients {
        query: zeros(wanted.query, [batch, heads, seq_q, head_dim]),
        key: zeros(wanted.key, [batch, kv_heads, seq_kv, head_dim]),
        value: zeros(wanted.value, [batch, kv_heads, seq_kv, value_dim]),
        bias: bias.map_or(MaybeFloat::None, |shape| zeros(wanted.bias, shape)),
    }
}

fn add<B: Backend>(sum: &mut Sum<B>, term: FloatTensor<B>) {
    *sum = Some(match sum.take() {
        Some(sum) => B::float_add(sum, term),
        None => term,
    });
}
