//! The backend-extension op behind the public functions.
//!
//! `attention_forward` and `attention_backward` are what a backend computes; the two
//! `flash_attention` methods are what autodiff records. Every default body is the composed
//! recurrence, so a backend without kernels needs an empty `impl`.
// Without a backend the generated dispatch has nothing to hand its arguments to.
#![cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]

use crate::composed;
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use flash_attention_spec::{Problem, Wanted};

/// A float tensor or none.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum MaybeFloat<B: Backend> {
    /// The tensor.
    Some(FloatTensor<B>),
    /// No tensor.
    None,
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeFloat<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        match tensor {
            Some(tensor) => MaybeFloat::Some(tensor),
            None => MaybeFloat::None,
        }
    }
}

impl<B: Backend> MaybeFloat<B> {
    /// The tensor, if any.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            MaybeFloat::Some(tensor) => Some(tensor),
            MaybeFloat::None => None,
        }
    }
}

/// A boolean tensor or none.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum MaybeBool<B: Backend> {
    /// The tensor.
    Some(BoolTensor<B>),
    /// No tensor.
    None,
}

impl<B: Backend> From<Option<BoolTensor<B>>> for MaybeBool<B> {
    fn from(tensor: Option<BoolTensor<B>>) -> Self {
        match tensor {
            Some(tensor) => MaybeBool::Some(tensor),
            None => MaybeBool::None,
        }
    }
}

impl<B: Backend> MaybeBool<B> {
    /// The tensor, if any.
    pub fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            MaybeBool::Some(tensor) => Some(tensor),
            MaybeBool::None => None,
        }
    }
}

/// The gradients of one backward pass; each has its operand's shape and element type, and is there
/// exactly when it was [`Wanted`].
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct OperandGradients<B: Backend> {
    /// Gradient of the query.
    #[extension_type]
    pub query: MaybeFloat<B>,
    /// Gradient of the key, summed over the query heads that read it.
    #[extension_type]
    pub key: MaybeFloat<B>,
    /// Gradient of the value, summed over the query heads that read it.
    #[extension_type]
    pub value: MaybeFloat<B>,
    /// Gradient of the bias, summed over the dimensions it was broadcast on.
    #[extension_type]
    pub bias: MaybeFloat<B>,
}

/// Attention as a Burn backend extension.
///
/// The problem has been checked; shapes and element types of the operands are those it holds.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion")
)]
pub trait FlashAttentionOps: Backend {
    /// The output `[batch, heads, seq_q, value_dim]` and the row statistics
    /// `[2, batch, heads, seq_q]` in `f32`: the row maximum, and the logarithm of the sum of
    /// `exp(score - maximum)`. Their sum is the row's `lse`; apart they keep probabilities exact to
    /// `f32` rounding however large the scores are. A row that sees nothing holds `0` and `-inf`.
    /// The default body adds the reciprocal of that sum as a third. Never recorded by autodiff.
    #[fusion(meta = forward_specs)]
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: MaybeBool<Self>,
        #[extension_type] bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let operands = composed::Operands {
            query,
            key,
            value,
            mask: mask.into_option(),
            bias: bias.into_option(),
        };
        composed::forward::<Self>(operands, &problem)
    }

    /// The wanted gradients, from the operands, the output, the row statistics and the gradients
    /// of the output and of `lse` (`[batch, heads, seq_q]`, `f32`). Never recorded by autodiff.
    #[allow(clippy::too_many_arguments)]
    #[fusion(meta = backward_specs)]
    fn attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: MaybeBool<Self>,
        #[extension_type] bias: MaybeFloat<Self>,
        output: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        output_gradient: FloatTensor<Self>,
        #[extension_type] lse_gradient: MaybeFloat<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> OperandGradients<Self> {
        let operands = composed::Operands {
            query,
            key,
            value,
            mask: mask.into_option(),
            bias: bias.into_option(),
        };
        composed::backward::<Self>(
            operands,
            output,
            statistics,
            output_gradient,
            lse_gradient.into_option(),
            &problem,
            wanted,
        )
    }

    /// The output, recorded by autodiff.
    #[fusion(default)]
    fn flash_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: MaybeBool<Self>,
        #[extension_type] bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> FloatTensor<Self> {
        Self::attention_forward(query, key, value, mask, bias, problem).0
    }

    /// The output and `lse` `[batch, heads, seq_q]` in `f32`, both recorded by autodiff.
    #[fusion(default)]
    fn flash_attention_with_lse(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: MaybeBool<Self>,
        #[extension_type] bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (output, statistics) = Self::attention_forward(query, key, value, mask, bias, problem);
        (output, log_sum_exp::<Self>(statistics, &problem))
    }
}

/// `lse` from the row statistics.
pub(crate) fn log_sum_exp<B: FlashAttentionOps>(
    statistics: FloatTensor<B>,
    problem: &Problem,
) -> FloatTensor<B> {
    let shape = problem.lse_shape();
    let part = |n: usize| {
        let [batch, heads, seq_q] = shape;
        let slices = [n..n + 1, 0..batch, 0..heads, 0..seq_q].map(Into::into);
        B::float_reshape(B::float_slice(statistics.clone(), &slices), shape.into())
    };
    if shape.contains(&0) {
        return B::float_reshape(statistics, shape.into());
    }
    B::float_add(part(0), part(1))
}

#[cfg(feature = "flex")]
impl FlashAttentionOps for burn::backend::Flex {}

#[cfg(feature = "fusion")]
fn forward_specs(
    query: &TensorSpec,
    _key: &TensorSpec,
    _value: &TensorSpec,
    _mask: &MaybeBoolMetadata,
    _bias: &MaybeFloatMetadata,
    problem: &Problem,
) -> (TensorSpec, TensorSpec) {
    (
        TensorSpec::new(problem.output_shape().into(), query.dtype),
        TensorSpec::new(statistics_shape(problem).into(), burn::tensor::DType::F32),
    )
}

#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn backward_specs(
    query: &TensorSpec,
    key: &TensorSpec,
    value: &TensorSpec,
    _mask: &MaybeBoolMetadata,
    bias: &MaybeFloatMetadata,
    _output: &TensorSpec,
    _statistics: &TensorSpec,
    _output_gradient: &TensorSpec,
    _lse_gradient: &MaybeFloatMetadata,
    _problem: &Problem,
    wanted: &Wanted,
) -> OperandGradientsMetadata {
    let like = |wanted: bool, spec: &TensorSpec| {
        if wanted {
            MaybeFloatMetadata::Some(spec.clone())
        } else {
            MaybeFloatMetadata::None
        }
    };
    OperandGradientsMetadata {
        query: like(wanted.query, query),
        key: like(wanted.key, key),
        value: like(wanted.value, value),
        bias: if wanted.bias {
            bias.clone()
        } else {
            MaybeFloatMetadata::None
        },
    }
}

/// Shape of the row statistics.
#[cfg(any(feature = "cube", feature = "fusion"))]
pub(crate) fn statistics_shape(problem: &Problem) -> [usize; 4] {
    [2, problem.batch, problem.heads, problem.seq_q]
}
