//! Operands on a device, laid out as a case asks.
//!
//! Each view is built before it becomes a leaf of the autodiff graph, so that gradients come back
//! in the shape of the operand whatever buffer lies under it.

use crate::cases::{Case, GradientLayout, Layout};
use crate::data::Data;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_flash_attention::burn_dtype;
use flash_attention_spec::Dtype;
use std::ops::Range;

/// Rows of NaN behind each sequence of a longer buffer: 38 rows become 64.
const BEHIND: usize = 26;
/// Rows of NaN before each sequence in the middle of a buffer: no tile of a kernel starts there.
const BEFORE: usize = 3;

/// The operands of a case on a device.
#[derive(Clone, Debug)]
pub struct Operands {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: Tensor<4>,
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: Tensor<4>,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: Tensor<4>,
    /// True hides.
    pub mask: Option<Tensor<4, Bool>>,
    /// Added to the scores.
    pub bias: Option<Tensor<4>>,
}

/// A float tensor of row-major `values`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device};
/// use flash_attention_check::layout::float_tensor;
/// use flash_attention_spec::Dtype;
///
/// let tensor = float_tensor(&[1.0, 2.0], [1, 2], Dtype::F16, &Device::flex());
/// assert_eq!(tensor.dtype(), DType::F16);
/// # }
/// ```
pub fn float_tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: Dtype,
    device: &Device,
) -> Tensor<D> {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(burn_dtype(dtype));
    Tensor::from_data(data, (device, burn_dtype(dtype)))
}

impl Operands {
    /// Puts the data of a case on a device.
    ///
    /// # Panics
    /// For [`Layout::FusedQkv`] if query, key and value differ in shape.
    pub fn new(case: &Case, data: &Data, device: &Device) -> Self {
        let problem = &data.problem;
        let [batch, heads, seq_q, _] = problem.score_shape();
        let query_shape = [batch, heads, seq_q, problem.head_dim];
        let key_shape = [batch, problem.kv_heads, problem.seq_kv, problem.head_dim];
        let value_shape = [batch, problem.kv_heads, problem.seq_kv, problem.value_dim];
        let dtype = problem.dtype;
        let score_shape = problem.score_shape();
        let mask = data.mask.as_ref().zip(problem.mask);
        let mask =
            mask.map(|(mask, shape)| lay_mask(mask, shape, score_shape, case.layout, device));
        let bias = data.bias.as_ref().zip(problem.bias);
        let bias = bias.map(|(bias, shape)| {
            let bias = lay(bias, shape, 3, case.layout, dtype, device);
            if case.layout == Layout::Expanded && !case.wanted.bias {
                bias.expand(score_shape)
            } else {
                bias
            }
        });
        let [query, key, value] = if case.layout == Layout::FusedQkv {
            assert!(query_shape == key_shape && key_shape == value_shape);
            fused(data, query_shape, device)
        } else {
            let lay = |values, shape| lay(values, shape, 2, case.layout, dtype, device);
            let [key, value] =
                [(&data.key, key_shape), (&data.value, value_shape)].map(|(values, shape)| {
                    match expanded_axis(case.layout) {
                        Some(axis) => {
                            let mut first = shape.map(|size| 0..size);
                            first[axis].end = first[axis].end.min(1);
                            let first = float_tensor(values, shape, dtype, device).slice(first);
                            first.expand(shape)
                        }
                        None => lay(values, shape),
                    }
                });
            [lay(&data.query, query_shape), key, value]
        };
        Self {
            query,
            key,
            value,
            mask,
            bias,
        }
    }

    /// Makes the operands that the case wants gradients of leaves of an autodiff graph.
    pub fn require_grad(self, case: &Case) -> Self {
        let leaf = |tensor: Tensor<4>, wanted: bool| tensor.autodiff().set_require_grad(wanted);
        Self {
            query: leaf(self.query, case.wanted.query),
            key: leaf(self.key, case.wanted.key),
            value: leaf(self.value, case.wanted.value),
            mask: self.mask.map(Tensor::autodiff),
            bias: self.bias.map(|bias| leaf(bias, case.wanted.bias)),
        }
    }
}

