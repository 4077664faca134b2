//! Operands of a case, drawn from a seed and rounded to the element type under test.
//!
//! The rounded values are what the device stores, and what the reference and the naive form are
//! given: rounding the inputs is no error of the attention that follows.

use crate::cases::{Bias, Case, Draw, GradientLayout, Layout, Mask, QueryPoison, QuerySide};
use flash_attention_spec::reference::Inputs;
use flash_attention_spec::{Dtype, Problem, ProblemError};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Operands and incoming gradients of one case in one element type, row-major.
#[derive(Clone, Debug)]
pub struct Data {
    /// The checked problem.
    pub problem: Problem,
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: Vec<f64>,
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: Vec<f64>,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: Vec<f64>,
    /// Shape [`Problem::mask`]; true hides.
    pub mask: Option<Vec<bool>>,
    /// Shape [`Problem::bias`].
    pub bias: Option<Vec<f64>>,
    /// Gradient of the loss with respect to the output, `[batch, heads, seq_q, value_dim]`.
    pub output_gradient: Vec<f64>,
    /// Gradient of the loss with respect to `lse`, `[batch, heads, seq_q]`.
    pub lse_gradient: Vec<f64>,
}

/// `value` rounded to the nearest number that `dtype` holds.
///
/// ```
/// use flash_attention_check::data::round;
/// use flash_attention_spec::Dtype;
///
/// assert_eq!(round(1.0 + 1.0 / 1024.0, Dtype::F16), 1.0 + 1.0 / 1024.0);
/// assert_eq!(round(1.0 + 1.0 / 1024.0, Dtype::BF16), 1.0);
/// ```
pub fn round(value: f64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(value as f32),
        Dtype::F16 => f16::from_f64(value).to_f64(),
        Dtype::BF16 => bf16::from_f64(value).to_f64(),
    }
}

impl Data {
    /// Draws the operands of `case` from `seed` and the case's name.
    ///
    /// # Errors
    /// If the case is not a valid problem.
    ///
    /// ```
    /// use flash_attention_check::{cases, data::Data};
    /// use flash_attention_spec::Dtype;
    ///
    /// let case = &cases::grid(false)[0];
    /// let first = Data::draw(case, Dtype::F16, 1).unwrap();
    /// assert_eq!(first.query, Data::draw(case, Dtype::F16, 1).unwrap().query);
    /// assert_ne!(first.query, Data::draw(case, Dtype::F16, 2).unwrap().query);
    /// ```
    pub fn draw(case: &Case, dtype: Dtype, seed: u64) -> Result<Self, ProblemError> {
        let problem = case.problem(dtype)?;
        let mut rng = StdRng::seed_from_u64(seed ^ name_hash(&case.name));
        let queries = case.batch * case.heads * case.seq_q;
        let keys = case.batch * case.kv_heads * case.seq_kv;
        let (mut query, mut key, mut value) = (
            uniform(&mut rng, queries * case.head_dim),
            uniform(&mut rng, keys * case.head_dim),
            uniform(&mut rng, keys * case.value_dim),
        );
        match case.draw {
            Draw::Uniform => {}
            Draw::WholeNumbers | Draw::Offset(_) => {
                query.fill_with(|| f64::from(rng.random_range(-2..=2)));
                key.fill_with(|| f64::from(rng.random_range(-2..=2)));
                if let Draw::Offset(number) = case.draw {
                    let rows = query.chunks_mut(case.head_dim);
                    let rows = rows.chain(key.chunks_mut(case.head_dim));
                    rows.for_each(|row| row[0] = number);
                }
            }
            Draw::Equal(number) => {
                query.fill(number);
                key.fill(number);
            }
            Draw::FlatScores(number) => {
                query.fill(0.0);
                value.fill(number);
            }
            Draw::Signs(number) => {
                query.fill(number);
                for row in key.chunks_mut(case.head_dim) {
                    row.fill(if rng.random() { number } else { -number });
                }
            }
        }
        if case.layout == Layout::Expanded {
            repeat_first_head(&mut key, case, case.head_dim);
            repeat_first_head(&mut value, case, case.value_dim);
        }
        if case.layout == Layout::SharedKeys {
            repeat_first(&mut key, case.batch);
            repeat_first(&mut value, case.batch);
        }
        if let Some(poison) = &case.poison {
            for (operand, dim) in [(&mut key, case.head_dim), (&mut value, case.value_dim)] {
                for head in operand.chunks_mut((case.seq_kv * dim).max(1)) {
                    head[poison.keys.start * dim..poison.keys.end * dim].fill(poison.with);
                }
            }
        }
        let (mask, bias) = (draw_mask(case, &mut rng), draw_bias(case, &mut rng));
        let mut output_gradient = uniform(&mut rng, queries * case.value_dim);
        let mut lse_gradient = uniform(&mut rng, queries);
        if case.gradient_layout == GradientLayout::Sum {
            output_gradient.fill(1.0);
            lse_gradient.fill(1.0);
        }
        if let Some(poison) = &case.query_poison {
            let write = |operand: &mut [f64], dim| poison_queries(operand, case.seq_q, dim, poison);
            if matches!(poison.side, QuerySide::All | QuerySide::Query) {
                write(&mut query, case.head_dim);
            }
            if matches!(poison.side, QuerySide::All | QuerySide::OutputGradient) {
                write(&mut output_gradient, case.value_dim);
            }
            if matches!(poison.side, QuerySide::All | QuerySide::LseGradient) {
                write(&mut lse_gradient, 1);
            }
        }
        let rounded = |values: Vec<f64>| values.into_iter().map(|x| round(x, dtype)).collect();
        Ok(Self {
            problem,
            query: rounded(query),
            key: rounded(key),
            value: rounded(value),
            mask,
            bias: bias.map(rounded),
            output_gradient: rounded(output_gradient),
            lse_gradient: lse_gradient
                .into_iter()
                .map(|x| round(x, Dtype::F32))
                .collect(),
        })
    }

