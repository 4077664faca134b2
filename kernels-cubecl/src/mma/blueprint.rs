//! Which blocks serve a problem on a device, or why this family does not: a pure function of plain
//! data.

use super::apart::in_parts;
use super::fragment::{CHUNK, Instructions, chunks, pitch};
use super::one_pass_blueprint::{OnePass, plan_one_pass};
use super::stage::Staging;
use super::tf32::Ties;
use crate::device::{Device, WITHOUT};
use crate::plan::MMA;
use flash_attention_spec::{Dtype, F32Precision, Problem};
use thiserror::Error;

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
    /// Assembly text for the exponential and for rounding.
    pub assembly: bool,
    /// Asynchronous copies; needs assembly text.
    pub asynchronous: bool,
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

/// Why this family does not serve a problem on a device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Decline {
    /// The environment asks for other families.
    #[error("left out by {WITHOUT}")]
    LeftOut,
    /// `f32` operands are split in assembly text, which the device's compiler does not take.
    #[error("device {device} is compiled for by {given}, f32 operands need assembly text")]
    Compiler {
        /// The device's name.
        device: String,
        /// What kernels are compiled by.
        given: &'static str,
    },
    /// `f32` sums over more terms than one accumulator adds within its bound of error.
    #[error("a sum of f32 has {given} terms, expected at most {expected}")]
    Long {
        /// Terms of the longest sum.
        given: usize,
        /// Terms that a sum may have.
        expected: usize,
    },
    /// The device lacks the product, or the load it is fed by.
    #[error("device {device} has no {expected}")]
    Instruction {
        /// The device's name.
        device: String,
        /// What is missing.
        expected: String,
    },
    /// A scale that leaves no finite factor from dot products to exponents, or next to none.
    #[error("scale is {given}, expected a size of at least 1e-30 that is finite times log2(e)")]
    Scale {
        /// The scale, as an `f32`.
        given: String,
    },
    /// The device's warps are not 32 wide.
    #[error("device {device} has planes of {given:?} units, expected 32")]
    Plane {
        /// The device's name.
        device: String,
        /// Its smallest and largest plane.
        given: (u32, u32),
    },
    /// The smallest blocks do not fit.
    #[error("device {device} has {given} bytes of shared memory, expected at least {expected}")]
    SharedMemory {
        /// The device's name.
        device: String,
        /// What it has.
        given: usize,
        /// What is needed.
        expected: usize,
    },
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
    if device.left_out.contains(&MMA) {
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
    let asynchronous = device.copy_async;
    if problem.dtype == Dtype::F32 && !asynchronous {
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
            candidates(widest, asynchronous, table).find(|blocks| {
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
        assembly: asynchronous,
        asynchronous,
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

/// Blocks in order of preference for heads up to a width, with asynchronous copies and without.
type Table = [(usize, &'static [Blocks], &'static [Blocks])];

const fn blocks(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        warps,
        row_tiles,
        walked,
        stages: 1,
        prefetch: true,
        apart: false,
    }
}

const fn taken_apart(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        apart: true,
        ..blocks(warps, row_tiles, walked)
    }
}

const fn staged_twice(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        stages: 2,
        ..blocks(warps, row_tiles, walked)
    }
}

/// The last of each fits every device that has the instructions.
const FORWARD: [(usize, &[Blocks], &[Blocks]); 4] = [
    (
        64,
        &[staged_twice(4, 2, 64), blocks(4, 2, 64), blocks(4, 1, 32)],
        &[blocks(4, 2, 64), blocks(4, 1, 32)],
    ),
    (
        96,
        &[
            staged_twice(4, 2, 64),
            blocks(4, 2, 64),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[blocks(4, 2, 32), blocks(4, 1, 32)],
    ),
    // Scores of 64 keys beside outputs of 128 features leave too few registers.
    (
        128,
        &[
            staged_twice(4, 2, 48),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[blocks(4, 2, 32), blocks(4, 1, 32)],
    ),
    (
        256,
        &[blocks(4, 1, 64), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 32), blocks(4, 1, 16)],
    ),
];

const QUERY_GRADIENT: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 64), blocks(4, 1, 32)],
    ),
    (
        128,
        &[staged_twice(4, 2, 32), blocks(4, 1, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 48), blocks(4, 1, 32)],
    ),
    (
        256,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 16)],
    ),
];

const KEY_VALUE_GRADIENT: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 1, 32)],
        &[blocks(4, 1, 64), blocks(4, 1, 32)],
    ),
    (
        128,
        &[staged_twice(4, 1, 64), blocks(4, 1, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 16)],
    ),
    (
        256,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 16)],
    ),
];

