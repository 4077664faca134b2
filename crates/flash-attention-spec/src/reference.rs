//! Textbook attention in `f64`, forward and backward: what every implementation is measured by.
//!
//! For each batch and head, with P of shape `[seq_q, seq_kv]`:
//!
//! ```text
//! S  = softcap(scale * Q K^T) + bias
//! P  = softmax(S) over the visible keys        O  = P V,  lse = ln sum exp(S)
//! dP = G V^T                                   dV = P^T G
//! dS = P * (dP - rowsum(P * dP) + dlse)        dbias = dS
//! dT = dS * softcap'                           dQ = scale * dT K,  dK = scale * dT^T Q
//! ```
//!
//! Scores and probabilities are written out in full, the softmax is the plain one and the row sum
//! is taken over P itself, so that nothing is shared with the block recurrence under test
//! (Dao et al., arXiv:2205.14135, appendix B.2, derives these gradients).
//!
//! A key takes part in a row when the band and the mask let it be seen and its score is not minus
//! infinity. Every other key is passed over, never multiplied by zero, so a NaN or infinity in it
//! stays there. A row without any key has output 0, `lse` minus infinity and gradients of 0.

use crate::problem::Problem;
use std::ops::Range;

/// Operands as row-major `f64` arrays with the shapes of the [`Problem`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: &'a [f64],
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: &'a [f64],
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: &'a [f64],
    /// Shape [`Problem::mask`]; true hides. Present exactly where the problem has a mask.
    pub mask: Option<&'a [bool]>,
    /// Shape [`Problem::bias`]. Present exactly where the problem has a bias.
    pub bias: Option<&'a [f64]>,
}

impl<'a> Inputs<'a> {
    /// Query, key and value alone.
    pub fn new(query: &'a [f64], key: &'a [f64], value: &'a [f64]) -> Self {
        Self {
            query,
            key,
            value,
            mask: None,
            bias: None,
        }
    }

    /// With this mask, or with none.
    pub fn mask(mut self, mask: impl Into<Option<&'a [bool]>>) -> Self {
        self.mask = mask.into();
        self
    }

    /// With this bias, or with none.
    pub fn bias(mut self, bias: impl Into<Option<&'a [f64]>>) -> Self {
        self.bias = bias.into();
        self
    }
}

/// What the forward pass returns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Forward {
    /// `[batch, heads, seq_q, value_dim]`.
    pub output: Vec<f64>,
    /// `[batch, heads, seq_q]`, natural logarithm of the sum of exponentials of a row's scores.
    pub lse: Vec<f64>,
}

/// Gradients of a loss with respect to each input, in the shape of that input.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Gradients {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: Vec<f64>,
    /// `[batch, kv_heads, seq_kv, head_dim]`, summed over the query heads that read a key head.
    pub key: Vec<f64>,
    /// `[batch, kv_heads, seq_kv, value_dim]`, summed likewise.
    pub value: Vec<f64>,
    /// Shape [`Problem::bias`], summed over the dimensions the bias was broadcast on.
    pub bias: Option<Vec<f64>>,
}

/// Attention output and log-sum-exp.
///
/// # Panics
/// If the length of an array does not fit the problem, or a mask or bias is given without being
/// part of the problem or the reverse.
///
/// ```
/// use flash_attention_spec::reference::{Inputs, forward};
/// use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
///
/// let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
/// let [query, key, value] = [[1, 1, 2, 1]; 3].map(operand);
/// let operands = Operands::new(query, key, value);
/// let problem = Problem::new(&operands, &Options::new().causal()).unwrap();
/// let key = [0.0, 3_f64.ln()];
/// let inputs = Inputs::new(&[1.0, 1.0], &key, &[4.0, 8.0]);
/// let result = forward(&problem, &inputs);
/// // The first query sees one key; the second weighs its two keys 1 to 3.
/// assert_eq!(result.output[0], 4.0);
/// assert!((result.output[1] - 7.0).abs() < 1e-12);
/// assert!((result.lse[1] - 4_f64.ln()).abs() < 1e-12);
/// ```
pub fn forward(problem: &Problem, inputs: &Inputs) -> Forward {
    check(problem, inputs);
    let value_dim = problem.value_dim;
    let mut output = vec![0.0; problem.output_shape().iter().product()];
    let mut lse = vec![0.0; problem.lse_shape().iter().product()];
    for head in heads(problem) {
        let table = Table::new(problem, inputs, &head);
        lse[head.queries(problem, 1)].copy_from_slice(&table.lse);
        let value = &inputs.value[head.keys(problem, value_dim)];
        let output = &mut output[head.queries(problem, value_dim)];
        for i in 0..problem.seq_q {
            for (j, p) in table.row(i) {
                let output = row_mut(output, i, value_dim);
                add_scaled(output, p, row(value, j, value_dim));
            }
        }
    }
    Forward { output, lse }
}

