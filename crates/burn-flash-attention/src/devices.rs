//! What is compiled in and found, and which kernels would serve a problem there.

use burn::tensor::{DType, Device};
use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
use std::fmt;

/// The family that serves devices without kernels: the recurrence in Burn's own operations.
const COMPOSED: &str = "composed";

/// The Burn element type of `dtype`.
pub fn burn_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    }
}

/// The element types `device` computes with.
pub(crate) fn dtypes_of(device: &Device) -> Vec<Dtype> {
    Dtype::ALL
        .into_iter()
        .filter(|&dtype| device.supports_dtype(burn_dtype(dtype)))
        .collect()
}

/// A device that is compiled in and was found, and what serves it.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// Name of the backend feature, with `:n` from the second device on.
    pub name: String,
    /// The device, to create tensors on.
    pub device: Device,
    /// The hardware's own name.
    pub hardware: String,
    /// What kernels are compiled by: `spirv`, `wgsl`, `msl`, `cuda c++`, `llvm`; `rust` where there
    /// are none.
    pub compiler: &'static str,
    /// Element types it computes with.
    pub dtypes: Vec<Dtype>,
    /// Smallest and largest plane (warp, subgroup).
    pub plane_size: Option<(u32, u32)>,
    /// Shared memory of a cube (thread block), in bytes.
    pub shared_memory: Option<usize>,
    /// Buffers a kernel can bind.
    pub max_bindings: Option<u32>,
    /// Matrix-unit instructions, as `m x n x k input -> accumulator`.
    pub matrix_shapes: Vec<String>,
    /// Kernel family of the forward pass, for each element type and a `head_dim` of 64.
    pub forward: Vec<(Dtype, &'static str)>,
    /// Kernel family of the backward pass, likewise.
    pub backward: Vec<(Dtype, &'static str)>,
}

/// Every device that is compiled in and found, in the order of the backend features.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let devices = burn_flash_attention::devices();
/// assert!(devices.iter().any(|report| report.name == "flex"));
/// # }
/// ```
pub fn devices() -> Vec<DeviceReport> {
    found()
        .into_iter()
        .flat_map(|(feature, devices)| {
            devices
                .into_iter()
                .enumerate()
                .map(move |(n, device)| match n {
                    0 => report(feature.to_string(), device),
                    _ => report(format!("{feature}:{n}"), device),
                })
        })
        .collect()
}

/// The devices of each backend feature that is on.
#[allow(clippy::vec_init_then_push, unused_mut)]
fn found() -> Vec<(&'static str, Vec<Device>)> {
    let mut found = Vec::new();
    #[cfg(feature = "flex")]
    found.push(("flex", vec![Device::flex()]));
    #[cfg(feature = "cuda")]
    found.push(("cuda", enumerate(burn::tensor::DeviceType::Cuda)));
    #[cfg(feature = "rocm")]
    found.push(("rocm", enumerate(burn::tensor::DeviceType::Rocm)));
    #[cfg(feature = "metal")]
    found.push(("metal", enumerate(burn::tensor::DeviceType::Metal)));
    #[cfg(feature = "vulkan")]
    found.push(("vulkan", enumerate(burn::tensor::DeviceType::Vulkan)));
    #[cfg(feature = "webgpu")]
    found.push(("webgpu", enumerate(burn::tensor::DeviceType::WebGpu)));
    #[cfg(feature = "wgpu")]
    found.push(("wgpu", enumerate(burn::tensor::DeviceType::Wgpu)));
    #[cfg(feature = "cpu")]
    found.push(("cpu", enumerate(burn::tensor::DeviceType::Cpu)));
    found
}

#[cfg(feature = "cube")]
fn enumerate(kind: burn::tensor::DeviceType) -> Vec<Device> {
    Device::enumerate(kind).into_iter().collect()
}

fn report(name: String, device: Device) -> DeviceReport {
    let dtypes = dtypes_of(&device);
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for &dtype in &dtypes {
        let operand = Operand::new([1, 1, 64, 64], dtype);
        let operands = Operands {
            query: operand.clone(),
            key: operand.clone(),
            value: operand,
            mask: None,
            bias: None,
        };
        let problem = Problem::new(&operands, &Options::default());
        if let Some(served) = problem
            .ok()
            .and_then(|problem| explain(&problem, &device).ok())
        {
            forward.push((dtype, served.forward.family));
            backward.push((dtype, served.backward.family));
        }
    }
    #[cfg(feature = "cube")]
    if let Some(limits) = crate::cube::limits(&device) {
        return DeviceReport {
            name,
            device,
            hardware: limits.hardware.clone(),
            compiler: limits.compiler,
            dtypes,
            plane_size: Some(limits.plane_size),
            shared_memory: Some(limits.shared_memory),
            max_bindings: Some(limits.max_bindings),
            matrix_shapes: limits.matrix_shapes.clone(),
            forward,
            backward,
        };
    }
    DeviceReport {
        name,
        device,
        hardware: "host processor".to_string(),
        compiler: "rust",
        dtypes,
        plane_size: None,
        shared_memory: None,
        max_bindings: None,
        matrix_shapes: Vec::new(),
        forward,
        backward,
    }
}

/// Which kernels serve a problem on a device, and why faster ones do not.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// What runs the forward pass.
    pub forward: Served,
    /// What runs the backward pass.
    pub backward: Served,
    /// Families that were asked first, each with its reason for declining.
    pub declined: Vec<(&'static str, String)>,
}

/// The kernels of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The family that runs.
    pub family: &'static str,
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            block_q,
            block_kv,
        } = self;
        write!(f, "{family}, blocks of {block_q} queries x {block_kv} keys")
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "forward {}; backward {}", self.forward, self.backward)?;
        for (family, reason) in &self.declined {
            write!(f, "; {family} declined: {reason}")?;
        }
        Ok(())
    }
}

/// Which kernels would serve `problem` on `device`.
///
/// # Errors
/// [`AttentionError`](crate::AttentionError) where none does.
pub fn explain(problem: &Problem, device: &Device) -> Result<Explanation, crate::AttentionError> {
    #[cfg(feature = "cube")]
    if let Some(limits) = crate::cube::limits(device) {
        let blueprint = kernels_cubecl::plan::plan(problem, &limits)?;
        let served = |served: kernels_cubecl::plan::Served| Served {
            family: served.family,
            block_q: served.block_q,
            block_kv: served.block_kv,
        };
        return Ok(Explanation {
            forward: served(blueprint.forward()),
            backward: served(blueprint.backward()),
            declined: blueprint.declined(),
        });
    }
    let _ = device;
    let (block_q, block_kv) = crate::composed::blocks(problem);
    let composed = Served {
        family: COMPOSED,
        block_q,
        block_kv,
    };
    Ok(Explanation {
        forward: composed,
        backward: composed,
        declined: Vec::new(),
    })
}
