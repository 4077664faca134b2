//! Computes a run on a device, or by the reference.

use super::array::{Array, stored};
use super::input::Inputs;
use crate::Outcome;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_flash_attention::{AttentionOptions, DeviceReport, Options, try_flash_attention_with_lse};
use flash_attention_spec::reference;
use half::{bf16, f16};
use safetensors::tensor::Dtype as Stored;

/// Output, lse and, where the inputs ask for them, gradients, by the op on a device.
pub fn on_device(inputs: &Inputs, options: &Options, on: &DeviceReport) -> Outcome<Vec<Array>> {
    let problem = &inputs.problem;
    if !on.dtypes.contains(&problem.dtype) {
        let has: Vec<String> = on.dtypes.iter().map(ToString::to_string).collect();
        let (given, device, has) = (problem.dtype, &on.name, has.join(", "));
        return Err(format!(
            "tensor q has element type {given}, expected one that device {device} has: {has}"
        )
        .into());
    }
    let wants_gradients = inputs.wants_gradients();
    let device = match wants_gradients {
        true => on.device.clone().autodiff(),
        false => on.device.clone(),
    };
    let leaf = |array: &Array| {
        let tensor: Tensor<4> = tensor(array, &device);
        if wants_gradients {
            tensor.require_grad()
        } else {
            tensor
        }
    };
    let (query, key, value) = (leaf(&inputs.query), leaf(&inputs.key), leaf(&inputs.value));
    let bias = inputs.bias.as_ref().map(leaf);
    let mask =
        inputs.mask.clone().zip(problem.mask).map(|(mask, shape)| {
            Tensor::<4, Bool>::from_data(TensorData::new(mask, shape), &device)
        });
    let mut options = AttentionOptions::from(*options);
    options.mask = mask;
    options.bias = bias.clone();
    let (output, lse) =
        try_flash_attention_with_lse(query.clone(), key.clone(), value.clone(), &options)?;

    // The sums only carry the gradients in; their own values are never read.
    let through_output = inputs.output_gradient.as_ref().map(|gradient| {
        let product = output.clone() * tensor(gradient, &device);
        product.sum().cast(DType::F32)
    });
    let through_lse = inputs.lse_gradient.as_ref().map(|gradient| {
        let product = lse.clone() * tensor(gradient, &device);
        product.sum()
    });
    let loss = match (through_output, through_lse) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    };
    let element = stored(problem.dtype);
    let mut arrays = vec![
        array("o", element, output)?,
        array("lse", Stored::F32, lse)?,
    ];
    if let Some(loss) = loss {
        let gradients = loss.backward();
        let leaves = [
            ("dq", Some(query)),
            ("dk", Some(key)),
            ("dv", Some(value)),
            ("dbias", bias),
        ];
        for (name, leaf) in leaves {
            let Some(leaf) = leaf else { continue };
            let gradient = leaf.grad(&gradients);
            let gradient = gradient.ok_or_else(|| format!("tensor {name} was not computed"))?;
            arrays.push(array(name, element, gradient)?);
        }
    }
    Ok(arrays)
}

fn tensor<const D: usize>(array: &Array, device: &Device) -> Tensor<D> {
    let values = array.values.iter().copied();
    let shape = array.shape.clone();
    let (data, dtype) = match array.stored {
        Stored::F16 => {
            let values: Vec<f16> = values.map(f16::from_f64).collect();
            (TensorData::new(values, shape), DType::F16)
        }
        Stored::BF16 => {
            let values: Vec<bf16> = values.map(bf16::from_f64).collect();
            (TensorData::new(values, shape), DType::BF16)
        }
        _ => {
            let values: Vec<f32> = values.map(|x| x as f32).collect();
            (TensorData::new(values, shape), DType::F32)
        }
    };
    Tensor::from_data(data, (device, dtype))
}

fn array<const D: usize>(name: &'static str, stored: Stored, tensor: Tensor<D>) -> Outcome<Array> {
    let shape = tensor.dims().to_vec();
    let data = tensor.try_into_data_dtype(DType::F64);
    let values = data.and_then(|data| Ok(data.try_into_vec::<f64>()?));
    let values = values.map_err(|error| format!("tensor {name} cannot be read back: {error}"))?;
    Ok(Array {
        name,
        stored,
        shape,
        values,
    })
}

/// The same by the `f64` reference, in `f64`.
pub fn by_reference(inputs: &Inputs) -> Vec<Array> {
    let problem = &inputs.problem;
    let (query, key, value) = (&inputs.query, &inputs.key, &inputs.value);
    let given = reference::Inputs::new(&query.values, &key.values, &value.values)
        .mask(inputs.mask.as_deref())
        .bias(inputs.bias.as_ref().map(|bias| bias.values.as_slice()));
    let f64_array = |name, shape: &[usize], values| Array {
        name,
        stored: Stored::F64,
        shape: shape.to_vec(),
        values,
    };
    let forward = reference::forward(problem, &given);
    let mut arrays = vec![
        f64_array("o", &problem.output_shape(), forward.output),
        f64_array("lse", &problem.lse_shape(), forward.lse),
    ];
    if inputs.wants_gradients() {
        let zeros = || vec![0.0; problem.output_shape().iter().product()];
        let output_gradient = match &inputs.output_gradient {
            Some(gradient) => &gradient.values,
            None => &zeros(),
        };
        let lse_gradient = inputs.lse_gradient.as_ref().map(|g| g.values.as_slice());
        let gradients = reference::backward(problem, &given, output_gradient, lse_gradient);
        arrays.push(f64_array("dq", &inputs.query.shape, gradients.query));
        arrays.push(f64_array("dk", &inputs.key.shape, gradients.key));
        arrays.push(f64_array("dv", &inputs.value.shape, gradients.value));
        if let (Some(bias), Some(gradient)) = (&inputs.bias, gradients.bias) {
            arrays.push(f64_array("dbias", &bias.shape, gradient));
        }
    }
    arrays
}
