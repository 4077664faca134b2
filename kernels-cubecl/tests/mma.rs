//! What the register-fragment family takes and what it declines, on recorded devices.

use flash_attention_spec::{Dtype, F32Precision, Operand, Operands, Options, Problem, Summation};
use kernels_cubecl::device::Device;
use kernels_cubecl::mma::{Blocks, Decline, OnePass, Ties, plan};
use kernels_cubecl::plan as families;

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
        left_out: Vec::new(),
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
                    if let Some(one_pass) = blueprint.one_pass {
                        let needed = one_pass.shared_memory(&problem);
                        assert!(needed <= device.shared_memory, "{case}");
                        assert!(
                            one_pass.walked <= one_pass.units(),
                            "{case}: statistics a unit"
                        );
                    }
                    assert_eq!(blueprint.assembly, copy_async);
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
            let mut capped = plain;
            capped.softcap = Some(20.0);
            let mut masked = plain;
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

/// Catches heads of models that fall back to two kernels where one pass fits, and blocks that share a
/// multiprocessor on paper only.
#[test]
fn one_pass_serves_common_heads() {
    let [a100, rtx_4090, h200] = devices();
    let form = |dim, device: &Device| {
        let blueprint = plan(&problem([dim, dim], Dtype::BF16), device).expect("served");
        let form = |one_pass: OnePass| (one_pass.owned(), one_pass.sides, one_pass.stages);
        blueprint.one_pass.map(form)
    };
    for (dim, expected) in [
        (
            64,
            [Some((128, 1, 1)), Some((128, 2, 1)), Some((128, 1, 2))],
        ),
        (96, [Some((128, 2, 2)), None, Some((128, 2, 2))]),
        (128, [Some((128, 2, 1)), None, Some((128, 2, 2))]),
        (192, [Some((64, 4, 1)), None, Some((64, 4, 2))]),
        (256, [Some((64, 4, 1)), None, Some((64, 4, 2))]),
        // Features that eight warps cannot divide among themselves in whole tiles.
        (80, [None, None, None]),
        (72, [None, None, None]),
    ] {
        let found = [&a100, &rtx_4090, &h200].map(|device| form(dim, device));
        assert_eq!(found, expected, "{dim}");
    }
    let problem = problem([64, 64], Dtype::BF16);
    for device in [&a100, &h200] {
        let one_pass = plan(&problem, device).expect("served").one_pass.unwrap();
        assert_eq!(one_pass.warps, 4);
        let needed = 2 * (one_pass.shared_memory(&problem) + 1024);
        assert!(needed <= device.shared_memory + 1024);
    }
}

/// Catches a blueprint that drops the order of additions, and instructions of a newer device or of the
/// other generator.
#[test]
fn one_pass_knows_its_order_and_its_device() {
    let [a100, _, h200] = devices();
    for summation in [Summation::Reproducible, Summation::Unordered] {
        let mut problem = problem([128, 128], Dtype::F16);
        problem.summation = summation;
        for (device, wide) in [(&a100, false), (&h200, true)] {
            let one_pass = plan(&problem, device).expect("served").one_pass.unwrap();
            assert_eq!((one_pass.summation, one_pass.wide), (summation, wide));
        }
        let other = Device {
            copy_async: false,
            ..h200.clone()
        };
        let one_pass = plan(&problem, &other).expect("served").one_pass.unwrap();
        assert!(!one_pass.wide);
    }
    assert_eq!(
        plan(&problem([64, 64], Dtype::F32), &a100)
            .unwrap()
            .one_pass,
        None
    );
}

/// Catches sums of the query gradient in a buffer that the device does not have.
#[test]
fn sums_that_no_buffer_holds_take_two_kernels() {
    let [_, _, h200] = devices();
    let one_pass = |max_buffer| {
        let device = Device {
            max_buffer,
            ..h200.clone()
        };
        plan(&problem([64, 64], Dtype::F16), &device)
            .unwrap()
            .one_pass
    };
    // 4 heads of 5 blocks of 64 queries.
    let bytes = 4 * 5 * 64 * 64 * 4;
    assert!(one_pass(bytes).is_some());
    assert_eq!(one_pass(bytes - 1), None);
}

