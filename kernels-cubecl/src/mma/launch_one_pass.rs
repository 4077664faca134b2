//! Launches of the pass that computes all gradients.

use super::launch::Backward;
use super::one_pass::one_pass_kernel;
use super::one_pass_blueprint::OnePass;
use super::query_sums::{clear_sums_kernel, query_rows_kernel};
use crate::device::elem_type;
use crate::operands::{CACHED, cube_count, optional};
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_attention_spec::Problem;

/// Units of a cube of the small kernels.
const UNITS: usize = 256;

/// Computes the gradients of query, key and value, all of which have elements.
pub(super) fn one_pass(backward: &Backward, one_pass: OnePass, gradients: [&Handle; 3]) {
    let (launch, problem) = (backward.launch, backward.launch.problem);
    let [query, key, value] = gradients;
    let client = launch.client;
    let heads = problem.batch * problem.kv_heads;
    let blocks = problem.batch * problem.heads * one_pass.query_blocks(problem);
    let sums = one_pass.sum_elements(problem);
    // One for each block of queries, and one for the cubes.
    let counters = blocks + 1;
    let query_sums = client.empty(sums * 4);
    let turns = client.empty(counters * 4);
    let address_type = launch.address_type.max(AddressType::from_len(sums));
    let units = (sums / 4).max(counters);
    // SAFETY: each number of the two buffers allocated above is written by one unit.
    unsafe {
        clear_sums_kernel::launch_unchecked(
            client,
            cube_count(client, units.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type,
            4,
            BufferArg::from_raw_parts(query_sums.clone(), sums),
            BufferArg::from_raw_parts(turns.clone(), counters),
            sums / 4,
            counters,
        );
    }
    let cubes = problem.seq_kv.div_ceil(one_pass.owned()) * heads;
    let operands = backward.operands.clone();
    let scores = &backward.scores;
    let key_elements = heads * problem.seq_kv * problem.head_dim;
    let value_elements = heads * problem.seq_kv * problem.value_dim;
    // SAFETY: the kernel reads rows and positions of the problem only, through the operands' strides;
    // each element of the two packed gradients is written once, additions go to sums of blocks of the
    // problem, and a cube waits for others that have started only.
    unsafe {
        one_pass_kernel::launch_unchecked(
            client,
            launch.count(cubes),
            CubeDim::new_1d(one_pass.units() as u32),
            address_type,
            launch.vector,
            launch.tensor(operands.query),
            launch.tensor(operands.key),
            launch.tensor(operands.value),
            optional(&scores.mask),
            optional(&scores.bias),
            launch.tensor(backward.output_gradient.clone()),
            BufferArg::from_raw_parts(backward.row_statistics.clone(), 3 * backward.rows),
            BufferArg::from_raw_parts(key.clone(), key_elements),
            BufferArg::from_raw_parts(value.clone(), value_elements),
            BufferArg::from_raw_parts(query_sums.clone(), sums),
            BufferArg::from_raw_parts(turns, counters),
            launch.geometry(),
            section(client, problem, one_pass, heads),
            one_pass,
            launch.config(one_pass.blocks()),
            launch.element,
            elem_type(problem.dtype),
            scores.mask_element,
        );
    }
    // A unit takes 16 numbers.
    let units = sums / 16;
    // SAFETY: the kernel reads whole blocks of the sums; each element of the packed gradient is written
    // once.
    unsafe {
        query_rows_kernel::launch_unchecked(
            client,
            cube_count(client, units.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type,
            4,
            launch.vector,
            BufferArg::from_raw_parts(query_sums, sums),
            BufferArg::from_raw_parts(query.clone(), backward.rows * problem.head_dim),
            launch.geometry(),
            one_pass,
            launch.config(one_pass.blocks()),
            launch.element,
        );
    }
}

/// Blocks of keys of a head that are at work at once, of cubes that take turns. Each block waits until the
/// one before is a step ahead, which takes the longer the more start at once; those that are at work side
/// by side read each row of the queries from the cache but once.
const TAKING_TURNS: usize = 3;

/// Key heads whose cubes run side by side.
fn section(client: &Client, problem: &Problem, one_pass: OnePass, heads: usize) -> usize {
    let row = (problem.head_dim + problem.value_dim) * problem.dtype.size();
    let bytes = problem.seq_q * problem.group() * row;
    let cached = CACHED / bytes.max(1);
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let cubes = processors.map_or(0, |count| count as usize * one_pass.cubes());
    let apart = if one_pass.ordered() {
        cubes / TAKING_TURNS
    } else {
        0
    };
    cached.max(apart).clamp(1, heads)
}
