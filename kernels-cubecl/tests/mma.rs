//! What the register-fragment family takes and what it declines, on recorded devices.

use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
use kernels_cubecl::device::Device;
use kernels_cubecl::mma::{Blocks, Decline, plan};

/// An NVIDIA device as the C++ generator reports it.
fn nvidia(name: &str, capability: u32, shared_memory: usize) -> Device {
    let shapes = ["16x8x16 f16 -> f32", "16x8x16 bf16 -> f32"].map(str::to_string);
    Device {
        hardware: name.to_string(),
        compiler: "cuda c++",
        plane_size: (32, 32),
        shared_memory,
        units: 1024,
        max_bindings: 1024,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_buffer: 16 << 30,
        software: false,
        loop_iterations: None,
        dtypes: Dtype::ALL.to_vec(),
        matrix_shapes: shapes.to_vec(),
        mma_shapes: shapes.to_vec(),
        ldmatrix: vec![Dtype::F16, Dtype::BF16],
        copy_async: true,
        cuda_capability: Some(capability),
        tensor_copies: capability >= 90,
    }
}

fn devices() -> [Device; 3] {
    [
        nvidia("A100", 80, 166_912),
        nvidia("RTX 4090", 89, 101_376),
        nvidia("H200", 90, 232_448),
    ]
}

fn problem(dims: [usize; 2], dtype: Dtype) -> Problem {
    let operands = Operands {
        query: Operand::new([1, 4, 300, dims[0]], dtype),
        key: Operand::new([1, 2, 500, dims[0]], dtype),
        value: Operand::new([1, 2, 500, dims[1]], dtype),
        mask: None,
        bias: None,
    };
    Problem::new(&operands, &Options::default()).expect("a valid problem")
}

/// Catches a dimension that no blocks serve, and blocks that a device cannot hold, by either
/// generator.
#[test]
fn every_dimension_is_served_on_every_device() {
    for mut device in devices() {
        for (dtype, copy_async) in [
            (Dtype::BF16, true),
            (Dtype::BF16, false),
            (Dtype::F32, true),
        ] {
            device.copy_async = copy_async;
            for head_dim in 1..=256 {
                for value_dim in [1, 8, 63, 64, 65, 128, 129, 200, 256] {
                    let problem = problem([head_dim, value_dim], dtype);
                    let blueprint = plan(&problem, &device).expect("served");
                    let case = format!("{} {head_dim} {value_dim}: {blueprint:?}", device.hardware);
                    for needed in blueprint.shared_memory(&problem) {
                        assert!(needed <= device.shared_memory, "{case}");
                    }
                    for blocks in [
                        blueprint.forward,
                        blueprint.query_gradient,
                        blueprint.key_value_gradient,
                    ] {
                        assert!(blocks.walked.is_multiple_of(16), "{case}");
                        assert!(blocks.walked <= blocks.units(), "{case}: statistics a unit");
                    }
                    assert_eq!(blueprint.asynchronous, copy_async);
                    assert!(!blueprint.asynchronous || blueprint.assembly);
                }
            }
        }
    }
}

/// Catches a device with room for two cubes that gets blocks of which it holds one.
#[test]
fn two_cubes_share_a_multiprocessor_where_there_is_room() {
    for device in devices() {
        let problem = problem([64, 64], Dtype::F16);
        let blueprint = plan(&problem, &device).expect("served");
        let [forward, _, _] = blueprint.shared_memory(&problem);
        let room = device.shared_memory + 1024;
        assert!(2 * (forward + 1024) <= room, "{}", device.hardware);
    }
    let blueprint = plan(&problem([128, 128], Dtype::F16), &devices()[2]).expect("served");
    let expected = Blocks {
        warps: 4,
        row_tiles: 2,
        walked: 48,
        stages: 2,
        prefetch: true,
        apart: false,
    };
    assert_eq!(blueprint.forward, expected);
}

/// Catches rows of `f32` that are taken for rows of 16-bit numbers.
#[test]
fn f32_takes_twice_the_shared_memory() {
    let device = &devices()[0];
    let blueprint = plan(&problem([64, 64], Dtype::F32), device).expect("served");
    // The same blocks serve both, but for those of the key and value gradients.
    let [forward, query, _] = blueprint.shared_memory(&problem([128, 128], Dtype::F16));
    let [forward_f32, query_f32, _] = blueprint.shared_memory(&problem([64, 64], Dtype::F32));
    assert_eq!([forward_f32, query_f32], [forward, query]);
}

