//! What autodiff records: the operands, the output and two numbers a row.
//!
//! A Burn backward step has one output. `lse` is therefore recorded as a child of the output's
//! step: its own step leaves `dL/dlse` in a slot that both share and hands a zero gradient to the
//! output, whose step runs after it and takes both gradients in one backward pass.

use crate::ops::{FlashAttentionOps, MaybeBool, MaybeFloat, OperandGradients, log_sum_exp};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind},
};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use flash_attention_spec::{Problem, Wanted};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor on the graph.
type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Where the step of `lse` leaves its gradient for the step of the output.
type LseGradient<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

/// What the backward pass needs.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<B>>,
    output: FloatTensor<B>,
    statistics: FloatTensor<B>,
    lse_gradient: LseGradient<B>,
    problem: Problem,
}

/// Gradients of query, key, value and, where there is one, bias.
#[derive(Debug)]
struct AttentionBackward;

impl<B: FlashAttentionOps, const N: usize> Backward<B, N> for AttentionBackward {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let output_gradient = grads.consume::<B>(&ops.node);
        let saved = ops.state;
        let lse_gradient = saved
            .lse_gradient
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let parent = |n: usize| ops.parents.get(n).cloned().flatten();
        let wanted = Wanted::NONE
            .query(parent(0).is_some())
            .key(parent(1).is_some())
            .value(parent(2).is_some())
            .bias(parent(3).is_some());
        let OperandGradients {
            query,
            key,
            value,
            bias,
        } = B::attention_backward(
            saved.query,
            saved.key,
            saved.value,
            saved.mask.into(),
            saved.bias.into(),
            saved.output,
            saved.statistics,
            output_gradient,
            lse_gradient.into(),
            saved.problem,
            wanted,
        );
        for (n, gradient) in [query, key, value, bias].into_iter().enumerate() {
            if let (Some(node), MaybeFloat::Some(gradient)) = (parent(n), gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// Hands the gradient of `lse` to the step of the output.
#[derive(Debug)]
struct LseBackward;

impl<B: FlashAttentionOps> Backward<B, 1> for LseBackward {
    /// The slot, and an output to take shape, device and element type from.
    type State = (LseGradient<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let (slot, output) = ops.state;
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
        let [parent] = ops.parents;
        if let Some(node) = parent {
            // The output's step runs only once it has a gradient.
            let zeros = B::float_zeros(output.shape(), &output.device(), output.dtype().into());
            grads.register::<B>(node.id, zeros);
        }
    }
}

/// The operands of one call, off the graph.
struct Inputs<B: Backend> {
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<B>>,
    problem: Problem,
}

/// What one recorded call hands back.
struct Recorded<B: Backend, C: CheckpointStrategy> {
    output: Tracked<B, C>,
    /// Off the graph.
    statistics: FloatTensor<B>,
    lse_gradient: LseGradient<B>,
}

fn forward<B: FlashAttentionOps>(inputs: Inputs<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    B::attention_forward(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.mask.into(),
        inputs.bias.into(),
        inputs.problem,
    )
}

/// Runs the forward pass and records it with `nodes` as parents.
fn record<B: FlashAttentionOps, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
) -> Recorded<B, C> {
    let lse_gradient = LseGradient::<B>::default();
    match Backward::<B, N>::prepare::<C>(AttentionBackward, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let (output, statistics) = forward::<B>(Inputs {
                query: inputs.query.clone(),
                key: inputs.key.clone(),
                value: inputs.value.clone(),
                mask: inputs.mask.clone(),
                bias: inputs.bias.clone(),
                problem: inputs.problem,
            });
            let saved = Saved {
                query: inputs.query,
                key: inputs.key,
                value: inputs.value,
                mask: inputs.mask,
                bias: inputs.bias,
                output: output.clone(),
                statistics: statistics.clone(),
                lse_gradient: lse_gradient.clone(),
                problem: inputs.problem,
            };
            Recorded {
                output: prep.finish(saved, output),
                statistics,
                lse_gradient,
            }
        }
        OpsKind::UnTracked(prep) => {
            let (output, statistics) = forward::<B>(inputs);
            Recorded {
                output: prep.finish(output),
                statistics,
                lse_gradient,
            }
        }
    }
}

/// [`record`] with the bias among the parents where there is one.
fn record_operands<B: FlashAttentionOps, C: CheckpointStrategy>(
    query: Tracked<B, C>,
    key: Tracked<B, C>,
    value: Tracked<B, C>,
    mask: Option<BoolTensor<B>>,
    bias: Option<Tracked<B, C>>,
    problem: Problem,
) -> Recorded<B, C> {
    let (query, query_node) = query.into_parts();
    let (key, key_node) = key.into_parts();
    let (value, value_node) = value.into_parts();
    let (bias, bias_node) = bias.map(Tracked::<B, C>::into_parts).unzip();
    let inputs = Inputs {
        query,
        key,
        value,
        mask,
        bias,
        problem,
    };
    match bias_node {
        Some(bias_node) => record::<B, C, 4>([query_node, key_node, value_node, bias_node], inputs),
        None => record::<B, C, 3>([query_node, key_node, value_node], inputs),
    }
}

impl<B: FlashAttentionOps, C: CheckpointStrategy> FlashAttentionOps for Autodiff<B, C> {
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (output, statistics) = forward::<B>(Inputs {
            query: query.into_primitive(),
            key: key.into_primitive(),
            value: value.into_primitive(),
            mask: mask.into_option(),
            bias: bias.into_option().map(Tracked::<B, C>::into_primitive),
            problem,
        });
        (
            Tracked::<B, C>::new(output),
            Tracked::<B, C>::new(statistics),
        )
    }

    fn attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        output: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        output_gradient: FloatTensor<Self>,
        lse_gradient: MaybeFloat<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> OperandGradients<Self> {
        let inner = |tensor: MaybeFloat<Self>| {
            MaybeFloat::<B>::from(tensor.into_option().map(Tracked::<B, C>::into_primitive))
        };
        let outer = |tensor: MaybeFloat<B>| {
            MaybeFloat::<Self>::from(tensor.into_option().map(Tracked::<B, C>::new))
        };
        let gradients = B::attention_backward(
            query.into_primitive(),
            key.into_primitive(),
            value.into_primitive(),
            mask.into_option().into(),
            inner(bias),
            output.into_primitive(),
            statistics.into_primitive(),
            output_gradient.into_primitive(),
            inner(lse_gradient),
            problem,
            wanted,
        );
        OperandGradients {
            query: outer(gradients.query),
            key: outer(gradients.key),
            value: outer(gradients.value),
            bias: outer(gradients.bias),
        }
    }

    fn flash_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> FloatTensor<Self> {
        let (mask, bias) = (mask.into_option(), bias.into_option());
        record_operands::<B, C>(query, key, value, mask, bias, problem).output
    }

    fn flash_attention_with_lse(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (mask, bias) = (mask.into_option(), bias.into_option());
        let recorded = record_operands::<B, C>(query, key, value, mask, bias, problem);
        let lse = log_sum_exp::<B>(recorded.statistics, &problem);
        let lse = match LseBackward
            .prepare::<C>([recorded.output.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let state = (recorded.lse_gradient, recorded.output.primitive().clone());
                prep.finish(state, lse)
            }
            OpsKind::UnTracked(prep) => prep.finish(lse),
        };
        (recorded.output, lse)
    }
}
