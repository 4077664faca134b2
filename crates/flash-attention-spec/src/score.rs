//! How a score is formed, and its derivative beside it.
//!
//! In order: `scale * (q . k)`, the soft cap, the bias. Host and kernels call the same functions.
// The attribute that makes a function callable from kernels adds undocumented items beside it.
#![cfg_attr(feature = "cube", allow(missing_docs))]

#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// `softcap * tanh(score / softcap)`, the soft cap of Gemma 2 (arXiv:2408.00118, section 2).
#[cfg_attr(feature = "cube", cube)]
pub fn soft_cap(score: f32, softcap: f32) -> f32 {
    softcap * (score / softcap).tanh()
}

/// Derivative of [`soft_cap()`] with respect to the score, from the capped value:
/// `1 - tanh^2 = 1 - (capped / softcap)^2`.
#[cfg_attr(feature = "cube", cube)]
pub fn soft_cap_derivative(capped: f32, softcap: f32) -> f32 {
    let t = capped / softcap;
    1.0 - t * t
}