/// Catches blocks with options that hold as many scores as plain ones, to which the cap's derivative and
/// the addresses of masks and biases come on top.
#[test]
fn options_take_smaller_blocks_of_the_gradients() {
    let scores = |blocks: &Blocks| blocks.row_tiles * blocks.walked;
    for device in devices() {
        for dim in [64, 128] {
            let plain = problem([dim, dim], Dtype::BF16);
            let mut capped = plain.clone();
            capped.softcap = Some(20.0);
            let mut masked = plain.clone();
            masked.mask = Some([1, 1, 300, 500]);
            let before = plan(&plain, &device).expect("served");
            for problem in [capped, masked] {
                let with = plan(&problem, &device).expect("served");
                let case = format!("{} {dim}: {with:?}", device.hardware);
                assert!(scores(&with.query_gradient) <= scores(&before.query_gradient));
                let sums = |blocks: &Blocks| blocks.row_tiles * dim + scores(blocks);
                let (key_value, plain) = (&with.key_value_gradient, &before.key_value_gradient);
                assert!(sums(key_value) <= sums(plain), "{case}");
            }
        }
    }
}

/// Catches walked rows of `f32` without room for their parts beside the place where they land, or whose
/// chunks are no whole number for each unit that takes them apart.
#[test]
fn rows_that_are_taken_apart_have_room_for_both() {
    let dims = problem([128, 128], Dtype::F32);
    let blueprint = plan(&dims, &devices()[2]).expect("served");
    // Pitches in chunks: 32 of a whole row and 48 of its parts, and one more.
    let needed = |walked: usize, statistics: usize| {
        let tiles = 2 * (128 * 33 + walked * (33 + 49)) * 16;
        tiles + statistics * 3 * 4 + (walked + 1) * 4 + 128
    };
    let [_, query, key_value] = blueprint.shared_memory(&dims);
    assert_eq!(query, needed(32, 128));
    assert_eq!(key_value, needed(16, 16));
    for device in devices() {
        for dim in 1..=256 {
            let blueprint = plan(&problem([dim, dim], Dtype::F32), &device).expect("served");
            assert!(!blueprint.forward.apart);
            for blocks in [blueprint.query_gradient, blueprint.key_value_gradient] {
                let shared = blocks.units().is_multiple_of(blocks.walked);
                assert!(!blocks.apart || shared, "{dim}: {blocks:?}");
            }
        }
    }
}

/// Catches a problem or device that is taken although an instruction is missing, and a reason that
/// does not name it.
#[test]
fn what_is_missing_is_named() {
    let [mut device, ..] = devices();
    let f16 = problem([64, 64], Dtype::F16);
    device.mma_shapes.retain(|shape| !shape.contains(" f16"));
    let error = plan(&f16, &device).unwrap_err().to_string();
    assert_eq!(error, "device A100 has no 16x8x16 f16 -> f32");
    plan(&problem([64, 64], Dtype::BF16), &device).expect("the other type is still there");

    let [mut device, ..] = devices();
    device.ldmatrix.clear();
    let error = plan(&f16, &device).unwrap_err().to_string();
    assert_eq!(error, "device A100 has no ldmatrix of f16");

    let [mut device, ..] = devices();
    let f32 = problem([64, 64], Dtype::F32);
    device.mma_shapes.retain(|shape| !shape.contains("bf16"));
    let error = plan(&f32, &device).unwrap_err().to_string();
    assert_eq!(error, "device A100 has no 16x8x16 bf16 -> f32");

    let [mut device, ..] = devices();
    device.copy_async = false;
    device.compiler = "llvm";
    let error = plan(&f32, &device).unwrap_err();
    let expected = Decline::Compiler {
        device: "A100".to_string(),
        given: "llvm",
    };
    assert_eq!(error, expected);

    let [mut device, ..] = devices();
    device.plane_size = (32, 64);
    let error = plan(&f16, &device).unwrap_err().to_string();
    assert_eq!(
        error,
        "device A100 has planes of (32, 64) units, expected 32"
    );

    let [mut device, ..] = devices();
    device.shared_memory = 16 << 10;
    let error = plan(&problem([256, 256], Dtype::F16), &device).unwrap_err();
    assert!(matches!(error, Decline::SharedMemory { given: 16_384, .. }));

    let [device, ..] = devices();
    for scale in [0.0, 1e-31, -1e-31, 3e38] {
        let mut scaled = problem([64, 64], Dtype::F16);
        scaled.scale = scale;
        let error = plan(&scaled, &device).unwrap_err();
        assert!(matches!(error, Decline::Scale { .. }), "{scale}");
    }
}

/// Catches sums of `f32` in a single accumulator where they are too long for it, by rows and, through the
/// group of heads that reads a key, by columns.
#[test]
fn long_sums_of_f32_are_declined() {
    let [device, ..] = devices();
    let long = |seq_q, seq_kv, dtype| {
        let mut problem = problem([64, 64], dtype);
        (problem.seq_q, problem.seq_kv) = (seq_q, seq_kv);
        plan(&problem, &device)
    };
    let error = long(5, 131_073, Dtype::F32).unwrap_err().to_string();
    assert_eq!(
        error,
        "a sum of f32 has 131073 terms, expected at most 131072"
    );
    assert!(long(5, 131_072, Dtype::F32).is_ok());
    // Two query heads read each key head.
    assert!(long(65_536, 5, Dtype::F32).is_ok());
    assert!(long(65_537, 5, Dtype::F32).is_err());
    assert!(long(131_073, 131_073, Dtype::BF16).is_ok());
}
