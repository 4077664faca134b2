//! A transformer layer around the attention, as it is trained: what remains of a faster attention in
//! the time of a whole step.
//!
//! ```text
//! x1 = x + W_o attention(W_qkv norm(x))
//! y  = x1 + W_contract gelu(W_expand norm(x1))
//! ```
//!
//! Pre-normalised, the perceptron four times as wide as the hidden state, no biases (Xiong et al.,
//! arXiv:2002.04745, figure 1b). A step goes forward and backward and takes one step of gradient
//! descent.

use crate::Outcome;
use crate::workload::Workload;
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;

/// Small, so that a step changes nothing that the next one's time depends on.
const LEARNING_RATE: f64 = 1e-6;

/// The weights, `[in, out]`, without autodiff.
pub struct Layer {
    query_key_value: Tensor<2>,
    output: Tensor<2>,
    expand: Tensor<2>,
    contract: Tensor<2>,
}

impl Layer {
    /// Weights from `draw`, which gives numbers of variance 1 in a shape.
    pub fn new(workload: &Workload, mut draw: impl FnMut([usize; 4]) -> Tensor<4>) -> Self {
        let hidden = workload.hidden();
        let mut weights = |inputs: usize, outputs: usize| {
            let drawn = draw([1, 1, inputs, outputs]).reshape([inputs, outputs]);
            // Keeps the variance of what it multiplies.
            drawn / (inputs as f64).sqrt()
        };
        Self {
            query_key_value: weights(hidden, workload.projected()),
            output: weights(hidden, hidden),
            expand: weights(hidden, 4 * hidden),
            contract: weights(4 * hidden, hidden),
        }
    }

    /// One step on `x`, with the gradient of the loss with respect to the output: the results in the
    /// order of [`Workload::outputs`]. The weights stay, so that every call starts from the same.
    ///
    /// `attend` is the attention of `[batch, heads, seq, head_dim]`.
    pub fn step(
        &self,
        workload: &Workload,
        x: &Tensor<4>,
        output_gradient: &Tensor<4>,
        attend: impl FnOnce(Tensor<4>, Tensor<4>, Tensor<4>) -> Outcome<Tensor<4>>,
    ) -> Outcome<Vec<Tensor<4>>> {
        let weights = [
            &self.query_key_value,
            &self.output,
            &self.expand,
            &self.contract,
        ];
        let weights = weights.map(|weight| weight.clone().autodiff().require_grad());
        let [query_key_value, output, expand, contract] = weights.clone();
        let x = x.clone().autodiff().require_grad();

        let projected = times(norm(x.clone()), query_key_value);
        let (heads, kv_heads) = (workload.heads, workload.kv_heads);
        let mut start = 0;
        let mut part = |heads: usize| {
            let width = heads * workload.head_dim;
            let columns = projected.clone().slice_dim(3, start..start + width);
            start += width;
            columns
                .reshape([workload.batch, workload.seq, heads, workload.head_dim])
                .swap_dims(1, 2)
        };
        let (query, key, value) = (part(heads), part(kv_heads), part(kv_heads));
        let attended = attend(query, key, value)?;
        let joined =
            attended
                .swap_dims(1, 2)
                .reshape([workload.batch, 1, workload.seq, workload.hidden()]);
        let middle = x.clone() + times(joined, output);
        let wide = gelu(times(norm(middle.clone()), expand));
        let y = middle + times(wide, contract);

        let gradients = (y.clone() * output_gradient.clone().autodiff()).backward();
        let input_gradient = x.grad(&gradients).ok_or("the input has no gradient")?;
        let mut results = vec![y.without_autodiff(), input_gradient];
        for weight in weights {
            let gradient = weight.grad(&gradients).ok_or("a weight has no gradient")?;
            let stepped = weight.without_autodiff() - gradient * LEARNING_RATE;
            let [inputs, outputs] = stepped.dims();
            results.push(stepped.reshape([1, 1, inputs, outputs]));
        }
        Ok(results)
    }
}

/// `x W` over the last dimension.
fn times(x: Tensor<4>, weight: Tensor<2>) -> Tensor<4> {
    let [batch, one, seq, _] = x.dims();
    let [inputs, outputs] = weight.dims();
    let rows = x.reshape([batch * seq, inputs]);
    rows.matmul(weight).reshape([batch, one, seq, outputs])
}

/// Layer normalisation without gain.
fn norm(x: Tensor<4>) -> Tensor<4> {
    let centred = x.clone() - x.mean_dim(3);
    let variance = centred.clone().powi_scalar(2).mean_dim(3);
    centred / (variance + 1e-5).sqrt()
}
