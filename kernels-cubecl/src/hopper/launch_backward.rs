//! Allocation and launches of the gradient kernels.

use super::declined::Declined;
use super::gradient_blueprint::{BackwardBlueprint, Division};
use super::launch::{check, check_operands, section, tensor_map};
use super::one_pass::one_pass_kernel;
use super::query_gradient::query_gradient_kernel;
use super::query_sums::query_sums_kernel;
use super::statistics::{statistics_kernel, units_of_row};
use crate::device::elem_type;
use crate::operands::{
    Gradients, Operands, Outputs, ScoreOperands, bias_elements, cube_count, geometry, optional,
};
use crate::portable::{self, Tile};
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides, Tiling};
use flash_attention_spec::{Problem, Summation, Wanted};

/// Whether the family reads query, key, value and output gradient as they lie in memory.
///
/// # Errors
/// [`Declined::Layout`] names the first that it does not.
pub fn check_gradient_operands(
    operands: &Operands,
    output_gradient: &TensorBinding,
) -> Result<(), Declined> {
    check_operands(operands)?;
    check("output gradient", output_gradient)
}

/// The wanted gradients. `outputs` holds what [`attention_forward`](super::attention_forward) returned.
///
/// `blueprint` is what [`plan_backward`](super::plan_backward) returned for `problem` on the client's
/// device, or made of [`gradient_variants`](super::gradient_variants) that fit it; operands and output
/// gradient passed [`check_gradient_operands`]. The gradient of the bias comes from the portable kernel,
/// in blocks of `tile`.
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &BackwardBlueprint,
    tile: Tile,
    operands: Operands,
    outputs: Outputs,
    wanted: Wanted,
) -> Gradients {
    let gradients = Gradients::allocate(client, problem, wanted);
    let rows = problem.lse_shape().iter().product::<usize>();
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let by_key = keys > 0 && (wanted.key || wanted.value);
    // Where only the query's gradient is wanted, a kernel that computes no other is cheaper.
    let together = by_key && wanted.query && blueprint.key_value.division == Division::Rows;
    let summation = together.then_some(blueprint.summation);
    let backward = Backward {
        client,
        problem,
        blueprint,
        operands: &operands,
        scores: ScoreOperands::of(&operands),
        output_gradient: &outputs.output_gradient,
        row_statistics: row_statistics(client, problem, blueprint, summation, &outputs),
        rows,
        keys,
    };
    if by_key {
        // One kernel computes both: one that is not asked for goes to a buffer of its own.
        let or_scratch = |handle: &Option<Handle>, features: usize| {
            let scratch = || client.empty(keys * features * problem.dtype.size());
            handle.clone().unwrap_or_else(scratch)
        };
        let key = or_scratch(&gradients.key, problem.head_dim);
        let value = or_scratch(&gradients.value, problem.value_dim);
        match blueprint.key_value.division {
            Division::Rows => backward.one_pass(key, value, summation),
            Division::Gradients { .. } => backward.wide_key_value(key, value),
        }
    }
    if let Some(gradient) = gradients.query.clone().filter(|_| rows > 0) {
        if together {
            backward.query_rows(gradient);
        } else {
            backward.query(gradient);
        }
    }
    let bias = gradients.bias.clone();
    if let Some(gradient) = bias.filter(|_| bias_elements(problem) > 0) {
        let output_gradient = &outputs.output_gradient;
        let portable =
            portable::Launch::new(client, problem, tile, &operands, Some(output_gradient));
        let row_statistics = portable.row_statistics(&outputs);
        let bound = portable.bind(operands, false);
        portable.bias_gradient(bound, output_gradient, row_statistics, gradient);
    }
    gradients
}

/// What the gradient kernels of one call read.
pub(super) struct Backward<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub blueprint: &'a BackwardBlueprint,
    pub operands: &'a Operands,
    pub scores: ScoreOperands,
    pub output_gradient: &'a TensorBinding,
    row_statistics: RowStatistics,
    /// Rows of the query in all heads.
    rows: usize,
    /// Rows of the key in all heads.
    pub keys: usize,
}

