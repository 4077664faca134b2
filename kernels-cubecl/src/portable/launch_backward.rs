//! Allocation and launches of the portable gradient kernels.

use super::bias_gradient::{BiasBroadcast, BiasShapeLaunch, bias_gradient_kernel};
use super::blueprint::Blueprint;
use super::delta::delta_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::launch::Launch;
use super::pack::pack_kernel;
use super::query_gradient::query_gradient_kernel;
use crate::operands::{Gradients, Operands, Outputs, ScoreOperands, bias_elements, optional};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides, Tiling};
use flash_attention_spec::{Problem, Wanted};

/// The wanted gradients. `outputs` holds what [`attention_forward`](super::attention_forward) returned.
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    operands: Operands,
    outputs: Outputs,
    wanted: Wanted,
) -> Gradients {
    let tile = blueprint.backward;
    let output_gradient = &outputs.output_gradient;
    let launch = Launch::new(client, problem, tile, &operands, Some(output_gradient));
    let rows = problem.lse_shape().iter().product::<usize>();
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let key_value = KeyValueGradients::allocate(client, problem, blueprint, wanted);
    let others = wanted.key(false).value(false);
    let gradients = Gradients {
        key: key_value.key(),
        value: key_value.value(),
        ..Gradients::allocate(client, problem, others)
    };
    let row_statistics = launch.row_statistics(&outputs);
    let bound = launch.bind(operands, blueprint.packed_key_value);
    let dim = CubeDim::new_1d(tile.units());
    if let Some(gradient) = gradients.query.clone().filter(|_| rows > 0) {
        let cubes = problem.seq_q.div_ceil(tile.block_q()) * problem.batch * problem.heads;
        // SAFETY: as in `attention_forward`; each element of the packed gradient is written once.
        unsafe {
            query_gradient_kernel::launch_unchecked(
                client,
                launch.count(cubes),
                dim,
                launch.address_type,
                launch.vector_size(),
                bound.query.clone().into_tensor_arg(),
                bound.key.clone().into_tensor_arg(),
                optional(&bound.value),
                optional(&bound.scores.mask),
                optional(&bound.scores.bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(gradient, rows * problem.head_dim),
                launch.geometry(),
                launch.summing(problem.seq_kv),
                launch.element,
                bound.scores.mask_element,
            );
        }
    }
    for part in key_value.parts.iter().filter(|_| keys > 0) {
        let cubes = problem.seq_kv.div_ceil(tile.block_kv()) * problem.batch * problem.kv_heads;
        // SAFETY: as above; the gradients of a part do not overlap in its buffer.
        unsafe {
            key_value_gradient_kernel::launch_unchecked(
                client,
                launch.count(cubes),
                dim,
                launch.address_type,
                launch.vector_size(),
                bound.query.clone().into_tensor_arg(),
                bound.key.clone().into_tensor_arg(),
                optional(&bound.value),
                optional(&bound.scores.mask),
                optional(&bound.scores.bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(part.buffer.clone(), part.elements),
                part.value_start,
                launch.geometry(),
                part.sides,
                launch.summing(problem.group() * problem.seq_q),
                launch.element,
                bound.scores.mask_element,
            );
        }
    }
    let bias = gradients.bias.clone();
    if let Some(gradient) = bias.filter(|_| bias_elements(problem) > 0) {
        launch.bias_gradient(bound, output_gradient, row_statistics, gradient);
    }
    gradients
}

/// The buffers of the key and value gradients: one part for each launch.
struct KeyValueGradients {
    parts: Vec<KeyValuePart>,
}

struct KeyValuePart {
    sides: Sides,
    buffer: Handle,
    elements: usize,
    /// First element of the value gradient.
    value_start: usize,
    /// Bytes of the key gradient.
    key_bytes: u64,
    /// Bytes of an element.
    float: u64,
}

impl KeyValueGradients {
    fn allocate(client: &Client, problem: &Problem, blueprint: &Blueprint, wanted: Wanted) -> Self {
        let keys = problem.batch * problem.kv_heads * problem.seq_kv;
        let float = problem.dtype.size();
        // A buffer of its own starts at a multiple of this; so does the second half of a shared one.
        let aligned = (client.properties().memory.alignment as usize).max(4 * float);
        let part = |key: bool, value: bool| {
            let key_elements = if key { keys * problem.head_dim } else { 0 };
            let value_elements = if value { keys * problem.value_dim } else { 0 };
            let value_start = (key_elements * float).next_multiple_of(aligned) / float;
            let elements = if value {
                value_start + value_elements
            } else {
                key_elements
            };
            KeyValuePart {
                sides: Sides { key, value },
                buffer: client.empty(elements * float),
                elements,
                value_start,
                key_bytes: (key_elements * float) as u64,
                float: float as u64,
            }
        };
        let parts = match (wanted.key, wanted.value) {
            (true, true) if blueprint.key_value_together => vec![part(true, true)],
            (true, true) => vec![part(true, false), part(false, true)],
            (false, false) => vec![],
            (key, value) => vec![part(key, value)],
        };
        Self { parts }
    }

    fn key(&self) -> Option<Handle> {
        let part = self.parts.iter().find(|part| part.sides.key)?;
        let rest = part.elements as u64 * part.float - part.key_bytes;
        Some(part.buffer.clone().offset_end(rest))
    }

    fn value(&self) -> Option<Handle> {
        let part = self.parts.iter().find(|part| part.sides.value)?;
        Some(
            part.buffer
                .clone()
                .offset_start(part.value_start as u64 * part.float),
        )
    }
}

/// Operands as the gradient kernels take them.
pub(crate) struct Bound {
    query: TensorBinding,
    key: TensorBinding,
    /// None where it lies behind the key.
    value: Option<TensorBinding>,
    scores: ScoreOperands,
}

impl Launch<'_> {
    /// The statistics of each row that the gradient kernels of every family read,
    /// `[3, batch, heads, seq_q]`: the two saved ones and `D`.
    pub(crate) fn row_statistics(&self, outputs: &Outputs) -> Handle {
        let rows = self.problem.lse_shape().iter().product::<usize>();
        let row_statistics = self.client.empty((3 * rows).max(1) * 4);
        if rows > 0 {
            // The saved output is packed, so it is read in fours wherever its gradient is.
            // SAFETY: one unit writes the three statistics of each row of the buffer allocated
            // above.
            unsafe {
                delta_kernel::launch_unchecked(
                    self.client,
                    self.count(rows.div_ceil(64)),
                    CubeDim::new_1d(64),
                    self.address_type,
                    self.vector_size(),
                    outputs.output.clone().into_tensor_arg(),
                    outputs.output_gradient.clone().into_tensor_arg(),
                    BufferArg::from_raw_parts(outputs.statistics.clone(), 2 * rows),
                    optional(&outputs.lse_gradient),
                    BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                    self.geometry(),
                    self.config,
                    self.element,
                );
            }
        }
        row_statistics
    }

    /// Writes the gradient of the bias, which has elements.
    pub(crate) fn bias_gradient(
        &self,
        bound: Bound,
        output_gradient: &TensorBinding,
        row_statistics: Handle,
        gradient: Handle,
    ) {
        let problem = self.problem;
        let tile = self.config.tile;
        let rows = problem.lse_shape().iter().product::<usize>();
        let shape = problem.bias.unwrap_or([0; 4]);
        let [batch, heads, seq_q, seq_kv] = shape;
        let cubes =
            batch * heads * seq_q.div_ceil(tile.block_q()) * seq_kv.div_ceil(tile.block_kv());
        let summed = tile.summed_blocks(problem, shape);
        // SAFETY: the kernel reads rows and positions of the problem only, through the operands'
        // strides, and writes each element of the packed gradient once.
        unsafe {
            bias_gradient_kernel::launch_unchecked(
                self.client,
                self.count(cubes),
                CubeDim::new_1d(tile.units()),
                self.address_type,
                self.vector_size(),
                bound.query.into_tensor_arg(),
                bound.key.into_tensor_arg(),
                optional(&bound.value),
                optional(&bound.scores.mask),
                optional(&bound.scores.bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics, 3 * rows),
                BufferArg::from_raw_parts(gradient, shape.iter().product()),
                self.geometry(),
                BiasShapeLaunch::new(batch, heads, seq_q, seq_kv),
                BiasBroadcast {
                    queries: seq_q == 1 && problem.seq_q != 1,
                    keys: seq_kv == 1 && problem.seq_kv != 1,
                },
                self.summing(summed.iter().product()),
                self.element,
                bound.scores.mask_element,
            );
        }
    }

    /// The operands as the gradient kernels take them.
    pub(crate) fn bind(&self, operands: Operands, packed_key_value: bool) -> Bound {
        let scores = ScoreOperands::of(&operands);
        let (key, value) = if packed_key_value {
            (self.pack(&operands.key, &operands.value), None)
        } else {
            (operands.key, Some(operands.value))
        };
        Bound {
            query: operands.query,
            key,
            value,
            scores,
        }
    }

    /// Key and value side by side: `[batch, kv_heads, seq_kv, head_dim + value_dim]`.
    fn pack(&self, key: &TensorBinding, value: &TensorBinding) -> TensorBinding {
        let problem = self.problem;
        let length = problem.head_dim + problem.value_dim;
        let shape = [problem.batch, problem.kv_heads, problem.seq_kv, length];
        let elements = shape.iter().product::<usize>();
        let packed = self.client.empty(elements.max(1) * problem.dtype.size());
        if elements > 0 {
            // SAFETY: one unit writes each element of the buffer allocated above.
            unsafe {
                pack_kernel::launch_unchecked(
                    self.client,
                    self.count(elements.div_ceil(64)),
                    CubeDim::new_1d(64),
                    self.address_type,
                    key.clone().into_tensor_arg(),
                    value.clone().into_tensor_arg(),
                    BufferArg::from_raw_parts(packed.clone(), elements),
                    self.geometry(),
                    self.config,
                    self.element,
                );
            }
        }
        let strides = [
            problem.kv_heads * problem.seq_kv * length,
            problem.seq_kv * length,
            length,
            1,
        ];
        TensorBinding {
            handle: packed.binding(),
            strides: Strides::new(&strides),
            shape: Shape::new(shape),
            tiling: Tiling::UNTILED,
        }
    }
}
