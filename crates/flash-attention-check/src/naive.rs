//! Attention as it is written without thought of blocks, in the element type under test.
//!
//! Every tensor a framework would store is rounded to that type: the scores after each step, the
//! probabilities, dP, dS, dT. Matrix products accumulate in `f32` in the order of their index, the
//! softmax is the usual one in `f32`, and row reductions add in pairs as frameworks' reductions do.
//! Where a problem permits TF32 the operands of each matrix product are rounded to that first.
//! The distance of the result to the exact one is what this arithmetic costs on this problem.

use crate::data::{Data, round};
use flash_attention_spec::F32Precision;
use flash_attention_spec::score::{soft_cap, soft_cap_derivative};

/// All outputs of the unfused form; gradients are those of the data's incoming gradients.
#[derive(Clone, Debug)]
pub struct Naive {
    /// `[batch, heads, seq_q, value_dim]`.
    pub output: Vec<f64>,
    /// `[batch, heads, seq_q]`.
    pub lse: Vec<f64>,
    /// As the query.
    pub query: Vec<f64>,
    /// As the key.
    pub key: Vec<f64>,
    /// As the value.
    pub value: Vec<f64>,
    /// As the bias.
    pub bias: Option<Vec<f64>>,
}

/// Runs the unfused form. The loss reads the output and `lse` as far as `loss_reads` says, in
/// this order.
///
/// ```
/// use flash_attention_check::{cases, data::Data, naive::naive};
/// use flash_attention_spec::{Dtype, reference};
///
/// let data = Data::draw(&cases::grid(false)[0], Dtype::F32, 1).unwrap();
/// let exact = reference::forward(&data.problem, &data.inputs());
/// let unfused = naive(&data, (true, false));
/// assert!((exact.output[0] - unfused.output[0]).abs() < 1e-6);
/// ```
pub fn naive(data: &Data, loss_reads: (bool, bool)) -> Naive {
    let problem = &data.problem;
    let mut sums = Sums {
        output: vec![0.0; problem.output_shape().iter().product()],
        lse: vec![f32::NEG_INFINITY; problem.lse_shape().iter().product()],
        query: vec![0.0; data.query.len()],
        key: vec![0.0; data.key.len()],
        value: vec![0.0; data.value.len()],
        bias: data.bias.as_ref().map(|bias| vec![0.0; bias.len()]),
    };
    let factors = |values: &[f64]| {
        let values = narrow(values).into_iter();
        values.map(|x| factor(x, problem.f32_precision)).collect()
    };
    let operands = Operands {
        query: factors(&data.query),
        key: factors(&data.key),
        value: factors(&data.value),
        bias: data.bias.as_deref().map(narrow),
        output_gradient: narrow(&data.output_gradient),
    };
    for batch in 0..problem.batch {
        for head in 0..problem.heads {
            for i in 0..problem.seq_q {
                row(data, &operands, loss_reads, [batch, head, i], &mut sums);
            }
        }
    }
    let rounded = |sums: Vec<f32>| -> Vec<f64> {
        let sums = sums.into_iter().map(f64::from);
        sums.map(|x| round(x, problem.dtype)).collect()
    };
    Naive {
        output: rounded(sums.output),
        lse: sums.lse.into_iter().map(f64::from).collect(),
        query: rounded(sums.query),
        key: rounded(sums.key),
        value: rounded(sums.value),
        bias: sums.bias.map(rounded),
    }
}

/// Query, key and value are as products take them.
struct Operands {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    bias: Option<Vec<f32>>,
    output_gradient: Vec<f32>,
}

