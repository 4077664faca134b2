//! The block recurrence of flash attention, written down step by step in `f64`.
//!
//! [`forward`] walks one row of scores block by block: a running maximum, a running denominator
//! and an accumulated output replace the row of probabilities (FlashAttention, arXiv:2205.14135,
//! Algorithm 1; online softmax, arXiv:1805.02867). [`backward`] rebuilds each block of
//! probabilities from one saved number per row, its log-sum-exp, and adds up the gradients
//! (arXiv:2205.14135, Algorithm 4). Both return every intermediate as data, with the result of the
//! full-row computation beside it.
//!
//! This is for reading and for tests: it keeps each step, so it is not meant for long sequences.

mod backward;
mod forward;

pub use backward::{BackwardBlock, BackwardLedger, Counts, GradientRows, Rows, backward};
pub use forward::{ForwardBlock, ForwardLedger, forward};

use crate::error::ProblemError;
use std::ops::Range;
use thiserror::Error;

/// Scores of the worked forward example; their maximum is 3.
pub const WORKED_SCORES: [f64; 6] = [1.0, 2.0, -1.0, 3.0, 0.0, 2.5];
/// One value for each of [`WORKED_SCORES`]: its position, counted from 1.
pub const WORKED_VALUES: [f64; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
/// The worked backward example: five positions of two channels.
pub const WORKED_ROWS: Rows<'static, 2> = Rows {
    query: &[
        [0.2, -0.3],
        [0.5, 0.1],
        [-0.4, 0.7],
        [0.6, -0.2],
        [0.1, 0.8],
    ],
    key: &[
        [0.3, 0.5],
        [-0.2, 0.4],
        [0.7, -0.1],
        [0.1, -0.6],
        [-0.5, 0.2],
    ],
    value: &[[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [2.0, -1.0], [0.5, 0.3]],
    output_gradient: &[
        [0.2, -0.1],
        [0.3, 0.5],
        [-0.4, 0.2],
        [0.1, -0.3],
        [0.6, 0.4],
    ],
};

/// What a ledger cannot be drawn up for.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// A block size of 0.
    #[error("{name} is 0, expected at least 1")]
    BlockSize {
        /// Which block size.
        name: &'static str,
    },
    /// A list without entries.
    #[error("{operand} is empty, expected at least one entry")]
    Empty {
        /// Name of the list.
        operand: &'static str,
    },
    /// Two lists that go together differ in length.
    #[error("{operand} has {given} entries, expected {expected} as in {other}")]
    Length {
        /// Name of the list.
        operand: &'static str,
        /// Its length.
        given: usize,
        /// The length it must have.
        expected: usize,
        /// The list that fixed that length.
        other: &'static str,
    },
    /// An entry the softmax or its gradient is not defined on.
    #[error("{operand}[{index}] is {given}, expected {expected}")]
    Entry {
        /// Name of the list.
        operand: &'static str,
        /// Position of the entry, counted through the rows one after the other.
        index: usize,
        /// The entry.
        given: f64,
        /// What is accepted.
        expected: &'static str,
    },
    /// The rows do not form an attention problem, for example because they have too many channels.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

fn check_block(name: &'static str, size: usize) -> Result<(), LedgerError> {
    if size == 0 {
        return Err(LedgerError::BlockSize { name });
    }
    Ok(())
}

fn check_not_empty(operand: &'static str, length: usize) -> Result<(), LedgerError> {
    if length == 0 {
        return Err(LedgerError::Empty { operand });
    }
    Ok(())
}

fn check_length(
    (operand, given): (&'static str, usize),
    (other, expected): (&'static str, usize),
) -> Result<(), LedgerError> {
    if given != expected {
        return Err(LedgerError::Length {
            operand,
            given,
            expected,
            other,
        });
    }
    Ok(())
}

fn check_finite<const D: usize>(
    operand: &'static str,
    rows: &[[f64; D]],
) -> Result<(), LedgerError> {
    check_entries(
        operand,
        rows.as_flattened(),
        f64::is_finite,
        "a finite number",
    )
}

fn check_entries(
    operand: &'static str,
    entries: &[f64],
    accepts: impl Fn(f64) -> bool,
    expected: &'static str,
) -> Result<(), LedgerError> {
    match entries.iter().position(|&entry| !accepts(entry)) {
        Some(index) => Err(LedgerError::Entry {
            operand,
            index,
            given: entries[index],
            expected,
        }),
        None => Ok(()),
    }
}

/// `0..length` cut into tiles of `size`; the last one may be shorter.
fn tiles(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length)
        .step_by(size)
        .map(move |start| start..start.saturating_add(size).min(length))
}

fn add_scaled<const D: usize>(sum: &mut [f64; D], factor: f64, row: &[f64; D]) {
    for (s, x) in sum.iter_mut().zip(row) {
        *s += factor * x;
    }
}

fn largest_difference<const D: usize>(a: &[[f64; D]], b: &[[f64; D]]) -> f64 {
    let pairs = a.as_flattened().iter().zip(b.as_flattened());
    let differences = pairs.map(|(x, y)| (x - y).abs());
    // `f64::max` would drop a NaN, which is the largest difference there is.
    differences.fold(
        0.0,
        |worst, d| if d > worst || d.is_nan() { d } else { worst },
    )
}
