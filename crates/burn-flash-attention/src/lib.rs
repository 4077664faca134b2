//! Exact blockwise (flash) attention for Burn tensors, forward and backward, on Burn's Cube and Flex backends.
//!
//! One call computes `softmax(scale * q k^T + bias) v` without ever storing the matrix of scores:
//! key blocks are visited one after the other with a running maximum and denominator (Dao et al.,
//! "FlashAttention", arXiv:2205.14135, algorithm 1), and the backward pass rebuilds probabilities
//! from two saved numbers a row (algorithm 4). Memory grows with the sequence length, not with its
//! square, in both directions.
//!
//! ```
//! # #[cfg(all(feature = "flex", feature = "autodiff"))] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flash_attention::{AttentionOptions, flash_attention};
//!
//! let device = Device::flex().autodiff();
//! let random = |seq| Tensor::<4>::random([2, 8, seq, 64], Distribution::Default, &device);
//! let (query, key, value) = (random(128).require_grad(), random(128), random(128));
//!
//! let output = flash_attention(query.clone(), key, value, &AttentionOptions::new().causal());
//! assert_eq!(output.dims(), [2, 8, 128, 64]);
//!
//! let gradients = output.sum().backward();
//! assert_eq!(query.grad(&gradients).unwrap().dims(), [2, 8, 128, 64]);
//! # }
//! ```
//!
//! CubeCL devices (CUDA, ROCm, Metal, Vulkan, WebGPU, CPU) run the kernels of `kernels-cubecl`; Flex and any other
//! backend run the same recurrence composed from Burn's own operations.

#[cfg(feature = "autodiff")]
mod autodiff;
mod composed;
#[cfg(feature = "cube")]
mod cube;
mod devices;
mod error;
mod ops;
mod options;

pub use devices::{DeviceReport, Explanation, Served, burn_dtype, device, devices, explain};
pub use error::AttentionError;
pub use flash_attention_spec::{
    Alignment, Band, Dtype, ElementType, F32Precision, MAX_ELEMENTS, MAX_HEAD_DIM, MAX_SEQUENCE,
    Operand, Operands, Options, Problem, ProblemError, Reason, Summation, Wanted, Window,
};
#[cfg(feature = "cube")]
pub use kernels_cubecl::plan::PlanError;
pub use ops::{FlashAttentionOps, MaybeBool, MaybeFloat, OperandGradients};
pub use options::AttentionOptions;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// Exact attention, without storing the matrix of scores.
///
/// `query` is `[batch, heads, seq_q, head_dim]`, `key` `[batch, kv_heads, seq_kv, head_dim]`, `value`
/// `[batch, kv_heads, seq_kv, value_dim]`; the result is `[batch, heads, seq_q, value_dim]` in the
/// query's element type. `heads` is a multiple of `kv_heads`; any length may be 0, any strides are
/// accepted. Under autodiff it is differentiable with respect to query, key, value and bias.
///
/// Sums and the softmax are in `f32` for every element type. In `f16` the backward kernels for matrix units
/// (`mma`, `hopper`) round the gradient of a score to `f16`: where one passes 65504, those of query and
/// key are not finite. `bf16` has the range of `f32`.
///
/// # Panics
/// With the text of the [`AttentionError`] that [`try_flash_attention`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionOptions, flash_attention};
///
/// let device = Device::flex();
/// let query = Tensor::<4>::ones([1, 1, 2, 4], &device);
/// let value = Tensor::<4>::from_floats([[[[1.0], [3.0]]]], &device);
/// let options = AttentionOptions::new();
/// let output = flash_attention(query.clone(), query, value, &options);
/// assert_eq!(output.into_data().to_vec::<f32>().unwrap(), [2.0, 2.0]);
/// # }
/// ```
#[track_caller]
pub fn flash_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> Tensor<4> {
    match try_flash_attention(query, key, value, options) {
        Ok(output) => output,
        Err(error) => panic!("{error}"),
    }
}

/// [`flash_attention`] that returns its error.
///
/// # Errors
/// [`AttentionError`] names every operand or option that is wrong, what was given and what was
/// expected. Nothing is launched then.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionOptions, try_flash_attention};
///
/// let device = Device::flex();
/// let query = Tensor::<4>::ones([1, 3, 2, 4], &device);
/// let key = Tensor::<4>::ones([1, 2, 2, 4], &device);
/// let error = try_flash_attention(query, key.clone(), key, &AttentionOptions::new()).unwrap_err();
/// assert_eq!(error.to_string(), "query has 3 heads, expected a positive multiple of the 2 heads of key and value");
/// # }
/// ```
pub fn try_flash_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let problem = options.problem(&query, &key, &value)?;
    let (mask, bias) = options.operands();
    Ok(Tensor::from_dispatch(Dispatch::flash_attention(
        query.into_dispatch(),
        key.into_dispatch(),
        value.into_dispatch(),
        mask,
        bias,
        problem,
    )))
}

/// [`flash_attention`] that also returns the row statistic `lse = ln(sum of exp(scores))`,
/// `[batch, heads, seq_q]`, always `f32`, natural logarithm; `-inf` for a row that sees no key.
///
/// Both results are differentiable: partial results over key ranges can be merged by their `lse`,
/// as in ring attention (Liu et al., arXiv:2310.01889).
///
/// # Panics
/// With the text of the [`AttentionError`] that [`try_flash_attention_with_lse`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionOptions, flash_attention_with_lse};
///
/// let query = Tensor::<4>::zeros([1, 1, 3, 4], &Device::flex());
/// let (_, lse) = flash_attention_with_lse(query.clone(), query.clone(), query, &AttentionOptions::new());
/// assert_eq!(lse.dims(), [1, 1, 3]);
/// assert!((lse.into_data().to_vec::<f32>().unwrap()[0] - 3f32.ln()).abs() < 1e-6);
/// # }
/// ```
#[track_caller]
pub fn flash_attention_with_lse(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    match try_flash_attention_with_lse(query, key, value, options) {
        Ok(outputs) => outputs,
        Err(error) => panic!("{error}"),
    }
}

/// [`flash_attention_with_lse`] that returns its error.
///
/// # Errors
/// As [`try_flash_attention`].
pub fn try_flash_attention_with_lse(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = options.problem(&query, &key, &value)?;
    let (mask, bias) = options.operands();
    let (output, lse) = Dispatch::flash_attention_with_lse(
        query.into_dispatch(),
        key.into_dispatch(),
        value.into_dispatch(),
        mask,
        bias,
        problem,
    );
    Ok((Tensor::from_dispatch(output), Tensor::from_dispatch(lse)))
}