/// Gradients of a loss whose gradient with respect to the output is `output_gradient`
/// (`[batch, heads, seq_q, value_dim]`) and, where it reads the log-sum-exp too, with respect to
/// `lse` is `lse_gradient` (`[batch, heads, seq_q]`). Runs the forward pass itself.
///
/// # Panics
/// As [`forward`] does, and if the length of an incoming gradient does not fit the problem.
///
/// ```
/// use flash_attention_spec::reference::{Inputs, backward};
/// use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
///
/// let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
/// let [query, key, value] = [[1, 1, 1, 1], [1, 1, 2, 1], [1, 1, 2, 1]].map(operand);
/// let operands = Operands::new(query, key, value);
/// let problem = Problem::new(&operands, &Options::new()).unwrap();
/// let inputs = Inputs::new(&[0.0], &[1.0, -1.0], &[3.0, 1.0]);
/// // Both keys have probability 1/2 and the output is 2, so dS = [1/2 * (3 - 2), 1/2 * (1 - 2)].
/// let gradients = backward(&problem, &inputs, &[1.0], None);
/// assert_eq!(gradients.query, [0.5 * 1.0 + -0.5 * -1.0]);
/// assert_eq!(gradients.key, [0.0, 0.0]);
/// assert_eq!(gradients.value, [0.5, 0.5]);
/// ```
pub fn backward(
    problem: &Problem,
    inputs: &Inputs,
    output_gradient: &[f64],
    lse_gradient: Option<&[f64]>,
) -> Gradients {
    check(problem, inputs);
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let output_shape = problem.output_shape();
    check_length("output gradient", output_gradient.len(), &output_shape);
    if let Some(gradient) = lse_gradient {
        check_length("lse gradient", gradient.len(), &problem.lse_shape());
    }
    let mut gradients = Gradients {
        query: vec![0.0; inputs.query.len()],
        key: vec![0.0; inputs.key.len()],
        value: vec![0.0; inputs.value.len()],
        bias: inputs.bias.map(|bias| vec![0.0; bias.len()]),
    };
    let mut dp = vec![0.0; problem.seq_kv];
    for head in heads(problem) {
        let table = Table::new(problem, inputs, &head);
        // Positions of the head's rows in q and dq, in k and dk, in v and dv.
        let at_q = head.queries(problem, head_dim);
        let at_k = head.keys(problem, head_dim);
        let at_v = head.keys(problem, value_dim);
        let query = &inputs.query[at_q.clone()];
        let key = &inputs.key[at_k.clone()];
        let value = &inputs.value[at_v.clone()];
        let dq = &mut gradients.query[at_q];
        let dk = &mut gradients.key[at_k];
        let dv = &mut gradients.value[at_v];
        let output_gradient = &output_gradient[head.queries(problem, value_dim)];
        let lse_gradient = lse_gradient.map(|gradient| &gradient[head.queries(problem, 1)]);
        for i in 0..problem.seq_q {
            let g = row(output_gradient, i, value_dim);
            let mut row_sum = 0.0;
            for (j, p) in table.row(i) {
                dp[j] = dot(g, row(value, j, value_dim));
                row_sum += p * dp[j];
                add_scaled(row_mut(dv, j, value_dim), p, g);
            }
            let dlse = lse_gradient.map_or(0.0, |gradient| gradient[i]);
            for (j, p) in table.row(i) {
                let ds = p * (dp[j] - row_sum + dlse);
                if let (Some(bias), Some(shape)) = (&mut gradients.bias, problem.bias) {
                    bias[broadcast_index(shape, [head.batch, head.head, i, j])] += ds;
                }
                let dt = problem.scale * ds * table.cap_slope(i, j);
                add_scaled(row_mut(dq, i, head_dim), dt, row(key, j, head_dim));
                add_scaled(row_mut(dk, j, head_dim), dt, row(query, i, head_dim));
            }
        }
    }
    gradients
}

