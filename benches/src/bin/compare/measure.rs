//! The measuring process: one implementation, one workload, timed call by call.
//!
//! It runs nothing else, so that its peak memory and the cost of its first call, which compiles and
//! tunes kernels, belong to that implementation alone.

use crate::Outcome;
use crate::layer::Layer;
use crate::memory::{peak_resident_bytes, resident_bytes};
use crate::workload::{Implementation, Pass, Workload};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::{AttentionOptions, devices, try_flash_attention};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Sets of inputs that calls take in turn, so that none finds its own left in a cache.
pub const SETS: usize = 3;

/// Calls between the first and the first sample go on for this long, and are at least one.
const WARM_UP: Duration = Duration::from_millis(300);

/// What the measuring process is asked for.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// A name from [`devices`].
    pub device: String,
    pub implementation: Implementation,
    pub workload: Workload,
    pub samples: usize,
    /// Inputs are drawn from it, so that both implementations are given the same.
    pub seed: u64,
}

/// What it found; times in seconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// The first call, with compilation and tuning.
    pub first: f64,
    /// From the call to the end of the work on the device, of each sample.
    pub total: Vec<f64>,
    /// From the call until the device has been handed all work, of each sample.
    pub issue: Vec<f64>,
    /// Resident memory before the first call, inputs included, in bytes.
    pub start_bytes: Option<u64>,
    /// Peak resident memory after the last sample, in bytes.
    pub peak_bytes: Option<u64>,
}

/// Measures, and writes what the last timed call computed to `outputs`, as little-endian f32 in the
/// order of [`Workload::outputs`].
pub fn measure(request: &Request, outputs: &Path) -> Outcome<Measurement> {
    let found = devices().into_iter().find(|it| it.name == request.device);
    let device = found
        .ok_or_else(|| format!("device {} is gone", request.device))?
        .device;
    let workload = &request.workload;
    let seeds = (0..SETS as u64).map(|set| request.seed.wrapping_add(set));
    let sets: Vec<Inputs> = seeds
        .map(|seed| Inputs::random(workload, seed, &device))
        .collect();
    device.sync()?;
    let start_bytes = resident_bytes();
    let call = |turn: usize| -> Outcome<Call> {
        let inputs = &sets[turn % SETS];
        let start = Instant::now();
        let outputs = compute(request.implementation, workload, inputs)?;
        device.flush()?;
        let issue = start.elapsed().as_secs_f64();
        device.sync()?;
        let total = start.elapsed().as_secs_f64();
        // Kept until here, so that no backend can leave out work whose result nobody holds.
        Ok(Call {
            issue,
            total,
            outputs,
        })
    };

    let first = call(0)?.total;
    let warm_up = Instant::now();
    for turn in 1.. {
        call(turn)?;
        if warm_up.elapsed() >= WARM_UP {
            break;
        }
    }
    let (mut issue, mut total, mut last) = (Vec::new(), Vec::new(), Vec::new());
    // Turns start over: the length of the warm-up must not decide which inputs the last sample takes.
    for turn in 0..request.samples {
        // The next call must not find the memory of this one's results in use.
        drop(std::mem::take(&mut last));
        let sample = call(turn)?;
        issue.push(sample.issue);
        total.push(sample.total);
        last = sample.outputs;
    }
    let peak_bytes = peak_resident_bytes();
    write(last, outputs)?;
    Ok(Measurement {
        first,
        total,
        issue,
        start_bytes,
        peak_bytes,
    })
}

struct Call {
    issue: f64,
    total: f64,
    outputs: Vec<Tensor<4>>,
}

/// What a call reads, without autodiff.
struct Inputs {
    /// Query, key and value; or what goes into the layer.
    operands: Vec<Tensor<4>>,
    /// Gradient of the loss with respect to the output, of all but a forward pass.
    output_gradient: Option<Tensor<4>>,
    layer: Option<Layer>,
}

impl Inputs {
    fn random(workload: &Workload, seed: u64, device: &Device) -> Self {
        let mut numbers = StdRng::seed_from_u64(seed);
        let dtype = DType::from(workload.dtype);
        let mut tensor = |shape: [usize; 4]| {
            // Uniform with variance 1, so that scores have it too.
            let bound = 3f32.sqrt();
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| numbers.random_range(-bound..bound))
                .collect();
            let data = TensorData::new(values, shape).convert_dtype(dtype);
            Tensor::from_data(data, (device, dtype))
        };
        let (query, key) = (workload.query_shape(), workload.key_shape());
        let (shapes, output) = match workload.pass {
            Pass::Layer => (vec![workload.layer_shape()], Some(workload.layer_shape())),
            Pass::Training => (vec![query, key, key], Some(query)),
            Pass::Forward => (vec![query, key, key], None),
        };
        Self {
            operands: shapes.into_iter().map(&mut tensor).collect(),
            output_gradient: output.map(&mut tensor),
            layer: (workload.pass == Pass::Layer).then(|| Layer::new(workload, tensor)),
        }
    }
}

/// One call: the results in the order of [`Workload::outputs`], without autodiff.
fn compute(who: Implementation, workload: &Workload, inputs: &Inputs) -> Outcome<Vec<Tensor<4>>> {
    let operand = |n: usize| inputs.operands[n].clone();
    let Some(output_gradient) = &inputs.output_gradient else {
        let output = attend(who, workload, operand(0), operand(1), operand(2))?;
        return Ok(vec![output]);
    };
    if let Some(layer) = &inputs.layer {
        let attend = |query, key, value| attend(who, workload, query, key, value);
        return layer.step(workload, &operand(0), output_gradient, attend);
    }
    let leaf = |n: usize| operand(n).autodiff().require_grad();
    let leaves = [leaf(0), leaf(1), leaf(2)];
    let [query, key, value] = leaves.clone();
    let output = attend(who, workload, query, key, value)?;
    // Its derivative is `output_gradient` itself, at the cost of two products by element.
    let weighted = output.clone() * output_gradient.clone().autodiff();
    let gradients = weighted.backward();
    let mut results = vec![output.without_autodiff()];
    for leaf in leaves {
        results.push(leaf.grad(&gradients).ok_or("an operand has no gradient")?);
    }
    Ok(results)
}

fn attend(
    who: Implementation,
    workload: &Workload,
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
) -> Outcome<Tensor<4>> {
    match who {
        Implementation::Flash => {
            let options = match workload.causal {
                true => AttentionOptions::new().causal(),
                false => AttentionOptions::new(),
            };
            Ok(try_flash_attention(query, key, value, &options)?)
        }
        Implementation::Burn => {
            let options = AttentionModuleOptions {
                is_causal: workload.causal,
                ..Default::default()
            };
            let [key, value] = [key, value].map(|tensor| repeat_heads(tensor, workload.heads));
            Ok(attention(query, key, value, None, None, options))
        }
    }
}

/// Repeats each head until there are `heads`: Burn's attention wants as many keys as queries.
fn repeat_heads(tensor: Tensor<4>, heads: usize) -> Tensor<4> {
    let [batch, kv_heads, seq, width] = tensor.dims();
    if kv_heads == heads {
        return tensor;
    }
    tensor
        .reshape([batch, kv_heads, 1, seq, width])
        .expand([batch, kv_heads, heads / kv_heads, seq, width])
        .reshape([batch, heads, seq, width])
}

fn write(tensors: Vec<Tensor<4>>, path: &Path) -> Outcome<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for tensor in tensors {
        for value in tensor.into_data().iter::<f32>() {
            file.write_all(&value.to_le_bytes())?;
        }
    }
    Ok(file.flush()?)
}
