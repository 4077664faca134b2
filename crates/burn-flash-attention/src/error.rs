//! What a call can refuse, before anything is launched.

use flash_attention_spec::{Dtype, ProblemError};
use thiserror::Error;

/// Why a call was refused.
///
/// ```
/// use burn_flash_attention::{AttentionError, MAX_HEAD_DIM, Reason};
///
/// /// Whether a smaller head dimension would help.
/// fn is_too_wide(error: &AttentionError) -> bool {
///     match error {
///         AttentionError::Problem(problem) => problem.reasons.iter().any(|reason| {
///             matches!(reason, Reason::Dim { given, .. } if *given > MAX_HEAD_DIM)
///         }),
///         _ => false,
///     }
/// }
/// ```
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
    /// Two operands are tracked under different strategies of gradient checkpointing.
    #[error(
        "{operand} is on a device of gradient checkpointing {given}, expected {expected} as for {other}"
    )]
    Checkpointing {
        /// Name of the operand.
        operand: &'static str,
        /// Its device's strategy.
        given: String,
        /// That of the first operand that has one.
        expected: String,
        /// Name of that operand.
        other: &'static str,
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

#[cfg(all(test, feature = "cube"))]
mod tests {
    /// Catches an error that holds what users of this crate cannot name.
    #[test]
    fn what_errors_hold_is_exported() {
        let plan = crate::PlanError::Bindings {
            device: "small".to_string(),
            given: 4,
            expected: 8,
        };
        assert!(matches!(
            crate::AttentionError::from(plan),
            crate::AttentionError::Plan(crate::PlanError::Bindings { given: 4, .. })
        ));
    }
}
