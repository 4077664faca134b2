//! Problems past what an index, a launch or a single sum holds, on rows and keys taken as samples.

use burn::tensor::{DType, Distribution, Tensor};
use burn_flash_attention::{
    AttentionError, AttentionOptions, DeviceReport, Dtype, ElementType, burn_dtype, explain,
    try_flash_attention,
};
use flash_attention_check::sampled::{Head, RelativeError, bounds, key_gradients, rows};
use flash_attention_spec::reference::{Inputs, backward, forward};
use flash_attention_spec::{F32Precision, Operand, Operands, Options, Problem};
use flash_attention_tests::{full_grid, selected_devices, uniform};

/// Sizes of query and key; the value is as the key.
struct Shape {
    batch: usize,
    heads: usize,
    seq_q: usize,
    seq_kv: usize,
    dim: usize,
}

impl Shape {
    const fn new(batch: usize, heads: usize, seq_q: usize, seq_kv: usize, dim: usize) -> Self {
        Self {
            batch,
            heads,
            seq_q,
            seq_kv,
            dim,
        }
    }

    /// Of a head taken alone, as the reference sees it.
    fn problem_of_head(&self) -> Problem {
        let operand = |seq: usize| Operand::new([1, 1, seq, self.dim], Dtype::F32);
        let operands = Operands {
            query: operand(self.seq_q),
            key: operand(self.seq_kv),
            value: operand(self.seq_kv),
            mask: None,
            bias: None,
        };
        Problem::new(&operands, &Options::default()).expect("a valid problem")
    }
}

fn numbers(tensor: Tensor<4>) -> Vec<f32> {
    let data = tensor.into_data().convert_dtype(DType::F32);
    data.try_into_vec().expect("f32 numbers")
}

fn head_of(tensor: &Tensor<4>, batch: usize, head: usize) -> Vec<f32> {
    let [_, _, seq, dim] = tensor.dims();
    let part = [batch..batch + 1, head..head + 1, 0..seq, 0..dim];
    numbers(tensor.clone().slice(part))
}

/// Runs `shape` forward and backward and holds `samples`, each a batch and a head, to the reference.
fn check(
    report: &DeviceReport,
    dtype: Dtype,
    shape: &Shape,
    samples: &[(usize, usize)],
) -> Result<(), AttentionError> {
    let device = report.device.clone().autodiff();
    let draw = |seq: usize| {
        let sizes = [shape.batch, shape.heads, seq, shape.dim];
        let options = (&device, DType::F32);
        Tensor::<4>::random(sizes, Distribution::Uniform(-1.5, 1.5), options)
            .cast(burn_dtype(dtype))
    };
    let [query, key, value] =
        [shape.seq_q, shape.seq_kv, shape.seq_kv].map(|seq| draw(seq).require_grad());
    let options = AttentionOptions::new();
    let output = try_flash_attention(query.clone(), key.clone(), value.clone(), &options)?;
    // In f32 the gradient of a plain sum, which takes no memory of the output's size.
    let output_gradient = (dtype != Dtype::F32).then(|| draw(shape.seq_q));
    let loss = match &output_gradient {
        Some(gradient) => (output.clone() * gradient.clone()).sum(),
        None => output.clone().sum(),
    };
    let gradients = loss.backward();
    let gradient = |x: &Tensor<4>| x.grad(&gradients).expect("a gradient");
    let (dq, dk, dv) = (gradient(&query), gradient(&key), gradient(&value));

    let problem = shape.problem_of_head();
    let spread = |n: usize| -> Vec<usize> {
        let mut taken = vec![0, n / 3, n / 2, n - 1];
        taken.dedup();
        taken
    };
    let (queries, keys) = (spread(shape.seq_q), spread(shape.seq_kv));
    let [output_limit, gradient_limit] = bounds(dtype, F32Precision::Full);
    for &(batch, head) in samples {
        let [q, k, v] = [&query, &key, &value].map(|x| head_of(x, batch, head));
        let ones = || vec![1.0; shape.seq_q * shape.dim];
        let of_output = output_gradient.as_ref();
        let of_output = of_output.map_or_else(ones, |x| head_of(x, batch, head));
        let operands = Head {
            query: &q,
            key: &k,
            value: &v,
            mask: None,
            bias: None,
            output_gradient: &of_output,
        };
        let exact_rows = rows(&problem, &operands, &queries);
        let exact_keys = key_gradients(&problem, &[operands], &keys);
        let compare = |name: &str, got: &Tensor<4>, at: &[usize], exact: Vec<&[f64]>, limit| {
            let got = head_of(got, batch, head);
            let mut error = RelativeError::default();
            for (&at, exact) in at.iter().zip(exact) {
                error.add(&got[at * shape.dim..], exact);
            }
            let relative = error.relative();
            assert!(
                relative <= limit,
                "{} {dtype}, batch {batch}, head {head}: {name} is off by {relative:.1e}, at most \
                 {limit:.1e} is accepted",
                report.name
            );
        };
        let o = exact_rows.iter().map(|row| &row.output[..]).collect();
        compare("o", &output, &queries, o, output_limit);
        let q = exact_rows
            .iter()
            .map(|row| &row.query_gradient[..])
            .collect();
        compare("dq", &dq, &queries, q, gradient_limit);
        let k = exact_keys.iter().map(|key| &key.key[..]).collect();
        compare("dk", &dk, &keys, k, gradient_limit);
        let v = exact_keys.iter().map(|key| &key.value[..]).collect();
        compare("dv", &dv, &keys, v, gradient_limit);
    }
    Ok(())
}

