//! What must be equal to what, bit for bit wherever the arithmetic is the same.

use burn::tensor::{DType, Device, Tensor};
use burn_flash_attention::{
    AttentionOptions, DeviceReport, flash_attention, flash_attention_with_lse,
};
use flash_attention_check::cases::{Bias, FULL, GradientLayout, Layout, Loss, Mask};
use flash_attention_check::runner::DeviceOutput;
use flash_attention_check::{Case, Prepared};
use flash_attention_spec::{Dtype, Wanted};
use flash_attention_tests::{relative_error, selected_devices, uniform};

/// Relative errors that the acceptance rule grants an output and a gradient in `f32`.
const OUTPUT_LIMIT: f64 = 5e-6;
const GRADIENT_LIMIT: f64 = 2e-5;

fn prepare(case: &Case, dtype: Dtype) -> Prepared {
    Prepared::new(case, dtype, 1).expect("a case is a valid problem")
}

fn outputs(prepared: &Prepared, report: &DeviceReport) -> Vec<DeviceOutput> {
    let outputs = prepared.outputs(&report.device);
    outputs.unwrap_or_else(|error| panic!("{}: {error}", report.name))
}

/// The bytes of an output of a case of one draw.
fn bytes(output: &DeviceOutput) -> &[u8] {
    let [data] = &output.data[..] else {
        panic!("{} has {} draws", output.output, output.data.len());
    };
    data.as_bytes()
}

/// The bytes of the output of one name.
fn bits<'a>(outputs: &'a [DeviceOutput], name: &str) -> &'a [u8] {
    let output = outputs.iter().find(|output| output.output == name);
    bytes(output.unwrap_or_else(|| panic!("{name} is missing")))
}

/// Every device in every element type that it has.
fn for_each_dtype(mut test: impl FnMut(&DeviceReport, Dtype)) {
    for report in selected_devices() {
        for &dtype in &report.dtypes {
            test(&report, dtype);
        }
    }
}

fn everything(name: &str) -> Case {
    Case::new(name, "", [2, 4, 2, 35, 37, 16, 8])
        .causal()
        .softcap(3.0)
        .mask(Mask::Random(FULL))
        .bias(Bias::Uniform([true, false, false, false]))
        .loss(Loss::Both)
}

/// Runs a case once more and again: every bit has to be that of the `first` run.
fn reruns(prepared: &Prepared, first: &[DeviceOutput], times: usize, report: &DeviceReport) {
    for rerun in 1..=times {
        for output in &outputs(prepared, report) {
            let name = output.output;
            assert!(
                bytes(output) == bits(first, name),
                "{}: {name} of rerun {rerun} differs",
                report.name
            );
        }
    }
}

/// Catches sums whose order depends on scheduling: 50 reruns have to agree in every bit.
#[test]
fn reruns_are_bit_equal() {
    let case = everything("reruns");
    for_each_dtype(|report, dtype| {
        let prepared = prepare(&case, dtype);
        let first = outputs(&prepared, report);
        assert_eq!(first.len(), 6);
        reruns(&prepared, &first, 49, report);
    });
}

/// Two lengths of several blocks of queries and keys each, which are up to 192 on a card. Kernels that
/// a processor runs have blocks of 64 at most, and would take minutes over a card's lengths.
fn lengths_of_many_blocks(report: &DeviceReport) -> [usize; 2] {
    if report.processor && report.compiler != "rust" {
        [230, 370]
    } else {
        [700, 1100]
    }
}

/// Catches an order of sums that is kept within a block and lost between blocks: here several blocks
/// of keys add to each gradient of a query, and several blocks of queries and several heads to each
/// of a key, in every family of kernels.
#[test]
fn reruns_over_many_blocks_are_bit_equal() {
    for_each_dtype(|report, dtype| {
        let [short, long] = lengths_of_many_blocks(report);
        let case = |name: &str, seq_q, seq_kv, dim| {
            let name = format!("reruns over many blocks: {name}");
            Case::new(name, "", [1, 3, 1, seq_q, seq_kv, dim, dim]).loss(Loss::Both)
        };
        let cases = [
            case("causal", short, long, 64).causal(),
            case("all keys", long, short, 128),
            case("options", short, short, 64)
                .causal()
                .softcap(3.0)
                .mask(Mask::Random([true, true, false, false]))
                .bias(Bias::Uniform([true, true, false, false])),
        ];
        for case in cases {
            let prepared = prepare(&case, dtype);
            let first = outputs(&prepared, report);
            let verdict = prepared.judge(&first).unwrap();
            assert!(verdict.passed, "{} {dtype}: {verdict}", report.name);
            reruns(&prepared, &first, 4, report);
        }
    });
}

