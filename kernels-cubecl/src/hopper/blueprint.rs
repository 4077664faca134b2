//! Which blocks serve a problem, and what the family declines: pure functions of plain data.

use super::declined::Declined;
use super::products::Products;
use super::tiles::QUERY_PANEL;
use crate::device::Device;
use crate::plan::HOPPER;
use flash_attention_spec::{Dtype, Problem};

/// What is decided before a launch of the forward kernel, and determines its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardBlueprint {
    /// Warpgroups of a cube, 1 to 4, each with 64 queries.
    pub warpgroups: u32,
    /// Keys of a block, a multiple of 16.
    pub block_kv: usize,
    /// Blocks of keys and values that shared memory holds, a power of two.
    pub stages: u32,
    /// Tiles whose queries shared memory holds.
    pub query_stages: u32,
    /// Whether the scores of a block and the output with the values of the block before are one run of
    /// products, at which two warpgroups take turns.
    pub joined: bool,
    /// Features of query and key.
    pub head_dim: usize,
    /// Features of the value.
    pub value_dim: usize,
    /// Element type of the operands.
    pub dtype: Dtype,
    /// Whether scores are capped.
    pub capped: bool,
    /// Whether a bias is added to scores.
    pub biased: bool,
    /// Whether the scale is negative, and the product takes the sign.
    pub negated: bool,
}

impl ForwardBlueprint {
    /// Queries of a cube.
    pub const fn block_q(&self) -> usize {
        self.warpgroups as usize * 64
    }

    /// Units of a cube: those of the warpgroups, and one more whose first plane asks for what they read.
    pub const fn units(&self) -> u32 {
        (self.warpgroups + 1) * 128
    }

    /// Shared memory of a cube, in bytes: the query, stages of keys and values, and barriers.
    pub const fn shared_memory(&self) -> usize {
        let (key, value) = (self.head_dim.div_ceil(64), self.value_dim.div_ceil(64));
        let stages = self.stages as usize * self.block_kv;
        let queries = self.query_stages as usize * self.block_q();
        let elements = queries * 64 * key + stages * 64 * (key + value);
        elements * 2 + 1024
    }

    /// Registers of a unit of the warpgroup whose first plane asks for copies, and of one that multiplies.
    /// All begin with the same number, a multiple of 8, and together have no more afterwards.
    pub const fn registers(&self) -> (u32, u32) {
        match self.warpgroups {
            4 => (32, 112),
            3 => (32, 160),
            2 => (40, 232),
            _ => (24, 232),
        }
    }

    /// Bytes of 64 features of a block of keys.
    pub(crate) const fn panel(&self) -> usize {
        self.block_kv * 128
    }

    /// Bytes of a warpgroup's queries.
    pub(crate) const fn own_queries(&self) -> u32 {
        (self.head_dim.div_ceil(64) * QUERY_PANEL * 2) as u32
    }

    /// Bytes of a stage of keys.
    pub(crate) const fn key_stage(&self) -> u32 {
        (self.head_dim.div_ceil(64) * self.panel()) as u32
    }

    /// Bytes of a stage of values.
    pub(crate) const fn value_stage(&self) -> u32 {
        (self.value_dim.div_ceil(64) * self.panel()) as u32
    }

    /// What copies fill: every warpgroup's queries, then stages of keys, of which this is the first.
    pub(crate) const fn first_key(&self) -> u32 {
        self.query_stages * self.warpgroups
    }

    /// Then stages of values, of which this is the first.
    pub(crate) const fn first_value(&self) -> u32 {
        self.first_key() + self.stages
    }

    /// How much there is that copies fill.
    pub(crate) const fn guarded(&self) -> u32 {
        self.first_value() + self.stages
    }

    /// Whether scores are dot products times a factor.
    pub(crate) const fn plain(&self) -> bool {
        !self.capped && !self.biased
    }

    /// The element type in PTX.
    pub(crate) const fn element(&self) -> &'static str {
        match self.dtype {
            Dtype::F16 => "f16",
            _ => "bf16",
        }
    }

    /// Vectors have a power of two lanes; products use the first.
    pub(crate) const fn score_registers(&self) -> usize {
        (self.block_kv / 2).next_power_of_two()
    }

    pub(crate) const fn probability_registers(&self) -> usize {
        self.score_registers() / 2
    }

    pub(crate) const fn output_registers(&self) -> usize {
        (self.value_dim / 2).next_power_of_two()
    }

    pub(crate) fn products(&self) -> Products {
        Products {
            element: self.element(),
            block_kv: self.block_kv,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            query_panel: QUERY_PANEL * 2,
            negated: self.negated,
        }
    }
}

/// The blueprint of the forward pass of `problem` on `device`: the first of [`variants`] that fits.
///
/// # Errors
/// What of the problem or the device the family cannot serve.
pub fn plan_forward(problem: &Problem, device: &Device) -> Result<ForwardBlueprint, Declined> {
    check_problem(problem, device)?;
    let all = variants(problem);
    let fits = |blueprint: &&ForwardBlueprint| {
        blueprint.shared_memory() <= device.shared_memory && blueprint.units() <= device.units
    };
    let Some(blueprint) = all.iter().find(fits) else {
        let smallest = all[all.len() - 1];
        return Err(if smallest.units() > device.units {
            Declined::Units {
                given: device.units,
                expected: smallest.units(),
            }
        } else {
            Declined::SharedMemory {
                given: device.shared_memory,
                expected: smallest.shared_memory(),
            }
        });
    };
    let blocks = problem.seq_q.div_ceil(blueprint.block_q()) as u128;
    let cubes = blocks * problem.batch as u128 * problem.heads as u128;
    let (x, y, _) = device.max_cube_count;
    let expected = (u128::from(x) * u128::from(y)).min(u128::from(i32::MAX as u32));
    if cubes > expected {
        return Err(Declined::Cubes {
            given: cubes,
            expected,
        });
    }
    Ok(*blueprint)
}

