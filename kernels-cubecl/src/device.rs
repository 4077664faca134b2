//! What a device can do, as plain data read once from its client.

use cubecl::features::{MmaConfig, Tma, TypeUsage};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::*;
use flash_attention_spec::Dtype;

/// The limits of a device that a plan depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The hardware's own name.
    pub hardware: String,
    /// What kernels are compiled by: `spirv`, `wgsl`, `msl`, `cuda c++`, `llvm`.
    pub compiler: &'static str,
    /// Smallest and largest plane (warp, subgroup).
    pub plane_size: (u32, u32),
    /// Shared memory of a cube, in bytes.
    pub shared_memory: usize,
    /// Units of a cube.
    pub units: u32,
    /// Buffers a kernel can bind.
    pub max_bindings: u32,
    /// Cubes of a launch in x, y and z.
    pub max_cube_count: (u32, u32, u32),
    /// Largest buffer, in bytes.
    pub max_buffer: u64,
    /// A processor behind a graphics interface, or a CPU: no card.
    pub software: bool,
    /// Times that the loops of one unit may go round in a kernel, where there is an end to it: Mesa's
    /// processor driver leaves every loop after so many, and what was computed by then is the result.
    pub loop_iterations: Option<u64>,
    /// Element types it computes with or, as storage, converts to `f32`.
    pub dtypes: Vec<Dtype>,
    /// Matrix-unit instructions, as `m x n x k input -> accumulator`.
    pub matrix_shapes: Vec<String>,
    /// Those of `matrix_shapes` whose registers a kernel holds itself.
    pub mma_shapes: Vec<String>,
    /// Element types that matrix fragments are loaded of from shared memory in one instruction.
    pub ldmatrix: Vec<Dtype>,
    /// Copies from global to shared memory that a kernel does not wait for.
    pub copy_async: bool,
    /// NVIDIA's compute capability, as `90`.
    pub cuda_capability: Option<u32>,
    /// Copies by tensor map between global and shared memory.
    pub tensor_copies: bool,
    /// Names of kernel families that plans leave out: what [`WITHOUT`] lists.
    pub left_out: Vec<String>,
}

/// Environment variable with the names of kernel families to leave out, separated by commas, so that a
/// family can be tested and measured where a faster one would serve: `hopper`, `mma`. A name that is none
/// of them is an error of every plan.
pub const WITHOUT: &str = "BURN_FLASH_ATTENTION_WITHOUT";

/// The names in a list.
fn names(list: &str) -> Vec<String> {
    let names = list.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(str::to_string)
        .collect()
}

/// The CubeCL element type of `dtype`.
pub fn elem_type(dtype: Dtype) -> ElemType {
    ElemType::Float(match dtype {
        Dtype::F32 => FloatKind::F32,
        Dtype::F16 => FloatKind::F16,
        Dtype::BF16 => FloatKind::BF16,
    })
}

impl Device {
    /// Reads the limits of `client`'s device.
    pub fn read(client: &Client) -> Self {
        let list = std::env::var_os(WITHOUT).unwrap_or_default();
        Self {
            left_out: names(&list.to_string_lossy()),
            ..Self::describe(client.name(), client.properties())
        }
    }

    /// The limits in `properties`, as the runtime of that name reports them.
    pub(crate) fn describe(runtime: &'static str, properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let dtypes = Dtype::ALL
            .into_iter()
            .filter(|&dtype| {
                let usage = properties.type_usage(elem_type(dtype));
                usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
            })
            .collect();
        let matmul = &properties.features.matmul;
        let shape =
            |m: &MmaConfig| format!("{}x{}x{} {} -> {}", m.m, m.n, m.k, m.a_type, m.cd_type);
        let mut matrix_shapes: Vec<String> =
            matmul.mma.iter().chain(&matmul.cmma).map(shape).collect();
        // Types of scales tell some apart, and are not named.
        matrix_shapes.dedup();
        let mma_shapes = matmul.mma.iter().map(shape).collect();
        let ldmatrix = Dtype::ALL
            .into_iter()
            .filter(|&dtype| matmul.ldmatrix.contains(&elem_type(dtype)))
            .collect();
        Self {
            hardware: properties.identity.name.clone(),
            compiler: compiler(runtime, properties.features.copy_async),
            plane_size: (hardware.plane_size_min, hardware.plane_size_max),
            shared_memory: hardware.max_shared_memory_size,
            units: hardware.max_units_per_cube.min(hardware.max_cube_dim.0),
            max_bindings: hardware.max_bindings,
            max_cube_count: hardware.max_cube_count,
            max_buffer: properties.memory.max_page_size,
            software: properties.identity.physical.is_none(),
            loop_iterations: properties
                .identity
                .name
                .starts_with("llvmpipe")
                .then_some(65_535),
            dtypes,
            matrix_shapes,
            mma_shapes,
            ldmatrix,
            copy_async: properties.features.copy_async,
            cuda_capability: properties
                .identity
                .fingerprint
                .strip_prefix("ptx_sm")
                .and_then(|version| version.parse().ok()),
            tensor_copies: properties.features.tma.contains(Tma::Base),
            left_out: Vec::new(),
        }
    }
}

/// The CUDA runtime has two generators and does not name the one in use; only the C++ one has
/// asynchronous copies.
fn compiler(runtime: &'static str, copy_async: bool) -> &'static str {
    match runtime {
        "wgpu<spirv>" => "spirv",
        "wgpu<wgsl>" => "wgsl",
        "wgpu<msl>" => "msl",
        "cuda" if copy_async => "cuda c++",
        "cuda" | "cpu" | "hip" => "llvm",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a list that leaves out nothing, or what it does not name.
    #[test]
    fn lists_are_of_names() {
        assert_eq!(names(""), Vec::<String>::new());
        assert_eq!(names("hopper"), ["hopper"]);
        assert_eq!(names(" mma, hopper,"), ["mma", "hopper"]);
    }
}
