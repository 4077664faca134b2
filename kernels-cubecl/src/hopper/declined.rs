//! What the family declines, and why.

use crate::device::WITHOUT;
use flash_attention_spec::Dtype;
use thiserror::Error;

/// Why the family does not serve a problem, or operands as they lie in memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Declined {
    /// The environment asks for other families.
    #[error("left out by {WITHOUT}")]
    LeftOut,
    /// Not the generator that has the instructions.
    #[error("kernels are compiled by {given}, expected cuda c++")]
    Compiler {
        /// The device's compiler.
        given: &'static str,
    },
    /// Not the architecture that has the instructions.
    #[error("compute capability is {}, expected 9.0", capability(*given))]
    Capability {
        /// The device's, as `90`; none where it has none.
        given: Option<u32>,
    },
    /// No copies by tensor map.
    #[error("the device has no tensor copies")]
    TensorCopies,
    /// An element type that the products do not take.
    #[error("element type is {given}, expected f16 or bf16")]
    Dtype {
        /// The problem's.
        given: Dtype,
    },
    /// A dimension that does not fill 16 bytes.
    #[error("{dimension} is {given}, expected a multiple of 8")]
    Dimension {
        /// `head_dim` or `value_dim`.
        dimension: &'static str,
        /// Its size.
        given: usize,
    },
    /// A scale that leaves no finite factor for base-two exponents.
    #[error("scale is {given}, expected one whose size is a normal f32, with log2(e) too")]
    Scale {
        /// The scale, as bits of an `f32`.
        given: String,
    },
    /// Nothing to copy.
    #[error("{dimension} is 0")]
    Empty {
        /// The dimension.
        dimension: &'static str,
    },
    /// More cubes than a launch counts.
    #[error("the problem takes {given} cubes, expected at most {expected}")]
    Cubes {
        /// Cubes of the launch.
        given: u128,
        /// Cubes that a launch can have.
        expected: u128,
    },
    /// Too little shared memory.
    #[error("the device has {given} bytes of shared memory, expected at least {expected}")]
    SharedMemory {
        /// The device's.
        given: usize,
        /// What the blocks need.
        expected: usize,
    },
    /// Sums that no buffer of the device holds.
    #[error("the sums of the query gradient take {given} bytes, expected at most {expected}")]
    Buffer {
        /// Bytes of the sums.
        given: u128,
        /// Bytes that a buffer holds.
        expected: u64,
    },
    /// Too few units.
    #[error("the device has {given} units in a cube, expected at least {expected}")]
    Units {
        /// The device's.
        given: u32,
        /// What the blocks need.
        expected: u32,
    },
    /// An operand that the copy engine cannot read.
    #[error(
        "{operand} has strides {strides:?} at byte {offset}, expected an innermost stride of 1, the \
         others non-zero multiples of 8 below 2^39, and a multiple of 16 bytes"
    )]
    Layout {
        /// The operand.
        operand: &'static str,
        /// Its strides, in elements.
        strides: Vec<usize>,
        /// Where it starts in its buffer.
        offset: u64,
    },
}

fn capability(version: Option<u32>) -> String {
    version.map_or("none".to_string(), |version| {
        format!("{}.{}", version / 10, version % 10)
    })
}