/// The probabilities P of one batch and query head, row-major `[seq_q, seq_kv]`: 0 for a hidden
/// key, and a row of zeros for a query that sees nothing.
///
/// # Panics
/// As [`forward`] does, and if `batch` or `head` is not below the problem's.
pub fn probabilities(problem: &Problem, inputs: &Inputs, batch: usize, head: usize) -> Vec<f64> {
    check(problem, inputs);
    assert!(
        batch < problem.batch && head < problem.heads,
        "batch {batch}, head {head} is outside of {} batches of {} heads",
        problem.batch,
        problem.heads
    );
    Table::new(problem, inputs, &Head { batch, head }).probabilities
}

/// S and P of one batch and head, row-major `[seq_q, seq_kv]`.
struct Table {
    seq_kv: usize,
    /// Minus infinity where the key takes no part in the row.
    scores: Vec<f64>,
    /// Derivative of the soft cap at each score; `None` without one.
    cap_slopes: Option<Vec<f64>>,
    probabilities: Vec<f64>,
    /// `[seq_q]`.
    lse: Vec<f64>,
}

impl Table {
    fn new(problem: &Problem, inputs: &Inputs, head: &Head) -> Self {
        let (seq_q, seq_kv, head_dim) = (problem.seq_q, problem.seq_kv, problem.head_dim);
        let mut table = Self {
            seq_kv,
            scores: vec![f64::NEG_INFINITY; seq_q * seq_kv],
            cap_slopes: problem.softcap.map(|_| vec![0.0; seq_q * seq_kv]),
            probabilities: vec![0.0; seq_q * seq_kv],
            lse: vec![f64::NEG_INFINITY; seq_q],
        };
        let query = &inputs.query[head.queries(problem, head_dim)];
        let key = &inputs.key[head.keys(problem, head_dim)];
        for i in 0..seq_q {
            for j in problem.band.keys(i, seq_kv) {
                let at = [head.batch, head.head, i, j];
                if let (Some(mask), Some(shape)) = (inputs.mask, problem.mask)
                    && mask[broadcast_index(shape, at)]
                {
                    continue;
                }
                let raw = problem.scale * dot(row(query, i, head_dim), row(key, j, head_dim));
                let score = &mut table.scores[i * seq_kv + j];
                *score = raw;
                if let (Some(cap), Some(slopes)) = (problem.softcap, &mut table.cap_slopes) {
                    *score = cap * (raw / cap).tanh();
                    // 1 - tanh^2, without its cancellation where tanh is near 1.
                    slopes[i * seq_kv + j] = (raw / cap).cosh().powi(-2);
                }
                if let (Some(bias), Some(shape)) = (inputs.bias, problem.bias) {
                    *score += bias[broadcast_index(shape, at)];
                }
            }
            table.softmax(i);
        }
        table
    }

    /// Fills row `i` of the probabilities and of `lse` from its scores.
    fn softmax(&mut self, i: usize) {
        let row = i * self.seq_kv..(i + 1) * self.seq_kv;
        let scores = &self.scores[row.clone()];
        let probabilities = &mut self.probabilities[row];
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        for (p, &score) in probabilities.iter_mut().zip(scores) {
            if takes_part(score) {
                *p = (score - max).exp();
                sum += *p;
            }
        }
        for (p, &score) in probabilities.iter_mut().zip(scores) {
            if takes_part(score) {
                *p /= sum;
            }
        }
        // Without any key this is -inf + ln 0 = -inf; a NaN score makes the sum, and so lse, NaN.
        self.lse[i] = max + sum.ln();
    }

