//! Which tiles serve a problem on a device: a pure function of plain data.

use super::iterations::most_iterations;
use super::tile::Tile;
use crate::device::Device;
use crate::plan::PlanError;
use flash_attention_spec::{Dtype, Problem};

/// Accumulators that a unit keeps in registers beside the scores it works on. A software device has
/// no such number, but compiles a kernel with more of them far longer.
const MOST_ACCUMULATORS: usize = 128;

/// Sequences longer than this are worth the larger kernels of [`Tile::SOFTWARE`], which take about
/// twice as long to compile.
const FIRST_LONG: usize = 256;

/// What is decided before a launch. Together with the element type and the options present it
/// determines the generated code; lengths, strides, batch and heads stay run-time values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Blocks of the forward pass.
    pub forward: Tile,
    /// Blocks of each backward kernel.
    pub backward: Tile,
    /// Key and value gradients in one kernel, which rebuilds the scores once for both.
    pub key_value_together: bool,
    /// Key and value copied side by side for the backward kernels, so that they bind one buffer.
    pub packed_key_value: bool,
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
    // gradient, and the optional operands. Packing key and value saves one.
    let needed = 6 + options;
    let packed_key_value = device.max_bindings < needed;
    if device.max_bindings < needed - 1 {
        return Err(PlanError::Bindings {
            device: name(),
            given: device.max_bindings,
            expected: needed - 1,
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
    let float = problem.dtype.size();
    let Problem {
        batch,
        kv_heads,
        seq_kv,
        head_dim,
        value_dim,
        ..
    } = *problem;
    let keys = |width: usize| size([batch, kv_heads, seq_kv, width], float);
    let buffers = [
        ("output", size(problem.output_shape(), float)),
        // Three statistics a row in one buffer.
        ("lse", rows * 3 * 4),
        ("query gradient", rows * (head_dim * float) as u128),
        ("key gradient", keys(head_dim)),
        ("value gradient", keys(value_dim)),
        (
            "bias gradient",
            problem.bias.map_or(0, |shape| size(shape, float)),
        ),
        (
            "key beside value",
            if packed_key_value {
                keys(head_dim + value_dim)
            } else {
                0
            },
        ),
    ];
    let largest = u128::from(device.max_buffer);
    for (operand, given) in buffers {
        if given > largest {
            return Err(PlanError::Buffer {
                device: name(),
                operand,
                given,
                expected: device.max_buffer,
            });
        }
    }
    // Both gradients and the gap between them.
    let one_buffer = keys(head_dim + value_dim) + 4096 <= largest;
    let fits =
        |tile: &&Tile| tile.shared_memory() <= device.shared_memory && tile.units() <= device.units;
    // Wide rows of accumulators need many units a row, or they leave the registers.
    let widest = problem.head_dim.max(problem.value_dim);
    let longest = problem.seq_q.max(problem.seq_kv);
    let order: &[Tile] = if device.software && longest > FIRST_LONG {
        &[Tile::SOFTWARE, Tile::SMALLEST]
    } else if widest > 64 {
        &[Tile::LARGE, Tile::MEDIUM, Tile::SMALLEST]
    } else {
        &[Tile::LARGE, Tile::SMALLEST]
    };
    let tile = order.iter().find(fits).ok_or_else(|| PlanError::Cube {
        device: name(),
        shared_memory: device.shared_memory,
        units: device.units,
    })?;
    let accumulators =
        tile.key_accumulators(problem.head_dim) + tile.key_accumulators(problem.value_dim);
    let key_value_together = one_buffer && accumulators <= MOST_ACCUMULATORS;
    if let Some(expected) = device.loop_iterations {
        let given = most_iterations(problem, *tile, key_value_together);
        if given > u128::from(expected) {
            return Err(PlanError::Iterations {
                device: name(),
                given,
                expected,
            });
        }
    }
    Ok(Blueprint {
        forward: *tile,
        backward: *tile,
        key_value_together,
        packed_key_value,
    })
}