/// The sum whose gradient reaches `output` as `gradient`, with the strides the case asks for.
pub fn output_loss(case: &Case, output: Tensor<4>, gradient: &[f64], dtype: Dtype) -> Tensor<1> {
    let device = output.device().without_autodiff();
    let shape = output.dims();
    match case.gradient_layout {
        GradientLayout::Packed => {
            let gradient = float_tensor(gradient, shape, dtype, &device).autodiff();
            (output * gradient).sum()
        }
        GradientLayout::Swapped => {
            let (gradient, swapped) = swap(gradient, shape, 1, 2);
            let gradient = float_tensor(&gradient, swapped, dtype, &device).autodiff();
            (output.swap_dims(1, 2) * gradient).sum()
        }
        GradientLayout::Sum => output.sum(),
    }
}

fn lay(
    values: &[f64],
    shape: [usize; 4],
    sequence: usize,
    layout: Layout,
    dtype: Dtype,
    device: &Device,
) -> Tensor<4> {
    match layout {
        Layout::Packed | Layout::FusedQkv | Layout::Expanded | Layout::SharedKeys => {
            float_tensor(values, shape, dtype, device)
        }
        Layout::SwappedAxes | Layout::Transposed => {
            let (a, b) = swapped_axes(layout);
            let (stored, stored_shape) = swap(values, shape, a, b);
            float_tensor(&stored, stored_shape, dtype, device).swap_dims(a, b)
        }
        Layout::LongerBuffer | Layout::MiddleOfBuffer => {
            let (stored, stored_shape, view) =
                lengthen(values, shape, sequence, before(layout), f64::NAN);
            float_tensor(&stored, stored_shape, dtype, device).slice(view)
        }
    }
}

fn lay_mask(
    values: &[bool],
    shape: [usize; 4],
    score_shape: [usize; 4],
    layout: Layout,
    device: &Device,
) -> Tensor<4, Bool> {
    let packed = |values: &[bool], shape: [usize; 4]| {
        Tensor::<4, Bool>::from_data(TensorData::new(values.to_vec(), shape), device)
    };
    match layout {
        Layout::Packed | Layout::FusedQkv | Layout::SharedKeys => packed(values, shape),
        Layout::Expanded => packed(values, shape).expand(score_shape),
        Layout::SwappedAxes | Layout::Transposed => {
            let (a, b) = swapped_axes(layout);
            let (stored, stored_shape) = swap(values, shape, a, b);
            packed(&stored, stored_shape).swap_dims(a, b)
        }
        Layout::LongerBuffer | Layout::MiddleOfBuffer => {
            let (stored, stored_shape, view) = lengthen(values, shape, 3, before(layout), true);
            packed(&stored, stored_shape).slice(view)
        }
    }
}

/// The axis of key and value that one slice is expanded along.
fn expanded_axis(layout: Layout) -> Option<usize> {
    match layout {
        Layout::SharedKeys => Some(0),
        Layout::Expanded => Some(1),
        _ => None,
    }
}

/// How many elements lie before each sequence of a longer buffer.
fn before(layout: Layout) -> usize {
    if layout == Layout::MiddleOfBuffer {
        BEFORE
    } else {
        0
    }
}

fn swapped_axes(layout: Layout) -> (usize, usize) {
    if layout == Layout::Transposed {
        (2, 3)
    } else {
        (1, 2)
    }
}

