//! Every kernel's CUDA C++ without a device, for the test `machine_code`, which compiles it and reads
//! registers, spills and instructions. Each family lists its kernels in a file of the same name.

use crate::device::Device;
use crate::portable::{BiasShape, BiasShapeLaunch};
use crate::schedule::{Geometry, GeometryLaunch};
use cubecl::Compiler;
use cubecl::cmma::MatrixLayout;
use cubecl::ir::{
    AddressType, ContiguousElements, DeviceIdentity, DeviceProperties, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties,
    features::{Features, Plane, Tma, TypeUsage},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_wmma_features,
};
use cubecl_cpp::target::Cuda;
use flash_attention_spec::{Dtype, ElementType, Operand, Operands, Problem};
use std::sync::Arc;

/// A kernel of a family, in one of the forms that a plan can give it.
pub struct Specimen {
    /// Family, kernel, element type, sizes and options.
    pub name: String,
    build: Build,
}

type Build = Box<dyn Fn(&mut Offline) -> Box<dyn CubeKernel> + Send + Sync>;

/// CUDA C++ of a kernel.
pub struct Source {
    /// The text that the runtime would hand to NVRTC.
    pub code: String,
    /// Dynamic shared memory of a launch, in bytes.
    pub shared_memory: usize,
}

/// Stands for the CUDA runtime on a device: what kernels are told about it, and their arguments.
pub(crate) struct Offline {
    pub properties: Arc<DeviceProperties>,
    pub target: Arc<TargetProperties>,
    launcher: KernelLauncher,
}

/// What a call has beside its operands, as far as it changes the code of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub mask: bool,
    pub bias: bool,
    pub softcap: bool,
}

/// The kernels that plans choose on a device of compute capability `version`, each once.
pub fn specimens(version: u32) -> Vec<Specimen> {
    let device = Device::describe("cuda", &properties(version));
    let mut all = crate::portable::specimens(&device);
    all.extend(crate::mma::specimens(&device));
    all.extend(crate::hopper::specimens(&device));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all.dedup_by(|a, b| a.name == b.name);
    all
}

impl Specimen {
    pub(crate) fn new(
        name: impl Into<String>,
        build: impl Fn(&mut Offline) -> Box<dyn CubeKernel> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            build: Box::new(build),
        }
    }

    /// The kernel's source for compute capability `version`.
    ///
    /// # Errors
    /// What CubeCL says against the kernel.
    pub fn source(&self, version: u32) -> Result<Source, String> {
        let mut offline = Offline::new(version);
        let kernel = (self.build)(&mut offline);
        let definition = kernel.define();
        offline.launcher.discard();
        let options = CompilationOptions {
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: version >= 90,
                fast_math: true,
                fast_tanh: true,
                elect_sync: version >= 90,
                dp4a: true,
            },
            ..Default::default()
        };
        let kernel = CppCompiler::<Cuda>::default()
            .compile(definition, &options)
            .map_err(|error| format!("{error:?}"))?;
        Ok(Source {
            shared_memory: kernel.shared_memory_size,
            code: kernel.source,
        })
    }
}

impl Options {
    pub(crate) const NONE: Self = Self {
        mask: false,
        bias: false,
        softcap: false,
    };
    pub(crate) const MASK: Self = Self {
        mask: true,
        ..Self::NONE
    };
    pub(crate) const BIAS: Self = Self {
        bias: true,
        ..Self::NONE
    };
    pub(crate) const SOFTCAP: Self = Self {
        softcap: true,
        ..Self::NONE
    };
    pub(crate) const ALL: Self = Self {
        mask: true,
        bias: true,
        softcap: true,
    };

    /// The end of a specimen's name.
    pub(crate) fn suffix(self) -> String {
        let words = [
            (self.mask, " mask"),
            (self.bias, " bias"),
            (self.softcap, " softcap"),
        ];
        let present = words.into_iter().filter(|(present, _)| *present);
        present.map(|(_, word)| word).collect()
    }

    /// A problem that has them.
    pub(crate) fn problem(self, [head_dim, value_dim]: [usize; 2], dtype: Dtype) -> Problem {
        let scores = [1, 1, 256, 256];
        let operands = Operands {
            query: Operand::new([1, 2, 256, head_dim], dtype),
            key: Operand::new([1, 2, 256, head_dim], dtype),
            value: Operand::new([1, 2, 256, value_dim], dtype),
            mask: self.mask.then(|| Operand::new(scores, ElementType::Bool)),
            bias: self.bias.then(|| Operand::new(scores, dtype)),
        };
        let options = flash_attention_spec::Options {
            softcap: self.softcap.then_some(20.0),
            ..Default::default()
        };
        Problem::new(&operands, &options).expect("a valid problem")
    }
}

