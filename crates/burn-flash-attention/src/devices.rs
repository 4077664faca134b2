//! What is compiled in and found, and which kernels would serve a problem there.

use burn::tensor::{DType, Device};
use flash_attention_spec::{Dtype, F32Precision, Operand, Operands, Options, Problem};
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
#[non_exhaustive]
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
    /// Whether it is the host's processor, behind a graphics interface too, and no card.
    pub processor: bool,
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
    let each = BACKENDS.iter().flat_map(|&(feature, enumerate)| {
        let devices = enumerate().into_iter().enumerate();
        devices.map(move |(n, device)| report(name(feature, n), device))
    });
    each.collect()
}

/// The device that [`devices`] lists under `name`, without a look at any other backend.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// assert_eq!(burn_flash_attention::device("flex").unwrap().hardware, "host processor");
/// assert!(burn_flash_attention::device("abacus").is_none());
/// # }
/// ```
pub fn device(name: &str) -> Option<DeviceReport> {
    named(BACKENDS, name).map(|device| report(name.to_string(), device))
}

/// Looks for the devices of a backend, which loads its driver and may take a while.
type Enumerate = fn() -> Vec<Device>;

/// Each backend feature that is on.
const BACKENDS: &[(&str, Enumerate)] = &[
    #[cfg(feature = "flex")]
    ("flex", || vec![Device::flex()]),
    #[cfg(feature = "cuda")]
    ("cuda", || enumerate(burn::tensor::DeviceType::Cuda)),
    #[cfg(feature = "rocm")]
    ("rocm", || enumerate(burn::tensor::DeviceType::Rocm)),
    #[cfg(feature = "metal")]
    ("metal", || enumerate(burn::tensor::DeviceType::Metal)),
    #[cfg(feature = "vulkan")]
    ("vulkan", || enumerate(burn::tensor::DeviceType::Vulkan)),
    #[cfg(feature = "webgpu")]
    ("webgpu", || enumerate(burn::tensor::DeviceType::WebGpu)),
    #[cfg(feature = "wgpu")]
    ("wgpu", || enumerate(burn::tensor::DeviceType::Wgpu)),
    #[cfg(feature = "cpu")]
    ("cpu", || enumerate(burn::tensor::DeviceType::Cpu)),
];

/// Name of the `n`th device of a backend.
fn name(feature: &str, n: usize) -> String {
    match n {
        0 => feature.to_string(),
        _ => format!("{feature}:{n}"),
    }
}

/// The device of that name, of the one backend that can have it.
fn named(backends: &[(&str, Enumerate)], wanted: &str) -> Option<Device> {
    let feature = wanted.split(':').next()?;
    let (_, enumerate) = backends.iter().find(|(known, _)| *known == feature)?;
    let mut devices = enumerate().into_iter().enumerate();
    devices.find_map(|(n, device)| (name(feature, n) == wanted).then_some(device))
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
        let operands = Operands::new(operand.clone(), operand.clone(), operand);
        let problem = Problem::new(&operands, &Options::new());
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
            processor: limits.software,
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
        processor: true,
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
#[non_exhaustive]
pub struct Explanation {
    /// What runs the forward pass.
    pub forward: Served,
    /// What runs the backward pass.
    pub backward: Served,
    /// Families that were asked first, each with its reason for declining.
    pub declined: Vec<(&'static str, String)>,
    /// Where the problem permits TF32 for its `f32` operands: how their products are formed. `None` where
    /// it does not, or has no `f32` operands.
    pub f32_precision: Option<F32Precision>,
}

/// The kernels of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
        match self.f32_precision {
            None => Ok(()),
            Some(F32Precision::Tf32) => f.write_str("; f32 rounded to TF32"),
            Some(F32Precision::Full) => {
                f.write_str("; f32 in full, TF32 has no form here or none for sums this long")
            }
        }
    }
}

/// Which kernels would serve `problem` on `device`.
///
/// # Errors
/// [`AttentionError`](crate::AttentionError) where none does.
pub fn explain(problem: &Problem, device: &Device) -> Result<Explanation, crate::AttentionError> {
    let permitted = problem.f32_precision == F32Precision::Tf32;
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
            f32_precision: permitted.then(|| blueprint.f32_precision()),
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
        f32_precision: permitted.then_some(F32Precision::Full),
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Catches a permission that nothing is heard of, and one that was not given.
    #[test]
    fn what_becomes_of_f32_is_said_where_tf32_is_permitted() {
        let device = Device::flex();
        let explained = |dtype, precision| {
            let operand = Operand::new([1, 1, 64, 64], dtype);
            let operands = Operands::new(operand.clone(), operand.clone(), operand);
            let options = Options::new().f32_precision(precision);
            let problem = Problem::new(&operands, &options).unwrap();
            explain(&problem, &device).unwrap()
        };
        let permitted = explained(Dtype::F32, F32Precision::Tf32);
        assert_eq!(permitted.f32_precision, Some(F32Precision::Full));
        assert!(
            permitted
                .to_string()
                .ends_with("; f32 in full, TF32 has no form here or none for sums this long")
        );
        for other in [
            explained(Dtype::F32, F32Precision::Full),
            explained(Dtype::BF16, F32Precision::Tf32),
        ] {
            assert_eq!(other.f32_precision, None);
            assert!(!other.to_string().contains("f32"), "{other}");
        }
    }

    /// Catches a driver that is loaded, with all it prints, though another device was asked for.
    #[test]
    fn a_name_is_looked_for_in_its_own_backend_only() {
        let two: Enumerate = || vec![Device::flex(), Device::flex()];
        let backends: [(&str, Enumerate); 3] = [
            ("vulkan", || panic!("the driver was loaded")),
            ("flex", two),
            ("cuda", || panic!("the driver was loaded")),
        ];
        for there in ["flex", "flex:1"] {
            assert!(named(&backends, there).is_some(), "{there}");
        }
        for absent in ["flex:0", "flex:2", "flex:", "flexible", "", ":1"] {
            assert!(named(&backends, absent).is_none(), "{absent}");
        }
    }
}
