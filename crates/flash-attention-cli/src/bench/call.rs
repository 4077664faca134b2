//! One call of a point: its operands, drawn on the device, and what is run.

use super::grid::{Pass, Point, Variant};
use crate::Outcome;
use burn::backend::Dispatch;
use burn::tensor::{Bool, DType, Device, Distribution, Tensor};
use burn_flash_attention::{
    AttentionOptions, ElementType, FlashAttentionOps, MaybeBool, MaybeFloat, Operand,
    OperandGradients, Operands as Shapes, Problem, Wanted, burn_dtype, try_flash_attention,
};

/// Elements that are drawn at once at most; beyond, head by head.
const DRAWN_AT_ONCE: usize = 1 << 30;

/// Gradients of query, key and value.
const WANTED: Wanted = Wanted::ALL.bias(false);

/// Operands of a call, without autodiff. A clone shares the device's memory.
#[derive(Clone)]
pub struct Operands {
    pub query: Tensor<4>,
    pub key: Tensor<4>,
    pub value: Tensor<4>,
    pub mask: Option<Tensor<4, Bool>>,
    pub bias: Option<Tensor<4>>,
    /// What a backward pass is given: the gradient of the output, and the output and the row
    /// statistics of a forward pass.
    pub backward: Option<Backward>,
}

/// See [`Operands::backward`].
#[derive(Clone)]
pub struct Backward {
    pub output_gradient: Tensor<4>,
    output: Tensor<4>,
    statistics: Tensor<4>,
}

/// The checked problem of a point.
pub fn problem(point: &Point) -> Outcome<Problem> {
    let operand = |shape: [usize; 4]| Operand::new(shape, point.dtype);
    let table = |variant| (point.variant == variant).then_some(point.table_shape());
    let key = operand(point.key_shape());
    let shapes = Shapes::new(operand(point.query_shape()), key.clone(), key)
        .mask(table(Variant::Mask).map(|shape| Operand::new(shape, ElementType::Bool)))
        .bias(table(Variant::Bias).map(operand));
    Ok(Problem::new(&shapes, &point.options())?)
}

impl Operands {
    /// Fresh random operands, uniform with mean 0 and variance 1, and what a backward pass needs.
    /// Mask and bias, which are larger than any cache where they matter, are those of `like`.
    pub fn draw(
        point: &Point,
        problem: &Problem,
        device: &Device,
        like: Option<&Self>,
    ) -> Outcome<Self> {
        let dtype = burn_dtype(point.dtype);
        let table = |distribution| {
            Tensor::<4>::random(point.table_shape(), distribution, (device, DType::F32))
        };
        let mask = || table(Distribution::Uniform(0.0, 3.0)).lower_elem(1.0);
        let bias = || table(UNIT).cast(dtype);
        let (query, key) = (point.query_shape(), point.key_shape());
        let mut operands = Self {
            query: random(query, dtype, device),
            key: random(key, dtype, device),
            value: random(key, dtype, device),
            mask: (point.variant == Variant::Mask)
                .then(|| like.and_then(|like| like.mask.clone()).unwrap_or_else(mask)),
            bias: (point.variant == Variant::Bias)
                .then(|| like.and_then(|like| like.bias.clone()).unwrap_or_else(bias)),
            backward: None,
        };
        if point.pass == Pass::Backward {
            let [query, key, value] = operands.tensors().map(Tensor::into_dispatch);
            let (mask, bias) = operands.tables();
            let (output, statistics) =
                Dispatch::attention_forward(query, key, value, mask, bias, *problem);
            operands.backward = Some(Backward {
                output_gradient: random(point.query_shape(), dtype, device),
                output: Tensor::from_dispatch(output),
                statistics: Tensor::from_dispatch(statistics),
            });
        }
        device.sync()?;
        Ok(operands)
    }

    /// Runs the pass of `point` once and returns what it computes: o; dq, dk, dv; or all four.
    pub fn run(&self, point: &Point, problem: &Problem) -> Result<Vec<Tensor<4>>, String> {
        match (&self.backward, point.pass) {
            (Some(given), Pass::Backward) => Ok(self.run_backward(given, problem)),
            (_, Pass::Training) => self.run_training(point),
            _ => {
                let [query, key, value] = self.tensors();
                Ok(vec![attend(query, key, value, &self.options(point))?])
            }
        }
    }

    fn run_backward(&self, given: &Backward, problem: &Problem) -> Vec<Tensor<4>> {
        let [query, key, value] = self.tensors().map(Tensor::into_dispatch);
        let (mask, bias) = self.tables();
        let OperandGradients {
            query, key, value, ..
        } = Dispatch::attention_backward(
            query,
            key,
            value,
            mask,
            bias,
            given.output.clone().into_dispatch(),
            given.statistics.clone().into_dispatch(),
            given.output_gradient.clone().into_dispatch(),
            MaybeFloat::None,
            *problem,
            WANTED,
        );
        let gradients = [query, key, value].into_iter();
        gradients
            .filter_map(MaybeFloat::into_option)
            .map(Tensor::from_dispatch)
            .collect()
    }

    fn run_training(&self, point: &Point) -> Result<Vec<Tensor<4>>, String> {
        let leaves = self
            .tensors()
            .map(|tensor| tensor.autodiff().require_grad());
        let [query, key, value] = leaves.clone();
        let output = attend(query, key, value, &self.options(point))?;
        let gradients = output.backward();
        let mut outputs = vec![output.without_autodiff()];
        for leaf in leaves {
            outputs.push(leaf.grad(&gradients).ok_or("an operand has no gradient")?);
        }
        Ok(outputs)
    }

    fn tensors(&self) -> [Tensor<4>; 3] {
        [self.query.clone(), self.key.clone(), self.value.clone()]
    }

    fn tables(&self) -> (MaybeBool<Dispatch>, MaybeFloat<Dispatch>) {
        let mask = self.mask.clone().map(Tensor::into_dispatch);
        let bias = self.bias.clone().map(Tensor::into_dispatch);
        (mask.into(), bias.into())
    }

    fn options(&self, point: &Point) -> AttentionOptions {
        let mut options = AttentionOptions::from(point.options());
        options.mask = self.mask.clone();
        options.bias = self.bias.clone();
        options
    }
}

fn attend(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> Result<Tensor<4>, String> {
    try_flash_attention(query, key, value, options).map_err(|error| error.to_string())
}

/// Mean 0 and variance 1: the edge is the root of 3.
const UNIT: Distribution = Distribution::Uniform(-1.732_050_807_568_877_2, 1.732_050_807_568_877_2);

fn random(shape: [usize; 4], dtype: DType, device: &Device) -> Tensor<4> {
    let draw =
        |shape: [usize; 4]| Tensor::<4>::random(shape, UNIT, (device, DType::F32)).cast(dtype);
    let [batch, heads, seq, width] = shape;
    match shape.iter().product::<usize>() {
        0..=DRAWN_AT_ONCE => draw(shape),
        _ => Tensor::cat(
            (0..heads).map(|_| draw([batch, 1, seq, width])).collect(),
            1,
        ),
    }
}
