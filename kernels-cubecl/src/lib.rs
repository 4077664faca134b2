//! Exact blockwise (flash) attention kernels, written once in CubeCL.
//!
//! CubeCL bindings go in and out ([`operands`]); nothing here knows Burn. [`device`] reads what a
//! device can do, [`plan`](mod@plan) picks kernels and block sizes for a problem on it, and each
//! kernel family is one folder: [`portable`] runs everywhere CubeCL does, [`mma`] on NVIDIA's matrix
//! units from compute capability 8.0 on, [`hopper`] on those of 9.0.

#![recursion_limit = "256"]

mod assembly;
pub mod device;
mod dispatch;
pub mod hopper;
#[cfg(feature = "machine-code")]
#[doc(hidden)]
pub mod machine_code;
pub mod mma;
pub mod operands;
pub mod plan;
pub mod portable;
mod rounding;
mod schedule;
mod score;
mod turns;
mod unit;

pub use dispatch::{attention_backward, attention_forward};
pub use flash_attention_spec as spec;
