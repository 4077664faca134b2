//! What exact attention computes, apart from any device that computes it.
//!
//! - [`Problem`] checks shapes and options once; everything downstream trusts it.
//! - [`visibility`] and [`score`] hold the one definition of which keys a query sees and how a
//!   score is formed. Kernels and host code call the same functions.
//! - [`mod@reference`] is the textbook computation in `f64`, forward and backward.
//! - [`ledger`] shows the block recurrence of flash attention step by step.
//!
//! Shapes are `[batch, heads, seq_q, head_dim]` for queries, `[batch, kv_heads, seq_kv, head_dim]`
//! for keys and `[batch, kv_heads, seq_kv, value_dim]` for values throughout.

pub mod error;
pub mod ledger;
pub mod operand;
pub mod options;
pub mod problem;
pub mod reference;
pub mod score;
pub mod visibility;

pub use error::{ProblemError, Reason};
pub use operand::{Dtype, ElementType, Operand, Operands};
pub use options::{Alignment, F32Precision, Options, Summation, Wanted, Window};
pub use problem::{MAX_ELEMENTS, MAX_HEAD_DIM, MAX_SEQUENCE, Problem};
pub use visibility::Band;