/// The features of the heads that models have.
pub(crate) const HEADS: [usize; 5] = [64, 96, 128, 192, 256];

/// Those of the heads that options are tried on.
pub(crate) const HEADS_WITH_OPTIONS: [usize; 3] = [64, 128, 256];

/// The heads that forms which differ little from others are tried on.
pub(crate) const HEADS_OF_EVERY_FORM: usize = 128;

impl Offline {
    fn new(version: u32) -> Self {
        let settings = KernelSettings::new(
            *CubeDim::new_1d(1),
            ExecutionMode::Unchecked,
            AddressType::U32,
        );
        Self {
            properties: Arc::new(properties(version)),
            target: Arc::new(target()),
            launcher: KernelLauncher::new(settings),
        }
    }

    /// Settings of a launch without bound checks.
    pub fn settings(&self, units: u32, address_type: AddressType) -> KernelSettings {
        KernelSettings::new(
            *CubeDim::new_1d(units),
            ExecutionMode::Unchecked,
            address_type,
        )
    }

    /// The argument `&Tensor<_>` or `&mut Tensor<_>` with four dimensions.
    pub fn tensor(&mut self) -> TensorCompilationArg {
        TensorCompilationArg {
            meta: TensorMeta::register(TensorMetaLaunch::new(1, 4), &mut self.launcher),
            buffer: self.buffer(),
        }
    }

    /// The argument `&[_]` or `&mut [_]`.
    pub fn buffer(&self) -> BufferCompilationArg {
        BufferCompilationArg { inplace: None }
    }

    /// An optional tensor.
    pub fn optional<T: LaunchArg<CompilationArg = TensorCompilationArg> + CubeType>(
        &mut self,
        present: bool,
    ) -> ComptimeOptionCompilationArg<T> {
        if present {
            ComptimeOptionCompilationArg::Some(self.tensor())
        } else {
            ComptimeOptionCompilationArg::None
        }
    }

    /// A scalar of type `usize`.
    pub fn index(&mut self) -> <usize as LaunchArg>::CompilationArg {
        <usize as LaunchArg>::register(1, &mut self.launcher)
    }

    /// The run-time numbers of a problem.
    pub fn geometry(&mut self) -> <Geometry as LaunchArg>::CompilationArg {
        let geometry = GeometryLaunch::new(1, 1, 1, 1, 1, 0, 0, 0, 1.0, 1.0, f32::NEG_INFINITY);
        Geometry::register(geometry, &mut self.launcher)
    }

    /// The shape of a bias.
    pub fn bias_shape(&mut self) -> <BiasShape as LaunchArg>::CompilationArg {
        BiasShape::register(BiasShapeLaunch::new(1, 1, 1, 1), &mut self.launcher)
    }
}

/// What the CUDA runtime with its C++ generator reports for compute capability `version`, as far as
/// kernels depend on it.
fn properties(version: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: match version {
            80 => 163 << 10,
            90.. => 227 << 10,
            _ => 99 << 10,
        },
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: usize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: format!("sm_{version}"),
        fingerprint: format!("ptx_sm{version}"),
        physical: None,
    };
    let mut properties = DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(u64::MAX, 512),
        hardware,
        cubecl::profile::TimingMethod::Device,
        identity,
    );
    cubecl_cpp::register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    let features = &mut properties.features;
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::NonUniformControlFlow);
    features.copy_async = true;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    for float in [cubecl::ir::FloatKind::F16, cubecl::ir::FloatKind::BF16] {
        let float = cubecl::ir::ElemType::Float(float);
        features.matmul.ldmatrix.insert(float);
        if version >= 90 {
            features.matmul.stmatrix.insert(float);
        }
    }
    if version >= 90 {
        features.tma.insert(Tma::Base);
        features.cube_cluster = true;
        properties.register_opaque_type(OpaqueType::TensorMap);
    }
    properties.register_type_usage(
        cubecl::ir::ElemType::Float(cubecl::ir::FloatKind::TF32),
        TypeUsage::Conversion,
    );
    let arch = CudaArchitecture {
        version,
        tensor_cores: true,
    };
    register_wmma_features(
        CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch),
        &mut properties,
    );
    register_mma_features(
        cubecl_cpp::cuda::supported_mma_combinations(&arch),
        &mut properties,
    );
    properties
}

fn target() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}
