//! Which kernels and block sizes serve a problem on a device: a pure function of plain data.

use crate::device::Device;
use crate::portable::Tile;
use flash_attention_spec::{Dtype, Problem};
use thiserror::Error;

/// Name of the register-tile family that serves every device.
pub const PORTABLE: &str = "portable";

/// What is decided before a launch. Together with the element type and the options present it
/// determines the generated code; lengths, strides, batch and heads stay run-time values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Blocks of the forward pass.
    pub forward: Tile,
    /// Blocks of each backward kernel.
    pub backward: Tile,
}

impl Blueprint {
    /// The kernel family.
    pub fn family(&self) -> &'static str {
        PORTABLE
    }
}

/// Why no kernel family serves a problem on a device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The device cannot hold the element type.
    #[error("device {device} has no {given}, expected one of {expected}")]
    Dtype {
        /// The device's name.
        device: String,
        /// The element type asked for.
        given: Dtype,
        /// Those it has.
        expected: String,
    },
    /// A kernel needs more buffers than the device binds.
    #[error(
        "device {device} binds {given} buffers in a kernel, expected at least {expected} for {what}"
    )]
    Bindings {
        /// The device's name.
        device: String,
        /// Buffers it binds.
        given: u32,
        /// Buffers needed.
        expected: u32,
        /// What needs them.
        what: &'static str,
    },
    /// The smallest blocks need more than the device has.
    #[error(
        "device {device} has {shared_memory} bytes of shared memory and {units} units in a cube, \
         expected at least {} bytes and {} units", Tile::SMALLEST.shared_memory(), Tile::SMALLEST.units()
    )]
    Cube {
        /// The device's name.
        device: String,
        /// Its shared memory.
        shared_memory: usize,
        /// Its units of a cube.
        units: u32,
    },
    /// An operand is larger than a buffer of the device.
    #[error("{operand} needs {given} bytes, device {device} holds at most {expected} in a buffer")]
    Buffer {
        /// The device's name.
        device: String,
        /// Name of the operand.
        operand: &'static str,
        /// Bytes it needs.
        given: u128,
        /// Bytes a buffer holds.
        expected: u64,
    },
}

/// The blueprint of `problem` on `device`.
///
/// # Errors
/// [`PlanError`] names what the device lacks.
pub fn plan(problem: &Problem, device: &Device) -> Result<Blueprint, PlanError> {
    let name = || device.hardware.clone();
    if !device.dtypes.contains(&problem.dtype) {
        let expected: Vec<String> = device.dtypes.iter().map(Dtype::to_string).collect();
        return Err(PlanError::Dtype {
            device: name(),
            given: problem.dtype,
            expected: expected.join(", "),
        });
    }
    let options = u32::from(problem.mask.is_some()) + u32::from(problem.bias.is_some());
    // The gradient kernels bind the most: query, key, value, output gradient, row statistics, a
    // gradient, and the optional operands.
    let needed = 6 + options;
    if device.max_bindings < needed {
        return Err(PlanError::Bindings {
            device: name(),
            given: device.max_bindings,
            expected: needed,
            what: if options == 2 {
                "gradients with mask and bias"
            } else {
                "gradients"
            },
        });
    }
    let size = |shape: [usize; 4], bytes: usize| {
        shape.iter().map(|&n| n as u128).product::<u128>() * bytes as u128
    };
    let rows = problem
        .lse_shape()
        .map(|n| n as u128)
        .iter()
        .product::<u128>();
    let buffers = [
        ("output", size(problem.output_shape(), problem.dtype.size())),
        // Three statistics a row in one buffer.
        ("lse", rows * 3 * 4),
    ];
    for (operand, given) in buffers {
        if given > u128::from(device.max_buffer) {
            return Err(PlanError::Buffer {
                device: name(),
                operand,
                given,
                expected: device.max_buffer,
            });
        }
    }
    let fits =
        |tile: &&Tile| tile.shared_memory() <= device.shared_memory && tile.units() <= device.units;
    // Wide rows of accumulators need many units a row, or they leave the registers.
    let widest = problem.head_dim.max(problem.value_dim);
    let order: &[Tile] = if widest > 64 {
        &[Tile::LARGE, Tile::MEDIUM, Tile::SMALLEST]
    } else {
        &[Tile::LARGE, Tile::SMALLEST]
    };
    let tile = order.iter().find(fits).ok_or_else(|| PlanError::Cube {
        device: name(),
        shared_memory: device.shared_memory,
        units: device.units,
    })?;
    Ok(Blueprint {
        forward: *tile,
        backward: *tile,
    })
}
