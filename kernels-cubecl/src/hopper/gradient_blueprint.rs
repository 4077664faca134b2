//! Which blocks serve the gradients of a problem: pure functions of plain data.

use super::blueprint::check_problem;
use super::declined::Declined;
use super::products::Products;
use crate::device::Device;
use flash_attention_spec::{Dtype, Problem, Summation};

/// What is decided before a launch of a gradient kernel, and determines its code.
///
/// A cube owns rows of one side: keys where the gradients of key and value are computed, queries for the
/// query gradient alone. It walks blocks of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientBlueprint {
    /// Warpgroups of a cube.
    pub warpgroups: u32,
    /// What each of them does.
    pub division: Division,
    /// Rows of a walked block, a multiple of 16.
    pub walked: usize,
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
}

/// How the warpgroups of a cube divide its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Each owns 64 rows.
    Rows,
    /// Two own the same 64 keys: one sums the gradient of the values, the other that of the keys.
    Gradients {
        /// Steps of 16 features for which a product takes its owned operand from registers: shared
        /// memory is what such products wait for.
        held: usize,
    },
}

/// What is decided before the launches of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardBlueprint {
    /// The query gradient alone: a cube owns queries.
    pub query: GradientBlueprint,
    /// All gradients in one pass, or where heads are wide those of key and value: a cube owns keys.
    pub key_value: GradientBlueprint,
    /// How the parts of the query gradient are added in one pass.
    pub summation: Summation,
}

/// The widest heads of which both gradients of 64 keys stay in a warpgroup's registers.
const NARROW: usize = 128;

/// Shared memory of a cube of compute capability 9.0.
const SHARED_MEMORY: usize = 227 << 10;

impl GradientBlueprint {
    /// Rows that a cube owns.
    pub const fn owned(&self) -> usize {
        match self.division {
            Division::Rows => self.warpgroups as usize * 64,
            Division::Gradients { .. } => 64,
        }
    }

    /// Units of a cube.
    pub const fn units(&self) -> u32 {
        self.warpgroups * 128
    }

    /// Shared memory of a cube of the key and value gradients, in bytes: two stages of score gradients
    /// and the tiles of the query gradient besides where that is computed in the same pass.
    pub const fn key_value_memory(&self) -> usize {
        match self.division {
            Division::Rows => {
                self.shared_memory() + 2 * self.score_stage() + self.query_tiles() * 64 * 64 * 4
            }
            Division::Gradients { .. } => self.shared_memory(),
        }
    }

    /// Features of a row of the query gradient's sums: whole tiles.
    pub(crate) const fn sum_width(&self) -> usize {
        self.head_dim.next_multiple_of(64)
    }

    /// Shared memory of a cube that computes the query gradient alone, in bytes: two operands of the
    /// rows that it owns, stages of those that it walks and their statistics, and barriers. Where heads
    /// are wide, two blocks of weights on their way from one warpgroup to the other as well.
    pub const fn shared_memory(&self) -> usize {
        let weights = match self.division {
            Division::Rows => 0,
            Division::Gradients { .. } => 2 * self.handed_over(),
        };
        self.with_value_stages(self.value_stages()) + weights
    }

    const fn with_value_stages(&self, stages: usize) -> usize {
        let (key, value) = (self.head_dim.div_ceil(64), self.value_dim.div_ceil(64));
        let rows =
            (self.owned() + 2 * self.walked) * key + (self.owned() + stages * self.walked) * value;
        rows * 128 + 2 * self.statistics() * 4 + 1024
    }

    /// Stages of walked values, or of walked output gradients: two, but for wide heads.
    pub(crate) const fn value_stages(&self) -> usize {
        if self.with_value_stages(2) <= SHARED_MEMORY {
            2
        } else {
            1
        }
    }

    /// Bytes of a block of weights in `f32`.
    pub(crate) const fn handed_over(&self) -> usize {
        self.owned() * self.walked * 4
    }

    /// Steps whose owned operand stays in registers.
    pub(crate) const fn held(&self) -> usize {
        match self.division {
            Division::Rows => 0,
            Division::Gradients { held } => held,
        }
    }

    /// Registers that hold it.
    pub(crate) const fn held_registers(&self) -> usize {
        (4 * self.held()).next_power_of_two()
    }

    /// Numbers from one stage's statistics to the next's: copies land at multiples of 128 bytes.
    pub(crate) const fn statistics(&self) -> usize {
        (3 * self.walked).next_multiple_of(32)
    }

