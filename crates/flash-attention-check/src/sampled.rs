//! The `f64` reference on a few rows and keys, for problems whose whole table is out of reach.
//!
//! ```text
//! o_i, lse_i, dq_i   of sampled rows i: one row of S and P over all keys
//! dk_j, dv_j         of sampled keys j: the rows of S and P of every query that sees one of them
//! ```
//!
//! The formulas are those of [`flash_attention_spec::reference`]; a row is written out in full, its
//! softmax is the plain one, and rows are shared out over the processor's threads. Nothing of size
//! `seq_q * seq_kv` is held.

use crate::acceptance::{F32_GRADIENT, F32_OUTPUT};
use flash_attention_spec::{Dtype, F32Precision, Problem};
use rayon::prelude::*;
use std::ops::Range;

/// One query head of one batch, and the key head that it reads.
///
/// Operands are row-major `f32`, which holds every number of the narrower types exactly.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[seq_q, head_dim]`.
    pub query: &'a [f32],
    /// `[seq_kv, head_dim]`.
    pub key: &'a [f32],
    /// `[seq_kv, value_dim]`.
    pub value: &'a [f32],
    /// `[seq_q, seq_kv]`; true hides.
    pub mask: Option<&'a [bool]>,
    /// `[seq_q, seq_kv]`.
    pub bias: Option<&'a [f32]>,
    /// Gradient of the loss with respect to the output, `[seq_q, value_dim]`.
    pub output_gradient: &'a [f32],
}

/// What one query computes and is given back.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// `[value_dim]`.
    pub output: Vec<f64>,
    /// Natural logarithm of the sum of exponentials.
    pub lse: f64,
    /// `[head_dim]`.
    pub query_gradient: Vec<f64>,
}

/// What one key is given back, from every query of the heads that read it.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyGradients {
    /// `[head_dim]`.
    pub key: Vec<f64>,
    /// `[value_dim]`.
    pub value: Vec<f64>,
}

/// How far samples lie from what they should be, relative to its size:
/// `sqrt(sum (got - exact)^2 / sum exact^2)`.
///
/// ```
/// use flash_attention_check::sampled::RelativeError;
///
/// let mut error = RelativeError::default();
/// error.add(&[3.0, 4.5], &[3.0, 4.0]);
/// assert_eq!(error.relative(), 0.1);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RelativeError {
    difference: f64,
    size: f64,
}

impl RelativeError {
    /// Adds as many numbers as the shorter of the two has.
    pub fn add(&mut self, got: &[f32], exact: &[f64]) {
        for (got, exact) in got.iter().zip(exact) {
            self.difference += (f64::from(*got) - exact).powi(2);
            self.size += exact.powi(2);
        }
    }

    /// Of all that was added; NaN where that held one, which is within no bound.
    pub fn relative(&self) -> f64 {
        if self.difference == 0.0 {
            0.0
        } else {
            (self.difference / self.size).sqrt()
        }
    }
}

/// The largest relative error that samples of an output and of a gradient may have.
///
/// In `f32` those of the acceptance rule. In f16 and bf16 two roundings of the type for the output, which
/// is rounded once and whose probabilities are, and four for gradients, which go through one more product.
/// TF32 has the bits of f16.
///
/// ```
/// use flash_attention_check::sampled::bounds;
/// use flash_attention_spec::{Dtype, F32Precision};
///
/// assert_eq!(bounds(Dtype::BF16, F32Precision::Full), [1.0 / 128.0, 1.0 / 64.0]);
/// ```
pub fn bounds(dtype: Dtype, precision: F32Precision) -> [f64; 2] {
    match dtype {
        Dtype::F32 if precision == F32Precision::Full => [F32_OUTPUT, F32_GRADIENT],
        Dtype::F32 | Dtype::F16 => [2f64.powi(-10), 2f64.powi(-9)],
        Dtype::BF16 => [2f64.powi(-7), 2f64.powi(-6)],
    }
}

