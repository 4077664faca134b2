//! The case grid and the acceptance rule that every device must pass.
//!
//! - [`cases`] is the grid: each case says in one sentence which fault it catches.
//! - [`data`] draws a case's operands, rounded to the element type under test.
//! - [`naive`] is the same formula done unfused in that type: what ordinary rounding costs.
//! - [`acceptance`] holds a result to the `f64` reference, with that cost as the yardstick.
//! - [`layout`] lays operands out on a device: slices, swapped axes, expanded heads.
//! - [`runner`] runs a case on a device and judges every output.
//! - [`sampled`] is the reference on a few rows and keys of a problem too large for the full table.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::Device;
//! use flash_attention_check::{grid, run_case};
//! use flash_attention_spec::Dtype;
//!
//! let case = &grid(false)[0];
//! let report = run_case(case, &Device::flex(), Dtype::F32, 1).unwrap();
//! assert!(report.passed, "{report}");
//! # }
//! ```

pub mod acceptance;
pub mod cases;
pub mod data;
pub mod layout;
pub mod naive;
pub mod runner;
pub mod sampled;

pub use acceptance::OutputVerdict;
pub use cases::{Case, grid};
pub use runner::{CaseError, CaseReport, Prepared, run_case};
