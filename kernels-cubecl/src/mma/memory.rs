//! Shared memory of a cube of each kernel.

use super::apart::in_parts;
use super::blueprint::Blocks;
use super::fragment::pitch;
use super::tables::blocks;
use flash_attention_spec::{Dtype, Problem};

pub(super) fn smallest(problem: &Problem) -> usize {
    let blocks = blocks(4, 1, 16);
    forward_shared_memory(problem, &blocks)
        .max(query_gradient_shared_memory(problem, &blocks))
        .max(key_value_gradient_shared_memory(problem, &blocks))
}

/// What tiles are staged as: 16-bit numbers, and `f32` as halves of a type whose values do not matter.
pub(crate) const fn staged_as(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 => Dtype::BF16,
        dtype => dtype,
    }
}

/// Staged elements of `dim` features.
pub(super) const fn staged(dtype: Dtype, dim: usize) -> usize {
    dim * dtype.size() / staged_as(dtype).size()
}

/// Distances of two rows of shared tiles: of queries and keys, and of values.
fn pitches(problem: &Problem) -> (usize, usize) {
    let of = |dim| pitch(staged(problem.dtype, dim));
    (of(problem.head_dim), of(problem.value_dim))
}

/// Bytes of a cube: queries (then outputs), keys, values, flags.
pub(super) fn forward_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    let (key, value) = pitches(problem);
    let chunks = blocks.owned() * key.max(value) + blocks.stages * blocks.walked * (key + value);
    chunks * 16 + flags(blocks)
}

/// Bytes of a cube: queries and output gradients with their statistics, keys and values, flags.
pub(super) fn query_gradient_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    gradient_tiles(problem, blocks) + blocks.owned() * 3 * 4 + flags(blocks)
}

/// Bytes of a cube: keys and values, queries and output gradients with their statistics, flags.
pub(super) fn key_value_gradient_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    gradient_tiles(problem, blocks) + blocks.stages * blocks.walked * 3 * 4 + flags(blocks)
}

fn gradient_tiles(problem: &Problem, blocks: &Blocks) -> usize {
    let (key, value) = pitches(problem);
    let walked = |dim| walked_tile(problem.dtype, dim, blocks);
    let walked = walked(problem.head_dim) + walked(problem.value_dim);
    (blocks.owned() * (key + value) + walked) * 16
}

/// Chunks that the walked rows of one operand of a gradient take: of every stage, or of the parts and of
/// the place where rows land.
pub(super) const fn walked_tile(dtype: Dtype, dim: usize, blocks: &Blocks) -> usize {
    let whole = pitch(staged(dtype, dim));
    if blocks.apart {
        blocks.walked * (pitch(in_parts(dim)) + whole)
    } else {
        blocks.stages * blocks.walked * whole
    }
}

/// Flags of the walked rows, with the alignment of what lies beside them.
fn flags(blocks: &Blocks) -> usize {
    (blocks.walked + 1) * 4 + 128
}
