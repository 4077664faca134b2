//! One head, forward and backward, block by block.

use super::forward::Recurrence;
use super::{
    LedgerError, add_scaled, check_block, check_finite, check_length, check_not_empty,
    largest_difference, tiles,
};
use crate::operand::{Dtype, Operand, Operands};
use crate::options::Options;
use crate::problem::Problem;
use crate::reference::{self, Inputs};
use std::ops::Range;

/// The operands of one attention head and the gradient that reaches its output, row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows<'a, const D: usize> {
    /// `[seq_q, D]`.
    pub query: &'a [[f64; D]],
    /// `[seq_kv, D]`.
    pub key: &'a [[f64; D]],
    /// `[seq_kv, D]`.
    pub value: &'a [[f64; D]],
    /// `[seq_q, D]`: the loss is the sum of `output * output_gradient`.
    pub output_gradient: &'a [[f64; D]],
}

/// Gradients of the loss, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientRows<const D: usize> {
    /// `[seq_q, D]`.
    pub query: Vec<[f64; D]>,
    /// `[seq_kv, D]`.
    pub key: Vec<[f64; D]>,
    /// `[seq_kv, D]`.
    pub value: Vec<[f64; D]>,
}

impl<const D: usize> GradientRows<D> {
    fn concat(&self) -> Vec<[f64; D]> {
        [&self.query[..], &self.key, &self.value].concat()
    }
}

/// One visited pair of a query block and a key block. Its rows are queries, its columns keys.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardBlock<const D: usize> {
    /// Queries of the block.
    pub queries: Range<usize>,
    /// Keys of the block.
    pub keys: Range<usize>,
    /// `P = exp(score - lse)`, rebuilt from the saved lse; 0 where hidden.
    pub probabilities: Vec<Vec<f64>>,
    /// `D`, the row sum of `output * output_gradient`, for each query of the block.
    pub delta: Vec<f64>,
    /// `dS = P * (output_gradient . value - D)`; 0 where hidden.
    pub score_gradients: Vec<Vec<f64>>,
    /// Every gradient as it stands after this block.
    pub gradients: GradientRows<D>,
}

/// What is stored and what is worked out, kept apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Probabilities that a full table holds: `seq_q * seq_kv`.
    pub full_probabilities: usize,
    /// Numbers the forward pass saves for the backward pass beside its output: one lse per query.
    pub saved_statistics: usize,
    /// Probabilities in the largest block, all that exist at once.
    pub largest_block: usize,
    /// Dot products of a query and a key that the forward pass works out.
    pub forward_dot_products: usize,
    /// Dot products of a query and a key that the backward pass works out again.
    pub backward_dot_products: usize,
    /// Pairs of a query block and a key block that are visited.
    pub visited_blocks: usize,
    /// Pairs in which no query sees a key, which both passes skip.
    pub skipped_blocks: usize,
}

/// The backward pass over one head.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardLedger<const D: usize> {
    /// Output of the forward pass, `[seq_q, D]`.
    pub output: Vec<[f64; D]>,
    /// The statistic it saves, `[seq_q]`.
    pub lse: Vec<f64>,
    /// Visited blocks: the key blocks in order, within each the query blocks in order.
    pub blocks: Vec<BackwardBlock<D>>,
    /// The gradients by [`reference::backward`], which holds the full table.
    pub full: GradientRows<D>,
    /// Largest difference of any gradient after the last block to [`full`](Self::full).
    pub difference: f64,
    /// Storage and work.
    pub counts: Counts,
}

