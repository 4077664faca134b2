//! How many heads' tiles lie side by side in the list that cubes deal out among themselves.
//!
//! Few heads side by side leave their keys and values in the cache, for many cubes read them at a time.
//! But a cube keeps the places of the list that it is dealt, and where tiles are not of one length a
//! section of few tiles may leave some cubes with more to do than others.

use super::blueprint::ForwardBlueprint;
use flash_attention_spec::Problem;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// What a tile costs beside its blocks of keys, in blocks.
const TILE: usize = 1;
/// Of a list with more tiles a cube than this, every order is even enough.
const MANY: usize = 64;

/// Heads side by side for `cubes` cubes, where the cache holds keys and values of `cached` heads.
pub(super) fn heads_side_by_side(
    problem: &Problem,
    blueprint: &ForwardBlueprint,
    cubes: usize,
    cached: usize,
) -> usize {
    let heads = problem.batch * problem.heads;
    let lengths = lengths(problem, blueprint);
    let even = lengths.iter().all(|&length| length == lengths[0]);
    if even || lengths.len() * heads > MANY * cubes {
        return cached;
    }
    let list = List {
        lengths,
        heads,
        cubes,
        cached,
    };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&width) = known.get(&list) {
        return width;
    }
    // A head that few cubes share comes from memory as often as it is read.
    let shared = (cubes / 4).clamp(1, heads);
    let width = (1..=8)
        .map(|parts| heads.div_ceil(parts))
        .filter(|&width| width <= shared)
        .chain([cached, shared])
        .min_by_key(|&width| longest(&list.lengths, heads, width, cubes))
        .unwrap_or(heads);
    if known.len() >= KEPT {
        known.clear();
    }
    known.insert(list, width);
    width
}

/// What an answer depends on.
#[derive(PartialEq, Eq, Hash)]
struct List {
    lengths: Vec<usize>,
    heads: usize,
    cubes: usize,
    cached: usize,
}

/// Answers so far: to find one takes as long as a short launch, and a program asks for the same ones over
/// and over.
static KNOWN: LazyLock<Mutex<HashMap<List, usize>>> = LazyLock::new(Mutex::default);

/// Answers that are kept at most.
const KEPT: usize = 1024;

/// Blocks of keys that each block of queries of a head walks, the last first, and what a tile costs.
fn lengths(problem: &Problem, blueprint: &ForwardBlueprint) -> Vec<usize> {
    let (block_q, block_kv) = (blueprint.block_q(), blueprint.block_kv);
    let blocks = problem.seq_q.div_ceil(block_q);
    (0..blocks)
        .rev()
        .map(|block| {
            let (first, last) = (
                block * block_q,
                ((block + 1) * block_q).min(problem.seq_q) - 1,
            );
            let start = problem.band.keys(first, problem.seq_kv).start;
            let end = problem.band.keys(last, problem.seq_kv).end;
            let walked = end.div_ceil(block_kv).saturating_sub(start / block_kv);
            walked.max(1) + TILE
        })
        .collect()
}

/// What the busiest cube is dealt of a list with `width` heads side by side.
fn longest(lengths: &[usize], heads: usize, width: usize, cubes: usize) -> usize {
    let mut dealt = vec![0; cubes];
    let mut place = 0;
    for first in (0..heads).step_by(width) {
        let width = width.min(heads - first);
        for &length in lengths {
            for _ in 0..width {
                let (round, at) = (place / cubes, place % cubes);
                let cube = if round % 2 == 0 { at } else { cubes - 1 - at };
                dealt[cube] += length;
                place += 1;
            }
        }
    }
    dealt.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::variants;
    use flash_attention_spec::{Dtype, Operand, Operands, Options};

    fn problem(batch: usize, heads: usize, seq: usize, dim: usize) -> Problem {
        let operand = || Operand::new([batch, heads, seq, dim], Dtype::BF16);
        let operands = Operands::new(operand(), operand(), operand());
        Problem::new(&operands, &Options::new().causal()).unwrap()
    }

    /// Catches sections that leave cubes idle: the busiest has little more to do than the average.
    #[test]
    fn causal_lists_are_dealt_evenly() {
        for (batch, heads, seq, dim) in [
            (1, 16, 16_384, 128),
            (8, 16, 2048, 128),
            (4, 16, 4096, 128),
            (1, 32, 16_384, 64),
            (8, 32, 2048, 64),
            (8, 8, 2048, 256),
            (1, 8, 16_384, 256),
        ] {
            let problem = problem(batch, heads, seq, dim);
            let blueprint = variants(&problem)[0];
            let (lengths, heads, cubes) = (lengths(&problem, &blueprint), batch * heads, 132);
            let width = heads_side_by_side(&problem, &blueprint, cubes, 3);
            let busiest = longest(&lengths, heads, width, cubes);
            let average = lengths.iter().sum::<usize>() * heads / cubes;
            assert!(
                busiest * 100 <= average * 107,
                "{problem:?}: {width} side by side, {busiest} for {average}"
            );
        }
    }
}