/// Output, `lse` and query gradient of the queries `rows` of a head.
///
/// # Panics
/// If the length of an operand does not fit the problem, or a row is not one of its.
///
/// ```
/// use flash_attention_check::sampled::{Head, rows};
/// use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
///
/// let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
/// let operands = Operands {
///     query: operand([1, 1, 2, 1]),
///     key: operand([1, 1, 2, 1]),
///     value: operand([1, 1, 2, 1]),
///     mask: None,
///     bias: None,
/// };
/// let problem = Problem::new(&operands, &Options { causal: true, ..Options::default() }).unwrap();
/// let head = Head {
///     query: &[1.0, 0.0],
///     key: &[0.0, 5.0],
///     value: &[4.0, 8.0],
///     mask: None,
///     bias: None,
///     output_gradient: &[1.0, 1.0],
/// };
/// // The first query sees one key, the second weighs both alike.
/// assert_eq!(rows(&problem, &head, &[0])[0].output, [4.0]);
/// assert_eq!(rows(&problem, &head, &[1])[0].output, [6.0]);
/// ```
pub fn rows(problem: &Problem, head: &Head, rows: &[usize]) -> Vec<Row> {
    check(problem, head);
    rows.par_iter().map(|&i| row(problem, head, i)).collect()
}

/// Gradients of the keys `keys` of one key head, from the query heads of `group` that read it.
///
/// # Panics
/// As [`rows`] does.
pub fn key_gradients(problem: &Problem, group: &[Head], keys: &[usize]) -> Vec<KeyGradients> {
    let zeros = || {
        let zero = KeyGradients {
            key: vec![0.0; problem.head_dim],
            value: vec![0.0; problem.value_dim],
        };
        vec![zero; keys.len()]
    };
    let mut sums = zeros();
    for head in group {
        check(problem, head);
        let of_head = seen_by(problem, keys)
            .into_par_iter()
            .fold(zeros, |mut sums, i| {
                add_row(problem, head, i, keys, &mut sums);
                sums
            })
            .reduce(zeros, add);
        sums = add(sums, of_head);
    }
    sums
}

/// How many scores [`key_gradients`] of one query head forms, which is what its time grows with.
pub fn scores_formed(problem: &Problem, keys: &[usize]) -> usize {
    let seen = |i| problem.band.keys(i, problem.seq_kv).len();
    seen_by(problem, keys).map(seen).sum()
}

/// From the first to the last query whose band holds one of `keys`.
fn seen_by(problem: &Problem, keys: &[usize]) -> Range<usize> {
    let queries = |&j: &usize| problem.band.queries(j, problem.seq_q);
    let seen = || {
        keys.iter()
            .map(queries)
            .filter(|queries| !queries.is_empty())
    };
    let first = seen().map(|queries| queries.start).min().unwrap_or(0);
    first..seen().map(|queries| queries.end).max().unwrap_or(first)
}

fn row(problem: &Problem, head: &Head, i: usize) -> Row {
    let weights = Weights::new(problem, head, i);
    let mut output = vec![0.0; problem.value_dim];
    for entry in &weights.entries {
        let value = line(head.value, entry.key, problem.value_dim);
        add_scaled(&mut output, entry.probability, value);
    }
    let mut query_gradient = vec![0.0; problem.head_dim];
    let (products, row_sum) = weights.products(problem, head, i);
    for (entry, product) in weights.entries.iter().zip(products) {
        let dt = problem.scale * entry.probability * (product - row_sum) * entry.cap_slope;
        add_scaled(
            &mut query_gradient,
            dt,
            line(head.key, entry.key, problem.head_dim),
        );
    }
    Row {
        output,
        lse: weights.lse,
        query_gradient,
    }
}

/// Adds what query `i` gives to each of `keys`.
fn add_row(problem: &Problem, head: &Head, i: usize, keys: &[usize], sums: &mut [KeyGradients]) {
    let weights = Weights::new(problem, head, i);
    let (products, row_sum) = weights.products(problem, head, i);
    let gradient = line(head.output_gradient, i, problem.value_dim);
    let query = line(head.query, i, problem.head_dim);
    for (&key, sums) in keys.iter().zip(sums) {
        let Ok(at) = weights
            .entries
            .binary_search_by_key(&key, |entry| entry.key)
        else {
            continue;
        };
        let entry = &weights.entries[at];
        add_scaled(&mut sums.value, entry.probability, gradient);
        let dt = problem.scale * entry.probability * (products[at] - row_sum) * entry.cap_slope;
        add_scaled(&mut sums.key, dt, query);
    }
}

fn add(mut to: Vec<KeyGradients>, from: Vec<KeyGradients>) -> Vec<KeyGradients> {
    for (to, from) in to.iter_mut().zip(from) {
        let numbers = to.key.iter_mut().chain(&mut to.value);
        numbers
            .zip(from.key.iter().chain(&from.value))
            .for_each(|(to, from)| *to += from);
    }
    to
}

/// The keys that take part in one row, in order.
struct Weights {
    entries: Vec<Entry>,
    lse: f64,
}