/// Accumulators of every output, in `f32`.
struct Sums {
    output: Vec<f32>,
    lse: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// One visible key of a row.
struct Entry {
    key: usize,
    /// Capped score before the bias.
    capped: f32,
    /// Score, and later its exponential.
    score: f32,
    probability: f32,
}

fn row(
    data: &Data,
    operands: &Operands,
    loss_reads: (bool, bool),
    [batch, head, i]: [usize; 3],
    sums: &mut Sums,
) {
    let problem = &data.problem;
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let stored = |x: f32| round(f64::from(x), problem.dtype) as f32;
    let as_factor = |x: f32| factor(x, problem.f32_precision);
    let q_row = (batch * problem.heads + head) * problem.seq_q + i;
    let kv_row = (batch * problem.kv_heads + problem.kv_head(head)) * problem.seq_kv;
    let query = line(&operands.query, q_row, head_dim);

    let mut entries = scores(data, operands, [batch, head, i], query, kv_row);
    let maximum = entries
        .iter()
        .fold(f32::NEG_INFINITY, |max, entry| max.max(entry.score));
    if maximum == f32::NEG_INFINITY && entries.iter().all(|entry| !entry.score.is_nan()) {
        return;
    }
    let mut sum = 0.0;
    for entry in &mut entries {
        entry.score = (entry.score - maximum).exp();
        sum += entry.score;
    }
    sums.lse[q_row] = maximum + sum.ln();
    let output = &mut sums.output[q_row * value_dim..][..value_dim];
    for entry in &mut entries {
        entry.probability = stored(entry.score / sum);
        let value = line(&operands.value, kv_row + entry.key, value_dim);
        add_scaled(output, as_factor(entry.probability), value);
    }
    let gradient: Vec<f32> = line(&operands.output_gradient, q_row, value_dim)
        .iter()
        .map(|g| if loss_reads.0 { *g } else { 0.0 })
        .collect();
    let products: Vec<f32> = gradient
        .iter()
        .zip(output)
        .map(|(g, o)| g * stored(*o))
        .collect();
    let lse_gradient = if loss_reads.1 {
        data.lse_gradient[q_row] as f32
    } else {
        0.0
    };
    let delta = pairwise_sum(&products) - lse_gradient;
    let gradient: Vec<f32> = gradient.into_iter().map(as_factor).collect();

    for entry in &entries {
        let kv_row = kv_row + entry.key;
        let dp = stored(dot(&gradient, line(&operands.value, kv_row, value_dim)));
        let ds = stored(entry.probability * (dp - delta));
        let dv = &mut sums.value[kv_row * value_dim..][..value_dim];
        add_scaled(dv, as_factor(entry.probability), &gradient);
        if let (Some(bias), Some(shape)) = (&mut sums.bias, problem.bias) {
            bias[broadcast_index(shape, [batch, head, i, entry.key])] += ds;
        }
        let slope = problem
            .softcap
            .map_or(1.0, |cap| soft_cap_derivative(entry.capped, cap as f32));
        let dt = as_factor(stored(ds * slope) * problem.scale as f32);
        let dq = &mut sums.query[q_row * head_dim..][..head_dim];
        add_scaled(dq, dt, line(&operands.key, kv_row, head_dim));
        let dk = &mut sums.key[kv_row * head_dim..][..head_dim];
        add_scaled(dk, dt, query);
    }
}

/// The scores of the keys that query `i` sees, rounded after each step.
fn scores(
    data: &Data,
    operands: &Operands,
    [batch, head, i]: [usize; 3],
    query: &[f32],
    kv_row: usize,
) -> Vec<Entry> {
    let problem = &data.problem;
    let stored = |x: f32| round(f64::from(x), problem.dtype) as f32;
    let visible = |j: &usize| match (&data.mask, problem.mask) {
        (Some(mask), Some(shape)) => !mask[broadcast_index(shape, [batch, head, i, *j])],
        _ => true,
    };
    let keys = problem.band.keys(i, problem.seq_kv).filter(visible);
    keys.map(|key| {
        let product = dot(query, line(&operands.key, kv_row + key, problem.head_dim));
        let scaled = stored(stored(product) * problem.scale as f32);
        let capped = match problem.softcap {
            Some(cap) => stored(soft_cap(scaled, cap as f32)),
            None => scaled,
        };
        let score = match (&operands.bias, problem.bias) {
            (Some(bias), Some(shape)) => {
                stored(capped + bias[broadcast_index(shape, [batch, head, i, key])])
            }
            _ => capped,
        };
        Entry {
            key,
            capped,
            score,
            probability: 0.0,
        }
    })
    // A score of minus infinity has probability 0 whatever its key and value hold.
    .filter(|entry| entry.score != f32::NEG_INFINITY)
    .collect()
}

/// A number as an operand of a matrix product: in TF32 the nearest of 11 bits, ties away from 0.
fn factor(x: f32, precision: F32Precision) -> f32 {
    match precision {
        F32Precision::Tf32 if x.is_finite() => f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF),
        F32Precision::Tf32 | F32Precision::Full => x,
    }
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

fn line(rows: &[f32], n: usize, width: usize) -> &[f32] {
    &rows[n * width..][..width]
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

fn add_scaled(sums: &mut [f32], factor: f32, terms: &[f32]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += factor * term;
    }
}

fn pairwise_sum(terms: &[f32]) -> f32 {
    match terms {
        [] => 0.0,
        [term] => *term,
        _ => {
            let (low, high) = terms.split_at(terms.len() / 2);
            pairwise_sum(low) + pairwise_sum(high)
        }
    }
}

fn broadcast_index(shape: [usize; 4], position: [usize; 4]) -> usize {
    shape.iter().zip(position).fold(0, |index, (&size, at)| {
        index * size + if size == 1 { 0 } else { at }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceptance::{Judged, Quantity, judge};
    use crate::cases::grid;
    use flash_attention_spec::{Dtype, reference};

    /// Catches a form with other bits than TF32 has, and one that turns NaN into a number.
    #[test]
    fn factors_have_eleven_bits() {
        let rounded = |x| factor(x, F32Precision::Tf32);
        let ulp = 2.0_f32.powi(-10);
        for (given, expected) in [
            (1.0, 1.0),
            (1.0 + 0.49 * ulp, 1.0),
            (1.0 + 0.5 * ulp, 1.0 + ulp),
            (-1.0 - 1.5 * ulp, -1.0 - 2.0 * ulp),
            (0.0, 0.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(rounded(given), expected, "{given}");
            assert_eq!(factor(given, F32Precision::Full), given);
        }
        assert!(rounded(f32::from_bits(0x7FFF_FFFF)).is_nan());
    }

    /// Catches a rule for TF32 that is met by nothing, by everything, or by `f32` in full alone.
    #[test]
    fn the_rule_for_tf32_takes_tf32_and_nothing_coarser() {
        let cases = grid(false);
        let cases = cases.iter().filter(|case| {
            case.options.f32_precision == F32Precision::Tf32 && case.poison.is_none()
        });
        let mut judged = 0;
        for case in cases {
            let data = Data::draw(case, Dtype::F32, 1).unwrap();
            let exact = reference::forward(&data.problem, &data.inputs());
            let unfused = naive(&data, (true, false));
            let mut full = data.clone();
            full.problem.f32_precision = F32Precision::Full;
            let full = naive(&full, (true, false));
            let passes = |got: &[f64], precision, naive: &Naive| {
                let verdict = judge(&Judged {
                    output: "o",
                    quantity: Quantity::Output,
                    dtype: Dtype::F32,
                    f32_precision: precision,
                    shape: &data.problem.output_shape(),
                    got,
                    exact: &exact.output,
                    naive: &naive.output,
                });
                verdict.passed
            };
            let (tf32, whole) = (F32Precision::Tf32, F32Precision::Full);
            assert!(passes(&unfused.output, tf32, &unfused), "{}", case.name);
            assert!(passes(&full.output, tf32, &unfused), "{}", case.name);
            assert!(!passes(&unfused.output, whole, &full), "{}", case.name);
            // Operands of 8 bits, as in bf16.
            let mut coarse = data.clone();
            for operand in [&mut coarse.query, &mut coarse.key, &mut coarse.value] {
                operand.iter_mut().for_each(|x| *x = round(*x, Dtype::BF16));
            }
            let coarse = naive(&coarse, (true, false));
            assert!(!passes(&coarse.output, tf32, &unfused), "{}", case.name);
            judged += 1;
        }
        assert!(judged > 5);
    }
}