/// Whether a device's driver ends loops early, so that the largest problems have to be refused.
fn ends_loops(report: &DeviceReport) -> bool {
    report.hardware.starts_with("llvmpipe")
}

/// Within the rule or, on a driver that ends loops early, refused before the launch.
fn passed_or_refused(report: &DeviceReport, result: Result<(), AttentionError>) {
    match result {
        Ok(()) => assert!(!ends_loops(report), "{} did not refuse", report.name),
        Err(error) => {
            let text = error.to_string();
            let named = text.contains("the loops of a kernel would go round");
            assert!(ends_loops(report) && named, "{}: {text}", report.name);
        }
    }
}

/// Catches a launch of more cubes than one dimension of a grid holds, or one whose columns overlap.
#[test]
fn more_cubes_than_a_dimension_holds() {
    let shape = Shape::new(1, 70_000, 3, 5, 8);
    let samples = [0, 1, 34_999, 65_534, 65_535, 65_536, 69_999].map(|head| (0, head));
    for report in selected_devices() {
        check(&report, Dtype::F32, &shape, &samples).unwrap();
    }
}

/// Catches sums over long sequences that lose digits or leave out a part: rows over many keys, keys
/// over many queries.
#[test]
fn long_sums_keep_their_digits() {
    for report in selected_devices() {
        for shape in [
            Shape::new(1, 1, 9, 20_000, 16),
            Shape::new(1, 1, 20_000, 9, 16),
        ] {
            check(&report, Dtype::F32, &shape, &[(0, 0)]).unwrap();
        }
    }
}

/// The same over 150,000 keys and queries, which a driver that ends loops early has to refuse.
#[test]
fn very_long_sums_keep_their_digits_or_are_refused() {
    for report in selected_devices() {
        for shape in [
            Shape::new(1, 1, 5, 150_000, 16),
            Shape::new(1, 1, 150_000, 5, 16),
        ] {
            passed_or_refused(&report, check(&report, Dtype::F32, &shape, &[(0, 0)]));
        }
    }
}

/// Catches loops that a driver ends although the plan let them pass: the longest rows and columns that
/// it accepts, where there is an end to them.
#[test]
fn the_longest_that_is_not_refused() {
    for report in selected_devices()
        .iter()
        .filter(|report| ends_loops(report))
    {
        let shapes: [fn(usize) -> Shape; 2] = [
            |length| Shape::new(1, 1, 5, length, 16),
            |length| Shape::new(1, 1, length, 5, 16),
        ];
        for shape in shapes {
            let accepted =
                |length| explain(&shape(length).problem_of_head(), &report.device).is_ok();
            // The first is refused, the last accepted.
            let lengths: Vec<usize> = (1..=2048).rev().map(|blocks| blocks * 64).collect();
            let longest = lengths[lengths.partition_point(|&length| !accepted(length))];
            assert!((10_000..100_000).contains(&longest), "{longest}");
            check(report, Dtype::F32, &shape(longest), &[(0, 0)]).unwrap();
        }
    }
}

/// Catches a bias gradient that drops some of the many blocks it sums: a bias shared by 12,000 heads.
#[test]
fn a_bias_over_many_heads() {
    let (query_shape, key_shape, bias_shape) = ([3, 4000, 5, 8], [3, 4000, 7, 8], [1, 1, 5, 7]);
    let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
    let operands = Operands {
        query: operand(query_shape),
        key: operand(key_shape),
        value: operand(key_shape),
        mask: None,
        bias: Some(operand(bias_shape)),
    };
    let problem = Problem::new(&operands, &Options::default()).unwrap();
    for report in selected_devices() {
        let device = report.device.clone().autodiff();
        let draw = |shape, seed| uniform(shape, seed, &device);
        let (query, gradient) = (draw(query_shape, 1), draw(query_shape, 2));
        let (key, value) = (draw(key_shape, 3), draw(key_shape, 4));
        let bias = draw(bias_shape, 5).require_grad();
        let [q, k, v, b, g] = [&query, &key, &value, &bias, &gradient]
            .map(|x| Vec::from_iter(numbers(x.clone()).into_iter().map(f64::from)));
        let options = AttentionOptions::new().bias(bias.clone());
        let result = try_flash_attention(query, key, value, &options).map(|output| {
            let gradients = (output * gradient).sum().backward();
            let got = numbers(bias.grad(&gradients).expect("a gradient"));
            let inputs = Inputs::new(&q, &k, &v).bias(b.as_slice());
            let exact = backward(&problem, &inputs, &g, None).bias.unwrap();
            assert_eq!(got.len(), exact.len());
            let mut error = RelativeError::default();
            error.add(&got, &exact);
            let relative = error.relative();
            assert!(
                relative <= bounds(Dtype::F32, F32Precision::Full)[1],
                "{}: dbias is off by {relative:.1e}",
                report.name
            );
        });
        passed_or_refused(&report, result);
    }
}

