//! The plan on recorded devices: a blueprint that fits, or an error that names what is missing.

use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
use kernels_cubecl::device::Device;
use kernels_cubecl::plan::{PlanError, plan};
use kernels_cubecl::portable::Tile;

/// WebGPU's guaranteed limits, of whose eight buffers the runtime keeps one.
fn webgpu() -> Device {
    Device {
        hardware: "webgpu".to_string(),
        compiler: "wgsl",
        plane_size: (4, 64),
        shared_memory: 16 << 10,
        units: 256,
        max_bindings: 7,
        max_cube_count: (65_535, 65_535, 65_535),
        max_buffer: 128 << 20,
        software: false,
        loop_iterations: None,
        dtypes: vec![Dtype::F32],
        matrix_shapes: Vec::new(),
        mma_shapes: Vec::new(),
        ldmatrix: Vec::new(),
        copy_async: false,
        cuda_capability: None,
        tensor_copies: false,
        left_out: Vec::new(),
    }
}

/// As an NVIDIA H200 reports itself.
fn h200() -> Device {
    Device {
        hardware: "NVIDIA H200".to_string(),
        compiler: "cuda c++",
        plane_size: (32, 32),
        shared_memory: 232_448,
        units: 1024,
        max_bindings: 1024,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_buffer: 64 << 30,
        software: false,
        loop_iterations: None,
        dtypes: Dtype::ALL.to_vec(),
        matrix_shapes: Vec::new(),
        mma_shapes: vec![
            "16x8x16 f16 -> f32".to_string(),
            "16x8x16 bf16 -> f32".to_string(),
        ],
        ldmatrix: vec![Dtype::F16, Dtype::BF16],
        copy_async: true,
        cuda_capability: Some(90),
        tensor_copies: true,
        left_out: Vec::new(),
    }
}

fn problem(seq: usize, dims: [usize; 2], dtype: Dtype, mask: bool, bias: bool) -> Problem {
    let [head_dim, value_dim] = dims;
    let full = [1, 2, seq, seq];
    let operands = Operands {
        query: Operand::new([1, 2, seq, head_dim], dtype),
        key: Operand::new([1, 2, seq, head_dim], dtype),
        value: Operand::new([1, 2, seq, value_dim], dtype),
        mask: mask.then(|| Operand::new(full, flash_attention_spec::ElementType::Bool)),
        bias: bias.then(|| Operand::new(full, dtype)),
    };
    Problem::new(&operands, &Options::default()).expect("a valid problem")
}

/// Catches blocks that the device cannot hold, for any head dimension.
#[test]
fn every_blueprint_fits_its_device() {
    for device in [webgpu(), h200()] {
        for head_dim in 1..=256 {
            for value_dim in [1, 64, 65, 256] {
                let problem = problem(64, [head_dim, value_dim], Dtype::F32, true, false);
                let blueprint = plan(&problem, &device).expect("one option fits seven bindings");
                for tile in [blueprint.portable.forward, blueprint.portable.backward] {
                    assert!(tile.shared_memory() <= device.shared_memory, "{tile:?}");
                    assert!(tile.units() <= device.units, "{tile:?}");
                }
            }
        }
    }
}

/// Catches a plan that stays with the smallest blocks where larger ones fit.
#[test]
fn a_large_device_gets_large_blocks() {
    let problem = problem(64, [64, 64], Dtype::F32, false, false);
    assert_eq!(
        plan(&problem, &h200()).unwrap().portable.forward,
        Tile::LARGE
    );
    assert_eq!(
        plan(&problem, &webgpu()).unwrap().portable.forward,
        Tile::SMALLEST
    );
    let software = Device {
        software: true,
        loop_iterations: Some(65_535),
        shared_memory: 32 << 10,
        ..webgpu()
    };
    let tile = |seq| {
        let problem = self::problem(seq, [64, 64], Dtype::F32, false, false);
        plan(&problem, &software).unwrap().portable.forward
    };
    assert_eq!(tile(257), Tile::SOFTWARE);
    assert_eq!(tile(256), Tile::SMALLEST);
}

