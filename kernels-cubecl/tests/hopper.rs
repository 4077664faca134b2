//! What the Hopper family takes and what it declines, on recorded devices and layouts.

use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem, Summation};
use kernels_cubecl::device::{Device, WITHOUT};
use kernels_cubecl::hopper::{
    Declined, Division, GradientBlueprint, check_layout, gradient_variants, plan_backward,
    plan_forward, variants,
};
use kernels_cubecl::plan::{HOPPER, MMA, PORTABLE, plan};

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
        mma_shapes: Vec::new(),
        ldmatrix: Vec::new(),
        copy_async: true,
        cuda_capability: Some(90),
        tensor_copies: true,
        left_out: Vec::new(),
    }
}

fn problem(seq: [usize; 2], dims: [usize; 2], dtype: Dtype, options: Options) -> Problem {
    let operands = Operands {
        query: Operand::new([1, 4, seq[0], dims[0]], dtype),
        key: Operand::new([1, 2, seq[1], dims[0]], dtype),
        value: Operand::new([1, 2, seq[1], dims[1]], dtype),
        mask: None,
        bias: None,
    };
    Problem::new(&operands, &options).expect("a valid problem")
}

/// Catches blocks that the device cannot hold, registers that no unit has, and panels that the
/// products cannot step through.
#[test]
fn every_variant_of_every_dimension_fits() {
    let device = h200();
    for head_dim in (8..=256).step_by(8) {
        for value_dim in (8..=256).step_by(8) {
            let problem = problem(
                [300, 500],
                [head_dim, value_dim],
                Dtype::BF16,
                Options::default(),
            );
            let chosen = plan_forward(&problem, &device).expect("every such dimension is served");
            let all = variants(&problem);
            assert_eq!(
                chosen, all[0],
                "{head_dim} {value_dim}: the first variant fits"
            );
            for blueprint in all {
                let case = format!("{blueprint:?}");
                assert!(blueprint.shared_memory() <= device.shared_memory, "{case}");
                assert!(blueprint.units() <= device.units, "{case}");
                assert!(
                    blueprint.block_kv.is_multiple_of(16) && blueprint.block_kv <= 256,
                    "{case}"
                );
                assert!(blueprint.stages.is_power_of_two(), "{case}");
                let held = (blueprint.block_kv + blueprint.value_dim) / 2;
                let (few, many) = blueprint.registers();
                assert!(
                    held + 32 <= many as usize,
                    "{case}: {held} registers of {many}"
                );
                let first = (65_536 / blueprint.units()) / 8 * 8;
                assert!(
                    few + many * blueprint.warpgroups <= first * (blueprint.warpgroups + 1),
                    "{case}: more registers than the cube has"
                );
            }
        }
    }
}

/// Catches blocks of the gradient kernels that the device cannot hold.
#[test]
fn every_gradient_variant_of_every_dimension_fits() {
    let device = h200();
    for head_dim in (8..=256).step_by(8) {
        for value_dim in (8..=256).step_by(8) {
            let dims = [head_dim, value_dim];
            let problem = problem([300, 500], dims, Dtype::BF16, Options::default());
            let chosen = plan_backward(&problem, &device).expect("every such dimension is served");
            let (query, key_value) = gradient_variants(&problem);
            assert_eq!(chosen.query, query[0], "{dims:?}: the first variant fits");
            assert_eq!(chosen.key_value, key_value[0], "{dims:?}");
            for blueprint in &query {
                assert!(blueprint.shared_memory() <= device.shared_memory);
                check_registers(blueprint, head_dim);
            }
            for blueprint in &key_value {
                assert!(blueprint.key_value_memory() <= device.shared_memory);
                if blueprint.division == Division::Rows {
                    assert_eq!(blueprint.owned(), 128, "tiles of the query gradient");
                }
                check_registers(blueprint, head_dim + value_dim);
            }
        }
    }
}

/// The gradients that a unit holds, of `both` features where it holds those of both, and what else.
fn check_registers(blueprint: &GradientBlueprint, both: usize) {
    let case = format!("{blueprint:?}");
    assert!(blueprint.units() <= h200().units, "{case}");
    assert!(blueprint.walked.is_multiple_of(16), "{case}");
    assert!(blueprint.owned() <= 256, "{case}: rows of a tensor copy");
    let registers = match blueprint.division {
        // Probabilities and their gradients, which are rounded in place.
        Division::Rows => both / 2 + blueprint.walked,
        // One gradient, an operand's steps, and scores while they are rounded.
        Division::Gradients { held } => {
            blueprint.head_dim.max(blueprint.value_dim) / 2 + 4 * held + blueprint.walked * 3 / 4
        }
    };
    let limit = 65_536 / blueprint.units() as usize;
    assert!(
        registers + 24 <= limit.min(255),
        "{case}: {registers} registers of {limit}"
    );
}

/// Catches sums of the query gradient that no buffer holds; wide heads need none.
#[test]
fn sums_past_the_largest_buffer_are_declined() {
    let of = |dim, max_buffer| {
        let problem = problem([1000, 500], [dim, dim], Dtype::F16, Options::default());
        let device = Device {
            max_buffer,
            ..h200()
        };
        plan_backward(&problem, &device)
    };
    // 4 heads x 1,024 rows x 64 features x 4 bytes.
    assert!(of(64, 1 << 20).is_ok());
    assert_eq!(
        of(64, (1 << 20) - 1).expect_err("declined").to_string(),
        "the sums of the query gradient take 1048576 bytes, expected at most 1048575"
    );
    assert!(of(256, 1 << 20).is_ok());
}

