//! Tensor maps over the operands as they lie, allocation and launch.

use super::blueprint::{ForwardBlueprint, check_layout};
use super::dealing::heads_side_by_side;
use super::declined::Declined;
use super::forward::forward_kernel;
use crate::device::elem_type;
use crate::operands::{CACHED, Operands, ScoreOperands, geometry, optional};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};
use flash_attention_spec::Problem;

/// Whether the family reads query, key and value as they lie in memory.
///
/// # Errors
/// [`Declined::Layout`] names the first that it does not.
pub fn check_operands(operands: &Operands) -> Result<(), Declined> {
    let floats = [
        ("query", &operands.query),
        ("key", &operands.key),
        ("value", &operands.value),
    ];
    floats.into_iter().try_for_each(|(name, x)| check(name, x))
}

/// [`check_layout`] of an operand.
pub(super) fn check(name: &'static str, x: &TensorBinding) -> Result<(), Declined> {
    let four = |list: &[usize]| [list[0], list[1], list[2], list[3]];
    let offset = x.handle.offset_start.unwrap_or(0);
    check_layout(name, four(&x.shape), four(&x.strides), offset)
}

/// The output `[batch, heads, seq_q, value_dim]` and the statistics `[2, batch, heads, seq_q]` in
/// `f32` (row maximum, logarithm of the sum of `exp(score - maximum)`), both packed.
///
/// `blueprint` is what [`plan_forward`](super::plan_forward) returned for `problem` on the client's
/// device, or one of [`variants`](super::variants) that fits it; `operands` passed
/// [`check_operands`].
pub fn attention_forward(
    client: &Client,
    problem: &Problem,
    blueprint: &ForwardBlueprint,
    operands: Operands,
) -> (Handle, Handle) {
    let rows = problem.lse_shape().iter().product::<usize>();
    let bytes = problem.dtype.size();
    let output = client.empty(rows * problem.value_dim * bytes);
    let statistics = client.empty(2 * rows * 4);
    if rows == 0 {
        return (output, statistics);
    }
    let (cubes, section) = tiles(client, problem, blueprint);
    let scores = ScoreOperands::of(&operands);
    let element = elem_type(problem.dtype);
    // SAFETY: tensor maps bound every read of query, key and value; mask and bias are read at
    // positions of the problem only, through their strides; each element of the two packed outputs
    // allocated above is written once, and every loop ends at a number of blocks.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(blueprint.units()),
            scores.address_type(&[rows * problem.value_dim]),
            blueprint.score_registers(),
            blueprint.probability_registers(),
            blueprint.output_registers(),
            tensor_map(operands.query, 64, element),
            tensor_map(operands.key, blueprint.block_kv, element),
            tensor_map(operands.value, blueprint.block_kv, element),
            optional(&scores.mask),
            optional(&scores.bias),
            BufferArg::from_raw_parts(output.clone(), rows * problem.value_dim / 8),
            BufferArg::from_raw_parts(statistics.clone(), 2 * rows),
            geometry(problem),
            section,
            *blueprint,
            element,
            scores.mask_element,
        );
    }
    (output, statistics)
}

/// Cubes of the forward pass, one a multiprocessor at most, and heads whose tiles lie side by side in the
/// list that the cubes deal out.
fn tiles(client: &Client, problem: &Problem, blueprint: &ForwardBlueprint) -> (usize, usize) {
    let heads = problem.batch * problem.heads;
    let tiles = problem.seq_q.div_ceil(blueprint.block_q()) * heads;
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let cubes = processors.map_or(tiles, |count| tiles.min(count.max(1) as usize));
    let cached = section(problem, problem.seq_kv, problem.group(), heads);
    (cubes, heads_side_by_side(problem, blueprint, cubes, cached))
}

/// Heads, of `heads`, whose cubes run side by side: the cache holds two operands of `rows` rows for
/// every `group` of them.
pub(super) fn section(problem: &Problem, rows: usize, group: usize, heads: usize) -> usize {
    let bytes = rows * (problem.head_dim + problem.value_dim) * problem.dtype.size();
    (CACHED / bytes.max(1) * group).clamp(1, heads)
}

/// Copies of `rows` rows, 64 features at a time.
pub(super) fn tensor_map(x: TensorBinding, rows: usize, element: ElemType) -> TensorMapArg<Tiled> {
    TensorMapArg::new(
        TiledArgs {
            tile_size: Shape::new([1, 1, rows, 64]),
        },
        mapped(x).into_tensor_arg(),
        element,
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// The operand with strides that a tensor map takes: those of dimensions of one element are never
/// walked and may be anything.
fn mapped(x: TensorBinding) -> TensorBinding {
    let mut strides: Vec<usize> = x.strides.iter().copied().collect();
    let row = x.shape[3].next_multiple_of(8);
    for (stride, &length) in strides.iter_mut().zip(x.shape.iter()).take(3) {
        if length <= 1 {
            *stride = row;
        }
    }
    strides[3] = 1;
    TensorBinding {
        strides: Strides::new(&strides),
        ..x
    }
}