/// Catches operands that are read as if they were packed: a view has to give what its packed copy
/// gives, in every bit or, where a device sums it in another order, within the acceptance rule.
#[test]
fn views_equal_their_packed_copies() {
    let layouts = [
        Layout::FusedQkv,
        Layout::SwappedAxes,
        Layout::Transposed,
        Layout::LongerBuffer,
    ];
    let gradients = [GradientLayout::Packed, GradientLayout::Swapped];
    let packed = Case {
        heads: 2,
        seq_kv: 35,
        value_dim: 16,
        ..everything("views")
    };
    for_each_dtype(|report, dtype| {
        let expected = outputs(&prepare(&packed, dtype), report);
        for layout in layouts {
            for gradient in gradients {
                let view = packed.clone().layout(layout).gradient_layout(gradient);
                let view = prepare(&view, dtype);
                let got = outputs(&view, report);
                let same = got
                    .iter()
                    .all(|output| bytes(output) == bits(&expected, output.output));
                let verdict = view.judge(&got).unwrap();
                assert!(
                    same || verdict.passed,
                    "{}, {layout:?}: {verdict}",
                    report.name
                );
            }
        }
    });
}

/// Catches an unused lse that changes the backward pass: its gradients have to be those of the
/// plain call in every bit.
#[test]
fn an_unused_lse_changes_no_bit() {
    for_each_dtype(|report, dtype| {
        let case = everything("unused lse");
        let plain = outputs(&prepare(&case.clone().loss(Loss::Plain), dtype), report);
        let with_lse = outputs(&prepare(&case.loss(Loss::Output), dtype), report);
        for name in ["o", "dq", "dk", "dv", "dbias"] {
            assert!(
                bits(&plain, name) == bits(&with_lse, name),
                "{} {dtype}: {name} differs",
                report.name
            );
        }
    });
}

/// Catches a gradient that depends on which other gradients are wanted, and an output that depends
/// on autodiff.
#[test]
fn each_gradient_is_the_same_in_any_company() {
    for_each_dtype(|report, dtype| {
        let case = everything("company");
        let all = outputs(&prepare(&case, dtype), report);
        for subset in 0..16_u8 {
            let wants = |n: u8| subset & (1 << n) != 0;
            let case = case.clone().wanted(
                Wanted::NONE
                    .query(wants(0))
                    .key(wants(1))
                    .value(wants(2))
                    .bias(wants(3)),
            );
            let some = outputs(&prepare(&case, dtype), report);
            assert_eq!(some.len(), 2 + subset.count_ones() as usize);
            for output in &some {
                let name = output.output;
                assert!(
                    bytes(output) == bits(&all, name),
                    "{} {dtype}: {name} differs with gradients {subset:04b}",
                    report.name
                );
            }
        }
    });
}

/// Catches keys nobody sees, and rows that see nothing, that keep what a freed buffer held.
#[test]
fn nothing_visible_is_exactly_zero_in_dirty_memory() {
    for_each_dtype(|report, dtype| {
        let keys = Case::new("dirty keys", "", [1, 1, 1, 3, 8, 8, 8]).mask(Mask::Later);
        let causal = Case::new("dirty causal", "", [1, 2, 2, 3, 8, 8, 8])
            .causal()
            .top_left();
        let rows = Case::new("dirty rows", "", [1, 2, 1, 5, 2, 8, 8])
            .causal()
            .loss(Loss::Both);
        let empty = Case::new("dirty empty", "", [1, 2, 1, 5, 0, 8, 8]);
        for _ in 0..3 {
            dirty(report, dtype);
            let is_zero = |case: &Case, name: &str, rows: std::ops::Range<usize>| {
                let got = outputs(&prepare(case, dtype), report);
                let got = got.iter().find(|output| output.output == name).unwrap();
                let [.., seq, dim] = got.data[0].shape().to_vec()[..] else {
                    panic!("{name} has too few dimensions");
                };
                let values: Vec<f64> = got.data[0].iter::<f64>().collect();
                for head in values.chunks((seq * dim).max(1)) {
                    for value in &head[rows.start * dim..rows.end * dim] {
                        assert!(*value == 0.0, "{} {dtype}: {name} is {value}", report.name);
                    }
                }
            };
            for case in [&keys, &causal] {
                is_zero(case, "dk", 3..8);
                dirty(report, dtype);
                is_zero(case, "dv", 3..8);
                dirty(report, dtype);
            }
            for name in ["o", "dq"] {
                is_zero(&rows, name, 0..3);
                dirty(report, dtype);
                is_zero(&empty, name, 0..5);
                dirty(report, dtype);
            }
        }
    });
}

/// Fills the device's free memory with NaN, in buffers of the sizes that small outputs have.
fn dirty(report: &DeviceReport, dtype: Dtype) {
    let dtype = burn_flash_attention::burn_dtype(dtype);
    let full = |shape: [usize; 4], dtype: DType| {
        Tensor::<4>::full(shape, f32::NAN, (&report.device, dtype))
    };
    let shapes = [
        [1, 1, 3, 8],
        [1, 1, 8, 8],
        [1, 2, 3, 8],
        [1, 2, 5, 8],
        [1, 2, 8, 8],
    ];
    for shape in shapes {
        let held: Vec<_> = (0..8)
            .flat_map(|_| [full(shape, dtype), full(shape, DType::F32)])
            .collect();
        // Reading one back makes sure that they were written before they are freed.
        for tensor in held {
            let first = tensor.into_data().iter::<f32>().next();
            assert!(first.is_some_and(f32::is_nan));
        }
    }
}