/// Catches an option that is lost on its way to the kernel.
#[test]
fn the_order_of_additions_is_the_problems() {
    for summation in [Summation::Reproducible, Summation::Unordered] {
        let options = Options::new().summation(summation);
        let problem = problem([64, 64], [64, 64], Dtype::F16, options);
        let blueprint = plan_backward(&problem, &h200()).expect("served");
        assert_eq!(blueprint.summation, summation);
    }
}

/// Catches wide heads whose two gradients would not stay in the registers of a warpgroup, and narrow
/// ones that would walk everything for half of the keys.
#[test]
fn warpgroups_share_the_keys_of_wide_heads_alone() {
    let divided = |dims| {
        let problem = problem([64, 64], dims, Dtype::F16, Options::default());
        let blueprint = plan_backward(&problem, &h200()).expect("served");
        assert_eq!(blueprint.query.division, Division::Rows, "{dims:?}");
        matches!(blueprint.key_value.division, Division::Gradients { .. })
    };
    assert!(!divided([128, 128]));
    assert!(divided([136, 64]));
    assert!(divided([64, 136]));
    assert!(divided([256, 256]));
}

/// Catches a device or a problem that would reach code it cannot run.
#[test]
fn what_it_cannot_serve_it_declines_by_name() {
    let plain = |dims, dtype| problem([64, 64], dims, dtype, Options::default());
    let good = plain([64, 64], Dtype::F16);
    let reason = |problem: &Problem, device: &Device| {
        plan_forward(problem, device)
            .expect_err("declined")
            .to_string()
    };
    let llvm = Device {
        compiler: "llvm",
        ..h200()
    };
    assert_eq!(
        reason(&good, &llvm),
        "kernels are compiled by llvm, expected cuda c++"
    );
    let blackwell = Device {
        cuda_capability: Some(120),
        ..h200()
    };
    assert_eq!(
        reason(&good, &blackwell),
        "compute capability is 12.0, expected 9.0"
    );
    let small = Device {
        shared_memory: 48 << 10,
        ..h200()
    };
    assert!(matches!(
        plan_forward(&good, &small),
        Err(Declined::SharedMemory { .. })
    ));
    let single = plain([64, 64], Dtype::F32);
    assert_eq!(
        reason(&single, &h200()),
        "element type is f32, expected f16 or bf16"
    );
    let odd = plain([64, 60], Dtype::F16);
    assert_eq!(
        reason(&odd, &h200()),
        "value_dim is 60, expected a multiple of 8"
    );
    let empty = problem([64, 0], [64, 64], Dtype::F16, Options::default());
    assert_eq!(reason(&empty, &h200()), "seq_kv is 0");
    let zero = Options {
        scale: Some(0.0),
        ..Options::default()
    };
    let zero = problem([64, 64], [64, 64], Dtype::F16, zero);
    assert!(matches!(
        plan_forward(&zero, &h200()),
        Err(Declined::Scale { .. })
    ));
}

/// Catches a sign that is applied twice or not at all.
#[test]
fn a_negative_scale_negates_the_product_of_plain_scores_alone() {
    let options = Options {
        scale: Some(-0.5),
        ..Options::default()
    };
    let plain = problem([64, 64], [64, 64], Dtype::F16, options);
    assert!(plan_forward(&plain, &h200()).expect("served").negated);
    let capped = Options {
        softcap: Some(10.0),
        ..options
    };
    let capped = problem([64, 64], [64, 64], Dtype::F16, capped);
    assert!(!plan_forward(&capped, &h200()).expect("served").negated);
}

/// Catches layouts that the copy engine would refuse at the launch, where nobody hears of it.
#[test]
fn only_layouts_of_the_copy_engine_pass() {
    let shape = [2, 4, 100, 64];
    let check = |strides, offset| check_layout("key", shape, strides, offset).is_ok();
    assert!(check([25_600, 6_400, 64, 1], 0));
    assert!(check([25_600, 64, 256, 1], 32), "heads beside each other");
    assert!(!check([25_600, 6_400, 64, 1], 8), "offset of half a chunk");
    assert!(!check([25_600, 6_400, 68, 1], 0), "rows of half chunks");
    assert!(!check([25_600, 0, 64, 1], 0), "expanded heads");
    assert!(!check([25_600, 6_400, 1, 100], 0), "transposed");
    assert!(check_layout("key", [1, 1, 100, 64], [0, 3, 64, 1], 0).is_ok());
}

/// Catches a family that serves although it was left out, and one that leaves without its reason.
#[test]
fn a_family_that_is_left_out_leaves_the_problem_to_the_next() {
    let problem = problem([300, 500], [64, 64], Dtype::BF16, Options::default());
    let mut device = Device {
        mma_shapes: vec!["16x8x16 bf16 -> f32".to_string()],
        ldmatrix: vec![Dtype::BF16],
        ..h200()
    };
    let served = |device: &Device| {
        let blueprint = plan(&problem, device).unwrap();
        (blueprint.forward().family, blueprint.backward().family)
    };
    assert_eq!(served(&device), (HOPPER, HOPPER));
    device.left_out = vec![HOPPER.to_string()];
    assert_eq!(served(&device), (MMA, MMA));
    device.left_out = vec![HOPPER.to_string(), MMA.to_string()];
    assert_eq!(served(&device), (PORTABLE, PORTABLE));
    let reason = format!("left out by {WITHOUT}");
    let declined = plan(&problem, &device).unwrap().declined();
    assert_eq!(declined, [(HOPPER, reason.clone()), (MMA, reason)]);
    device.left_out = vec!["Hopper".to_string()];
    assert_eq!(
        plan(&problem, &device).unwrap_err().to_string(),
        format!("{WITHOUT} names Hopper, expected hopper or mma")
    );
}