/// What the first kernel writes for the others.
struct RowStatistics {
    /// `[batch * heads, 3, padded]`.
    rows: Handle,
    /// Rows of a head, with those that fill the last block.
    padded: usize,
    /// Sums of the query gradient `[batch * heads, padded, width]`, in tiles; zeros.
    query_sums: Handle,
    sum_elements: usize,
    /// A counter for each tile of the sums, and one for the cubes; zeros.
    turns: Handle,
    counters: usize,
}

impl Backward<'_> {
    fn query(&self, gradient: Handle) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.query);
        let heads = problem.batch * problem.heads;
        let cubes = problem.seq_q.div_ceil(blueprint.owned()) * heads;
        let element = elem_type(problem.dtype);
        let operands = self.operands.clone();
        let (owned, walked) = (blueprint.owned(), blueprint.walked);
        let elements = self.rows * problem.head_dim / 2;
        let padded = self.row_statistics.padded;
        let statistic_elements = problem.batch * problem.heads * 3 * padded;
        // SAFETY: tensor maps bound every read of the operands; statistics, mask and bias are read at
        // positions of the problem only; each element of the packed gradient is written once, and
        // every loop ends at a number of blocks.
        unsafe {
            query_gradient_kernel::launch_unchecked(
                client,
                cube_count(client, cubes),
                CubeDim::new_1d(blueprint.units()),
                self.scores
                    .address_type(&[elements, statistic_elements, cubes]),
                blueprint.score_registers(),
                blueprint.weight_registers(),
                blueprint.key_registers(),
                tensor_map(operands.query, owned, element),
                tensor_map(operands.key, walked, element),
                tensor_map(operands.value, walked, element),
                tensor_map(self.output_gradient.clone(), owned, element),
                optional(&self.scores.mask),
                optional(&self.scores.bias),
                BufferArg::from_raw_parts(self.row_statistics.rows.clone(), statistic_elements),
                BufferArg::from_raw_parts(gradient, elements),
                geometry(problem),
                padded,
                section(problem, problem.seq_kv, problem.group(), heads),
                blueprint,
                element,
                self.scores.mask_element,
            );
        }
    }

    fn one_pass(&self, key_gradient: Handle, value_gradient: Handle, summation: Option<Summation>) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.key_value);
        let heads = problem.batch * problem.kv_heads;
        let cubes = problem.seq_kv.div_ceil(blueprint.owned()) * heads;
        let element = elem_type(problem.dtype);
        let operands = self.operands.clone();
        let (owned, walked) = (blueprint.owned(), blueprint.walked);
        let key_elements = self.keys * problem.head_dim / 2;
        let value_elements = self.keys * problem.value_dim / 2;
        let scratch = &self.row_statistics;
        let lengths = [key_elements, value_elements, scratch.sum_elements, cubes];
        // SAFETY: as above; each element of the two packed gradients is written once, tiles are added
        // to sums of blocks of the problem, and a cube waits for others that have started only.
        unsafe {
            one_pass_kernel::launch_unchecked(
                client,
                cube_count(client, cubes),
                CubeDim::new_1d(blueprint.units()),
                self.scores.address_type(&lengths),
                blueprint.score_registers(),
                blueprint.weight_registers(),
                blueprint.sum_registers(),
                tensor_map(operands.query, walked, element),
                tensor_map(operands.key, owned, element),
                tensor_map(operands.value, owned, element),
                tensor_map(self.output_gradient.clone(), walked, element),
                self.statistics_map(walked),
                optional(&self.scores.mask),
                optional(&self.scores.bias),
                BufferArg::from_raw_parts(key_gradient, key_elements),
                BufferArg::from_raw_parts(value_gradient, value_elements),
                BufferArg::from_raw_parts(scratch.query_sums.clone(), scratch.sum_elements),
                BufferArg::from_raw_parts(scratch.turns.clone(), scratch.counters),
                geometry(problem),
                section(problem, problem.seq_q * problem.group(), 1, heads),
                blueprint,
                summation,
                element,
                self.scores.mask_element,
            );
        }
    }

    /// Copies of the statistics of `rows` rows.
    pub(super) fn statistics_map(&self, rows: usize) -> TensorMapArg<Tiled> {
        let padded = self.row_statistics.padded;
        let statistics = TensorBinding {
            handle: self.row_statistics.rows.clone().binding(),
            strides: Strides::new(&[3 * padded, padded, 1]),
            shape: Shape::new([self.problem.batch * self.problem.heads, 3, padded]),
            tiling: Tiling::UNTILED,
        };
        TensorMapArg::new(
            TiledArgs {
                tile_size: Shape::new([1, 3, rows]),
            },
            statistics.into_tensor_arg(),
            ElemType::Float(FloatKind::F32),
        )
    }

    /// The query gradient from the sums of [`one_pass`](Self::one_pass).
    fn query_rows(&self, gradient: Handle) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.key_value);
        let scratch = &self.row_statistics;
        let elements = self.rows * problem.head_dim;
        let units = scratch.sum_elements / 16;
        // SAFETY: the kernel reads whole tiles of the sums; each element of the packed gradient is
        // written once.
        unsafe {
            query_sums_kernel::launch_unchecked(
                client,
                cube_count(client, units.div_ceil(256)),
                CubeDim::new_1d(256),
                AddressType::from_len(scratch.sum_elements),
                4,
                BufferArg::from_raw_parts(scratch.query_sums.clone(), scratch.sum_elements),
                BufferArg::from_raw_parts(gradient, elements / 2),
                geometry(problem),
                blueprint,
            );
        }
    }
}