    /// Keys that take part in row `i`, each with its probability.
    fn row(&self, i: usize) -> impl Iterator<Item = (usize, f64)> {
        let row = i * self.seq_kv..(i + 1) * self.seq_kv;
        let scores = self.scores[row.clone()].iter();
        let probabilities = self.probabilities[row].iter();
        scores
            .zip(probabilities)
            .enumerate()
            .filter(|(_, (score, _))| takes_part(**score))
            .map(|(j, (_, p))| (j, *p))
    }

    fn cap_slope(&self, i: usize, j: usize) -> f64 {
        let slopes = self.cap_slopes.as_ref();
        slopes.map_or(1.0, |slopes| slopes[i * self.seq_kv + j])
    }
}

/// A NaN score takes part: it comes from a visible key and must show.
fn takes_part(score: f64) -> bool {
    score != f64::NEG_INFINITY
}

/// One batch and query head, and where its rows lie in each array.
struct Head {
    batch: usize,
    head: usize,
}

impl Head {
    /// The head's rows in an array of `[batch, heads, seq_q, width]`.
    fn queries(&self, problem: &Problem, width: usize) -> Range<usize> {
        let head = self.batch * problem.heads + self.head;
        block(head, problem.seq_q * width)
    }

    /// The rows it reads in an array of `[batch, kv_heads, seq_kv, width]`.
    fn keys(&self, problem: &Problem, width: usize) -> Range<usize> {
        let head = self.batch * problem.kv_heads + problem.kv_head(self.head);
        block(head, problem.seq_kv * width)
    }
}

fn heads(problem: &Problem) -> impl Iterator<Item = Head> {
    let heads = problem.heads;
    (0..problem.batch).flat_map(move |batch| (0..heads).map(move |head| Head { batch, head }))
}

fn block(index: usize, length: usize) -> Range<usize> {
    index * length..(index + 1) * length
}

fn row(array: &[f64], index: usize, width: usize) -> &[f64] {
    &array[block(index, width)]
}

fn row_mut(array: &mut [f64], index: usize, width: usize) -> &mut [f64] {
    &mut array[block(index, width)]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Where an array of the given shape, broadcast to the scores, holds the element of position `at`.
fn broadcast_index(shape: [usize; 4], at: [usize; 4]) -> usize {
    let pairs = shape.into_iter().zip(at);
    pairs.fold(0, |index, (n, at)| index * n + if n == 1 { 0 } else { at })
}

fn check(problem: &Problem, inputs: &Inputs) {
    let p = problem;
    let query = [p.batch, p.heads, p.seq_q, p.head_dim];
    let key = [p.batch, p.kv_heads, p.seq_kv, p.head_dim];
    let value = [p.batch, p.kv_heads, p.seq_kv, p.value_dim];
    check_length("query", inputs.query.len(), &query);
    check_length("key", inputs.key.len(), &key);
    check_length("value", inputs.value.len(), &value);
    check_optional("mask", inputs.mask.map(<[bool]>::len), problem.mask);
    check_optional("bias", inputs.bias.map(<[f64]>::len), problem.bias);
}

fn check_optional(name: &str, given: Option<usize>, shape: Option<[usize; 4]>) {
    match (given, shape) {
        (Some(given), Some(shape)) => check_length(name, given, &shape),
        (Some(_), None) => panic!("{name} is given, but the problem has none"),
        (None, Some(shape)) => panic!("{name} is missing, the problem has one of shape {shape:?}"),
        (None, None) => {}
    }
}

fn check_length(name: &str, given: usize, shape: &[usize]) {
    let expected: usize = shape.iter().product();
    assert!(
        given == expected,
        "{name} has {given} elements, expected {expected} for shape {shape:?}"
    );
}