    /// The operands as the reference takes them.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.query, &self.key, &self.value)
            .mask(self.mask.as_deref())
            .bias(self.bias.as_deref())
    }
}

/// FNV-1a, so that a case keeps its data wherever it stands in the grid.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Uniform numbers of mean 0 and variance 1.
///
/// Bounded on purpose: with a long tail one row of large scores decides the largest error of every
/// output, and a bound taken from a single row of the unfused form is a matter of luck.
fn uniform(rng: &mut StdRng, len: usize) -> Vec<f64> {
    let edge = 3.0_f64.sqrt();
    (0..len).map(|_| rng.random_range(-edge..edge)).collect()
}

fn repeat_first_head(operand: &mut [f64], case: &Case, dim: usize) {
    let batches = operand.chunks_mut((case.kv_heads * case.seq_kv * dim).max(1));
    batches.for_each(|batch| repeat_first(batch, case.kv_heads));
}

/// Copies the first of `parts` equal parts over the others.
fn repeat_first(operand: &mut [f64], parts: usize) {
    let part = operand.len() / parts.max(1);
    for n in 1..parts {
        operand.copy_within(0..part, n * part);
    }
}

fn poison_queries(operand: &mut [f64], seq_q: usize, dim: usize, poison: &QueryPoison) {
    for head in operand.chunks_mut((seq_q * dim).max(1)) {
        head[poison.queries.start * dim..poison.queries.end * dim].fill(poison.with);
    }
}

fn draw_mask(case: &Case, rng: &mut StdRng) -> Option<Vec<bool>> {
    let len = case.mask_shape()?.iter().product();
    Some(match &case.mask {
        Mask::None => return None,
        Mask::Random(_) => (0..len).map(|_| rng.random_range(0..3) == 0).collect(),
        Mask::Rows(hidden) | Mask::Keys(hidden) => (0..len).map(|n| hidden.contains(&n)).collect(),
        Mask::Later => (0..len)
            .map(|n| n % case.seq_kv > n / case.seq_kv)
            .collect(),
    })
}

fn draw_bias(case: &Case, rng: &mut StdRng) -> Option<Vec<f64>> {
    let len = case.bias_shape()?.iter().product();
    let mut bias = uniform(rng, len);
    match &case.bias {
        Bias::None => return None,
        Bias::Uniform(_) => {}
        Bias::Rows(rows, value) => {
            bias.fill(0.0);
            bias[rows.clone()].fill(*value);
        }
        Bias::Keys(keys, value) => bias[keys.clone()].fill(*value),
        Bias::Score([i, j], value) => bias[i * case.seq_kv + j] = *value,
        Bias::NanOnKeys(keys) => {
            for row in bias.chunks_mut(case.seq_kv.max(1)) {
                row[keys.clone()].fill(f64::NAN);
            }
        }
    }
    Some(bias)
}