/// Catches a launch with more buffers than the device binds: with mask and bias, key and value share
/// one where there are only seven.
#[test]
fn too_few_bindings_pack_key_and_value() {
    let both = problem(64, [64, 64], Dtype::F32, true, true);
    let binding = |max_bindings| Device {
        max_bindings,
        ..webgpu()
    };
    assert!(plan(&both, &binding(7)).unwrap().portable.packed_key_value);
    assert!(!plan(&both, &binding(8)).unwrap().portable.packed_key_value);
    let one = problem(64, [64, 64], Dtype::F32, true, false);
    assert!(!plan(&one, &binding(7)).unwrap().portable.packed_key_value);
    let error = plan(&both, &binding(6)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device webgpu binds 6 buffers in a kernel, expected at least 7 for gradients"
    );
}

/// Catches accumulators of both gradients in the registers of a GPU's unit where they do not fit.
#[test]
fn wide_heads_compute_key_and_value_gradients_apart() {
    let together = |dims, device: &Device| {
        let problem = problem(64, dims, Dtype::F32, false, false);
        plan(&problem, device).unwrap().portable.key_value_together
    };
    assert!(together([64, 64], &h200()));
    assert!(together([256, 256], &h200()));
    assert!(together([64, 64], &webgpu()));
    assert!(!together([256, 256], &webgpu()));
}

/// Catches an element type that reaches a device without it.
#[test]
fn a_missing_element_type_is_named() {
    let half = problem(64, [64, 64], Dtype::F16, false, false);
    assert_eq!(
        plan(&half, &webgpu()).unwrap_err().to_string(),
        "device webgpu has no f16, expected one of f32"
    );
    assert!(plan(&half, &h200()).is_ok());
}

/// Catches a device too small for any blocks, one limit at a time.
#[test]
fn too_little_for_the_smallest_blocks() {
    let problem = problem(64, [64, 64], Dtype::F32, false, false);
    let starved = [
        Device {
            shared_memory: Tile::SMALLEST.shared_memory() - 1,
            ..webgpu()
        },
        Device {
            units: Tile::SMALLEST.units() - 1,
            ..webgpu()
        },
    ];
    for device in starved {
        let error = plan(&problem, &device).unwrap_err();
        assert!(matches!(error, PlanError::Cube { .. }), "{error}");
    }
}

/// Catches an output that no buffer of the device holds.
#[test]
fn outputs_past_the_largest_buffer() {
    // 2 heads x 65,537 rows x 256 features x 4 bytes lie just past 128 MiB.
    let long = problem(65_537, [64, 256], Dtype::F32, false, false);
    let error = plan(&long, &webgpu()).unwrap_err();
    assert!(
        matches!(
            error,
            PlanError::Buffer {
                operand: "output",
                given: 134_219_776,
                ..
            }
        ),
        "{error}"
    );
}

/// Catches a walk that a driver ends early, which leaves wrong numbers: by long rows, by long columns
/// that a group of heads reads, and by a bias that many blocks of scores add to.
#[test]
fn loops_past_what_a_device_runs() {
    let llvmpipe = Device {
        software: true,
        loop_iterations: Some(65_535),
        shared_memory: 32 << 10,
        max_buffer: 1 << 40,
        ..webgpu()
    };
    let shapes = |heads: usize, seq_q: usize, seq_kv: usize, bias: Option<[usize; 4]>| {
        let float = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
        let operands = Operands {
            query: float([1, heads, seq_q, 64]),
            key: float([1, 1, seq_kv, 64]),
            value: float([1, 1, seq_kv, 64]),
            mask: None,
            bias: bias.map(float),
        };
        Problem::new(&operands, &Options::default()).unwrap()
    };
    let refused = |problem: Problem| match plan(&problem, &llvmpipe) {
        Ok(_) => false,
        Err(error) => {
            assert!(
                matches!(error, PlanError::Iterations { expected: 65_535, given, .. } if given > 65_535),
                "{error}"
            );
            assert!(plan(&problem, &h200()).is_ok());
            true
        }
    };
    assert!(!refused(shapes(1, 64, 10_000, None)));
    assert!(refused(shapes(1, 64, 100_000, None)));
    assert!(!refused(shapes(1, 10_000, 64, None)));
    assert!(refused(shapes(1, 100_000, 64, None)));
    assert!(refused(shapes(16, 10_000, 64, None)));
    assert!(!refused(shapes(1, 3000, 3000, Some([1, 1, 3000, 3000]))));
    assert!(refused(shapes(1, 3000, 3000, Some([1; 4]))));
}
