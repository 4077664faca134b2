//! Which blocks serve a problem on a device, or why this family does not: a pure function of plain
//! data.

use super::decline::Decline;
use super::fragment::CHUNK;
use super::memory::{
    forward_shared_memory, key_value_gradient_shared_memory, query_gradient_shared_memory,
    smallest, staged_as,
};
use super::one_pass_blueprint::{OnePass, plan_one_pass};
use super::tables::{blocks, candidates, tables};
use super::tf32::Ties;
use crate::device::Device;
use crate::plan::MMA;
use flash_attention_spec::{Dtype, F32Precision, Problem};

/// The blocks of one kernel. A cube owns `warps * row_tiles * 16` rows of one side and walks blocks
/// of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// Warps of a cube.
    pub warps: usize,
    /// Tiles of 16 rows that a warp owns. Two halve the shared memory traffic of each product, and
    /// double the registers.
    pub row_tiles: usize,
    /// Rows of a block of the other side; a multiple of 16.
    pub walked: usize,
    /// Walked blocks in shared memory at once, 1 or 2. With 2 the next one is on its way while one is
    /// worked on. Only asynchronous copies need a place of their own for that.
    pub stages: usize,
    /// Without asynchronous copies: whether the next block waits in registers.
    pub prefetch: bool,
    /// Of `f32`: whether the warps take a walked block apart together, once, from the place where it
    /// lands to another, and the next one lands meanwhile; else each warp does so by itself.
    pub apart: bool,
}

impl Blocks {
    /// Rows of the cube.
    pub const fn owned(&self) -> usize {
        self.warps * self.row_tiles * 16
    }

    /// Units of the cube.
    pub const fn units(&self) -> usize {
        self.warps * 32
    }

    /// The blocks of a kernel that copies `vector` elements at a time. Copies that are no whole chunks take
    /// registers, and do not run beside the products: rows need no place to land in meanwhile.
    pub(crate) fn read_in(self, vector: usize) -> Self {
        if vector == CHUNK {
            self
        } else {
            Self {
                apart: false,
                stages: 1,
                walked: self.walked.min(32),
                ..self
            }
        }
    }
}

/// What is decided before a launch. Together with the options present it determines the generated
/// code; lengths, strides, batch and heads stay run-time values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// The forward kernel; owns queries.
    pub forward: Blocks,
    /// The query gradient; owns queries.
    pub query_gradient: Blocks,
    /// The key and value gradients; owns keys.
    pub key_value_gradient: Blocks,
    /// One kernel for the key and the value gradient, or one for each: wide heads leave no room
    /// for both in the registers.
    pub joint_key_value: bool,
    /// One kernel for all gradients, where all are wanted of operands that are read 16 bytes at a time;
    /// none where two serve the problem.
    pub one_pass: Option<OnePass>,
    /// Assembly text and asynchronous copies, which the C++ generator has both and the other neither.
    pub assembly: bool,
    /// Of `f32`: rounding of operands to TF32, where a product is one of these; else numbers are split
    /// and nothing is lost.
    pub tf32: Option<Ties>,
}

impl Blueprint {
    /// How products of `f32` operands are formed.
    pub const fn f32_precision(&self) -> F32Precision {
        match self.tf32 {
            Some(_) => F32Precision::Tf32,
            None => F32Precision::Full,
        }
    }

    /// Shared memory of a cube of each kernel, in bytes: forward, query gradient, key and value
    /// gradients.
    pub fn shared_memory(&self, problem: &Problem) -> [usize; 3] {
        [
            forward_shared_memory(problem, &self.forward),
            query_gradient_shared_memory(problem, &self.query_gradient),
            key_value_gradient_shared_memory(problem, &self.key_value_gradient),
        ]
    }
}

/// Terms of a sum of `f32`, of which 16 at a time are added to its accumulator: rounding errors grow with
/// the root of the additions, and these many stay at half of what `f32` may be off by.
const LONGEST_F32: usize = 1 << 17;

/// Terms of a sum of products in TF32: eight at a time are added on the units, which cut 4e-8 of the sum on
/// the way, and these many keep that below what rounding the operands costs. Longer sums are in full.
const LONGEST_TF32: usize = 1 << 16;

