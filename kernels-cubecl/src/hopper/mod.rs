//! Warpgroup products and tensor copies of compute capability 9.0, through CubeCL's CUDA C++ generator.
//!
//! A cube stays for the whole launch and takes one block of queries of a head after the other; each of its
//! warpgroups owns 64 of them, with the output and a block of scores in registers. Keys and values come
//! through shared memory in stages, by the copy engine, which also fills in zeros past the ends of a
//! sequence and of a head. A plane of its own asks for them, for one block of queries after the other, and
//! leaves most of its registers to the warpgroups. No warpgroup waits for another but for its stages: one
//! ends its queries and starts the next while others multiply. Wide heads with many keys are different:
//! there two warpgroups take turns at the products of two blocks (`joined.rs`).
//!
//! ```text
//! for each visible key block, from the last          all warpgroups walk the same blocks
//!     wait for K                                      a warpgroup that sees nothing of it passes by
//!     S = Q K^T            one run of products, both operands in shared memory
//!     done with K          and, at the last block, with Q: every plane says so for itself
//!     hide, cap, bias      where the block is not wholly visible
//!     m' = max(m, rowmax S)      over four neighbouring units
//!     O, l *= 2^(m - m')   only where a maximum outgrew what f16 and f32 can carry
//!     P = 2^(S - m)        rounded in place, in the layout of the next product's operand
//!     wait for V
//!     O += P V             P in registers
//!     done with V
//! O / l, m and ln l to global memory
//! ```
//!
//! While one warpgroup takes exponents another multiplies.
//!
//! A probability of 0 does not undo a value that is not finite: 0 times it is NaN. Where a block has
//! hidden keys, its values are looked at first, and one that is not finite sends the block's product
//! to a loop over keys that leaves out those of probability 0.
//!
//! One kernel computes the gradients in one pass over the scores: a cube owns keys, and adds what they
//! contribute to the query gradient to sums in global memory, which a small kernel rounds in the end.
//! Where those are the only ones wanted, a kernel whose cubes own queries has less to do.
//!
//! ```text
//! all gradients, a cube owns keys                  query gradient alone, a cube owns queries
//!     for each head of the group, query block          for each visible key block
//!         S^T = K Q^T                                      S = Q K^T
//!         P^T = 2^(S^T - m - ln l)                         P
//!         dP^T = V dO^T                                    dP = dO V^T
//!         dS^T = P^T (dP^T - D)                            dS = P (dP - D)
//!         dV += P^T dO          weights in registers       dQ += dS K
//!         dK += dS^T Q
//!         dQ += dS K            dS in shared memory, dQ in global memory
//! ```
//!
//! `dS` is rounded to the operands' type for its products; in `f16` it becomes infinite past 65504.
//!
//! Where heads are wide, two gradients of 64 keys are more than a warpgroup's registers hold. Then two
//! warpgroups own the same keys: the one with scores sums `dV` and hands its weights, through shared
//! memory, to the one with `dP`, which sums `dK`.
//!
//! A small kernel before them computes `D` and pads the row statistics: of transposed scores they vary
//! along the columns, and come through shared memory with the queries. It also writes the zeros that the
//! sums start from.

mod arrivals;
mod block;
mod blueprint;
mod careful;
mod dealing;
mod declined;
mod forward;
mod gradient;
mod gradient_blueprint;
mod handover;
mod instructions;
mod joined;
mod launch;
mod launch_backward;
mod launch_wide;
#[cfg(feature = "machine-code")]
mod machine_code;
mod one_pass;
mod one_pass_pipeline;
mod output;
mod parts;
mod pipeline;
mod products;
mod query_gradient;
mod query_sums;
mod query_tile;
mod softmax;
mod statistics;
mod step;
mod tiles;
mod turns;
mod walk;
mod wide_instructions;
mod wide_key_value_gradient;
mod wide_pipeline;
mod wide_sums;

pub use blueprint::{ForwardBlueprint, check_layout, plan_forward, variants};
pub use declined::Declined;
pub use gradient_blueprint::{
    BackwardBlueprint, Division, GradientBlueprint, gradient_variants, plan_backward,
};
pub use launch::{attention_forward, check_operands};
pub use launch_backward::{attention_backward, check_gradient_operands};
#[cfg(feature = "machine-code")]
pub(crate) use machine_code::specimens;