/// Row statistics, and zeros for sums where there are some.
fn row_statistics(
    client: &Client,
    problem: &Problem,
    blueprint: &BackwardBlueprint,
    summation: Option<Summation>,
    outputs: &Outputs,
) -> RowStatistics {
    let rows = problem.lse_shape().iter().product::<usize>();
    let padded = problem.seq_q.next_multiple_of(blueprint.key_value.walked);
    let places = problem.batch * problem.heads * padded;
    let width = summation.map_or(0, |_| blueprint.key_value.sum_width());
    let sum_elements = (places * width).max(4);
    let counters = places / 64 * (width / 64) + 1;
    let made = RowStatistics {
        rows: client.empty((3 * places).max(1) * 4),
        padded,
        query_sums: client.empty(sum_elements * 4),
        sum_elements,
        turns: client.empty(counters * 4),
        counters,
    };
    if rows > 0 {
        // One place more for the counter of the cubes.
        let units = (places + 1) * units_of_row(problem.value_dim);
        let longest = [&outputs.output, &outputs.output_gradient]
            .into_iter()
            .map(|x| x.handle.size as usize)
            .chain([3 * places, units, sum_elements])
            .max();
        // SAFETY: the kernel reads rows of the problem only, through the operands' strides; one unit
        // writes the three statistics of each row of the buffer allocated above, and each zero.
        unsafe {
            statistics_kernel::launch_unchecked(
                client,
                cube_count(client, units.div_ceil(256)),
                CubeDim::new_1d(256),
                AddressType::from_len(longest.unwrap_or(0)),
                8,
                4,
                outputs.output.clone().into_tensor_arg(),
                outputs.output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(outputs.statistics.clone(), 2 * rows),
                optional(&outputs.lse_gradient),
                BufferArg::from_raw_parts(made.rows.clone(), 3 * places),
                BufferArg::from_raw_parts(made.query_sums.clone(), sum_elements),
                BufferArg::from_raw_parts(made.turns.clone(), counters),
                geometry(problem),
                padded,
                problem.value_dim,
                width,
                elem_type(problem.dtype),
            );
        }
    }
    made
}
