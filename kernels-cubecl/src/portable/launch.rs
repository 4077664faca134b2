//! What the launches of the portable kernels have in common, and that of the forward kernel.

use super::blueprint::Blueprint;
use super::forward::forward_kernel;
use super::sums::is_long;
use super::tile::{Config, Tile};
use crate::device::elem_type;
use crate::operands::{
    Operands, ScoreOperands, address_type, cube_count, geometry, in_vectors, optional,
};
use crate::schedule::GeometryLaunch;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_attention_spec::Problem;

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
    let scores = ScoreOperands::of(&operands);
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
            optional(&scores.mask),
            optional(&scores.bias),
            BufferArg::from_raw_parts(output.clone(), rows * problem.value_dim),
            BufferArg::from_raw_parts(statistics.clone(), 2 * rows),
            launch.geometry(),
            launch.summing(problem.seq_kv),
            launch.element,
            scores.mask_element,
        );
    }
    (output, statistics)
}

/// What the launches of one call have in common.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub config: Config,
    pub address_type: AddressType,
    pub element: ElemType,
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

    /// The choices of a kernel whose sums run over so many terms.
    pub(super) fn summing(&self, terms: usize) -> Config {
        Config {
            long: is_long(terms),
            ..self.config
        }
    }

    pub(super) fn vector_size(&self) -> usize {
        if self.config.vectorized { 4 } else { 1 }
    }

    pub(super) fn count(&self, cubes: usize) -> CubeCount {
        cube_count(self.client, cubes)
    }

    pub(super) fn geometry(&self) -> GeometryLaunch {
        geometry(self.problem)
    }
}
