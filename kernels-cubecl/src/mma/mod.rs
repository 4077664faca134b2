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
//! The backward kernels rebuild `P = exp((S - m) - ln l)` from two saved numbers a row and form
//! `dS = P (dP - D)`:
//!
//! ```text
//! query gradient, one cube a query block            key and value gradients, one cube a key block
//!     for each visible key block                        for each head of the group, query block
//!         P from S = Q K^T; dP = dO V^T                     P^T from K Q^T; dP^T = V dO^T
//!         dQ = dQ + dS K                                    dV = dV + P^T dO; dK = dK + dS^T Q
//! ```
//!
//! `dS` is rounded to the operands' type for its products; in `f16` it becomes infinite past 65504.
//!
//! Together they take seven products. Where all three gradients are wanted of 16-bit operands, one pass
//! with five serves most heads (`one_pass.rs`): cubes own keys, and add to the query's gradient in global
//! memory. They do so in a fixed order (`crate::turns`): every result is reproducible bit for bit, unless the
//! call permits any order.
//!
//! `f32` operands go through the same kernels in three parts each, which `split.rs` explains, by the
//! generator that takes assembly text. Where there is room the gradients' walked rows are taken apart once
//! a block, which `apart.rs` does. Where a problem permits it they are rounded to TF32 instead: `tf32.rs`.
//!
//! One source for both of CubeCL's CUDA generators. Where asynchronous copies are missing a block
//! waits in registers while the one before it is worked on. Shared tiles have an odd pitch of
//! 16-byte chunks instead of a swizzle: as free of bank conflicts, and every offset is a constant.

mod apart;
mod blueprint;
mod config;
mod decline;
mod forward;
mod fragment;
mod gradient;
mod hidden;
mod instructions;
mod key_value_gradient;
mod launch;
mod launch_one_pass;
#[cfg(feature = "machine-code")]
mod machine_code;
mod memory;
mod one_pass;
mod one_pass_blueprint;
mod one_pass_end;
mod one_pass_shared;
mod one_pass_step;
mod one_pass_tiles;
mod one_pass_walk;
mod products;
mod queries;
mod query_gradient;
mod query_sums;
mod rows;
mod scores;
mod softmax;
mod split;
mod split_products;
mod stage;
mod tables;
mod tf32;
mod turns;
mod weights;

pub use blueprint::{Blocks, Blueprint, forward_variants, plan};
pub use decline::Decline;
pub use launch::{attention_backward, attention_forward};
#[cfg(feature = "machine-code")]
pub(crate) use machine_code::specimens;
pub use one_pass_blueprint::OnePass;
pub use tf32::Ties;