    /// Whether scores are dot products times the scale.
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
        (self.walked / 2).next_power_of_two()
    }

    pub(crate) const fn weight_registers(&self) -> usize {
        self.score_registers() / 2
    }

    pub(crate) const fn key_registers(&self) -> usize {
        (self.head_dim / 2).next_power_of_two()
    }

    pub(crate) const fn value_registers(&self) -> usize {
        (self.value_dim / 2).next_power_of_two()
    }

    /// The product of owned rows with walked ones over `dim` features, as text.
    pub(crate) fn dots(&self, dim: usize) -> String {
        self.products(dim).scores(self.score_registers())
    }

    /// The sum of walked rows of `dim` features, by weights in registers, as text.
    pub(crate) fn sums(&self, dim: usize) -> String {
        let length = (dim / 2).next_power_of_two();
        self.products(dim).values(length, self.weight_registers())
    }

    fn products(&self, dim: usize) -> Products {
        Products {
            element: self.element(),
            block_kv: self.walked,
            head_dim: dim,
            value_dim: dim,
            query_panel: self.owned() * 128,
            negated: false,
        }
    }
}

/// The blueprint of the gradients of `problem` on `device`: the first of [`gradient_variants`] that
/// fits, for each kernel.
///
/// # Errors
/// What of the problem or the device the family cannot serve.
pub fn plan_backward(problem: &Problem, device: &Device) -> Result<BackwardBlueprint, Declined> {
    check_problem(problem, device)?;
    let (query, key_value) = gradient_variants(problem);
    let query_heads = problem.batch as u128 * problem.heads as u128;
    let key_heads = problem.batch as u128 * problem.kv_heads as u128;
    let blueprint = BackwardBlueprint {
        query: fitting(
            &query,
            GradientBlueprint::shared_memory,
            problem.seq_q,
            query_heads,
            device,
        )?,
        key_value: fitting(
            &key_value,
            GradientBlueprint::key_value_memory,
            problem.seq_kv,
            key_heads,
            device,
        )?,
        summation: problem.summation,
    };
    let one_pass = blueprint.key_value;
    let rows = problem.seq_q.next_multiple_of(one_pass.walked);
    let given = query_heads * (rows * one_pass.sum_width() * 4) as u128;
    if one_pass.division == Division::Rows && given > u128::from(device.max_buffer) {
        return Err(Declined::Buffer {
            given,
            expected: device.max_buffer,
        });
    }
    Ok(blueprint)
}

fn fitting(
    all: &[GradientBlueprint],
    memory: impl Fn(&GradientBlueprint) -> usize,
    rows: usize,
    heads: u128,
    device: &Device,
) -> Result<GradientBlueprint, Declined> {
    let fits = |blueprint: &&GradientBlueprint| {
        memory(blueprint) <= device.shared_memory && blueprint.units() <= device.units
    };
    let smallest = &all[all.len() - 1];
    let Some(blueprint) = all.iter().find(fits) else {
        return Err(if smallest.units() > device.units {
            Declined::Units {
                given: device.units,
                expected: smallest.units(),
            }
        } else {
            Declined::SharedMemory {
                given: device.shared_memory,
                expected: memory(smallest),
            }
        });
    };
    let given = rows.div_ceil(blueprint.owned()) as u128 * heads;
    let (x, y, _) = device.max_cube_count;
    let expected = (u128::from(x) * u128::from(y)).min(u128::from(i32::MAX as u32));
    if given > expected {
        return Err(Declined::Cubes { given, expected });
    }
    Ok(*blueprint)
}

/// Blueprints worth measuring, of the query gradient alone and of all gradients in one pass; the ones
/// that are taken unmeasured first.
pub fn gradient_variants(problem: &Problem) -> (Vec<GradientBlueprint>, Vec<GradientBlueprint>) {
    let divided = |warpgroups: u32, division: Division, walked: usize| GradientBlueprint {
        warpgroups,
        division,
        walked,
        head_dim: problem.head_dim,
        value_dim: problem.value_dim,
        dtype: problem.dtype,
        capped: problem.softcap.is_some(),
        biased: problem.bias.is_some(),
    };
    let form = |&(warpgroups, walked): &(u32, usize)| divided(warpgroups, Division::Rows, walked);
    let forms = |blocks: &[(u32, usize)]| blocks.iter().map(form).collect();
    let widest = problem.head_dim.max(problem.value_dim);
    if widest > NARROW {
        let held = |held| divided(2, Division::Gradients { held }, 64);
        // Tests of each score need registers, too.
        let key_value = if problem.mask.is_some() || problem.bias.is_some() {
            vec![held(8), held(0)]
        } else {
            vec![held(12), held(8), held(0)]
        };
        (forms(&[(2, 64), (2, 48)]), key_value)
    } else if widest <= 64 {
        (
            forms(&[(3, 96), (3, 64), (2, 128), (4, 64), (2, 64)]),
            forms(&[(2, 128)]),
        )
    } else if problem.mask.is_some() && problem.bias.is_none() {
        // A mask alone is read for all scores at once.
        (forms(&[(3, 48), (2, 64)]), forms(&[(2, 64)]))
    } else {
        (
            forms(&[(3, 64), (2, 128), (3, 80), (2, 64)]),
            forms(&[(2, 64)]),
        )
    }
}
