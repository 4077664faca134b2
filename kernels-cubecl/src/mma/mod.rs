//! Register fragments of known layout, for NVIDIA devices of compute capability 8.0 and later:
//! scores and probabilities never leave the registers.
//!
//! A cube owns a block of queries (forward, query gradient) or of keys (key and value gradients),
//! each warp 16 or 32 rows of it, and walks the blocks of the other side that it can see. The
//! `m16n8k16` product leaves its sums where, two tiles side by side, it wants its left operand: what
//! becomes of a block of scores goes straight into the next product.
//!
//! ```text
//! queries to shared memory; first keys on their way          one cube, one query block
//! for each visible key block
//!     keys have arrived; values on their way
//!     S = Q K^T                       fragments from shared memory by ldmatrix
//!     values have arrived; next keys on their way
//!     where some score is hidden: visibility, element by element
//!     m' = max(m, rowmax S)           four lanes hold a row: two shuffles
//!     P = exp(S - m'); O = exp(m - m') O
//!     O = O + P V                     P from registers, V by ldmatrix, transposed
//! O / l through shared memory; m and ln l to global memory
//! ```
//!
//! One source for both of CubeCL's CUDA generators. Where asynchronous copies are missing a block
//! waits in registers while the one before it is worked on. Shared tiles have an odd pitch of
//! 16-byte chunks instead of a swizzle: as free of bank conflicts, and every offset is a constant.

mod blueprint;
mod forward;
mod fragment;
mod gradient;
mod hidden;
mod key_value_gradient;
mod launch;
#[cfg(feature = "machine-code")]
mod machine_code;
mod query_gradient;
mod softmax;
mod stage;

pub use blueprint::{Blocks, Blueprint, Decline, plan};
pub use launch::attention_forward;
#[cfg(feature = "machine-code")]
pub(crate) use machine_code::specimens;