/// Forward blocks where a mask is read alone, for all scores at once; with a bias they are read in turns.
const FORWARD_MASKED: [(usize, &[Blocks], &[Blocks]); 4] = [
    FORWARD[0],
    FORWARD[1],
    (
        128,
        &[staged_twice(4, 1, 64), blocks(4, 1, 64), blocks(4, 1, 32)],
        FORWARD[2].2,
    ),
    FORWARD[3],
];

/// Blocks of the gradients with options: the cap's derivative needs dot products beside probabilities and
/// their gradients, and masks and biases addresses.
const QUERY_GRADIENT_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 1, 32)],
        QUERY_GRADIENT[0].2,
    ),
    (
        128,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32)],
        QUERY_GRADIENT[1].2,
    ),
    QUERY_GRADIENT[2],
];

const KEY_VALUE_GRADIENT_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 1, 64), blocks(4, 1, 32)],
        KEY_VALUE_GRADIENT[0].2,
    ),
    (
        128,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32)],
        KEY_VALUE_GRADIENT[1].2,
    ),
    KEY_VALUE_GRADIENT[2],
];

/// The same where a mask is read alone, on compute capability 9.0.
const KEY_VALUE_GRADIENT_MASKED: [(usize, &[Blocks], &[Blocks]); 3] = [
    KEY_VALUE_GRADIENT_OPTIONS[0],
    (
        128,
        &[staged_twice(4, 1, 16), blocks(4, 1, 16)],
        KEY_VALUE_GRADIENT_OPTIONS[1].2,
    ),
    KEY_VALUE_GRADIENT_OPTIONS[2],
];

/// Blocks for `f32`: rows take twice the shared memory, and a lane holds its operands in parts. A
/// warp takes its right operands apart by itself, so two row tiles halve that work too. The gradients,
/// which multiply by walked rows four times a block, or three, have them taken apart for all warps where
/// there is room for parts beside whole rows; eight warps, so that one cube has as many as two of four,
/// and 32 rows, for each warp takes its own rows apart again in each block.
const FORWARD_F32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 2, 32), blocks(4, 1, 32)],
        &[],
    ),
    (
        128,
        &[blocks(4, 2, 16), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[],
    ),
    (
        256,
        &[blocks(4, 1, 32), blocks(4, 1, 16), blocks(2, 1, 16)],
        &[],
    ),
];

const QUERY_GRADIENT_F32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            taken_apart(4, 2, 32),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[
            taken_apart(8, 1, 32),
            taken_apart(4, 1, 16),
            staged_twice(4, 1, 16),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// Blocks for `f32` with options.
const FORWARD_F32_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    FORWARD_F32[0],
    (128, &[blocks(4, 1, 32), blocks(4, 1, 16)], &[]),
    FORWARD_F32[FORWARD_F32.len() - 1],
];

