//! Allocation and launches of the portable kernels.

use super::bias_gradient::{BiasBroadcast, BiasShapeLaunch, bias_gradient_kernel};
use super::blueprint::Blueprint;
use super::delta::delta_kernel;
use super::forward::forward_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::pack::pack_kernel;
use super::query_gradient::query_gradient_kernel;
use super::sums::is_long;
use super::tile::{Config, Tile};
use crate::device::elem_type;
use crate::operands::{
    Gradients, Operands, address_type, broadcast_bias, broadcast_mask, cube_count, geometry,
    in_vectors, optional,
};
use crate::schedule::GeometryLaunch;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides, Tiling};
use flash_attention_spec::{Problem, Wanted};

/// The output `[batch, heads, seq_q, value_dim]` and the statistics `[2, batch, heads, seq_q]` in
/// `f32` (row maximum, logarithm of the sum of `exp(score - maximum)`), both packed.
///
/// `blueprint` is what [`plan`](super::plan) returned for `problem` on the client's device.
pub fn attention_forward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    operands: Operands,
) -> (Handle, Handle) {
    let rows = problem.lse_shape().iter().product::<usize>();
    let output = client.empty(rows * problem.value_dim * problem.dtype.size());
    let statistics = client.empty(2 * rows * 4);
    if rows == 0 {
        return (output, statistics);
    }
    let launch = Launch::new(client, problem, blueprint.forward, &operands, None);
    let tile = blueprint.forward;
    let cubes = problem.seq_q.div_ceil(tile.block_q()) * problem.batch * problem.heads;
    let (mask, mask_element) = broadcast_mask(operands.mask);
    // SAFETY: the kernel reads rows and positions of the problem only, through the operands'
    // strides, and writes each element of the two packed outputs allocated above once.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch.count(cubes),
            CubeDim::new_1d(tile.units()),
            launch.address_type,
            launch.vector_size(),
            operands.query.into_tensor_arg(),
            operands.key.into_tensor_arg(),
            operands.value.into_tensor_arg(),
            optional(&mask),
            optional(&broadcast_bias(operands.bias)),
            BufferArg::from_raw_parts(output.clone(), rows * problem.value_dim),
            BufferArg::from_raw_parts(statistics.clone(), 2 * rows),
            launch.geometry(),
            launch.summing(problem.seq_kv),
            launch.element,
            mask_element,
        );
    }
    (output, statistics)
}

