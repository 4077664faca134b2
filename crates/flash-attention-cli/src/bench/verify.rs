//! Holds what a point computes to the `f64` reference, on rows and keys taken at random.

use super::call::Operands;
use super::grid::{Pass, Point};
use super::limit::Limit;
use crate::Outcome;
use burn::tensor::{DType, Tensor};
use burn_flash_attention::{Dtype, F32Precision, Problem};
use flash_attention_check::sampled::{
    Head, RelativeError, bounds, key_gradients, rows, scores_formed,
};
use rand::Rng;
use rand::seq::index;
use std::time::Instant;

/// Queries of a head whose rows are compared, the first and the last among them.
const ROWS: usize = 16;

/// Keys of a head whose gradients are compared, the last among them.
const KEYS: usize = 8;

/// Scores that the gradients of the keys may take: some seconds on a large host.
const SCORES: usize = 1 << 29;

/// How far one output lies from the reference.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// `o`, `dq`, `dk` or `dv`.
    pub output: &'static str,
    /// `|got - exact| / |exact|` over all that was compared.
    pub error: f64,
    /// The largest error that is accepted.
    pub bound: f64,
}

/// Compares `outputs`, which are those of [`Operands::run`]. An output over its bound is an error,
/// and so are operands that are not what was to be drawn.
///
/// The gradients of keys need every row that sees one. Where that is too much, the keys are taken
/// from the end of the sequence, which under a causal mask few queries see; where even that does
/// not help, dk and dv have no verdict. Under a time limit it is too much where it would take half of what
/// is left, and the result is `None` where even the last keys would.
pub fn verify(
    point: &Point,
    problem: &Problem,
    operands: &Operands,
    outputs: &[Tensor<4>],
    limit: &Limit,
    rng: &mut impl Rng,
) -> Outcome<Option<Vec<Verdict>>> {
    if limit.is_over() {
        return Ok(None);
    }
    let names: &[&'static str] = match point.pass {
        Pass::Forward => &["o"],
        Pass::Backward => &["dq", "dk", "dv"],
        Pass::Training => &["o", "dq", "dk", "dv"],
    };
    let output = |name| {
        let at = names.iter().position(|known| *known == name);
        at.and_then(|at| outputs.get(at))
    };
    let batch = rng.random_range(0..point.batch);
    let kv_head = rng.random_range(0..point.kv_heads);
    let group = problem.group();
    let data: Vec<HeadData> = (kv_head * group..(kv_head + 1) * group)
        .map(|head| HeadData::read(point, operands, batch, [head, kv_head]))
        .collect::<Outcome<_>>()?;
    let [mask, bias] = tables(operands)?;
    let mask: Option<Vec<bool>> = mask.map(|mask| mask.into_iter().map(|x| x != 0.0).collect());
    let heads: Vec<Head> = data
        .iter()
        .map(|data| data.head(mask.as_deref(), bias.as_deref()))
        .collect();

    let mut errors: Vec<(&'static str, RelativeError)> = Vec::new();
    let queries = sample(point.seq, ROWS, 0, rng);
    let start = Instant::now();
    let exact = rows(problem, &heads[0], &queries);
    let score = start.elapsed().as_secs_f64() / (queries.len() * point.seq) as f64;
    for name in ["o", "dq"] {
        let Some(output) = output(name) else { continue };
        let got = read_head(output, batch, kv_head * group)?;
        let mut error = RelativeError::default();
        for (&i, row) in queries.iter().zip(&exact) {
            let exact = if name == "o" {
                &row.output
            } else {
                &row.query_gradient
            };
            error.add(&got[i * point.head_dim..], exact);
        }
        errors.push((name, error));
    }
    if let (Some(dk), Some(dv)) = (output("dk"), output("dv")) {
        let in_time = limit
            .left()
            .map(|left| (left.as_secs_f64() / 2.0 / score) as usize);
        let scores = in_time.map_or(SCORES, |in_time| in_time.min(SCORES));
        let keys = keys_within_reach(point, problem, scores, rng);
        if keys.is_empty() && scores < SCORES {
            // What was compared must be right all the same.
            for (output, error) in errors {
                judge(point.dtype, point.f32_precision, output, error.relative())?;
            }
            return Ok(None);
        }
        if !keys.is_empty() {
            let (dk, dv) = (
                read_head(dk, batch, kv_head)?,
                read_head(dv, batch, kv_head)?,
            );
            let mut of = [RelativeError::default(), RelativeError::default()];
            for (&j, exact) in keys.iter().zip(key_gradients(problem, &heads, &keys)) {
                of[0].add(&dk[j * point.head_dim..], &exact.key);
                of[1].add(&dv[j * point.head_dim..], &exact.value);
            }
            let [dk, dv] = of;
            errors.extend([("dk", dk), ("dv", dv)]);
        }
    }
    let verdicts = errors
        .into_iter()
        .map(|(output, error)| judge(point.dtype, point.f32_precision, output, error.relative()));
    verdicts.collect::<Outcome<_>>().map(Some)
}

fn judge(
    dtype: Dtype,
    precision: F32Precision,
    output: &'static str,
    error: f64,
) -> Outcome<Verdict> {
    let [of_output, of_gradient] = bounds(dtype, precision);
    let bound = if output == "o" {
        of_output
    } else {
        of_gradient
    };
    // A NaN is not within any bound.
    if error <= bound {
        return Ok(Verdict {
            output,
            error,
            bound,
        });
    }
    Err(format!(
        "{output} is wrong: its relative error is {error:.1e}, at most {bound:.1e} is accepted"
    )
    .into())
}

/// At most `count` of the positions `from..seq`, in order: the first, the last and others.
fn sample(seq: usize, count: usize, from: usize, rng: &mut impl Rng) -> Vec<usize> {
    let all = seq - from;
    let mut taken = index::sample(rng, all, count.min(all)).into_vec();
    taken.extend([0, all - 1]);
    taken.sort_unstable();
    taken.dedup();
    taken.into_iter().map(|n| from + n).collect()
}

fn keys_within_reach(
    point: &Point,
    problem: &Problem,
    scores: usize,
    rng: &mut impl Rng,
) -> Vec<usize> {
    let mut reach = point.seq;
    while reach > 0 {
        let keys = sample(point.seq, KEYS, point.seq - reach, rng);
        if scores_formed(problem, &keys) * problem.group() <= scores {
            return keys;
        }
        reach /= 2;
    }
    Vec::new()
}

/// What the host holds of one query head and the key head it reads.
struct HeadData {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    output_gradient: Vec<f32>,
}

impl HeadData {
    fn read(
        point: &Point,
        operands: &Operands,
        batch: usize,
        [head, kv_head]: [usize; 2],
    ) -> Outcome<Self> {
        let data = Self {
            query: drawn("query", &operands.query, batch, head)?,
            key: drawn("key", &operands.key, batch, kv_head)?,
            value: drawn("value", &operands.value, batch, kv_head)?,
            output_gradient: match &operands.backward {
                Some(given) => drawn("output gradient", &given.output_gradient, batch, head)?,
                // Of a sum of the outputs, which is what training takes; a forward pass has none.
                None => vec![1.0; point.seq * point.head_dim],
            },
        };
        Ok(data)
    }

    fn head<'a>(&'a self, mask: Option<&'a [bool]>, bias: Option<&'a [f32]>) -> Head<'a> {
        Head {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            mask,
            bias,
            output_gradient: &self.output_gradient,
        }
    }
}

