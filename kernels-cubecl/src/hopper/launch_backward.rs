//! Allocation and launches of the gradient kernels.

use super::blueprint::{Declined, check_layout};
use super::gradient_blueprint::{BackwardBlueprint, Division};
use super::key_value_gradient::key_value_gradient_kernel;
use super::launch::{check_operands, section, tensor_map};
use super::query_gradient::query_gradient_kernel;
use super::statistics::{statistics_kernel, units_of_row};
use crate::device::elem_type;
use crate::operands::{
    Gradients, Operands, broadcast_bias, broadcast_mask, cube_count, geometry, optional,
};
use crate::portable::{self, Tile};
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides, Tiling};
use flash_attention_spec::{Problem, Wanted};

/// Whether the family reads query, key, value and output gradient as they lie in memory.
///
/// # Errors
/// [`Declined::Layout`] names the first that it does not.
pub fn check_gradient_operands(
    operands: &Operands,
    output_gradient: &TensorBinding,
) -> Result<(), Declined> {
    check_operands(operands)?;
    let four = |list: &[usize]| [list[0], list[1], list[2], list[3]];
    check_layout(
        "output gradient",
        four(&output_gradient.shape),
        four(&output_gradient.strides),
        output_gradient.handle.offset_start.unwrap_or(0),
    )
}

