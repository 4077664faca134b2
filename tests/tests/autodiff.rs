//! The op inside graphs: wherever Burn's own ops work, it works.

use burn::module::{Module, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Tensor, activation::softmax};
use burn_flash_attention::{AttentionOptions, flash_attention, flash_attention_with_lse};
use flash_attention_tests::{relative_error, selected_devices, uniform};

const LIMIT: f64 = 2e-5;
const SHAPE: [usize; 4] = [1, 2, 21, 8];

fn leaf(seed: u64, device: &Device) -> Tensor<4> {
    uniform(SHAPE, seed, device).autodiff().require_grad()
}

fn causal(query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>) -> Tensor<4> {
    let options = AttentionOptions::new().causal();
    flash_attention(query.clone(), key.clone(), value.clone(), &options)
}

/// Plain attention in Burn's own ops.
fn textbook(query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>) -> Tensor<4> {
    let scale = (SHAPE[3] as f64).sqrt().recip();
    let scores = query.clone().matmul(key.clone().transpose()) * scale;
    softmax(scores, 3).matmul(value.clone())
}

fn plain(query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>) -> Tensor<4> {
    let options = AttentionOptions::new();
    flash_attention(query.clone(), key.clone(), value.clone(), &options)
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}

/// Catches steps of one tensor that is query, key and value at once overwriting each other.
#[test]
fn one_tensor_as_query_key_and_value() {
    for report in selected_devices() {
        let device = &report.device;
        let shared = leaf(1, device);
        let apart = [leaf(1, device), leaf(1, device), leaf(1, device)];
        let gradient = uniform(SHAPE, 2, device).autodiff();
        let gradients = (causal(&shared, &shared, &shared) * gradient.clone())
            .sum()
            .backward();
        let got = shared.grad(&gradients).unwrap();
        let [query, key, value] = &apart;
        let gradients = (causal(query, key, value) * gradient).sum().backward();
        let [dq, dk, dv] = apart.map(|tensor| tensor.grad(&gradients).unwrap());
        assert!(relative_error(got, dq + dk + dv) < LIMIT);
    }
}

/// Catches an op that only works at the ends of a graph: layers of attention, with the output used
/// twice, have to have the gradients of the textbook form.
#[test]
fn layers_equal_the_textbook_form() {
    type Attention = fn(&Tensor<4>, &Tensor<4>, &Tensor<4>) -> Tensor<4>;
    for report in selected_devices() {
        let run = |attention: Attention| {
            let leaves = [1, 2, 3].map(|seed| leaf(seed, &report.device));
            let [query, key, value] = &leaves;
            let first = attention(query, key, value);
            let second = attention(&first, key, &first);
            let loss = (second.clone() * first.clone()).sum() + second.sum();
            let gradients = loss.backward();
            leaves.map(|tensor| tensor.grad(&gradients).unwrap())
        };
        for (got, expected) in run(plain).into_iter().zip(run(textbook)) {
            assert!(relative_error(got, expected) < LIMIT);
        }
    }
}

/// Catches state that outlives a backward pass: a second forward and backward on the same leaves
/// has to work and to agree in every bit.
#[test]
fn a_second_backward() {
    for report in selected_devices() {
        let leaves = [1, 2, 3].map(|seed| leaf(seed, &report.device));
        let [query, key, value] = &leaves;
        let run = || {
            let options = AttentionOptions::new().causal();
            let (output, lse) =
                flash_attention_with_lse(query.clone(), key.clone(), value.clone(), &options);
            let gradients = (output.sum() + lse.sum()).backward();
            leaves
                .each_ref()
                .map(|leaf| bits(leaf.grad(&gradients).unwrap()))
        };
        assert!(run() == run());
    }
}

/// Catches outputs that depend on each other's graph: of two losses, one on the output and one on
/// lse of separate calls, either may go first, and an output may be dropped unused.
#[test]
fn branches_of_a_graph() {
    for report in selected_devices() {
        let leaves = [1, 2, 3].map(|seed| leaf(seed, &report.device));
        let [query, key, value] = &leaves;
        let call = || {
            let options = AttentionOptions::new();
            flash_attention_with_lse(query.clone(), key.clone(), value.clone(), &options)
        };
        let dq = |loss: Tensor<1>| query.grad(&loss.backward()).unwrap();
        let of_output = || call().0.square().sum();
        let of_lse = || call().1.square().sum();
        let both = {
            let (output, lse) = call();
            dq(output.square().sum() + lse.square().sum())
        };
        let (first, second) = (of_output(), of_lse());
        let apart = dq(second) + dq(first);
        assert!(relative_error(apart, both.clone()) < LIMIT);
        // lse before the output in the sum, and the output used once more through detach.
        let (output, lse) = call();
        let detached = output.clone().detach().sum();
        let swapped = dq(lse.square().sum() + detached + output.square().sum());
        assert!(relative_error(swapped, both) < LIMIT);
    }
}

