//! Whether all gradients come from one pass over the scores, and how its warps divide a cube's work.

use super::blueprint::Blocks;
use super::config::Config;
use super::fragment::pitch;
use super::one_pass_walk::NOTES;
use super::queries::QueryStaging;
use super::stage::Staging;
use crate::device::Device;
use flash_attention_spec::{Dtype, Problem, Summation};

/// The blocks of the pass that computes all gradients. A cube owns keys and walks blocks of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OnePass {
    /// Warps of a cube.
    pub warps: usize,
    /// Warps that own the same 32 keys. Each computes the scores of its part of the queries, and sums
    /// its part of the features: where heads are wide, the sums of all of them do not fit one warp.
    pub sides: usize,
    /// Queries of a block.
    pub walked: usize,
    /// Blocks of queries in shared memory at once, 1 or 2.
    pub stages: usize,
    /// How the parts of the query gradient are added.
    pub summation: Summation,
    /// Additions to global memory of four numbers each, and stores of four matrices to shared memory:
    /// assembly text for compute capability 9.0.
    pub wide: bool,
}

/// Keys of a warp.
pub(crate) const KEYS: usize = 32;

/// Most queries of which a warp keeps scores at once: scores and their gradients take half a register
/// each of every key and query.
const SCORES: usize = 32;

impl OnePass {
    /// Keys of a cube.
    pub const fn owned(&self) -> usize {
        self.warps / self.sides * KEYS
    }

    /// Cubes that registers let run on a multiprocessor.
    pub(crate) const fn cubes(&self) -> usize {
        8 / self.warps
    }

    /// Units of a cube.
    pub const fn units(&self) -> usize {
        self.warps * 32
    }

    /// The same as what staging takes.
    pub(crate) const fn blocks(&self) -> Blocks {
        Blocks {
            warps: self.warps,
            row_tiles: KEYS / 16,
            walked: self.walked,
            stages: self.stages,
            prefetch: self.stages == 2,
            apart: false,
        }
    }

    /// Staging of `rows` rows of `dim` features.
    pub(crate) const fn staging(&self, config: &Config, rows: usize, dim: usize) -> Staging {
        config.staging(rows, dim).crowded(config.assembly)
    }

    /// Staging of walked queries and their output gradients.
    pub(crate) const fn query_staging(&self, config: &Config) -> QueryStaging {
        QueryStaging {
            query: self.staging(config, self.walked, config.head_dim),
            gradient: self.staging(config, self.walked, config.value_dim),
            query_slot: self.walked * config.pitch(config.head_dim),
            gradient_slot: self.walked * config.pitch(config.value_dim),
        }
    }

    /// Queries whose scores a warp computes.
    pub(crate) const fn part(&self) -> usize {
        self.walked / self.sides
    }

    /// Those of which it keeps scores at once.
    pub(crate) const fn chunk(&self) -> usize {
        if self.part() < SCORES {
            self.part()
        } else {
            SCORES
        }
    }

    /// Tiles of 16 queries and the features of them whose gradient a warp computes in each block. 32
    /// queries where the features can be divided so: both operands are read half as often.
    pub(crate) const fn query_tile(&self, head_dim: usize) -> (usize, usize) {
        let columns = self.warps / (self.walked / 32);
        if head_dim.is_multiple_of(16 * columns) {
            (2, head_dim / columns)
        } else {
            (1, head_dim / (columns / 2))
        }
    }

    /// Whether weights of both kinds pass through shared memory. Gradients of scores always do.
    pub(crate) const fn shares_probabilities(&self) -> bool {
        self.sides > 1
    }

    /// Whether additions wait for their turn.
    pub(crate) const fn ordered(&self) -> bool {
        matches!(self.summation, Summation::Reproducible)
    }