struct Entry {
    key: usize,
    probability: f64,
    /// Derivative of the soft cap at the score.
    cap_slope: f64,
}

impl Weights {
    fn new(problem: &Problem, head: &Head, i: usize) -> Self {
        let query = line(head.query, i, problem.head_dim);
        let mut entries = Vec::new();
        for key in problem.band.keys(i, problem.seq_kv) {
            let at = i * problem.seq_kv + key;
            if head.mask.is_some_and(|mask| mask[at]) {
                continue;
            }
            let mut score = problem.scale * dot(query, line(head.key, key, problem.head_dim));
            let mut cap_slope = 1.0;
            if let Some(cap) = problem.softcap {
                cap_slope = (score / cap).cosh().powi(-2);
                score = cap * (score / cap).tanh();
            }
            if let Some(bias) = head.bias {
                score += f64::from(bias[at]);
            }
            // A key with this score takes no part; a NaN does, and must show.
            if score != f64::NEG_INFINITY {
                entries.push(Entry {
                    key,
                    probability: score,
                    cap_slope,
                });
            }
        }
        let scores = entries.iter().map(|entry| entry.probability);
        let max = scores.fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        for entry in &mut entries {
            entry.probability = (entry.probability - max).exp();
            sum += entry.probability;
        }
        entries
            .iter_mut()
            .for_each(|entry| entry.probability /= sum);
        Self {
            entries,
            lse: max + sum.ln(),
        }
    }

    /// dP of each key, and the row sum of P * dP.
    fn products(&self, problem: &Problem, head: &Head, i: usize) -> (Vec<f64>, f64) {
        let gradient = line(head.output_gradient, i, problem.value_dim);
        let product = |entry: &Entry| dot(gradient, line(head.value, entry.key, problem.value_dim));
        let products: Vec<f64> = self.entries.iter().map(product).collect();
        let terms = self.entries.iter().zip(&products);
        let row_sum = terms
            .map(|(entry, product)| entry.probability * product)
            .sum();
        (products, row_sum)
    }
}

fn check(problem: &Problem, head: &Head) {
    let p = problem;
    let lengths = [
        ("query", Some(head.query.len()), p.seq_q * p.head_dim),
        ("key", Some(head.key.len()), p.seq_kv * p.head_dim),
        ("value", Some(head.value.len()), p.seq_kv * p.value_dim),
        ("mask", head.mask.map(<[bool]>::len), p.seq_q * p.seq_kv),
        ("bias", head.bias.map(<[f32]>::len), p.seq_q * p.seq_kv),
        (
            "output gradient",
            Some(head.output_gradient.len()),
            p.seq_q * p.value_dim,
        ),
    ];
    for (operand, given, expected) in lengths {
        if let Some(given) = given {
            assert_eq!(given, expected, "elements of {operand}");
        }
    }
    assert_eq!(head.mask.is_some(), p.mask.is_some(), "a mask is given");
    assert_eq!(head.bias.is_some(), p.bias.is_some(), "a bias is given");
}

fn line(rows: &[f32], n: usize, width: usize) -> &[f32] {
    &rows[n * width..][..width]
}