/// `problem`, with permission to round to TF32.
fn permitted(dims: [usize; 2], dtype: Dtype) -> Problem {
    let mut problem = problem(dims, dtype);
    problem.f32_precision = F32Precision::Tf32;
    problem
}

/// Catches a permission that is not used where it can be, one that is taken without being given, and one
/// that moves 16-bit kernels.
#[test]
fn tf32_is_used_where_it_is_permitted() {
    for device in devices() {
        let dims = [64, 64];
        let rounded = plan(&permitted(dims, Dtype::F32), &device).expect("served");
        let capability = device.cuda_capability.expect("of NVIDIA");
        let ties = if capability >= 90 {
            Ties::Even
        } else {
            Ties::Away
        };
        assert_eq!(rounded.tf32, Some(ties), "{}", device.hardware);
        assert_eq!(rounded.f32_precision(), F32Precision::Tf32);
        let full = plan(&problem(dims, Dtype::F32), &device).expect("served");
        assert_eq!(full.f32_precision(), F32Precision::Full);

        // What a caller permits is only kept for `f32`.
        let operand = |heads| Operand::new([1, heads, 300, 64], Dtype::BF16);
        let operands = Operands::new(operand(4), operand(2), operand(2));
        let options = Options::new().f32_precision(F32Precision::Tf32);
        let bf16 = Problem::new(&operands, &options).expect("a valid problem");
        let bf16 = plan(&bf16, &device).expect("served");
        assert_eq!(bf16.f32_precision(), F32Precision::Full);
    }
}

/// Catches a plan that rounds more than asked for where no kernel rounds to TF32: by the other generator,
/// and where sums are too long to stay on the units.
#[test]
fn tf32_is_a_permission() {
    let [_, _, mut device] = devices();
    let dims = permitted([64, 64], Dtype::F32);
    let blueprint = families::plan(&dims, &device).expect("served");
    assert_eq!(blueprint.f32_precision(), F32Precision::Tf32);
    // Other families have no `f32`, and so do not take the problem from this one.
    assert_eq!(blueprint.forward().family, families::MMA);
    assert_eq!(blueprint.backward().family, families::MMA);

    let mut long = dims;
    long.seq_kv = (1 << 16) + 1;
    let full = plan(&long, &device).expect("served");
    assert_eq!(full.f32_precision(), F32Precision::Full);
    long.seq_kv -= 1;
    let rounded = plan(&long, &device).expect("served");
    assert_eq!(rounded.f32_precision(), F32Precision::Tf32);

    device.copy_async = false;
    device.compiler = "llvm";
    let blueprint = families::plan(&dims, &device).expect("served");
    assert_eq!(blueprint.forward().family, families::PORTABLE);
    assert_eq!(blueprint.f32_precision(), F32Precision::Full);
}

/// Catches a dimension that no blocks of TF32 serve, and blocks that a device cannot hold.
#[test]
fn tf32_has_blocks_for_every_dimension() {
    for device in devices() {
        for head_dim in 1..=256 {
            for value_dim in [1, 63, 64, 65, 128, 129, 256] {
                let problem = permitted([head_dim, value_dim], Dtype::F32);
                let blueprint = plan(&problem, &device).expect("served");
                let case = format!("{} {head_dim} {value_dim}: {blueprint:?}", device.hardware);
                assert!(blueprint.tf32.is_some(), "{case}");
                for needed in blueprint.shared_memory(&problem) {
                    assert!(needed <= device.shared_memory, "{case}");
                }
                for blocks in [
                    blueprint.forward,
                    blueprint.query_gradient,
                    blueprint.key_value_gradient,
                ] {
                    assert!(blocks.walked <= blocks.units(), "{case}: statistics a unit");
                    // Numbers are not taken apart.
                    assert!(!blocks.apart, "{case}");
                }
            }
        }
    }
}
