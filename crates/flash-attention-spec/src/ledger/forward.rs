//! One row, block by block.

use super::{
    LedgerError, add_scaled, check_block, check_entries, check_finite, check_length,
    check_not_empty, largest_difference, tiles,
};
use std::ops::Range;

/// One block of the forward recurrence: `m`, `l` and `a` are its state after the block.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardBlock<const D: usize> {
    /// Keys of the block.
    pub keys: Range<usize>,
    /// Their scores; `-inf` for a hidden key.
    pub scores: Vec<f64>,
    /// Largest score of the block.
    pub block_max: f64,
    /// `m`: the largest score so far.
    pub running_max: f64,
    /// `alpha = exp(m_before - m)`, the factor on what was accumulated; 0 while there is nothing.
    pub rescale: f64,
    /// `exp(score - m)`, not yet divided by the denominator; 0 for a hidden key.
    pub probabilities: Vec<f64>,
    /// `l`: the sum of `exp(score - m)` so far.
    pub denominator: f64,
    /// `a`: the sum of `exp(score - m) * value` so far.
    pub accumulator: [f64; D],
}

/// The forward recurrence over one row.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardLedger<const D: usize> {
    /// The blocks in the order of their keys.
    pub blocks: Vec<ForwardBlock<D>>,
    /// `a / l` after the last block; 0 where every key is hidden.
    pub output: [f64; D],
    /// `m + ln l` after the last block; `-inf` where every key is hidden.
    pub lse: f64,
    /// The output by a softmax over the whole row at once.
    pub full_output: [f64; D],
    /// The log-sum-exp of the whole row at once.
    pub full_lse: f64,
    /// Largest `|output - full_output|`.
    pub output_difference: f64,
    /// `|lse - full_lse|`.
    pub lse_difference: f64,
}

/// Softmax of `scores` applied to `values`, `block` keys at a time.
///
/// A score of `-inf` is a hidden key. `scores` and `values` have one entry per key.
///
/// # Errors
/// [`LedgerError`] for a block size of 0, for lists that are empty or differ in length, for a
/// score that is NaN or `+inf` and for a value that is not finite.
///
/// ```
/// use flash_attention_spec::ledger;
///
/// let values = ledger::WORKED_VALUES.map(|v| [v]);
/// let ledger = ledger::forward(&ledger::WORKED_SCORES, &values, 2)?;
/// let maxima: Vec<f64> = ledger.blocks.iter().map(|b| b.running_max).collect();
/// assert_eq!(maxima, [2.0, 3.0, 3.0]);
/// assert_eq!(ledger.blocks[1].rescale, (-1.0_f64).exp());
/// assert!(ledger.output_difference < 1e-15);
/// # Ok::<(), ledger::LedgerError>(())
/// ```
pub fn forward<const D: usize>(
    scores: &[f64],
    values: &[[f64; D]],
    block: usize,
) -> Result<ForwardLedger<D>, LedgerError> {
    check_block("block", block)?;
    check_not_empty("scores", scores.len())?;
    check_length(("values", values.len()), ("scores", scores.len()))?;
    let hidden_or_finite = |s: f64| s < f64::INFINITY;
    check_entries(
        "scores",
        scores,
        hidden_or_finite,
        "a finite number or -inf",
    )?;
    check_finite("values", values)?;

    let mut state = Recurrence::new();
    let blocks: Vec<_> = tiles(scores.len(), block)
        .map(|keys| state.step(keys.clone(), scores[keys].to_vec(), values))
        .collect();
    let (output, lse) = state.finish();
    let (full_output, full_lse) = full_row(scores, values);
    Ok(ForwardLedger {
        blocks,
        output,
        lse,
        full_output,
        full_lse,
        output_difference: largest_difference(&[output], &[full_output]),
        // Two equal infinities do not differ, and must not be subtracted.
        lse_difference: if lse == full_lse {
            0.0
        } else {
            (lse - full_lse).abs()
        },
    })
}

/// The running state `m`, `l`, `a`.
pub(super) struct Recurrence<const D: usize> {
    max: f64,
    denominator: f64,
    accumulator: [f64; D],
}

impl<const D: usize> Recurrence<D> {
    pub(super) fn new() -> Self {
        Self {
            max: f64::NEG_INFINITY,
            denominator: 0.0,
            accumulator: [0.0; D],
        }
    }

    pub(super) fn step(
        &mut self,
        keys: Range<usize>,
        scores: Vec<f64>,
        values: &[[f64; D]],
    ) -> ForwardBlock<D> {
        let block_max = largest(&scores);
        let running_max = self.max.max(block_max);
        let rescale = exp_or_zero(self.max, running_max);
        let probabilities: Vec<f64> = scores
            .iter()
            .map(|&s| exp_or_zero(s, running_max))
            .collect();
        self.max = running_max;
        self.denominator = rescale * self.denominator + probabilities.iter().sum::<f64>();
        self.accumulator = self.accumulator.map(|a| rescale * a);
        for (&p, value) in probabilities.iter().zip(&values[keys.clone()]) {
            add_scaled(&mut self.accumulator, p, value);
        }
        ForwardBlock {
            keys,
            scores,
            block_max,
            running_max,
            rescale,
            probabilities,
            denominator: self.denominator,
            accumulator: self.accumulator,
        }
    }

    pub(super) fn finish(self) -> ([f64; D], f64) {
        if self.max == f64::NEG_INFINITY {
            return ([0.0; D], f64::NEG_INFINITY);
        }
        let output = self.accumulator.map(|a| a / self.denominator);
        (output, self.max + self.denominator.ln())
    }
}

/// The textbook way: maximum, sum and weighted sum, each over the whole row.
fn full_row<const D: usize>(scores: &[f64], values: &[[f64; D]]) -> ([f64; D], f64) {
    let max = largest(scores);
    if max == f64::NEG_INFINITY {
        return ([0.0; D], max);
    }
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut output = [0.0; D];
    for (s, value) in scores.iter().zip(values) {
        add_scaled(&mut output, (s - max).exp() / sum, value);
    }
    (output, max + sum.ln())
}

/// `exp(x - max)`, which is 0 for `x = -inf` even where the maximum is `-inf` too.
fn exp_or_zero(x: f64, max: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        0.0
    } else {
        (x - max).exp()
    }
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}
