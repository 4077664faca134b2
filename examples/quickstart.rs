//! Tensors in, gradients out: `cargo run --example quickstart`.

use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_attention::{AttentionOptions, flash_attention};

fn main() {
    let device = Device::default().autodiff();
    let (batch, heads, length, head_dim) = (1, 4, 256, 64);
    let random = || {
        let shape = [batch, heads, length, head_dim];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad()
    };
    let (query, key, value) = (random(), random(), random());

    let options = AttentionOptions::new().causal();
    let output = flash_attention(query.clone(), key.clone(), value.clone(), &options);
    println!("output {:?} on {device:?}", output.dims());

    let loss = output.powi_scalar(2).mean();
    let gradients = loss.backward();
    println!("loss {:.4}", loss.into_scalar::<f32>());
    for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
        let gradient = tensor.grad(&gradients).expect("it required a gradient");
        let norm = gradient.clone().powi_scalar(2).sum().sqrt();
        let norm = norm.into_scalar::<f32>();
        println!(
            "gradient of {name:<5} {:?}, norm {norm:.2e}",
            gradient.dims()
        );
    }
}