/// In eight sums, which the compiler can keep in vector registers; one sum it may not split.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for n in 0..8 {
            sums[n] += f64::from(a[n]) * f64::from(b[n]);
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    let rest: f64 = rest.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.iter().sum::<f64>() + rest
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * f64::from(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Case, grid};
    use crate::data::Data;
    use flash_attention_spec::reference;

    fn close(name: &str, got: &[f64], exact: &[f64]) {
        assert_eq!(got.len(), exact.len(), "{name}");
        for (got, exact) in got.iter().zip(exact) {
            let near = (got - exact).abs() <= 1e-10 * (1.0 + exact.abs());
            assert!(
                near || got.to_bits() == exact.to_bits(),
                "{name}: {got} for {exact}"
            );
        }
    }

    fn broadcast<T: Copy>(values: &[T], shape: [usize; 4], full: [usize; 4]) -> Vec<T> {
        let mut all = Vec::new();
        for n in 0..full.iter().product::<usize>() {
            let (mut n, mut at, mut stride) = (n, 0, 1);
            for (size, full) in shape.into_iter().zip(full).rev() {
                at += if size == 1 { 0 } else { n % full * stride };
                (n, stride) = (n / full, stride * size);
            }
            all.push(values[at]);
        }
        all
    }

    /// Every row and key of `case`, beside the full reference.
    fn compare(case: &Case) {
        let data = Data::draw(case, Dtype::BF16, 5).unwrap();
        let p = &data.problem;
        let inputs = data.inputs();
        let forward = reference::forward(p, &inputs);
        let exact = reference::backward(p, &inputs, &data.output_gradient, None);
        let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|x| *x as f32).collect() };
        let (query, key, value) = (narrow(&data.query), narrow(&data.key), narrow(&data.value));
        let gradient = narrow(&data.output_gradient);
        let full = p.score_shape();
        let mask = data
            .mask
            .as_ref()
            .map(|mask| broadcast(mask, p.mask.unwrap(), full));
        let bias = data
            .bias
            .as_ref()
            .map(|b| broadcast(&narrow(b), p.bias.unwrap(), full));
        let part = |n: usize, size: usize| n * size..(n + 1) * size;
        let table = p.seq_q * p.seq_kv;
        let head = |batch: usize, n: usize| {
            let (q, kv) = (batch * p.heads + n, batch * p.kv_heads + p.kv_head(n));
            Head {
                query: &query[part(q, p.seq_q * p.head_dim)],
                key: &key[part(kv, p.seq_kv * p.head_dim)],
                value: &value[part(kv, p.seq_kv * p.value_dim)],
                mask: mask.as_ref().map(|mask| &mask[part(q, table)]),
                bias: bias.as_ref().map(|bias| &bias[part(q, table)]),
                output_gradient: &gradient[part(q, p.seq_q * p.value_dim)],
            }
        };
        let (queries, keys): (Vec<usize>, Vec<usize>) =
            ((0..p.seq_q).collect(), (0..p.seq_kv).collect());
        for batch in 0..p.batch {
            for n in 0..p.heads {
                let q = batch * p.heads + n;
                for (i, row) in rows(p, &head(batch, n), &queries).iter().enumerate() {
                    let at = q * p.seq_q + i;
                    let name = &case.name;
                    close(name, &row.output, &forward.output[part(at, p.value_dim)]);
                    close(name, &[row.lse], &forward.lse[part(at, 1)]);
                    close(
                        name,
                        &row.query_gradient,
                        &exact.query[part(at, p.head_dim)],
                    );
                }
            }
            for kv in 0..p.kv_heads {
                let group: Vec<Head> = (0..p.group())
                    .map(|n| head(batch, kv * p.group() + n))
                    .collect();
                for (j, got) in key_gradients(p, &group, &keys).iter().enumerate() {
                    let at = (batch * p.kv_heads + kv) * p.seq_kv + j;
                    close(&case.name, &got.key, &exact.key[part(at, p.head_dim)]);
                    close(&case.name, &got.value, &exact.value[part(at, p.value_dim)]);
                }
            }
        }
    }

    /// Catches a formula that has come apart from the full reference, for any option of the grid.
    #[test]
    fn rows_and_keys_are_those_of_the_full_reference() {
        let cases = grid(false);
        let small = |case: &&Case| {
            case.batch * case.heads * case.seq_q * case.seq_kv <= 1 << 14
                && case.dtypes.contains(&Dtype::BF16)
                && case.poison.is_none()
        };
        let compared: Vec<&Case> = cases.iter().filter(small).collect();
        assert!(compared.len() > 40, "{}", compared.len());
        compared.into_iter().for_each(compare);
    }

    /// Catches a range of queries that leaves out some that see a sampled key.
    #[test]
    fn a_single_key_gets_what_it_gets_among_all() {
        let case = Case::new("one key", "As the test.", [1, 2, 1, 9, 9, 4, 3]).causal();
        let data = Data::draw(&case, Dtype::F32, 3).unwrap();
        let p = &data.problem;
        let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|x| *x as f32).collect() };
        let (query, key, value) = (narrow(&data.query), narrow(&data.key), narrow(&data.value));
        let gradient = narrow(&data.output_gradient);
        let group: Vec<Head> = (0..2)
            .map(|n| Head {
                query: &query[n * 36..][..36],
                key: &key,
                value: &value,
                mask: None,
                bias: None,
                output_gradient: &gradient[n * 27..][..27],
            })
            .collect();
        let all = key_gradients(p, &group, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
        for (j, all) in all.iter().enumerate() {
            let one = &key_gradients(p, &group, &[j])[0];
            close("dk", &one.key, &all.key);
            close("dv", &one.value, &all.value);
        }
        // Queries 7 and 8 see key 7, and form 8 and 9 scores.
        assert_eq!(scores_formed(p, &[7]), 17);
        assert_eq!(scores_formed(p, &[]), 0);
    }
}
