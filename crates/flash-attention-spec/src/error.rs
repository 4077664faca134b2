//! Typed errors: each names the operand, what was given and what was expected.

use crate::operand::ElementType;
use crate::problem::{MAX_ELEMENTS, MAX_HEAD_DIM, MAX_SEQUENCE};
use std::fmt;
use thiserror::Error;

/// One thing that is wrong with a request.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// An operand does not have four dimensions.
    #[error("{operand} has shape {given:?} with {} dimensions, expected 4", given.len())]
    Rank {
        /// Name of the operand.
        operand: &'static str,
        /// The shape as given.
        given: Vec<usize>,
    },
    /// A dimension differs from the one it must equal.
    #[error("{operand} has {dimension} {given}, expected {expected} as in {other}")]
    Mismatch {
        /// Name of the operand.
        operand: &'static str,
        /// Name of the dimension.
        dimension: &'static str,
        /// Its size as given.
        given: usize,
        /// The size it must have.
        expected: usize,
        /// The operand that fixed that size.
        other: &'static str,
    },
    /// The number of query heads is not a multiple of the number of key heads.
    #[error(
        "query has {heads} heads, expected a positive multiple of the {kv_heads} heads of key and value"
    )]
    Heads {
        /// Heads of the query.
        heads: usize,
        /// Heads of key and value.
        kv_heads: usize,
    },
    /// `head_dim` or `value_dim` lies outside the supported range.
    #[error("{operand} has {dimension} {given}, expected 1 to {MAX_HEAD_DIM}")]
    Dim {
        /// Name of the operand.
        operand: &'static str,
        /// Name of the dimension.
        dimension: &'static str,
        /// Its size as given.
        given: usize,
    },
    /// A sequence is longer than positions can be counted.
    #[error("{operand} has {dimension} {given}, expected at most {MAX_SEQUENCE}")]
    Sequence {
        /// Name of the operand.
        operand: &'static str,
        /// Name of the dimension.
        dimension: &'static str,
        /// Its size as given.
        given: usize,
    },
    /// An operand, or the output that the operands lead to, has more elements than can be addressed.
    #[error(
        "{operand} has shape {given:?}, expected a product of at most {MAX_ELEMENTS} over the \
         dimensions that are not 0"
    )]
    Elements {
        /// Name of the operand, or `output`.
        operand: &'static str,
        /// The shape as given.
        given: [usize; 4],
    },
    /// A mask or bias cannot be broadcast to the scores.
    #[error(
        "{operand} has shape {given:?}, expected [{}] with any dimension 1",
        expected.map(|n| n.to_string()).join(", ")
    )]
    Broadcast {
        /// Name of the operand.
        operand: &'static str,
        /// The shape as given.
        given: [usize; 4],
        /// `[batch, heads, seq_q, seq_kv]`.
        expected: [usize; 4],
    },
    /// An operand has an element type attention is not defined on.
    #[error("{operand} has element type {given}, expected {expected}")]
    ElementType {
        /// Name of the operand.
        operand: &'static str,
        /// The type as given.
        given: ElementType,
        /// What is accepted.
        expected: &'static str,
    },
    /// An operand's element type differs from the query's.
    #[error("{operand} has element type {given}, expected {expected} as in query")]
    UnequalTypes {
        /// Name of the operand.
        operand: &'static str,
        /// The type as given.
        given: ElementType,
        /// The query's type.
        expected: ElementType,
    },
    /// The scale is not a finite number of `f32`, in which it is used.
    #[error(
        "scale is {given:?}, expected a finite number of at most {:.2e} in size",
        f32::MAX
    )]
    Scale {
        /// The scale as given.
        given: f64,
    },
    /// The soft cap is not a positive normal number of `f32`, in which it is used and divided by.
    #[error(
        "softcap is {given:?}, expected a positive number from {:.2e} to {:.2e}",
        f32::MIN_POSITIVE,
        f32::MAX
    )]
    Softcap {
        /// The cap as given.
        given: f64,
    },
}

/// Everything that is wrong with a request, in the order it was checked.
#[derive(Clone, Debug, PartialEq, Error)]
pub struct ProblemError {
    /// Each reason; never empty.
    pub reasons: Vec<Reason>,
}

impl fmt::Display for ProblemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, reason) in self.reasons.iter().enumerate() {
            if n > 0 {
                f.write_str("; ")?;
            }
            reason.fmt(f)?;
        }
        Ok(())
    }
}