/// Attention through a window, with a mask and perhaps a bias that 16,400 queries of 16 heads share, on
/// parts of the last head whose rows see the same.
fn check_shared_tables(report: &DeviceReport, biased: bool) -> Result<(), AttentionError> {
    const HEADS: usize = 16;
    const LENGTH: usize = 16_400;
    const PART: usize = 32;
    const DIM: usize = 8;
    const REACH: usize = 3;
    let operand = |rows: usize, width: usize| Operand::new([1, 1, rows, width], Dtype::F32);
    let operands = Operands {
        query: operand(PART, DIM),
        key: operand(PART, DIM),
        value: operand(PART, DIM),
        mask: Some(Operand::new([1, 1, 1, PART], ElementType::Bool)),
        bias: biased.then(|| operand(1, PART)),
    };
    let window = Options::new().window(Some(REACH), Some(REACH));
    let problem = Problem::new(&operands, &window).unwrap();

    let device = report.device.clone().autodiff();
    let [query, key, value] = [1, 2, 3].map(|seed| uniform([1, HEADS, LENGTH, DIM], seed, &device));
    let query = query.require_grad();
    let bias = biased.then(|| uniform([1, 1, 1, LENGTH], 4, &device));
    let mask = uniform([1, 1, 1, LENGTH], 5, &device).lower_elem(-0.5);
    let mut options = AttentionOptions::new()
        .window(Some(REACH), Some(REACH))
        .mask(mask.clone());
    options.bias = bias.clone();
    let output = try_flash_attention(query.clone(), key.clone(), value.clone(), &options)?;
    let gradients = output.clone().sum().backward();
    let query_gradient = query.grad(&gradients).expect("a gradient");
    for first in [0, LENGTH / 2, LENGTH - PART] {
        let rows = |x: &Tensor<4>| {
            numbers(
                x.clone()
                    .slice([0..1, HEADS - 1..HEADS, first..first + PART, 0..DIM]),
            )
        };
        let columns =
            |x: &Tensor<4>| numbers(x.clone().slice([0..1, 0..1, 0..1, first..first + PART]));
        let exactly = |x: Vec<f32>| Vec::from_iter(x.into_iter().map(f64::from));
        let [q, k, v] = [&query, &key, &value].map(|x| exactly(rows(x)));
        let b = bias.as_ref().map(|bias| exactly(columns(bias)));
        let hidden = Vec::from_iter(columns(&mask.clone().float()).into_iter().map(|x| x != 0.0));
        let mut inputs = Inputs::new(&q, &k, &v).mask(hidden.as_slice());
        inputs.bias = b.as_deref();
        let exact = forward(&problem, &inputs);
        let exact_gradients = backward(&problem, &inputs, &vec![1.0; PART * DIM], None);
        let inner = REACH * DIM..(PART - REACH) * DIM;
        let [output_limit, gradient_limit] = bounds(Dtype::F32, F32Precision::Full);
        for (name, got, exact, limit) in [
            ("o", rows(&output), exact.output, output_limit),
            (
                "dq",
                rows(&query_gradient),
                exact_gradients.query,
                gradient_limit,
            ),
        ] {
            let mut error = RelativeError::default();
            error.add(&got[inner.clone()], &exact[inner.clone()]);
            let relative = error.relative();
            assert!(
                relative <= limit,
                "{}, from {first}: {name} is off by {relative:.1e}, at most {limit:.1e} is accepted",
                report.name
            );
        }
    }
    Ok(())
}

/// Catches tables that are counted as they are broadcast: shared by 16 heads of 16,400 queries over as many
/// keys they stand for more scores than 32 bits count, though a window leaves little of them to compute. The
/// gradient of such a bias takes loops that some drivers end early.
#[test]
fn tables_broadcast_to_more_than_two_to_the_32_scores() {
    for report in selected_devices() {
        check_shared_tables(&report, false).unwrap();
        passed_or_refused(&report, check_shared_tables(&report, true));
    }
}

/// Catches offsets of 32 bits: operands of more than 2^31 elements. They take up to 80 GB, so they are
/// part of the full grid alone.
#[test]
fn operands_past_two_to_the_31() {
    if !full_grid() {
        println!("FLASH_ATTENTION_GRID=full runs operands past 2^31 elements; this run does not");
        return;
    }
    let shape = Shape::new(131_200, 1, 128, 128, 128);
    let samples = [0, 65_535, 131_071, 131_072, 131_199].map(|batch| (batch, 0));
    for report in selected_devices() {
        for &dtype in &report.dtypes {
            check(&report, dtype, &shape, &samples).unwrap();
        }
    }
}
