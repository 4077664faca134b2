//! Allocation and launches of the register-fragment kernels.

use super::blueprint::{Blocks, Blueprint};
use super::config::Config;
use super::forward::forward_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::launch_one_pass::one_pass;
use super::memory::staged_as;
use super::query_gradient::query_gradient_kernel;
use crate::device::elem_type;
use crate::operands::{
    Gradients, Operands, Outputs, ScoreOperands, address_type, bias_elements, cube_count, geometry,
    in_vectors, optional,
};
use crate::portable::{self, Tile};
use crate::schedule::GeometryLaunch;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::Strides;
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
    let launch = Launch::new(client, problem, blueprint, &operands, None);
    let blocks = blueprint.forward;
    let cubes = problem.seq_q.div_ceil(blocks.owned()) * problem.batch * problem.heads;
    let scores = ScoreOperands::of(&operands);
    // SAFETY: the kernel reads rows and positions of the problem only, through the operands'
    // strides, and writes each element of the two packed outputs allocated above once.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch.count(cubes),
            CubeDim::new_1d(blocks.units() as u32),
            launch.address_type,
            launch.vector,
            launch.tensor(operands.query),
            launch.tensor(operands.key),
            launch.tensor(operands.value),
            optional(&scores.mask),
            optional(&scores.bias),
            launch.buffer(output.clone(), rows * problem.value_dim),
            BufferArg::from_raw_parts(statistics.clone(), 2 * rows),
            launch.geometry(),
            launch.config(blocks.read_in(launch.vector)),
            launch.element,
            elem_type(problem.dtype),
            scores.mask_element,
        );
    }
    (output, statistics)
}

/// The wanted gradients. `outputs` holds what [`attention_forward`] returned.
///
/// Row statistics and the gradient of the bias come from the portable kernels, in blocks of `tile`.
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    tile: Tile,
    operands: Operands,
    outputs: Outputs,
    wanted: Wanted,
) -> Gradients {
    let output_gradient = &outputs.output_gradient;
    let launch = Launch::new(client, problem, blueprint, &operands, Some(output_gradient));
    let portable = portable::Launch::new(client, problem, tile, &operands, Some(output_gradient));
    let rows = problem.lse_shape().iter().product::<usize>();
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let gradients = Gradients::allocate(client, problem, wanted);
    let row_statistics = portable.row_statistics(&outputs);
    let backward = Backward {
        launch: &launch,
        operands: &operands,
        scores: ScoreOperands::of(&operands),
        output_gradient,
        row_statistics: &row_statistics,
        rows,
    };
    // Copies of 16 bytes, and of all gradients: what is left out would save little.
    let all = match (&gradients.query, &gradients.key, &gradients.value) {
        (Some(query), Some(key), Some(value)) => Some([query, key, value]),
        _ => None,
    };
    let together = blueprint
        .one_pass
        .zip(all)
        .filter(|_| launch.vector == 8 && rows > 0 && keys > 0);
    if let Some((blueprint, gradients)) = together {
        one_pass(&backward, blueprint, gradients);
    } else {
        if let Some(gradient) = gradients.query.clone().filter(|_| rows > 0) {
            backward.query(gradient);
        }
        if keys > 0 {
            let (key, value) = (gradients.key.clone(), gradients.value.clone());
            let joint = blueprint.joint_key_value && key.is_some() && value.is_some();
            if joint {
                backward.key_value(Sides::BOTH, key, value);
            } else {
                if key.is_some() {
                    backward.key_value(Sides::KEY, key, None);
                }
                if value.is_some() {
                    backward.key_value(Sides::VALUE, None, value);
                }
            }
        }
    }
    let bias = gradients.bias.clone();
    if let Some(gradient) = bias.filter(|_| bias_elements(problem) > 0) {
        let bound = portable.bind(operands, false);
        portable.bias_gradient(bound, output_gradient, row_statistics, gradient);
    }
    gradients
}

/// What the gradient kernels of one call read.
pub(super) struct Backward<'a> {
    pub launch: &'a Launch<'a>,
    pub operands: &'a Operands,
    pub scores: ScoreOperands,
    pub output_gradient: &'a TensorBinding,
    pub row_statistics: &'a Handle,
    /// Rows of the query in all heads.
    pub rows: usize,
}