    /// Shared memory of a cube, in bytes: keys, values and weights; queries and output gradients with
    /// their statistics; the cube's number and flags.
    pub fn shared_memory(&self, problem: &Problem) -> usize {
        let pitches = pitch(problem.head_dim) + pitch(problem.value_dim);
        let weights = if self.shares_probabilities() { 2 } else { 1 };
        let chunks = (self.owned() + self.stages * self.walked) * pitches
            + weights * self.owned() * pitch(self.walked);
        chunks * 16 + self.stages * self.walked * 3 * 4 + NOTES * 4 + 128
    }

    /// Blocks of queries of a head.
    pub(crate) fn query_blocks(&self, problem: &Problem) -> usize {
        problem.seq_q.div_ceil(self.walked)
    }

    /// Numbers that the query gradient is summed in: whole blocks.
    pub(crate) fn sum_elements(&self, problem: &Problem) -> usize {
        let blocks = problem.batch * problem.heads * self.query_blocks(problem);
        blocks * self.walked * problem.head_dim
    }
}

/// Warps, sides and stages for heads up to a width, in order of preference, and how many cubes have to
/// fit a multiprocessor for each.
type Table = [(usize, &'static [(usize, usize, usize, usize)]); 3];

/// Eight warps of up to 255 registers fill a multiprocessor. Two cubes of four do not wait at each
/// other's barriers; one of eight owns as many keys where heads are too wide for a warp's registers. With
/// options heads of 128 features are divided among four warps, as wider ones are.
const BLOCKS: Table = [
    (
        64,
        &[(4, 1, 2, 2), (4, 1, 1, 2), (8, 2, 2, 1), (8, 2, 1, 1)],
    ),
    (128, &[(8, 2, 2, 1), (8, 2, 1, 1), (8, 4, 2, 1)]),
    (256, &[(8, 4, 2, 1), (8, 4, 1, 1)]),
];

/// Queries of a block.
const WALKED: usize = 64;

/// What a multiprocessor keeps of its shared memory for each cube.
const RESERVED: usize = 1 << 10;

/// The blocks of one pass, where there are some. Else two kernels compute the gradients:
///
/// - of `f32`, whose parts leave no registers for sums of both gradients of 32 keys;
/// - of features that do not divide among warps in whole tiles;
/// - on devices that hold no cube of all keys that eight warps own, or not the sums.
///
/// Every device that has the family's products adds to numbers of `f32` in global memory atomically.
pub(crate) fn plan_one_pass(problem: &Problem, device: &Device) -> Option<OnePass> {
    let widest = problem.head_dim.max(problem.value_dim);
    if problem.dtype == Dtype::F32 {
        return None;
    }
    let (_, forms) = BLOCKS.iter().find(|(width, _)| widest <= *width)?;
    // Tests of scores, and dot products that are kept for the derivative of a cap, need registers.
    let with_options =
        problem.mask.is_some() || problem.bias.is_some() || problem.softcap.is_some();
    let wide = device.copy_async && device.cuda_capability.is_some_and(|version| version >= 90);
    let fits = |one_pass: &OnePass, cubes: usize| {
        let columns = one_pass.warps / (one_pass.walked / 16);
        let divides = problem.head_dim.is_multiple_of(16 * columns)
            && problem.head_dim.is_multiple_of(16 * one_pass.sides)
            && problem.value_dim.is_multiple_of(16 * one_pass.sides);
        let needed = cubes * (one_pass.shared_memory(problem) + RESERVED);
        // So do rows that wait in registers instead of arriving by themselves.
        let waits = !device.copy_async && one_pass.stages == 1;
        let crowded = (with_options || waits) && one_pass.sides < 4 && widest / one_pass.sides > 32;
        divides && !crowded && needed <= device.shared_memory + RESERVED
    };
    let (one_pass, _) = forms
        .iter()
        .map(|&(warps, sides, stages, cubes)| {
            let one_pass = OnePass {
                warps,
                sides,
                walked: WALKED,
                stages,
                summation: problem.summation,
                wide,
            };
            (one_pass, cubes)
        })
        .find(|(one_pass, cubes)| fits(one_pass, *cubes))?;
    let bytes = one_pass.sum_elements(problem) as u128 * 4;
    (bytes <= u128::from(device.max_buffer)).then_some(one_pass)
}
