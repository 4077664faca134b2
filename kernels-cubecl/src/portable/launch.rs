//! Allocation and launches of the portable kernels.

use super::bias_gradient::{BiasBroadcast, BiasShapeLaunch, bias_gradient_kernel};
use super::delta::delta_kernel;
use super::forward::forward_kernel;
use super::key_value_gradient::key_value_gradient_kernel;
use super::query_gradient::query_gradient_kernel;
use super::tile::{Config, Tile};
use crate::device::elem_type;
use crate::operands::{
    Gradients, Operands, broadcast_bias, broadcast_mask, cube_count, geometry, optional,
};
use crate::plan::Blueprint;
use crate::schedule::GeometryLaunch;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_attention_spec::{Problem, Wanted};

/// The output `[batch, heads, seq_q, value_dim]` and the statistics `[2, batch, heads, seq_q]` in
/// `f32` (row maximum, logarithm of the sum of `exp(score - maximum)`), both packed.
///
/// `blueprint` is what [`plan`](crate::plan::plan) returned for `problem` on the client's device.
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
    let (mask, mask_element) = broadcast_mask(problem, operands.mask);
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
            optional(&broadcast_bias(problem, operands.bias)),
            BufferArg::from_raw_parts(output.clone(), rows * problem.value_dim),
            BufferArg::from_raw_parts(statistics.clone(), 2 * rows),
            launch.geometry(),
            launch.config,
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
    let gradients = Gradients {
        query: allocate(wanted.query, rows * problem.head_dim),
        key: allocate(wanted.key, keys * problem.head_dim),
        value: allocate(wanted.value, keys * problem.value_dim),
        bias: allocate(wanted.bias, bias_elements),
    };
    let row_statistics = launch.row_statistics(output, statistics, &output_gradient, &lse_gradient);
    let (mask, mask_element) = broadcast_mask(problem, operands.mask.clone());
    let bias = broadcast_bias(problem, operands.bias.clone());
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
                operands.query.clone().into_tensor_arg(),
                operands.key.clone().into_tensor_arg(),
                operands.value.clone().into_tensor_arg(),
                optional(&mask),
                optional(&bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(gradient, rows * problem.head_dim),
                launch.geometry(),
                launch.config,
                launch.element,
                mask_element,
            );
        }
    }
    let sides = [
        (true, gradients.key.clone(), problem.head_dim),
        (false, gradients.value.clone(), problem.value_dim),
    ];
    for (of_key, gradient, features) in sides {
        let Some(gradient) = gradient.filter(|_| keys > 0) else {
            continue;
        };
        let cubes = problem.seq_kv.div_ceil(tile.block_kv()) * problem.batch * problem.kv_heads;
        // SAFETY: as above.
        unsafe {
            key_value_gradient_kernel::launch_unchecked(
                client,
                launch.count(cubes),
                dim,
                launch.address_type,
                launch.vector_size(),
                operands.query.clone().into_tensor_arg(),
                operands.key.clone().into_tensor_arg(),
                operands.value.clone().into_tensor_arg(),
                optional(&mask),
                optional(&bias),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics.clone(), 3 * rows),
                BufferArg::from_raw_parts(gradient, keys * features),
                launch.geometry(),
                of_key,
                launch.config,
                launch.element,
                mask_element,
            );
        }
    }
    if let Some(gradient) = gradients.bias.clone().filter(|_| bias_elements > 0) {
        launch.bias_gradient(operands, output_gradient, row_statistics, gradient);
    }
    gradients
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
            && floats.into_iter().flatten().all(|x| in_fours(x, bytes));
        let mask = operands.mask.as_ref().map(|(mask, _)| mask);
        let longest = floats
            .into_iter()
            .chain([operands.bias.as_ref()])
            .flatten()
            .map(|x| x.handle.size() as usize / bytes)
            .chain(mask.map(|mask| mask.handle.size() as usize))
            .chain([
                problem.output_shape().iter().product(),
                problem.batch
                    * problem.kv_heads
                    * problem.seq_kv
                    * problem.head_dim.max(problem.value_dim),
                3 * problem.lse_shape().iter().product::<usize>(),
            ])
            .max()
            .unwrap_or(0);
        Self {
            client,
            problem,
            config: Config {
                tile,
                head_dim: problem.head_dim,
                value_dim: problem.value_dim,
                vectorized,
                capped: problem.softcap.is_some(),
            },
            address_type: AddressType::from_len(longest),
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
        operands: Operands,
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
        let (mask, mask_element) = broadcast_mask(problem, operands.mask);
        // SAFETY: the kernel reads rows and positions of the problem only, through the operands'
        // strides, and writes each element of the packed gradient once.
        unsafe {
            bias_gradient_kernel::launch_unchecked(
                self.client,
                self.count(cubes),
                CubeDim::new_1d(tile.units()),
                self.address_type,
                self.vector_size(),
                operands.query.into_tensor_arg(),
                operands.key.into_tensor_arg(),
                operands.value.into_tensor_arg(),
                optional(&mask),
                optional(&broadcast_bias(problem, operands.bias)),
                output_gradient.into_tensor_arg(),
                BufferArg::from_raw_parts(row_statistics, 3 * rows),
                BufferArg::from_raw_parts(gradient, shape.iter().product()),
                self.geometry(),
                BiasShapeLaunch::new(batch, heads, seq_q, seq_kv),
                BiasBroadcast {
                    queries: seq_q == 1 && problem.seq_q != 1,
                    keys: seq_kv == 1 && problem.seq_kv != 1,
                },
                self.config,
                self.element,
                mask_element,
            );
        }
    }

    fn vector_size(&self) -> usize {
        if self.config.vectorized { 4 } else { 1 }
    }

    fn count(&self, cubes: usize) -> CubeCount {
        cube_count(self.client, cubes)
    }

    fn geometry(&self) -> GeometryLaunch {
        geometry(self.problem)
    }
}

/// Whether every row starts at a multiple of four elements and lies without gaps.
fn in_fours(x: &TensorBinding, bytes: usize) -> bool {
    let offset = x.handle.offset_start.unwrap_or(0) as usize;
    x.strides[3] == 1
        && x.strides[..3].iter().all(|stride| stride % 4 == 0)
        && offset.is_multiple_of(4 * bytes)
}
