//! What is hidden and not finite stays out of every product.
//!
//! A probability of zero does not keep a NaN or infinity out of a matrix product. One look at the
//! operands tells whether that can happen; only then, and only in blocks that hide something, are
//! products formed with care, at the price of three products for one.

use super::cast;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, try_read_sync};
use burn::tensor::{BoolDType, FloatDType};

/// The hidden elements of a block of scores.
pub(super) struct Guard<B: Backend> {
    hidden: BoolTensor<B>,
    bool_dtype: BoolDType,
}

impl<B: Backend> Guard<B> {
    /// Of scores that are minus infinity where hidden.
    pub fn new(scores: FloatTensor<B>, bool_dtype: BoolDType) -> Self {
        Self {
            hidden: B::float_equal_elem(scores, f32::NEG_INFINITY.into(), bool_dtype),
            bool_dtype,
        }
    }

    /// `weights` with zeros at hidden elements, whatever was there.
    pub fn clear(&self, weights: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mask_fill(weights, self.hidden.clone(), 0f32.into())
    }

    /// For a block seen with its keys as rows.
    pub fn transposed(&self) -> Self {
        Self {
            hidden: B::bool_swap_dims(self.hidden.clone(), 2, 3),
            bool_dtype: self.bool_dtype,
        }
    }

    /// `weights * other` without the rows of `other` that are hidden from a row of `weights`.
    ///
    /// An element that sees something not finite takes the plain product, which has it; every
    /// other element takes the product with zeros in the place of what is not finite.
    pub fn product(&self, weights: FloatTensor<B>, other: FloatTensor<B>) -> FloatTensor<B> {
        let nan = B::float_is_nan(other.clone(), self.bool_dtype);
        let infinite = B::float_is_inf(other.clone(), self.bool_dtype);
        let lost = B::bool_or(nan, infinite);
        let finite = B::float_mask_fill(other.clone(), lost.clone(), 0f32.into());
        let visible = B::bool_into_float(B::bool_not(self.hidden.clone()), FloatDType::F32);
        let seen = B::float_matmul(visible, B::bool_into_float(lost, FloatDType::F32));
        let seen = B::float_greater_elem(seen, 0f32.into(), self.bool_dtype);
        let plain = B::float_matmul(weights.clone(), other);
        B::float_mask_where(B::float_matmul(weights, finite), seen, plain)
    }
}

/// [`Guard::product`] where there is a guard.
pub(super) fn product<B: Backend>(
    guard: Option<&Guard<B>>,
    weights: FloatTensor<B>,
    other: FloatTensor<B>,
) -> FloatTensor<B> {
    match guard {
        Some(guard) => guard.product(weights, other),
        None => B::float_matmul(weights, other),
    }
}

/// Whether no product of these tensors can be NaN or infinite.
///
/// The sums of squares are finite only if every element is; and then, by Cauchy and Schwarz, so is
/// every dot product of rows of any two of them. A device that cannot be read from here counts as
/// not tame, which costs time only.
pub(super) fn tame<B: Backend>(tensors: impl IntoIterator<Item = FloatTensor<B>>) -> bool {
    let squares = tensors.into_iter().map(|tensor| {
        let tensor = cast::<B>(tensor, FloatDType::F32);
        B::float_sum(B::float_mul(tensor.clone(), tensor))
    });
    let Some(sum) = squares.reduce(B::float_add) else {
        return true;
    };
    try_read_sync(B::float_into_data(sum))
        .and_then(Result::ok)
        .and_then(|sum| sum.iter::<f32>().next())
        .is_some_and(f32::is_finite)
}