/// The wanted gradients. `output` and `statistics` are those of
/// [`attention_forward`](super::attention_forward); `output_gradient` has the output's shape,
/// `lse_gradient` is `[batch, heads, seq_q]` in `f32` with any strides.
///
/// `blueprint` is what [`plan_backward`](super::plan_backward) returned for `problem` on the client's
/// device, or made of [`gradient_variants`](super::gradient_variants) that fit it; operands and output
/// gradient passed [`check_gradient_operands`]. The gradient of the bias comes from the portable kernel,
/// in blocks of `tile`.
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &BackwardBlueprint,
    tile: Tile,
    operands: Operands,
    output: TensorBinding,
    statistics: Handle,
    output_gradient: TensorBinding,
    lse_gradient: Option<TensorBinding>,
    wanted: Wanted,
) -> Gradients {
    let rows = problem.lse_shape().iter().product::<usize>();
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let bias_elements = problem.bias.unwrap_or([0; 4]).iter().product::<usize>();
    let float = problem.dtype.size();
    let allocate = |wanted: bool, elements: usize| wanted.then(|| client.empty(elements * float));
    let gradients = Gradients {
        query: allocate(wanted.query, rows * problem.head_dim),
        key: allocate(wanted.key, keys * problem.head_dim),
        value: allocate(wanted.value, keys * problem.value_dim),
        bias: allocate(wanted.bias, bias_elements),
    };
    let padded = problem.seq_q.next_multiple_of(blueprint.key_value.walked);
    let row_statistics = row_statistics(
        client,
        problem,
        padded,
        &output,
        &statistics,
        &output_gradient,
        &lse_gradient,
    );
    let backward = Backward {
        client,
        problem,
        blueprint,
        operands: &operands,
        output_gradient: &output_gradient,
        row_statistics: &row_statistics,
        padded,
        rows,
        keys,
    };
    if let Some(gradient) = gradients.query.clone().filter(|_| rows > 0) {
        backward.query(gradient);
    }
    if keys > 0 && (wanted.key || wanted.value) {
        // One kernel computes both: one that is not asked for goes to a buffer of its own.
        let or_scratch = |handle: &Option<Handle>, features: usize| {
            let scratch = || client.empty(keys * features * float);
            handle.clone().unwrap_or_else(scratch)
        };
        let key = or_scratch(&gradients.key, problem.head_dim);
        let value = or_scratch(&gradients.value, problem.value_dim);
        match blueprint.key_value.division {
            Division::Rows => backward.key_value(key, value),
            Division::Gradients { .. } => backward.wide_key_value(key, value),
        }
    }
    if let Some(gradient) = gradients.bias.clone().filter(|_| bias_elements > 0) {
        let portable =
            portable::Launch::new(client, problem, tile, &operands, Some(&output_gradient));
        let row_statistics =
            portable.row_statistics(output, statistics, &output_gradient, &lse_gradient);
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
    pub output_gradient: &'a TensorBinding,
    /// `[batch * heads, 3, padded]`.
    row_statistics: &'a Handle,
    padded: usize,
    /// Rows of the query in all heads.
    rows: usize,
    /// Rows of the key in all heads.
    pub keys: usize,
}

impl Backward<'_> {
    fn query(&self, gradient: Handle) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.query);
        let heads = problem.batch * problem.heads;
        let cubes = problem.seq_q.div_ceil(blueprint.owned()) * heads;
        let element = elem_type(problem.dtype);
        let operands = self.operands.clone();
        let (mask, mask_element) = broadcast_mask(problem, operands.mask);
        let (owned, walked) = (blueprint.owned(), blueprint.walked);
        let elements = self.rows * problem.head_dim / 2;
        let statistic_elements = problem.batch * problem.heads * 3 * self.padded;
        // SAFETY: tensor maps bound every read of the operands; statistics, mask and bias are read at
        // positions of the problem only; each element of the packed gradient is written once, and
        // every loop ends at a number of blocks.
        unsafe {
            query_gradient_kernel::launch_unchecked(
                client,
                cube_count(client, cubes),
                CubeDim::new_1d(blueprint.units()),
                self.address_type(&[elements, statistic_elements, cubes]),
                blueprint.score_registers(),
                blueprint.weight_registers(),
                blueprint.key_registers(),
                tensor_map(operands.query, owned, element),
                tensor_map(operands.key, walked, element),
                tensor_map(operands.value, walked, element),
                tensor_map(self.output_gradient.clone(), owned, element),
                optional(&mask),
                optional(&broadcast_bias(problem, operands.bias)),
                BufferArg::from_raw_parts(self.row_statistics.clone(), statistic_elements),
                BufferArg::from_raw_parts(gradient, elements),
                geometry(problem),
                self.padded,
                section(problem, problem.seq_kv, problem.group(), heads),
                blueprint,
                element,
                mask_element,
            );
        }
    }

    fn key_value(&self, key_gradient: Handle, value_gradient: Handle) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.key_value);
        let heads = problem.batch * problem.kv_heads;
        let cubes = problem.seq_kv.div_ceil(blueprint.owned()) * heads;
        let element = elem_type(problem.dtype);
        let operands = self.operands.clone();
        let (mask, mask_element) = broadcast_mask(problem, operands.mask);
        let (owned, walked) = (blueprint.owned(), blueprint.walked);
        let key_elements = self.keys * problem.head_dim / 2;
        let value_elements = self.keys * problem.value_dim / 2;
        // SAFETY: as above; each element of the two packed gradients is written once.
        unsafe {
            key_value_gradient_kernel::launch_unchecked(
                client,
                cube_count(client, cubes),
                CubeDim::new_1d(blueprint.units()),
                self.address_type(&[key_elements, value_elements, cubes]),
                blueprint.score_registers(),
                blueprint.weight_registers(),
                blueprint.key_registers(),
                blueprint.value_registers(),
                tensor_map(operands.query, walked, element),
                tensor_map(operands.key, owned, element),
                tensor_map(operands.value, owned, element),
                tensor_map(self.output_gradient.clone(), walked, element),
                self.statistics_map(walked),
                optional(&mask),
                optional(&broadcast_bias(problem, operands.bias)),
                BufferArg::from_raw_parts(key_gradient, key_elements),
                BufferArg::from_raw_parts(value_gradient, value_elements),
                geometry(problem),
                section(problem, problem.seq_q * problem.group(), 1, heads),
                blueprint,
                element,
                mask_element,
            );
        }
    }

    /// Copies of the statistics of `rows` rows.
    pub(super) fn statistics_map(&self, rows: usize) -> TensorMapArg<Tiled> {
        let statistics = TensorBinding {
            handle: self.row_statistics.clone().binding(),
            strides: Strides::new(&[3 * self.padded, self.padded, 1]),
            shape: Shape::new([self.problem.batch * self.problem.heads, 3, self.padded]),
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

    /// What addresses the longest of mask, bias and `lengths`.
    pub(super) fn address_type(&self, lengths: &[usize]) -> AddressType {
        let operands = self.operands;
        let longest = [
            operands.bias.as_ref(),
            operands.mask.as_ref().map(|(mask, _)| mask),
        ]
        .into_iter()
        .flatten()
        .map(|x| x.handle.size as usize)
        .chain(lengths.iter().copied())
        .max();
        AddressType::from_len(longest.unwrap_or(0))
    }
}

/// Row statistics `[batch * heads, 3, padded]`.
fn row_statistics(
    client: &Client,
    problem: &Problem,
    padded: usize,
    output: &TensorBinding,
    saved: &Handle,
    output_gradient: &TensorBinding,
    lse_gradient: &Option<TensorBinding>,
) -> Handle {
    let rows = problem.lse_shape().iter().product::<usize>();
    let places = problem.batch * problem.heads * padded;
    let statistics = client.empty((3 * places).max(1) * 4);
    if rows > 0 {
        let units = places * units_of_row(problem.value_dim);
        let longest = [output, output_gradient]
            .into_iter()
            .map(|x| x.handle.size as usize)
            .chain([3 * places, units])
            .max();
        // SAFETY: the kernel reads rows of the problem only, through the operands' strides; one unit
        // writes the three statistics of each row of the buffer allocated above.
        unsafe {
            statistics_kernel::launch_unchecked(
                client,
                cube_count(client, units.div_ceil(256)),
                CubeDim::new_1d(256),
                AddressType::from_len(longest.unwrap_or(0)),
                8,
                output.clone().into_tensor_arg(),
                output_gradient.clone().into_tensor_arg(),
                BufferArg::from_raw_parts(saved.clone(), 2 * rows),
                optional(lse_gradient),
                BufferArg::from_raw_parts(statistics.clone(), 3 * places),
                geometry(problem),
                padded,
                problem.value_dim,
                elem_type(problem.dtype),
            );
        }
    }
    statistics
}
