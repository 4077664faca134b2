//! What a call can refuse, before anything is launched.

use flash_attention_spec::{Dtype, ProblemError};
use thiserror::Error;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// Shapes, element types or options that do not fit together.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// An operand lives on another device than the query.
    #[error("{operand} is on device {given}, expected {expected} as for query")]
    Device {
        /// Name of the operand.
        operand: &'static str,
        /// Its device.
        given: String,
        /// The query's device.
        expected: String,
    },
    /// The device belongs to a backend that this crate does not serve.
    #[error("query is on device {given}, expected one of a backend that is served: {expected}")]
    Backend {
        /// The query's device.
        given: String,
        /// The backends compiled in.
        expected: &'static str,
    },
    /// The device cannot compute with the element type.
    #[error(
        "query has element type {given}, expected one that device {device} computes with: {expected}"
    )]
    Dtype {
        /// The query's element type.
        given: Dtype,
        /// The device.
        device: String,
        /// The types it has.
        expected: String,
    },
    /// No kernel family serves the problem on the device.
    #[cfg(feature = "cube")]
    #[error(transparent)]
    Plan(#[from] kernels_cubecl::plan::PlanError),
}
