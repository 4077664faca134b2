//! Warpgroup products and tensor copies of compute capability 9.0, through CubeCL's CUDA C++ generator.
//!
//! A cube stays on its multiprocessor and walks blocks of queries of heads, one after the other; each of
//! its warpgroups owns 64 queries of a block, with the output and a block of scores in registers. Keys
//! and values come through shared memory in stages, by the copy engine, which also fills in zeros past
//! the ends of a sequence and of a head. It runs ahead into the cube's next block of queries.
//!
//! ```text
//! for each visible key block, from the last          all warpgroups walk the same blocks
//!     wait for this K, and the V before               a warpgroup that sees nothing of it passes by
//!     start S = Q K^T            both operands in shared memory
//!     start O += P V             of the block before; P in registers
//!     wait for S                 the output's product runs on
//!     hide, cap, bias            where the block is not wholly visible
//!     m' = max(m, rowmax S)      over four neighbouring units
//!     P' = 2^(S - m)
//!     wait for O
//!     O, l *= 2^(m - m')         only where a maximum outgrew what f16 and f32 can carry
//!     P = P'                     rounded into the layout of the next product's operand
//!     done with this K, and the V before: the last warpgroup asks for what comes into their stages
//! O += P V of the last block
//! O / l, m and ln l to global memory
//! ```
//!
//! So the output's product runs while the same warpgroup takes exponents, and other warpgroups multiply
//! meanwhile, too.
//!
//! A probability of 0 does not undo a value that is not finite: 0 times it is NaN. Where a block has
//! hidden keys, its values are looked at first, and one that is not finite sends the block's product
//! to a loop over keys that leaves out those of probability 0.
//!
//! Two kernels compute the gradients, without atomics: what one adds, it adds in the same order every
//! time, at the price of two products more than one kernel with atomics has.
//!
//! ```text
//! key and value gradients, a cube owns keys        query gradient, a cube owns queries
//!     for each head of the group, query block          for each visible key block
//!         S^T = K Q^T                                      S = Q K^T
//!         P^T = 2^(S^T - m - ln l)                         P
//!         dV += P^T dO          weights in registers       dP = dO V^T
//!         dP^T = V dO^T                                    dS = P (dP - D)
//!         dS^T = P^T (dP^T - D)                            dQ += dS K
//!         dK += dS^T Q
//! ```
//!
//! Where heads are wide, two gradients of 64 keys are more than a warpgroup's registers hold. Then two
//! warpgroups own the same keys: the one with scores sums `dV` and hands its weights, through shared
//! memory, to the one with `dP`, which sums `dK`.
//!
//! A small kernel before them computes `D` and pads the row statistics: of transposed scores they vary
//! along the columns, and come through shared memory with the queries.

mod blueprint;
mod careful;
mod forward;
mod gradient;
mod gradient_blueprint;
mod handover;
mod instructions;
mod key_value_gradient;
mod launch;
mod launch_backward;
mod launch_wide;
#[cfg(feature = "machine-code")]
mod machine_code;
mod pipeline;
mod query_gradient;
mod softmax;
mod statistics;
mod tiles;
mod wide_instructions;
mod wide_key_value_gradient;
mod wide_pipeline;

pub use blueprint::{Declined, ForwardBlueprint, check_layout, plan_forward, variants};
pub use gradient_blueprint::{
    BackwardBlueprint, Division, GradientBlueprint, gradient_variants, plan_backward,
};
pub use launch::{attention_forward, check_operands};
pub use launch_backward::{attention_backward, check_gradient_operands};
#[cfg(feature = "machine-code")]
pub(crate) use machine_code::specimens;