/// Catches an op that asks every operand to be on an autodiff device, where Burn takes one that is
/// not for a constant.
#[test]
fn operands_without_autodiff_are_constants() {
    for report in selected_devices() {
        let device = &report.device;
        let query = leaf(1, device);
        let (key, value) = (uniform(SHAPE, 2, device), uniform(SHAPE, 3, device));
        let run = |key: &Tensor<4>, value: &Tensor<4>| {
            let output = causal(&query, key, value);
            let gradients = output.clone().square().sum().backward();
            (bits(output.inner()), bits(query.grad(&gradients).unwrap()))
        };
        let mixed = run(&key, &value);
        assert!(mixed == run(&key.clone().autodiff(), &value.clone().autodiff()));
        // And the other way round: the output is part of the graph when only the value is.
        let value = value.autodiff().require_grad();
        let output = causal(&uniform(SHAPE, 1, device), &key, &value);
        assert!(bits(output.clone().inner()) == mixed.0);
        assert!(value.grad(&output.sum().backward()).is_some());
    }
}

/// Catches results that need autodiff, or differ with it.
#[test]
fn without_autodiff() {
    for report in selected_devices() {
        let device = &report.device;
        let [query, key, value] = [1, 2, 3].map(|seed| uniform(SHAPE, seed, device));
        let inner = causal(&query, &key, &value);
        assert!(!inner.is_autodiff());
        let tracked = causal(&leaf(1, device), &leaf(2, device), &leaf(3, device));
        assert!(tracked.is_tracked());
        assert!(bits(inner) == bits(tracked.inner()));
        let constant = causal(&query.autodiff(), &key.autodiff(), &value.autodiff());
        assert!(constant.is_autodiff() && !constant.is_tracked());
    }
}

/// Catches operands that checkpointing recomputes and the op had counted on being kept.
#[test]
fn balanced_checkpointing() {
    for report in selected_devices() {
        let run = |device: &Device| {
            let leaves = [1, 2, 3].map(|seed| uniform(SHAPE, seed, device).require_grad());
            // Memory-bound operations, which checkpointing runs again in the backward pass.
            let [query, key, value] = leaves.each_ref().map(|leaf| leaf.clone() * 1.5 + 0.25);
            let options = AttentionOptions::new().causal();
            let (output, lse) = flash_attention_with_lse(query, key, value, &options);
            let loss = (output * 2.0).square().sum() + (lse + 1.0).square().sum();
            let gradients = loss.backward();
            leaves.map(|leaf| bits(leaf.grad(&gradients).unwrap()))
        };
        let kept = report.device.clone().autodiff();
        let balanced = kept.clone().gradient_checkpointing();
        assert!(run(&kept) == run(&balanced));
    }
}

/// Catches a graph that is tied to the thread or the device it was built on.
#[test]
fn moved_tensors() {
    let devices = selected_devices();
    for here in &devices {
        for there in &devices {
            let leaves = [1, 2, 3].map(|seed| leaf(seed, &here.device));
            let there = there.device.clone().autodiff();
            let [query, key, value] = leaves.each_ref().map(|leaf| leaf.clone().to_device(&there));
            let output = causal(&query, &key, &value);
            let back = output.to_device(&here.device.clone().autodiff());
            let loss = back.square().sum();
            let gradients = std::thread::spawn(move || loss.backward()).join().unwrap();
            let moved = leaves.map(|leaf| leaf.grad(&gradients).unwrap());

            let leaves = [1, 2, 3].map(|seed| leaf(seed, &here.device));
            let [query, key, value] = &leaves;
            let gradients = causal(query, key, value).square().sum().backward();
            for (moved, leaf) in moved.into_iter().zip(&leaves) {
                assert!(relative_error(moved, leaf.grad(&gradients).unwrap()) < LIMIT);
            }
        }
    }
}

/// Attention whose query, key, value and bias are made from parameters.
#[derive(Module, Debug)]
struct Layer {
    query: Param<Tensor<2>>,
    key: Param<Tensor<2>>,
    value: Param<Tensor<2>>,
    bias: Param<Tensor<4>>,
}

impl Layer {
    fn new(dim: usize, seq: usize, device: &Device) -> Self {
        let param = |seed| Param::from_tensor(uniform([dim, dim], seed, device) * 0.5);
        Self {
            query: param(1),
            key: param(2),
            value: param(3),
            bias: Param::from_tensor(Tensor::zeros([1, 1, seq, seq], device)),
        }
    }

    /// `input` is `[batch, 1, seq, dim]`.
    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let project = |weight: &Param<Tensor<2>>| input.clone().matmul(weight.val().unsqueeze());
        let options = AttentionOptions::new().causal().bias(self.bias.val());
        flash_attention(
            project(&self.query),
            project(&self.key),
            project(&self.value),
            &options,
        )
    }
}

/// Catches gradients that an optimizer cannot use: a layer learns to repeat the previous position,
/// for which query, key or bias, and value have to learn, and its loss falls to a tenth.
#[test]
fn a_module_learns() {
    let (dim, seq) = (8, 6);
    for report in selected_devices() {
        let device = report.device.clone().autodiff();
        let mut layer = Layer::new(dim, seq, &device);
        let mut optimizer = AdamConfig::new().init();
        let input = uniform([16, 1, seq, dim], 9, &device);
        let target = input.clone().narrow(2, 0, seq - 1);
        let mut losses = Vec::new();
        for _ in 0..150 {
            let output = layer.forward(input.clone()).narrow(2, 1, seq - 1);
            let loss = (output - target.clone()).square().mean();
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = GradientsParams::from_grads(loss.backward(), &layer);
            assert_eq!(gradients.len(), 4);
            layer = optimizer.step(0.05, layer, gradients);
        }
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        assert!(last < 0.1 * first, "{}: {first} to {last}", report.name);
    }
}