impl Backward<'_> {
    fn query(&self, gradient: Handle) {
        let (launch, problem) = (self.launch, self.launch.problem);
        let blocks = launch.blueprint.query_gradient;
        let cubes = problem.seq_q.div_ceil(blocks.owned()) * problem.batch * problem.heads;
        let operands = self.operands.clone();
        // SAFETY: as in `attention_forward`; each element of the packed gradient is written once.
        unsafe {
            query_gradient_kernel::launch_unchecked(
                launch.client,
                launch.count(cubes),
                CubeDim::new_1d(blocks.units() as u32),
                launch.address_type,
                launch.vector,
                launch.tensor(operands.query),
                launch.tensor(operands.key),
                launch.tensor(operands.value),
                optional(&self.scores.mask),
                optional(&self.scores.bias),
                launch.tensor(self.output_gradient.clone()),
                BufferArg::from_raw_parts(self.row_statistics.clone(), 3 * self.rows),
                launch.buffer(gradient, self.rows * problem.head_dim),
                launch.geometry(),
                launch.config(blocks.read_in(launch.vector)),
                launch.element,
                elem_type(problem.dtype),
                self.scores.mask_element,
            );
        }
    }

    fn key_value(&self, sides: Sides, key: Option<Handle>, value: Option<Handle>) {
        let (launch, problem) = (self.launch, self.launch.problem);
        let blocks = launch.blueprint.key_value_gradient;
        let heads = problem.batch * problem.kv_heads;
        let cubes = problem.seq_kv.div_ceil(blocks.owned()) * heads;
        let operands = self.operands.clone();
        let bytes = problem.dtype.size();
        // A side that is not asked for is not written: one vector stands for it.
        let buffer = |handle: Option<Handle>, features: usize| match handle {
            Some(handle) => (handle, heads * problem.seq_kv * features),
            None => (launch.client.empty(8 * bytes), 8),
        };
        let (key, key_elements) = buffer(key, problem.head_dim);
        let (value, value_elements) = buffer(value, problem.value_dim);
        // SAFETY: as above.
        unsafe {
            key_value_gradient_kernel::launch_unchecked(
                launch.client,
                launch.count(cubes),
                CubeDim::new_1d(blocks.units() as u32),
                launch.address_type,
                launch.vector,
                launch.tensor(operands.query),
                launch.tensor(operands.key),
                launch.tensor(operands.value),
                optional(&self.scores.mask),
                optional(&self.scores.bias),
                launch.tensor(self.output_gradient.clone()),
                BufferArg::from_raw_parts(self.row_statistics.clone(), 3 * self.rows),
                launch.buffer(key, key_elements),
                launch.buffer(value, value_elements),
                launch.geometry(),
                sides,
                launch.config(blocks.read_in(launch.vector)),
                launch.element,
                elem_type(problem.dtype),
                self.scores.mask_element,
            );
        }
    }
}

/// What the launches of one call have in common.
pub(super) struct Launch<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    blueprint: &'a Blueprint,
    /// Staged elements of a load.
    pub vector: usize,
    /// Staged elements of a number: `f32` is staged as two halves, of a type whose values do not matter.
    parts: usize,
    pub address_type: AddressType,
    /// Type of a staged element.
    pub element: ElemType,
}

impl<'a> Launch<'a> {
    fn new(
        client: &'a Client,
        problem: &'a Problem,
        blueprint: &'a Blueprint,
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
        // Of whole numbers, 16 bytes at most.
        let vector = [8, 4, 2]
            .into_iter()
            .filter(|vector| vector * bytes <= 16)
            .find(|&vector| {
                problem.head_dim.is_multiple_of(vector)
                    && problem.value_dim.is_multiple_of(vector)
                    && floats
                        .into_iter()
                        .flatten()
                        .all(|x| in_vectors(x, vector, bytes))
            })
            .unwrap_or(1);
        let staged = staged_as(problem.dtype);
        let parts = bytes / staged.size();
        Self {
            client,
            problem,
            blueprint,
            vector: parts * vector,
            parts,
            address_type: address_type(problem, staged.size(), operands, output_gradient),
            element: elem_type(staged),
        }
    }

    pub fn config(&self, blocks: Blocks) -> Config {
        Config::of(self.problem, self.blueprint, blocks, self.vector)
    }

    /// An operand, in staged elements.
    pub fn tensor(&self, x: TensorBinding) -> TensorArg {
        let scaled = |sizes: &[usize]| sizes.iter().map(|n| n * self.parts).collect::<Vec<_>>();
        let strides = Strides::new(&scaled(&x.strides));
        TensorBinding { strides, ..x }.into_tensor_arg()
    }

    /// A packed result of `numbers`, in staged elements.
    ///
    /// # Safety
    /// The handle has to hold that many.
    pub unsafe fn buffer(&self, handle: Handle, numbers: usize) -> BufferArg {
        // SAFETY: the caller's.
        unsafe { BufferArg::from_raw_parts(handle, numbers * self.parts) }
    }

    pub fn count(&self, cubes: usize) -> CubeCount {
        cube_count(self.client, cubes)
    }

    pub fn geometry(&self) -> GeometryLaunch {
        geometry(self.problem)
    }
}
