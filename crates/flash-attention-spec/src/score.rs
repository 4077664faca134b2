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
    let x = score / softcap;
    let mut t = x.tanh();
    // A shading language promises an absolute error of its tanh, which a large cap multiplies: near
    // 0 the series is exact to f32 rounding, relative to the score (its next term is under 1e-8).
    if x < 0.25f32 && x > -0.25f32 {
        // -1/3, 2/15, -17/315, 62/2835.
        let y = x * x;
        let tail = y * (-0.053_968_254f32 + y * 0.021_869_488f32);
        t = x + x * (y * (-0.333_333_34f32 + y * (0.133_333_34f32 + tail)));
    }
    softcap * t
}

/// Derivative of [`soft_cap()`] with respect to the score, from the capped value:
/// `1 - tanh^2 = 1 - (capped / softcap)^2`.
#[cfg_attr(feature = "cube", cube)]
pub fn soft_cap_derivative(capped: f32, softcap: f32) -> f32 {
    let t = capped / softcap;
    1.0 - t * t
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a series with a wrong coefficient, and a jump where it ends.
    #[test]
    fn soft_caps_are_right_to_rounding() {
        for cap in [0.5_f32, 50.0, 1e4, 1e10] {
            for n in -400..=400 {
                let score = n as f32 * cap / 400.0;
                let exact = f64::from(cap) * (f64::from(score) / f64::from(cap)).tanh();
                let error = (f64::from(soft_cap(score, cap)) - exact).abs();
                assert!(
                    error <= 4e-7 * exact.abs(),
                    "{score} under {cap}: {error:e}"
                );
            }
        }
    }
}