/// Catches a query head that reads the wrong key head: grouped heads have to equal key heads that
/// are repeated, and dk, dv the sums over each group.
#[test]
fn grouped_heads_equal_repeated_ones() {
    let (heads, seq_q, seq_kv, dim) = (6, 19, 23, 8);
    for report in selected_devices() {
        let device = &report.device;
        for kv_heads in [1, 2, 3] {
            let group = heads / kv_heads;
            let leaf = |n, shape| uniform(shape, n, device).autodiff().require_grad();
            let query = leaf(1, [2, heads, seq_q, dim]);
            let (key, value) = (
                leaf(2, [2, kv_heads, seq_kv, dim]),
                leaf(3, [2, kv_heads, seq_kv, dim]),
            );
            let repeat = |tensor: &Tensor<4>| {
                let repeated = tensor.clone().inner().unsqueeze_dim::<5>(2);
                let repeated = repeated.repeat_dim(2, group);
                let repeated = repeated.reshape([2, heads, seq_kv, dim]);
                repeated.autodiff().require_grad()
            };
            let (repeated_key, repeated_value) = (repeat(&key), repeat(&value));
            let repeated_query = query.clone().inner().autodiff().require_grad();
            let run = |query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>| {
                let options = AttentionOptions::new().causal();
                let output = flash_attention(query.clone(), key.clone(), value.clone(), &options);
                let gradient = uniform([2, heads, seq_q, dim], 4, device).autodiff();
                let gradients = (output.clone() * gradient).sum().backward();
                let of = |tensor: &Tensor<4>| tensor.grad(&gradients).unwrap();
                [output.inner(), of(query), of(key), of(value)]
            };
            let [output, dq, dk, dv] = run(&query, &key, &value);
            let [repeated_output, repeated_dq, repeated_dk, repeated_dv] =
                run(&repeated_query, &repeated_key, &repeated_value);
            let summed = |tensor: Tensor<4>| {
                let grouped = tensor.reshape([2, kv_heads, group, seq_kv, dim]);
                grouped.sum_dim(2).squeeze_dim::<4>(2)
            };
            assert!(relative_error(output, repeated_output) < OUTPUT_LIMIT);
            assert!(relative_error(dq, repeated_dq) < GRADIENT_LIMIT);
            assert!(relative_error(dk, summed(repeated_dk)) < GRADIENT_LIMIT);
            assert!(relative_error(dv, summed(repeated_dv)) < GRADIENT_LIMIT);
        }
    }
}

/// Catches an lse, or a gradient of it, that cannot be used: results over two ranges of keys, merged
/// by their lse as ring attention does, have to equal the result over all keys.
#[test]
fn partial_results_merge_by_lse() {
    let (seq_q, seq_kv, dim) = (9, 40, 8);
    let run = |device: &Device, cuts: &[usize]| {
        let leaf = |n, seq| {
            let tensor = uniform([1, 2, seq, dim], n, device);
            (tensor * 2.0).autodiff().require_grad()
        };
        let (query, key, value) = (leaf(1, seq_q), leaf(2, seq_kv), leaf(3, seq_kv));
        let mut merged: Option<(Tensor<4>, Tensor<3>)> = None;
        for pair in cuts.windows(2) {
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, pair[0], pair[1] - pair[0]);
            let options = AttentionOptions::new();
            let (output, lse) =
                flash_attention_with_lse(query.clone(), part(&key), part(&value), &options);
            merged = Some(match merged {
                None => (output, lse),
                Some((before, before_lse)) => {
                    let sum = (before_lse.clone().exp() + lse.clone().exp()).log();
                    let weight = |lse: Tensor<3>| (lse - sum.clone()).exp().unsqueeze_dim::<4>(3);
                    (before * weight(before_lse) + output * weight(lse), sum)
                }
            });
        }
        let (output, lse) = merged.unwrap();
        let gradient = uniform([1, 2, seq_q, dim], 4, device).autodiff();
        let loss = (output.clone() * gradient).sum() + lse.clone().sum();
        let gradients = loss.backward();
        let of = |tensor: &Tensor<4>| tensor.grad(&gradients).unwrap();
        let gradients = [of(&query), of(&key), of(&value)];
        (output.inner(), lse.inner(), gradients)
    };
    for report in selected_devices() {
        let (output, lse, gradients) = run(&report.device, &[0, seq_kv]);
        let (merged_output, merged_lse, merged_gradients) =
            run(&report.device, &[0, 13, 29, seq_kv]);
        assert!(relative_error(merged_output, output) < OUTPUT_LIMIT);
        assert!(relative_error(merged_lse, lse) < OUTPUT_LIMIT);
        for (merged, whole) in merged_gradients.into_iter().zip(gradients) {
            assert!(relative_error(merged, whole) < GRADIENT_LIMIT);
        }
    }
}
