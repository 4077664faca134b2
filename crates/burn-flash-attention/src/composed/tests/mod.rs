//! The composed recurrence against the `f64` reference, in blocks small enough that every case has
//! several.

mod hidden;
mod options;

use super::backward::{Saved, backward_in_blocks};
use super::forward::forward_in_blocks;
use super::{Blocks, Operands};
use crate::ops::OperandGradients;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Flex, ops::BoolTensorOps, ops::FloatTensorOps, read_sync};
use burn::tensor::{DType, FloatDType, TensorData};
use flash_attention_spec::{
    Alignment, Dtype, Operand, Options, Problem, Wanted, Window, reference,
};

const BLOCKS: Blocks = Blocks { query: 4, key: 3 };
/// One call: shapes, options and the numbers in every operand.
#[derive(Clone)]
struct Case {
    problem: Problem,
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    mask: Option<Vec<bool>>,
    bias: Option<Vec<f64>>,
    output_gradient: Vec<f64>,
    lse_gradient: Option<Vec<f64>>,
}

/// Shape of a case: batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim.
type Sizes = [usize; 7];

const SIZES: Sizes = [2, 4, 2, 11, 10, 5, 3];

/// Pseudo-random numbers in `-1.5..1.5`, multiples of 1/32 so that they are the same in every
/// element type. The generator is splitmix64 (Steele et al., OOPSLA 2014).
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    (0..count as u64)
        .map(|n| {
            let mut z = (seed << 32 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z >> 40) % 97) as f64 / 32.0 - 1.5
        })
        .collect()
}

impl Case {
    fn new(sizes: Sizes, options: Options) -> Self {
        Self::with(sizes, options, None, None, Dtype::F32)
    }

    fn with(
        [batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim]: Sizes,
        options: Options,
        mask: Option<[usize; 4]>,
        bias: Option<[usize; 4]>,
        dtype: Dtype,
    ) -> Self {
        let operand = |shape: [usize; 4]| Operand::new(shape, dtype);
        let operands = flash_attention_spec::Operands {
            query: operand([batch, heads, seq_q, head_dim]),
            key: operand([batch, kv_heads, seq_kv, head_dim]),
            value: operand([batch, kv_heads, seq_kv, value_dim]),
            mask: mask.map(|shape| Operand::new(shape, flash_attention_spec::ElementType::Bool)),
            bias: bias.map(operand),
        };
        let count = |operand: &Operand| operand.shape.iter().product::<usize>();
        let problem = Problem::new(&operands, &options).unwrap();
        Self {
            query: numbers(1, count(&operands.query)),
            key: numbers(2, count(&operands.key)),
            value: numbers(3, count(&operands.value)),
            mask: operands
                .mask
                .as_ref()
                .map(|mask| numbers(4, count(mask)).iter().map(|&x| x > 0.6).collect()),
            bias: operands.bias.as_ref().map(|bias| numbers(5, count(bias))),
            output_gradient: numbers(6, problem.output_shape().iter().product()),
            lse_gradient: Some(numbers(7, problem.lse_shape().iter().product())),
            problem,
        }
    }

    fn shape(&self, heads: usize, rows: usize, dim: usize) -> [usize; 4] {
        [self.problem.batch, heads, rows, dim]
    }

    fn operands(&self) -> Operands<Flex> {
        let p = &self.problem;
        Operands {
            query: self.float(&self.query, self.shape(p.heads, p.seq_q, p.head_dim)),
            key: self.float(&self.key, self.shape(p.kv_heads, p.seq_kv, p.head_dim)),
            value: self.float(&self.value, self.shape(p.kv_heads, p.seq_kv, p.value_dim)),
            mask: self.mask.as_ref().map(|mask| bools(mask, p.mask.unwrap())),
            bias: self
                .bias
                .as_ref()
                .map(|bias| self.float(bias, p.bias.unwrap())),
        }
    }

    fn gradient(&self) -> FloatTensor<Flex> {
        self.float(&self.output_gradient, self.problem.output_shape())
    }

    /// A tensor in the element type of the problem.
    fn float<const D: usize>(&self, data: &[f64], shape: [usize; D]) -> FloatTensor<Flex> {
        let dtype = match self.problem.dtype {
            Dtype::F32 => FloatDType::F32,
            Dtype::F16 => FloatDType::F16,
            Dtype::BF16 => FloatDType::BF16,
        };
        Flex::float_cast(floats(data, shape), dtype)
    }

    /// What the composed recurrence gives.
    fn composed(&self, wanted: Wanted) -> Results {
        self.composed_of(self.operands(), self.gradient(), wanted, BLOCKS)
    }

