//! What the family declines, and why.

use crate::device::WITHOUT;
use thiserror::Error;

/// Why this family does not serve a problem on a device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Decline {
    /// The environment asks for other families.
    #[error("left out by {WITHOUT}")]
    LeftOut,
    /// `f32` operands are split in assembly text, which the device's compiler does not take.
    #[error("device {device} is compiled for by {given}, f32 operands need assembly text")]
    Compiler {
        /// The device's name.
        device: String,
        /// What kernels are compiled by.
        given: &'static str,
    },
    /// `f32` sums over more terms than one accumulator adds within its bound of error.
    #[error("a sum of f32 has {given} terms, expected at most {expected}")]
    Long {
        /// Terms of the longest sum.
        given: usize,
        /// Terms that a sum may have.
        expected: usize,
    },
    /// The device lacks the product, or the load it is fed by.
    #[error("device {device} has no {expected}")]
    Instruction {
        /// The device's name.
        device: String,
        /// What is missing.
        expected: String,
    },
    /// A scale that leaves no finite factor from dot products to exponents, or next to none.
    #[error("scale is {given}, expected a size of at least 1e-30 that is finite times log2(e)")]
    Scale {
        /// The scale, as an `f32`.
        given: String,
    },
    /// The device's warps are not 32 wide.
    #[error("device {device} has planes of {given:?} units, expected 32")]
    Plane {
        /// The device's name.
        device: String,
        /// Its smallest and largest plane.
        given: (u32, u32),
    },
    /// The smallest blocks do not fit.
    #[error("device {device} has {given} bytes of shared memory, expected at least {expected}")]
    SharedMemory {
        /// The device's name.
        device: String,
        /// What it has.
        given: usize,
        /// What is needed.
        expected: usize,
    },
}