/// One head of an operand, whose numbers must have the variance they were drawn with: kernels take
/// another time over zeros.
fn drawn(name: &str, tensor: &Tensor<4>, batch: usize, head: usize) -> Outcome<Vec<f32>> {
    let values = read_head(tensor, batch, head)?;
    let squares: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
    let variance = squares / values.len() as f64;
    // Of fewer numbers the variance is a matter of luck.
    if values.len() >= 1_024 && !(0.7..1.3).contains(&variance) {
        let text = format!("the device drew {name} with variance {variance:.2}, expected 1");
        return Err(text.into());
    }
    Ok(values)
}

fn read_head(tensor: &Tensor<4>, batch: usize, head: usize) -> Outcome<Vec<f32>> {
    let [_, _, seq, width] = tensor.dims();
    let part = tensor
        .clone()
        .slice([batch..batch + 1, head..head + 1, 0..seq, 0..width]);
    numbers(part)
}

/// Mask (1 hides) and bias, which all heads share.
fn tables(operands: &Operands) -> Outcome<[Option<Vec<f32>>; 2]> {
    let mask = operands.mask.clone().map(|mask| numbers(mask.float()));
    let bias = operands.bias.clone().map(numbers);
    Ok([mask.transpose()?, bias.transpose()?])
}

fn numbers(tensor: Tensor<4>) -> Outcome<Vec<f32>> {
    Ok(tensor.try_into_data_dtype(DType::F32)?.try_into_vec()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    #[test]
    fn samples_hold_both_ends_and_stay_in_range() {
        let mut rng = StdRng::seed_from_u64(1);
        for (seq, from) in [(1, 0), (5, 3), (1_000, 0), (1_000, 900)] {
            let taken = sample(seq, 16, from, &mut rng);
            assert_eq!((taken[0], taken[taken.len() - 1]), (from, seq - 1));
            assert!(taken.is_sorted_by(|a, b| a < b) && taken.len() <= 18);
        }
    }

    #[test]
    fn a_wrong_or_missing_number_is_refused() {
        let relative = |got: f32| {
            let mut error = RelativeError::default();
            error.add(&[1.0, got], &[1.0, 1.0]);
            judge(Dtype::BF16, F32Precision::Full, "o", error.relative())
        };
        assert!(relative(1.0 + 2f32.powi(-8)).is_ok());
        assert!(relative(f32::NAN).is_err());
        let error = relative(1.5).unwrap_err().to_string();
        assert!(
            error.starts_with("o is wrong: its relative error is 3.5e-1"),
            "{error}"
        );
    }

    /// Catches a comparison that would pass any kernel: outputs of other operands, one at a time.
    #[test]
    #[cfg(feature = "flex")]
    fn outputs_of_other_operands_are_refused() {
        use crate::bench::call::problem;
        use crate::bench::grid::{Variant, tests::point};
        let device = burn::tensor::Device::flex();
        let mut rng = StdRng::seed_from_u64(2);
        for variant in Variant::ALL {
            let point = point(variant, Pass::Training);
            let problem = problem(&point).unwrap();
            let [one, other] =
                [(); 2].map(|()| Operands::draw(&point, &problem, &device, None).unwrap());
            let right = one.run(&point, &problem).unwrap();
            let wrong = other.run(&point, &problem).unwrap();
            let limit = Limit::default();
            let verdicts = verify(&point, &problem, &one, &right, &limit, &mut rng).unwrap();
            assert_eq!(verdicts.unwrap().len(), 4);
            for n in 0..4 {
                let mut outputs = right.clone();
                outputs[n] = wrong[n].clone();
                let error = verify(&point, &problem, &one, &outputs, &limit, &mut rng).unwrap_err();
                let says = format!("{} is wrong", ["o", "dq", "dk", "dv"][n]);
                assert!(error.to_string().starts_with(&says), "{variant}: {error}");
            }
        }
    }
}