const QUERY_GRADIENT_F32_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    QUERY_GRADIENT_F32[0],
    (
        128,
        &[
            taken_apart(8, 1, 16),
            taken_apart(4, 1, 16),
            staged_twice(4, 1, 16),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    QUERY_GRADIENT_F32[2],
];

/// Both sums beside probabilities and their gradients leave few registers.
const KEY_VALUE_GRADIENT_F32: [(usize, &[Blocks], &[Blocks]); 4] = [
    (
        64,
        &[
            taken_apart(8, 1, 32),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (96, &[taken_apart(8, 1, 16), taken_apart(4, 1, 16)], &[]),
    (128, &[taken_apart(8, 1, 16), blocks(4, 1, 16)], &[]),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// Blocks for `f32` rounded to TF32: shared memory as above, registers as 16-bit numbers but for right
/// operands, which take twice as many.
const FORWARD_TF32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            staged_twice(4, 2, 64),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[
            staged_twice(8, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    (
        256,
        &[blocks(4, 1, 32), blocks(4, 1, 16), blocks(2, 1, 16)],
        &[],
    ),
];

/// Of either gradient kernel.
const GRADIENT_TF32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            staged_twice(4, 2, 32),
            staged_twice(4, 1, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[staged_twice(8, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[],
    ),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// The tables of a problem on a device: forward, query gradient, key and value gradients.
fn tables(problem: &Problem, device: &Device, tf32: bool) -> [&'static Table; 3] {
    if problem.dtype == Dtype::F32 && tf32 {
        return [&FORWARD_TF32, &GRADIENT_TF32, &GRADIENT_TF32];
    }
    let (masked, biased) = (problem.mask.is_some(), problem.bias.is_some());
    let options = masked || biased || problem.softcap.is_some();
    if problem.dtype == Dtype::F32 {
        return if options {
            [
                &FORWARD_F32_OPTIONS,
                &QUERY_GRADIENT_F32_OPTIONS,
                &KEY_VALUE_GRADIENT_F32,
            ]
        } else {
            [&FORWARD_F32, &QUERY_GRADIENT_F32, &KEY_VALUE_GRADIENT_F32]
        };
    }
    let alone = masked && !biased;
    let forward: &Table = if alone { &FORWARD_MASKED } else { &FORWARD };
    if alone && device.cuda_capability >= Some(90) {
        [forward, &QUERY_GRADIENT_OPTIONS, &KEY_VALUE_GRADIENT_MASKED]
    } else if options {
        [
            forward,
            &QUERY_GRADIENT_OPTIONS,
            &KEY_VALUE_GRADIENT_OPTIONS,
        ]
    } else {
        [forward, &QUERY_GRADIENT, &KEY_VALUE_GRADIENT]
    }
}

fn candidates(
    widest: usize,
    asynchronous: bool,
    table: &'static Table,
) -> impl Iterator<Item = Blocks> {
    let row = table.iter().find(|(width, _, _)| widest <= *width);
    let (_, with, without) = row.expect("the last row serves the widest head");
    let order = if asynchronous { *with } else { *without };
    order.iter().copied()
}

fn smallest(problem: &Problem) -> usize {
    let blocks = blocks(4, 1, 16);
    forward_shared_memory(problem, &blocks)
        .max(query_gradient_shared_memory(problem, &blocks))
        .max(key_value_gradient_shared_memory(problem, &blocks))
}

/// What tiles are staged as: 16-bit numbers, and `f32` as halves of a type whose values do not matter.
pub(crate) const fn staged_as(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 => Dtype::BF16,
        dtype => dtype,
    }
}

/// Staged elements of `dim` features.
const fn staged(dtype: Dtype, dim: usize) -> usize {
    dim * dtype.size() / staged_as(dtype).size()
}

/// Distances of two rows of shared tiles: of queries and keys, and of values.
fn pitches(problem: &Problem) -> (usize, usize) {
    let of = |dim| pitch(staged(problem.dtype, dim));
    (of(problem.head_dim), of(problem.value_dim))
}

/// Bytes of a cube: queries (then outputs), keys, values, flags.
fn forward_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    let (key, value) = pitches(problem);
    let chunks = blocks.owned() * key.max(value) + blocks.stages * blocks.walked * (key + value);
    chunks * 16 + flags(blocks)
}

/// Bytes of a cube: queries and output gradients with their statistics, keys and values, flags.
fn query_gradient_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    gradient_tiles(problem, blocks) + blocks.owned() * 3 * 4 + flags(blocks)
}

/// Bytes of a cube: keys and values, queries and output gradients with their statistics, flags.
fn key_value_gradient_shared_memory(problem: &Problem, blocks: &Blocks) -> usize {
    gradient_tiles(problem, blocks) + blocks.stages * blocks.walked * 3 * 4 + flags(blocks)
}

fn gradient_tiles(problem: &Problem, blocks: &Blocks) -> usize {
    let (key, value) = pitches(problem);
    let walked = |dim| walked_tile(problem.dtype, dim, blocks);
    let walked = walked(problem.head_dim) + walked(problem.value_dim);
    (blocks.owned() * (key + value) + walked) * 16
}

/// Chunks that the walked rows of one operand of a gradient take: of every stage, or of the parts and of
/// the place where rows land.
const fn walked_tile(dtype: Dtype, dim: usize, blocks: &Blocks) -> usize {
    let whole = pitch(staged(dtype, dim));
    if blocks.apart {
        blocks.walked * (pitch(in_parts(dim)) + whole)
    } else {
        blocks.stages * blocks.walked * whole
    }
}

/// Flags of the walked rows, with the alignment of what lies beside them.
fn flags(blocks: &Blocks) -> usize {
    (blocks.walked + 1) * 4 + 128
}

/// Comptime choices of a kernel: one compiled kernel for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    pub blocks: Blocks,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Elements of a load: 8, 4 or 2, or 1 for rows of any stride. Halves of `f32` come two at least, and
    /// two are for rows of any stride.
    pub vector: usize,
    pub masked: bool,
    pub capped: bool,
    pub biased: bool,
    /// The scale is negative: the largest score belongs to the smallest dot product.
    pub negative: bool,
    pub assembly: bool,
    pub asynchronous: bool,
    pub dtype: Dtype,
    /// Rounding of operands to TF32.
    pub tf32: Option<Ties>,
}

impl Config {
    /// The kernel of `problem` with blocks of `blueprint`, whose operands are read in vectors.
    pub(crate) fn of(
        problem: &Problem,
        blueprint: &Blueprint,
        blocks: Blocks,
        vector: usize,
    ) -> Self {
        Self {
            blocks,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            vector,
            masked: problem.mask.is_some(),
            capped: problem.softcap.is_some(),
            biased: problem.bias.is_some(),
            negative: problem.scale < 0.0,
            assembly: blueprint.assembly,
            asynchronous: blueprint.asynchronous,
            dtype: problem.dtype,
            tf32: blueprint.tf32,
        }
    }

    /// Whether the score of a visible key is its dot product times the scale.
    pub(crate) const fn plain(&self) -> bool {
        !self.capped && !self.biased
    }

    /// Whether registers are scarce, and what follows from a unit's number is found out again where it is
    /// needed: all but plain kernels of 16-bit numbers, unless warps own two row tiles and the rows of a
    /// copy are no power of two of chunks.
    pub(crate) const fn crowded(&self) -> bool {
        let even =
            chunks(self.head_dim).is_power_of_two() && chunks(self.value_dim).is_power_of_two();
        let wide = self.blocks.row_tiles > 1 && !even;
        let options = self.masked || self.capped || self.biased;
        self.assembly && (self.halved() || options || self.vector < CHUNK || wide)
    }

    /// Whether the largest score belongs to the smallest value that the softmax compares.
    pub(crate) const fn descending(&self) -> bool {
        self.plain() && self.negative
    }

    /// The bits of infinity for the elements in a word of a walked tile, or of numbers that may be rounded
    /// to it: rows that hold one are not multiplied by weights of 0.
    pub(crate) const fn exponent(&self) -> u32 {
        match self.dtype {
            Dtype::F32 if self.blocks.apart => 0x7F80_7F80,
            Dtype::F32 if self.tf32.is_some() => 0x7F7F_0000,
            Dtype::F32 => 0x7F80_0000,
            Dtype::F16 => 0x7C00_7C00,
            Dtype::BF16 => 0x7F80_7F80,
        }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        match (self.dtype, self.tf32) {
            (Dtype::F32, Some(ties)) => Instructions::Tf32 {
                ties,
                columns: false,
            },
            (Dtype::F32, None) => Instructions::SplitF32 {
                apart: self.blocks.apart,
            },
            _ if !self.assembly => Instructions::Generated,
            (Dtype::F16, _) => Instructions::AssemblyF16,
            (Dtype::BF16, _) => Instructions::AssemblyBF16,
        }
    }

    /// Whether tiles are staged as the halves of `f32` numbers.
    pub(crate) const fn halved(&self) -> bool {
        matches!(self.dtype, Dtype::F32)
    }

    /// Staged elements of a row of `dim` features.
    pub(crate) const fn staged(&self, dim: usize) -> usize {
        staged(self.dtype, dim)
    }

    /// Distance of two rows of a shared tile, in chunks.
    pub(crate) const fn pitch(&self, dim: usize) -> usize {
        pitch(self.staged(dim))
    }

    /// Distance of two walked rows that products read, in chunks.
    pub(crate) const fn walked_pitch(&self, dim: usize) -> usize {
        if self.blocks.apart {
            pitch(in_parts(dim))
        } else {
            self.pitch(dim)
        }
    }

    /// Chunks of a walked operand's tile.
    pub(crate) const fn walked_tile(&self, dim: usize) -> usize {
        walked_tile(self.dtype, dim, &self.blocks)
    }

    /// Where walked rows land, in chunks from the place that products read.
    pub(crate) const fn landing(&self, dim: usize) -> usize {
        if self.blocks.apart {
            self.blocks.walked * self.walked_pitch(dim)
        } else {
            0
        }
    }

    /// Staging of walked rows as products read them: what hidden ones are looked for in.
    pub(crate) const fn walked_staging(&self, dim: usize) -> Staging {
        let mut staging = self.staging(self.blocks.walked, dim);
        if self.blocks.apart {
            staging.dim = in_parts(dim);
        }
        staging
    }

    /// Tiles of eight columns that the sums for `dim` features have.
    pub(crate) const fn tiles(&self, dim: usize) -> usize {
        if self.halved() {
            dim.div_ceil(8)
        } else {
            chunks(dim)
        }
    }

    /// Staging of `rows` rows of `dim` features.
    pub(crate) const fn staging(&self, rows: usize, dim: usize) -> Staging {
        Staging {
            rows,
            dim: self.staged(dim),
            units: self.blocks.units(),
            vector: self.vector,
            halved: self.halved(),
            crowded: self.crowded(),
            tf32: self.tf32,
            asynchronous: self.asynchronous && self.vector == 8,
            prefetch: self.blocks.prefetch && self.vector == 8,
        }
    }
}