/// The blueprint of `problem` on `device`.
///
/// # Errors
/// [`Decline`] names what the device or the problem lacks.
pub fn plan(problem: &Problem, device: &Device) -> Result<Blueprint, Decline> {
    if device.left_out.iter().any(|name| name == MMA) {
        return Err(Decline::LeftOut);
    }
    let name = || device.hardware.clone();
    // The parts of `f32` are of the type that its halves pass for.
    let element = staged_as(problem.dtype);
    // Register layouts are those of NVIDIA's instruction.
    let product = format!("16x8x16 {element} -> f32");
    if !device.mma_shapes.contains(&product) {
        return Err(Decline::Instruction {
            device: name(),
            expected: product,
        });
    }
    if !device.ldmatrix.contains(&element) {
        return Err(Decline::Instruction {
            device: name(),
            expected: format!("ldmatrix of {element}"),
        });
    }
    if device.plane_size != (32, 32) {
        return Err(Decline::Plane {
            device: name(),
            given: device.plane_size,
        });
    }
    let scale = problem.scale as f32;
    if scale.abs() < SMALLEST_SCALE || !(scale * std::f32::consts::LOG2_E).is_finite() {
        return Err(Decline::Scale {
            given: scale.to_string(),
        });
    }
    // One generator has both.
    let assembly = device.copy_async;
    if problem.dtype == Dtype::F32 && !assembly {
        return Err(Decline::Compiler {
            device: name(),
            given: device.compiler,
        });
    }
    let terms = problem.seq_kv.max(problem.seq_q * problem.group());
    if problem.dtype == Dtype::F32 && terms > LONGEST_F32 {
        return Err(Decline::Long {
            given: terms,
            expected: LONGEST_F32,
        });
    }
    let rounded = problem.f32_precision == F32Precision::Tf32 && terms <= LONGEST_TF32;
    let even = device
        .cuda_capability
        .is_some_and(|version| version >= ROUNDS_TO_EVEN);
    let tf32 = rounded.then_some(if even { Ties::Even } else { Ties::Away });
    let widest = problem.head_dim.max(problem.value_dim);
    let first = |table, shared_memory: fn(&Problem, &Blocks) -> usize| {
        let fits = |cubes: usize| {
            candidates(widest, assembly, table).find(|blocks| {
                let needed = shared_memory(problem, blocks) + RESERVED;
                let cubes = cubes.min(8usize.div_ceil(blocks.warps));
                cubes * needed <= device.shared_memory + RESERVED
            })
        };
        // While one cube waits for its loads or raises powers, another one multiplies; so do warps of one
        // that has eight.
        fits(2).or_else(|| fits(1))
    };
    let [forward, query_gradient, key_value_gradient] = tables(problem, device, tf32.is_some());
    let forward = first(forward, forward_shared_memory);
    let query_gradient = first(query_gradient, query_gradient_shared_memory);
    let key_value_gradient = first(key_value_gradient, key_value_gradient_shared_memory);
    let (Some(forward), Some(query_gradient), Some(key_value_gradient)) =
        (forward, query_gradient, key_value_gradient)
    else {
        return Err(Decline::SharedMemory {
            device: name(),
            given: device.shared_memory,
            expected: smallest(problem),
        });
    };
    Ok(Blueprint {
        forward,
        query_gradient,
        key_value_gradient,
        joint_key_value: widest <= 128,
        one_pass: plan_one_pass(problem, device),
        assembly,
        tf32,
    })
}

/// The plan, and the same with other blocks of the forward kernel that fit: for measurements.
///
/// # Errors
/// As [`plan`].
pub fn forward_variants(problem: &Problem, device: &Device) -> Result<Vec<Blueprint>, Decline> {
    let planned = plan(problem, device)?;
    let mut variants = vec![planned];
    for stages in [1, 2] {
        for (warps, row_tiles) in [(4, 1), (4, 2), (8, 1), (8, 2)] {
            for walked in [32, 48, 64, 96, 128] {
                let forward = Blocks {
                    stages,
                    ..blocks(warps, row_tiles, walked)
                };
                let blueprint = Blueprint { forward, ..planned };
                let fits = forward_shared_memory(problem, &forward) <= device.shared_memory;
                // Sums of outputs and scores: more do not leave room for the rest.
                let sums = row_tiles * (problem.value_dim.div_ceil(8) * 4 + walked / 2);
                if fits
                    && sums <= 192
                    && (stages == 1 || device.copy_async)
                    && forward != planned.forward
                {
                    variants.push(blueprint);
                }
            }
        }
    }
    Ok(variants)
}

/// A hidden score stays minus infinity times a scale that is not 0, and the largest `f32` is no small
/// score at a size like this.
const SMALLEST_SCALE: f32 = 1e-30;

/// The compute capability from which on a number is rounded to TF32 by one instruction, ties to even.
const ROUNDS_TO_EVEN: u32 = 90;

/// What a cube's shared memory costs beyond its own: a multiprocessor has as much more than a cube
/// can have.
const RESERVED: usize = 1 << 10;