    fn composed_of(
        &self,
        operands: Operands<Flex>,
        output_gradient: FloatTensor<Flex>,
        wanted: Wanted,
        blocks: Blocks,
    ) -> Results {
        let p = &self.problem;
        let (output, statistics) = forward_in_blocks::<Flex>(operands.clone(), p, blocks);
        let [maximum, logarithm] = [0, 1].map(|n| {
            let whole = [n..n + 1, 0..p.batch, 0..p.heads, 0..p.seq_q].map(Into::into);
            Flex::float_slice(statistics.clone(), &whole)
        });
        let saved = Saved {
            output: output.clone(),
            statistics,
            output_gradient,
            lse_gradient: self
                .lse_gradient
                .as_ref()
                .map(|gradient| floats(gradient, p.lse_shape())),
        };
        let OperandGradients {
            query,
            key,
            value,
            bias,
        } = backward_in_blocks::<Flex>(operands, saved, p, wanted, blocks);
        Results {
            output: data(output),
            lse: data(Flex::float_add(maximum, logarithm)),
            gradients: [query, key, value, bias].map(|gradient| gradient.into_option().map(data)),
        }
    }

    /// What the reference gives.
    fn reference(&self) -> Results {
        let inputs = reference::Inputs::new(&self.query, &self.key, &self.value)
            .mask(self.mask.as_deref())
            .bias(self.bias.as_deref());
        let forward = reference::forward(&self.problem, &inputs);
        let gradients = reference::backward(
            &self.problem,
            &inputs,
            &self.output_gradient,
            self.lse_gradient.as_deref(),
        );
        Results {
            output: forward.output,
            lse: forward.lse,
            gradients: [
                Some(gradients.query),
                Some(gradients.key),
                Some(gradients.value),
                gradients.bias,
            ],
        }
    }

    fn check(&self, name: &str) {
        let got = self.composed(Wanted::ALL);
        got.assert_near(&self.reference(), self.problem.dtype, name);
    }
}

fn floats<const D: usize>(data: &[f64], shape: [usize; D]) -> FloatTensor<Flex> {
    let data: Vec<f32> = data.iter().map(|&x| x as f32).collect();
    Flex::float_from_data(TensorData::new(data, shape), &Default::default())
}

fn bools(data: &[bool], shape: [usize; 4]) -> BoolTensor<Flex> {
    Flex::bool_from_data(TensorData::new(data.to_vec(), shape), &Default::default())
}

fn data(tensor: FloatTensor<Flex>) -> Vec<f64> {
    let data = read_sync(Flex::float_into_data(tensor)).unwrap();
    data.convert_dtype(DType::F64).try_into_vec().unwrap()
}

#[derive(Debug, PartialEq)]
struct Results {
    output: Vec<f64>,
    lse: Vec<f64>,
    /// Of query, key, value and bias.
    gradients: [Option<Vec<f64>>; 4],
}

impl Results {
    fn assert_near(&self, exact: &Results, dtype: Dtype, name: &str) {
        // Relative Frobenius errors; 16-bit results are rounded once, and their gradients come of a
        // rounded output.
        let (forward, backward) = match dtype {
            Dtype::F32 => (5e-6, 2e-5),
            Dtype::F16 => (5e-4, 1e-3),
            Dtype::BF16 => (4e-3, 8e-3),
        };
        assert_near(
            &self.output,
            &exact.output,
            forward,
            &format!("{name}: output"),
        );
        assert_near(&self.lse, &exact.lse, 5e-6, &format!("{name}: lse"));
        for (got, exact) in self.lse.iter().zip(&exact.lse) {
            let minus_infinity = [got, exact].map(|&x| x == f64::NEG_INFINITY);
            assert!(
                minus_infinity[0] == minus_infinity[1],
                "{name}: lse {got}, not {exact}"
            );
        }
        let names = ["query", "key", "value", "bias"];
        for ((got, exact), operand) in self.gradients.iter().zip(&exact.gradients).zip(names) {
            let name = format!("{name}: gradient of {operand}");
            assert_eq!(got.is_some(), exact.is_some(), "{name}");
            if let (Some(got), Some(exact)) = (got, exact) {
                assert_near(got, exact, backward, &name);
            }
        }
    }
}

/// Relative Frobenius error over what is finite; what is not must be so in both.
#[track_caller]
fn assert_near(got: &[f64], exact: &[f64], bound: f64, name: &str) {
    assert_eq!(got.len(), exact.len(), "{name}");
    let (mut error, mut norm) = (0.0, 0.0);
    for (n, (&got, &exact)) in got.iter().zip(exact).enumerate() {
        if exact.is_finite() && got.is_finite() {
            error += (got - exact).powi(2);
            norm += exact * exact;
        } else {
            let both = !got.is_finite() && !exact.is_finite();
            assert!(both, "{name}: element {n} is {got}, expected {exact}");
        }
    }
    assert!(
        error <= bound * bound * norm,
        "{name}: relative error {:.3e}, at most {bound:.1e} is allowed",
        (error / norm).sqrt()
    );
}

fn causal(alignment: Alignment) -> Options {
    Options {
        causal: true,
        alignment,
        ..Options::default()
    }
}

fn window(left: Option<usize>, right: Option<usize>) -> Options {
    Options {
        window: Window { left, right },
        ..Options::default()
    }
}
