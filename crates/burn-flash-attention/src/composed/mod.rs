//! Attention in Burn primitives, block by block: the body of the op on backends without kernels.
//!
//! ```text
//! for each block of query rows
//!     forward   for each block of keys that one of the rows sees
//!                   S = scale * Q K^T, softcap, bias; hidden scores become minus infinity
//!                   m' = max(m, rowmax S); E = exp(S - m' - c); a = exp(m - m')
//!                   l = a l + rowsum E; acc = a acc + E V
//!               o = acc / l, c = ln(2 seq_kv)
//!     backward  G' = r G, D' = r (rowsum(G * o) - dlse), with r = exp(-c) / l from forward
//!               for each block of keys that one of the rows sees
//!                   S again, from the same operands in the same order; E = exp(S - m)
//!                   dS = E * (G' V^T - D')
//!                   dV += E^T G', dQ += dS K, dK += dS^T Q
//! ```
//!
//! (Dao et al., arXiv:2205.14135, algorithms 1 and 4.) With c the rows of E sum up to at most 1/2, so
//! that acc is finite wherever V is, though `seq_kv` times V is not; the row maximum that is saved is
//! without it. Dividing G and D by the denominator instead of
//! E saves a pass over each block of scores. Backward forms bit for bit the scores whose maximum
//! forward has saved, so `S - m` is exact however large they are; this is why both passes take
//! their blocks from [`Blocks::of`] and their scores from [`Tiles::scores`](tile::Tiles::scores).
//!
//! All heads go through one batched product at a time. The query heads that read one key head are
//! stacked as rows of one block, so keys and values are never copied for them.

mod backward;
mod forward;
mod gradients;
mod guard;
#[cfg(test)]
mod tests;
mod tile;

pub(crate) use backward::backward;
pub(crate) use forward::forward;

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Slice};
use flash_attention_spec::Problem;
use std::ops::Range;

/// What attention reads.
#[derive(Clone, Debug)]
pub(crate) struct Operands<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: FloatTensor<B>,
    /// [`Problem::mask`]; true hides.
    pub mask: Option<BoolTensor<B>>,
    /// [`Problem::bias`].
    pub bias: Option<FloatTensor<B>>,
}

/// Sizes of the blocks that the sequences are cut into.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    query: usize,
    key: usize,
}

impl Blocks {
    /// Small enough that a block of scores of all heads stays near the processor: sizes from 128 to
    /// 512 run equally fast on few heads.
    fn of(problem: &Problem) -> Self {
        let edge = if problem.batch * problem.heads <= 64 {
            128
        } else {
            64
        };
        Self {
            query: edge,
            key: edge,
        }
    }
}

/// Rows of a block of queries and of a block of keys.
pub(crate) fn blocks(problem: &Problem) -> (usize, usize) {
    let Blocks { query, key } = Blocks::of(problem);
    (query, key)
}

/// Cuts `0..length` into blocks.
fn cut(length: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length)
        .step_by(block)
        .map(move |start| start..(start + block).min(length))
}

/// Part `range` of dimension `dim`.
fn slice<B: Backend>(tensor: FloatTensor<B>, dim: usize, range: Range<usize>) -> FloatTensor<B> {
    let shape = tensor.shape();
    if range == (0..shape[dim]) {
        return tensor;
    }
    B::float_slice(tensor, &slices(&shape, dim, range))
}

/// The whole of `shape` but for `range` of dimension `dim`.
fn slices(shape: &Shape, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let mut slices: Vec<Slice> = shape.iter().map(|&n| (0..n).into()).collect();
    slices[dim] = range.into();
    slices
}

/// `tensor` in the given shape.
fn reshape<B: Backend, const D: usize>(
    tensor: FloatTensor<B>,
    shape: [usize; D],
) -> FloatTensor<B> {
    let shape = Shape::new(shape);
    if tensor.shape() == shape {
        return tensor;
    }
    B::float_reshape(tensor, shape)
}

/// `tensor` in another element type.
fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if tensor.dtype() == DType::from(dtype) {
        return tensor;
    }
    B::float_cast(tensor, dtype)
}
