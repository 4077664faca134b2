//! Register tiles for any device: no plane operations, no matrix units, 16 KiB of shared memory.
//!
//! A cube owns a block of queries (forward, query gradient) or of keys (key and value gradients)
//! and walks the blocks of the other side that it can see. Its units form a grid: unit `(y, x)`
//! holds `rows` x 4 scores in registers.
//!
//! ```text
//! for each visible key block                        one cube, one query block
//!     S = Q K^T            register tiles, operands staged through shared memory, 4 features wide
//!     scale, cap, bias, visibility
//!     m' = max(m, rowmax S)                         across the x units, through shared memory
//!     P = exp(S - m')      to shared memory         hidden keys are exactly 0
//!     O = exp(m - m') O + P V                       O stays in registers
//! O / l, m and ln l to global memory
//! ```
//!
//! The backward kernels rebuild `P = exp((S - m) - ln l)` from the two saved numbers a row, form
//! `dS = P (dP - D)` and multiply it from the same shared tile. Nothing is added by atomics, so
//! every result is reproducible bit for bit. Sums over long sequences are taken in two levels
//! (`sums.rs`).

mod bias_gradient;
mod blueprint;
mod delta;
mod forward;
mod gradient;
mod iterations;
mod key_value_gradient;
mod launch;
mod launch_backward;
#[cfg(feature = "machine-code")]
mod machine_code;
mod pack;
mod product;
mod query_gradient;
mod stage;
mod sums;
mod tile;

#[cfg(feature = "machine-code")]
pub(crate) use bias_gradient::{BiasShape, BiasShapeLaunch};
pub use blueprint::{Blueprint, plan};
pub(crate) use launch::Launch;
pub use launch::attention_forward;
pub use launch_backward::attention_backward;
#[cfg(feature = "machine-code")]
pub(crate) use machine_code::specimens;
pub use tile::Tile;