/// Forward and backward pass over one head in blocks of `block_q` queries and `block_kv` keys.
///
/// Scores are `query . key / sqrt(D)`; with `causal`, a query sees the keys up to its own position
/// (counted from the end where the lengths differ).
///
/// # Errors
/// [`LedgerError`] for a block size of 0, for rows that are empty or differ in number, for an
/// entry that is not finite and for a `D` above [`MAX_HEAD_DIM`](crate::problem::MAX_HEAD_DIM).
///
/// ```
/// use flash_attention_spec::ledger;
///
/// let ledger = ledger::backward(&ledger::WORKED_ROWS, true, 2, 2)?;
/// assert_eq!(ledger.counts.full_probabilities, 25);
/// assert_eq!(ledger.counts.saved_statistics, 5);
/// assert_eq!(ledger.counts.largest_block, 4);
/// assert!(ledger.difference < 1e-15);
/// # Ok::<(), ledger::LedgerError>(())
/// ```
pub fn backward<const D: usize>(
    rows: &Rows<'_, D>,
    causal: bool,
    block_q: usize,
    block_kv: usize,
) -> Result<BackwardLedger<D>, LedgerError> {
    check_block("block_q", block_q)?;
    check_block("block_kv", block_kv)?;
    let problem = check_rows(rows, causal)?;
    let (seq_q, seq_kv) = (problem.seq_q, problem.seq_kv);
    let score = |i: usize, j: usize| problem.scale * dot(&rows.query[i], &rows.key[j]);
    let sees = |i: usize, j: usize| problem.band.keys(i, seq_kv).contains(&j);
    let visited = |queries: &Range<usize>, keys: &Range<usize>| {
        queries.clone().any(|i| keys.clone().any(|j| sees(i, j)))
    };
    let mut counts = Counts {
        full_probabilities: seq_q * seq_kv,
        ..Counts::default()
    };

    let (mut output, mut lse) = (Vec::new(), Vec::new());
    for queries in tiles(seq_q, block_q) {
        for i in queries.clone() {
            let mut state = Recurrence::new();
            for keys in tiles(seq_kv, block_kv).filter(|keys| visited(&queries, keys)) {
                let scores = keys.clone().map(|j| {
                    if !sees(i, j) {
                        return f64::NEG_INFINITY;
                    }
                    counts.forward_dot_products += 1;
                    score(i, j)
                });
                let scores = scores.collect();
                state.step(keys, scores, rows.value);
            }
            let (o, statistic) = state.finish();
            output.push(o);
            lse.push(statistic);
        }
    }
    counts.saved_statistics = lse.len();

    let grads = rows.output_gradient;
    let delta: Vec<f64> = grads.iter().zip(&output).map(|(g, o)| dot(g, o)).collect();
    let mut gradients = GradientRows {
        query: vec![[0.0; D]; seq_q],
        key: vec![[0.0; D]; seq_kv],
        value: vec![[0.0; D]; seq_kv],
    };
    let mut blocks = Vec::new();
    for keys in tiles(seq_kv, block_kv) {
        for queries in tiles(seq_q, block_q) {
            if !visited(&queries, &keys) {
                counts.skipped_blocks += 1;
                continue;
            }
            let mut probabilities = vec![vec![0.0; keys.len()]; queries.len()];
            let mut score_gradients = probabilities.clone();
            for (row, i) in queries.clone().enumerate() {
                for (column, j) in keys.clone().enumerate().filter(|&(_, j)| sees(i, j)) {
                    counts.backward_dot_products += 1;
                    let p = (score(i, j) - lse[i]).exp();
                    let ds = p * (dot(&grads[i], &rows.value[j]) - delta[i]);
                    add_scaled(&mut gradients.query[i], problem.scale * ds, &rows.key[j]);
                    add_scaled(&mut gradients.key[j], problem.scale * ds, &rows.query[i]);
                    add_scaled(&mut gradients.value[j], p, &grads[i]);
                    probabilities[row][column] = p;
                    score_gradients[row][column] = ds;
                }
            }
            counts.visited_blocks += 1;
            counts.largest_block = counts.largest_block.max(queries.len() * keys.len());
            blocks.push(BackwardBlock {
                delta: delta[queries.clone()].to_vec(),
                queries,
                keys: keys.clone(),
                probabilities,
                score_gradients,
                gradients: gradients.clone(),
            });
        }
    }

    let full = full_gradients(rows, &problem);
    let difference = largest_difference(&gradients.concat(), &full.concat());
    Ok(BackwardLedger {
        output,
        lse,
        blocks,
        full,
        difference,
        counts,
    })
}

fn full_gradients<const D: usize>(rows: &Rows<'_, D>, problem: &Problem) -> GradientRows<D> {
    let inputs = Inputs {
        query: rows.query.as_flattened(),
        key: rows.key.as_flattened(),
        value: rows.value.as_flattened(),
        mask: None,
        bias: None,
    };
    let full = reference::backward(problem, &inputs, rows.output_gradient.as_flattened(), None);
    let rows = |flat: &[f64]| flat.as_chunks::<D>().0.to_vec();
    GradientRows {
        query: rows(&full.query),
        key: rows(&full.key),
        value: rows(&full.value),
    }
}

fn check_rows<const D: usize>(rows: &Rows<'_, D>, causal: bool) -> Result<Problem, LedgerError> {
    let (queries, keys) = (rows.query.len(), rows.key.len());
    check_not_empty("query", queries)?;
    check_not_empty("key", keys)?;
    check_length(("value", rows.value.len()), ("key", keys))?;
    check_length(
        ("output_gradient", rows.output_gradient.len()),
        ("query", queries),
    )?;
    check_finite("query", rows.query)?;
    check_finite("key", rows.key)?;
    check_finite("value", rows.value)?;
    check_finite("output_gradient", rows.output_gradient)?;
    // The element type plays no part in `f64`.
    let operand = |length: usize| Operand::new([1, 1, length, D], Dtype::F32);
    let operands = Operands {
        query: operand(queries),
        key: operand(keys),
        value: operand(keys),
        mask: None,
        bias: None,
    };
    let options = Options {
        causal,
        ..Options::default()
    };
    Ok(Problem::new(&operands, &options)?)
}

fn dot<const D: usize>(a: &[f64; D], b: &[f64; D]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}