/// The wanted gradients. `output` and `statistics` are those of [`attention_forward`];
/// `output_gradient` has the output's shape and any strides, `lse_gradient` is
/// `[batch, heads, seq_q]` in `f32` with any strides.
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    operands: Operands,
    output: TensorBinding,
    statistics: Handle,
    output_gradient: TensorBinding,
    lse_gradient: Option<TensorBinding>,
    wanted: Wanted,
) -> Gradients {
    let tile = blueprint.backward;
    let launch = Launch::new(client, problem, tile, &operands, Some(&output_gradient));
    let rows = problem.lse_shape().iter().product::<usize>();
    let float = problem.dtype.size();
    let allocate = |wanted: bool, elements: usize| wanted.then(|| client.empty(elements * float));
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let bias_shape = problem.bias.unwrap_or([0; 4]);
    let bias_elements = bias_shape.iter().product::<usize>();
    let key_value = KeyValueGradients::allocate(client, problem, blueprint, wanted);
    let gradients = Gradients {
        query: allocate(wanted.query, rows * problem.head_dim),
        key: key_value.key(),
        value: key_value.value(),
        bias: allocate(wanted.bias, bias_elements),
    };
    let row_statistics = launch.row_statistics(output, statistics, &output_gradient, &lse_gradient);
    let Bound {
        query,
        key,
        value,
        mask,
        mask_element,
        bias,
    } = launch.bind(operands.clone(), blueprint.packed_key_value);
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
                query.clone().into_tensor_arg(),
                key.clone().into_tensor_arg(),
                optional(&value),
                optional(&mask),
                optional(&bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(gradient, rows * problem.head_dim),
                launch.geometry(),
                launch.summing(problem.seq_kv),
                launch.element,
                mask_element,
            );
        }
    }
    for part in &key_value.parts {
        if keys == 0 {
            break;
        }
        let cubes = problem.seq_kv.div_ceil(tile.block_kv()) * problem.batch * problem.kv_heads;
        // SAFETY: as above; the gradients of a part do not overlap in its buffer.
        unsafe {
            key_value_gradient_kernel::launch_unchecked(
                client,
                launch.count(cubes),
                dim,
                launch.address_type,
                launch.vector_size(),
                query.clone().into_tensor_arg(),
                key.clone().into_tensor_arg(),
                optional(&value),
                optional(&mask),
                optional(&bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(part.buffer.clone(), part.elements),
                part.value_start,
                launch.geometry(),
                part.sides,
                launch.summing(problem.group() * problem.seq_q),
                launch.element,
                mask_element,
            );
        }
    }
    if let Some(gradient) = gradients.bias.clone().filter(|_| bias_elements > 0) {
        let bound = Bound {
            query,
            key,
            value,
            mask,
            mask_element,
            bias,
        };
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
    mask: Option<TensorBinding>,
    mask_element: ElemType,
    bias: Option<TensorBinding>,
}

/// What the launches of one call have in common.
pub(crate) struct Launch<'a> {
    client: &'a Client,
    problem: &'a Problem,
    config: Config,
    address_type: AddressType,
    element: ElemType,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(
        client: &'a Client,
        problem: &'a Problem,
        tile: Tile,
        operands: &Operands,
        output_gradient: Option<&TensorBinding>,
    ) -> Self {
        let bytes = problem.dtype.size();
        let floats = [
            Some(&operands.query),
            Some(&operands.key),
            Some(&operands.value),
            output_gradient,
        ];
        let vectorized = problem.head_dim.is_multiple_of(4)
            && problem.value_dim.is_multiple_of(4)
            && floats
                .into_iter()
                .flatten()
                .all(|x| in_vectors(x, 4, bytes));
        Self {
            client,
            problem,
            config: Config {
                tile,
                head_dim: problem.head_dim,
                value_dim: problem.value_dim,
                vectorized,
                capped: problem.softcap.is_some(),
                long: false,
            },
            address_type: address_type(problem, problem.dtype.size(), operands, output_gradient),
            element: elem_type(problem.dtype),
        }
    }

    /// The statistics of each row that the gradient kernels of every family read,
    /// `[3, batch, heads, seq_q]`: the two saved ones and `D`.
    pub(crate) fn row_statistics(
        &self,
        output: TensorBinding,
        statistics: Handle,
        output_gradient: &TensorBinding,
        lse_gradient: &Option<TensorBinding>,
    ) -> Handle {
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
                    output.into_tensor_arg(),
                    output_gradient.clone().into_tensor_arg(),
                    BufferArg::from_raw_parts(statistics, 2 * rows),
                    optional(lse_gradient),
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
        output_gradient: TensorBinding,
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
                optional(&bound.mask),
                optional(&bound.bias),
                output_gradient.into_tensor_arg(),
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
                bound.mask_element,
            );
        }
    }

    /// The operands as the gradient kernels take them.
    pub(crate) fn bind(&self, operands: Operands, packed_key_value: bool) -> Bound {
        let (key, value) = if packed_key_value {
            (self.pack(&operands.key, &operands.value), None)
        } else {
            (operands.key, Some(operands.value))
        };
        let (mask, mask_element) = broadcast_mask(operands.mask);
        Bound {
            query: operands.query,
            key,
            value,
            mask,
            mask_element,
            bias: broadcast_bias(operands.bias),
        }
    }

    /// The choices of a kernel whose sums run over so many terms.
    fn summing(&self, terms: usize) -> Config {
        Config {
            long: is_long(terms),
            ..self.config
        }
    }

    fn vector_size(&self) -> usize {
        if self.config.vectorized { 4 } else { 1 }
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

    fn count(&self, cubes: usize) -> CubeCount {
        cube_count(self.client, cubes)
    }

    fn geometry(&self) -> GeometryLaunch {
        geometry(self.problem)
    }
}