/// Query, key and value as slices of one `[batch, seq, 3 * heads, dim]` buffer, axes swapped.
fn fused(data: &Data, shape: [usize; 4], device: &Device) -> [Tensor<4>; 3] {
    let [batch, heads, seq, dim] = shape;
    let mut buffer = vec![0.0; batch * seq * 3 * heads * dim];
    for (n, operand) in [&data.query, &data.key, &data.value]
        .into_iter()
        .enumerate()
    {
        let (rows, _) = swap(operand, shape, 1, 2);
        for (position, row) in rows.chunks(heads * dim).enumerate() {
            buffer[(position * 3 + n) * heads * dim..][..heads * dim].copy_from_slice(row);
        }
    }
    let dtype = data.problem.dtype;
    let buffer = float_tensor(&buffer, [batch, seq, 3 * heads, dim], dtype, device);
    [0, 1, 2].map(|n| {
        let heads = n * heads..(n + 1) * heads;
        let slice = buffer.clone().slice([0..batch, 0..seq, heads, 0..dim]);
        slice.swap_dims(1, 2)
    })
}

/// Row-major copy with axes `a` and `b` swapped.
fn swap<T: Copy>(values: &[T], shape: [usize; 4], a: usize, b: usize) -> (Vec<T>, [usize; 4]) {
    let mut swapped_shape = shape;
    swapped_shape.swap(a, b);
    let [n0, n1, n2, n3] = swapped_shape;
    let mut swapped = Vec::with_capacity(values.len());
    for i0 in 0..n0 {
        for i1 in 0..n1 {
            for i2 in 0..n2 {
                for i3 in 0..n3 {
                    let mut at = [i0, i1, i2, i3];
                    at.swap(a, b);
                    let index = at.iter().zip(shape).fold(0, |n, (i, size)| n * size + i);
                    swapped.push(values[index]);
                }
            }
        }
    }
    (swapped, swapped_shape)
}

/// Row-major copy with `before` elements of `filler` at the start of axis `axis` and `BEHIND` at its
/// end, and where in it the values lie.
fn lengthen<T: Copy>(
    values: &[T],
    shape: [usize; 4],
    axis: usize,
    before: usize,
    filler: T,
) -> (Vec<T>, [usize; 4], [Range<usize>; 4]) {
    let inner: usize = shape[axis + 1..].iter().product();
    let run = shape[axis] * inner;
    let fill = |rows| std::iter::repeat_n(filler, rows * inner);
    let mut longer = Vec::new();
    for values in values.chunks(run.max(1)) {
        longer.extend(fill(before));
        longer.extend_from_slice(values);
        longer.extend(fill(BEHIND));
    }
    let (mut longer_shape, mut view) = (shape, shape.map(|size| 0..size));
    longer_shape[axis] += before + BEHIND;
    view[axis] = before..before + shape[axis];
    (longer, longer_shape, view)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a layout that holds other values than the packed one, which would make a case pass
    /// or fail for the wrong reason.
    #[cfg(feature = "flex")]
    #[test]
    fn every_layout_holds_the_same_values() {
        let device = Device::flex();
        for layout in [
            Layout::FusedQkv,
            Layout::SwappedAxes,
            Layout::Transposed,
            Layout::Expanded,
            Layout::SharedKeys,
            Layout::LongerBuffer,
            Layout::MiddleOfBuffer,
        ] {
            let case = Case::new("layouts", "", [2, 3, 3, 5, 5, 4, 4])
                .layout(layout)
                .mask(crate::cases::Mask::Random([false, true, false, false]))
                .bias(crate::cases::Bias::Uniform(crate::cases::FULL));
            let data = Data::draw(&case, Dtype::F32, 1).unwrap();
            let laid = Operands::new(&case, &data, &device);
            let values =
                |tensor: Tensor<4>| -> Vec<f64> { tensor.into_data().iter::<f64>().collect() };
            assert_eq!(values(laid.query), data.query, "{layout:?}");
            assert_eq!(values(laid.key), data.key, "{layout:?}");
            assert_eq!(values(laid.value), data.value, "{layout:?}");
            assert_eq!(values(laid.bias.unwrap()), data.bias.unwrap(), "{layout:?}");
            let mask = laid.mask.unwrap().slice([0..2, 0..1, 0..5, 0..5]);
            let mask: Vec<bool> = mask.into_data().iter::<bool>().collect();
            assert_eq!(mask, data.mask.unwrap(), "{layout:?}");
        }
    }
}