/// What both passes ask of a problem and a device.
pub(super) fn check_problem(problem: &Problem, device: &Device) -> Result<(), Declined> {
    if device.left_out.iter().any(|name| name == HOPPER) {
        return Err(Declined::LeftOut);
    }
    if device.compiler != "cuda c++" {
        return Err(Declined::Compiler {
            given: device.compiler,
        });
    }
    if device.cuda_capability != Some(90) {
        return Err(Declined::Capability {
            given: device.cuda_capability,
        });
    }
    if !device.tensor_copies {
        return Err(Declined::TensorCopies);
    }
    if problem.dtype == Dtype::F32 {
        return Err(Declined::Dtype {
            given: problem.dtype,
        });
    }
    let dimensions = [
        ("head_dim", problem.head_dim),
        ("value_dim", problem.value_dim),
    ];
    for (dimension, given) in dimensions {
        if given == 0 || !given.is_multiple_of(8) {
            return Err(Declined::Dimension { dimension, given });
        }
    }
    let sizes = [
        ("batch", problem.batch),
        ("heads", problem.heads),
        ("seq_q", problem.seq_q),
        ("seq_kv", problem.seq_kv),
    ];
    for (dimension, given) in sizes {
        if given == 0 {
            return Err(Declined::Empty { dimension });
        }
    }
    let scale = problem.scale as f32;
    if !(scale.is_normal() && (scale * std::f32::consts::LOG2_E).is_normal()) {
        return Err(Declined::Scale {
            given: scale.to_string(),
        });
    }
    Ok(())
}

/// Keys that the middle query sees from which on wide heads are faster with joined products.
const JOINED_KEYS: usize = 1536;

/// Blueprints worth measuring for a problem, the fastest known first.
pub fn variants(problem: &Problem) -> Vec<ForwardBlueprint> {
    let plain = problem.softcap.is_none() && problem.bias.is_none() && problem.mask.is_none();
    let widest = problem.head_dim.max(problem.value_dim);
    // Three warpgroups keep the units as busy without turns, and narrow heads leave room for three. Turns
    // hold a warpgroup up at the ends of a tile, where the other has more to do.
    let long = problem.band.keys(problem.seq_q / 2, problem.seq_kv).len() >= JOINED_KEYS;
    let form = |warpgroups: u32, block_kv: usize, stages: u32| ForwardBlueprint {
        warpgroups,
        block_kv,
        stages,
        // Shared memory does not hold more of wide heads, nor registers with options.
        query_stages: if problem.head_dim <= 128 && plain {
            2
        } else {
            1
        },
        joined: warpgroups == 2 && plain && long && widest > 128,
        head_dim: problem.head_dim,
        value_dim: problem.value_dim,
        dtype: problem.dtype,
        capped: problem.softcap.is_some(),
        biased: problem.bias.is_some(),
        negated: problem.softcap.is_none() && problem.bias.is_none() && problem.scale < 0.0,
    };
    match (problem.head_dim, problem.value_dim) {
        (..=64, ..=64) => vec![form(3, 128, 4), form(4, 96, 4), form(2, 128, 4)],
        // One register more than the compiler has, where the keys come in fewer panels than the values.
        (..=64, ..=128) if plain => vec![form(3, 112, 2), form(2, 128, 2)],
        (..=128, ..=128) if plain => vec![form(3, 128, 2), form(3, 112, 2), form(2, 128, 2)],
        // What options need for every score takes registers, addresses most: a mask alone is read for all
        // scores at once.
        (..=128, ..=128) if problem.mask.is_some() && problem.bias.is_none() => {
            vec![form(3, 48, 2), form(2, 80, 2), form(2, 64, 2)]
        }
        (..=128, ..=128) if problem.bias.is_some() => {
            vec![form(3, 80, 2), form(2, 128, 2), form(2, 64, 2)]
        }
        (..=128, ..=128) => vec![form(3, 96, 2), form(2, 128, 2), form(2, 64, 2)],
        (..=256, ..=128) | (..=192, ..=192) => vec![form(2, 96, 2), form(2, 64, 2)],
        _ => vec![form(2, 80, 2), form(2, 64, 2)],
    }
}

/// Whether the copy engine can read an operand of that shape and those strides, in elements of two
/// bytes, that starts at byte `offset` of a buffer.
///
/// # Errors
/// [`Declined::Layout`].
pub fn check_layout(
    operand: &'static str,
    shape: [usize; 4],
    strides: [usize; 4],
    offset: u64,
) -> Result<(), Declined> {
    let outer = |d: usize| {
        shape[d] <= 1
            || (strides[d] != 0 && strides[d].is_multiple_of(8) && strides[d] < 1usize << 39)
    };
    let inner = shape[3] <= 1 || strides[3] == 1;
    if inner && (0..3).all(outer) && offset.is_multiple_of(16) {
        Ok(())
    } else {
        Err(Declined::Layout {
            operand,
            strides: strides.to_vec(),
            offset,
        })
    }
}
