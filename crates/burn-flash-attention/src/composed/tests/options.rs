//! Every option, shape and layout.

use super::{BLOCKS, Case, SIZES, causal, data, floats, window};
use crate::composed::{Blocks, Operands};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata, ops::BoolTensorOps, ops::FloatTensorOps, read_sync};
use flash_attention_spec::{Alignment, Dtype, Options, Wanted};

#[test]
fn every_band_at_every_pair_of_lengths() {
    let bands = [
        Options::default(),
        causal(Alignment::BottomRight),
        causal(Alignment::TopLeft),
        window(Some(0), Some(0)),
        window(Some(3), Some(0)),
        window(None, Some(2)),
        window(Some(5), Some(4)),
    ];
    for options in bands {
        for (seq_q, seq_kv) in [(1, 1), (3, 12), (4, 3), (9, 4), (11, 10), (2, 17), (17, 2)] {
            let sizes = [1, 2, 1, seq_q, seq_kv, 4, 4];
            let name = format!("{options:?}, {seq_q} queries, {seq_kv} keys");
            Case::new(sizes, options).check(&name);
        }
    }
}

#[test]
fn blocks_of_any_size_agree() {
    let options = causal(Alignment::BottomRight);
    let case = Case::new(SIZES, options);
    let exact = case.reference();
    for (query, key) in [(1, 1), (5, 2), (2, 5), (16, 3), (3, 16), (64, 64)] {
        let got = case.composed_of(
            case.operands(),
            case.gradient(),
            Wanted::ALL,
            Blocks { query, key },
        );
        got.assert_near(&exact, Dtype::F32, &format!("blocks of {query} and {key}"));
    }
}

#[test]
fn options_alone_and_together() {
    let [batch, heads, _, seq_q, seq_kv, ..] = SIZES;
    let full = [batch, heads, seq_q, seq_kv];
    for choice in 0..32 {
        let has = |bit: u32| choice >> bit & 1 == 1;
        let options = Options {
            causal: has(0),
            softcap: has(1).then_some(1.25),
            scale: has(2).then_some(-0.75),
            ..Options::default()
        };
        let mask = has(3).then_some(full);
        let bias = has(4).then_some(full);
        let case = Case::with(SIZES, options, mask, bias, Dtype::F32);
        case.check(&format!("{options:?}, mask {mask:?}, bias {bias:?}"));
    }
}

#[test]
fn mask_and_bias_broadcast_over_any_dimensions() {
    let full = [2, 4, 11, 10];
    for choice in 0..16 {
        let shape: [usize; 4] =
            std::array::from_fn(|dim| if choice >> dim & 1 == 1 { full[dim] } else { 1 });
        for (mask, bias) in [(Some(shape), None), (None, Some(shape))] {
            for causal in [false, true] {
                let options = Options {
                    causal,
                    ..Options::default()
                };
                let case = Case::with(SIZES, options, mask, bias, Dtype::F32);
                case.check(&format!("mask {mask:?}, bias {bias:?}, causal {causal}"));
            }
        }
    }
}

#[test]
fn grouped_heads() {
    for kv_heads in [1, 2, 3, 6] {
        let sizes = [2, 6, kv_heads, 7, 9, 4, 5];
        let case = Case::with(
            sizes,
            causal(Alignment::BottomRight),
            Some([2, 6, 1, 9]),
            Some([1, 6, 7, 9]),
            Dtype::F32,
        );
        case.check(&format!("{kv_heads} key heads"));
    }
}

#[test]
fn sixteen_bit_types() {
    for dtype in [Dtype::F16, Dtype::BF16] {
        let bias = Some([1, 4, 11, 10]);
        let case = Case::with(SIZES, causal(Alignment::BottomRight), None, bias, dtype);
        case.check(&format!("{dtype}"));
    }
}

#[test]
fn without_a_gradient_of_lse() {
    let mut case = Case::new(SIZES, Options::default());
    case.lse_gradient = None;
    case.check("no gradient of lse");
    let plain = case.composed(Wanted::ALL);
    case.lse_gradient = Some(vec![0.0; case.problem.lse_shape().iter().product()]);
    assert_eq!(case.composed(Wanted::ALL), plain);
}

#[test]
fn lengths_of_zero() {
    for sizes in [
        [0, 2, 1, 3, 4, 4, 4],
        [1, 2, 1, 0, 4, 4, 4],
        [1, 2, 1, 3, 0, 4, 4],
    ] {
        let [batch, heads, _, seq_q, seq_kv, ..] = sizes;
        for bias in [
            [batch, heads, seq_q, seq_kv],
            [1, 1, 1, seq_kv],
            [batch, 1, seq_q, 1],
        ] {
            let case = Case::with(sizes, Options::default(), None, Some(bias), Dtype::F32);
            case.check(&format!("{sizes:?}, bias {bias:?}"));
        }
    }
}

#[test]
fn any_strides() {
    let case = Case::with(
        [2, 4, 4, 9, 7, 4, 4],
        causal(Alignment::BottomRight),
        Some([2, 4, 9, 7]),
        Some([2, 4, 9, 7]),
        Dtype::F32,
    );
    let exact = case.reference();
    // Stored with dimensions 1 and 2 swapped, as a projection leaves them; and with the last two.
    for (a, b) in [(1, 2), (2, 3)] {
        let store = |tensor| {
            let swapped = data_and_shape(Flex::float_swap_dims(tensor, a, b));
            Flex::float_swap_dims(floats(&swapped.0, swapped.1), a, b)
        };
        let operands = case.operands();
        let mask = Flex::bool_swap_dims(operands.mask.unwrap(), a, b);
        let mask = read_sync(Flex::bool_into_data(mask)).unwrap();
        let mask = Flex::bool_from_data(mask, &Default::default());
        let operands = Operands {
            query: store(operands.query),
            key: store(operands.key),
            value: store(operands.value),
            mask: Some(Flex::bool_swap_dims(mask, a, b)),
            bias: operands.bias.map(store),
        };
        let gradient = store(case.gradient());
        let got = case.composed_of(operands, gradient, Wanted::ALL, BLOCKS);
        got.assert_near(&exact, Dtype::F32, &format!("{a} and {b} swapped"));
    }
    // One key head expanded over four, and the incoming gradient of a sum.
    let mut case = Case::new([1, 4, 4, 6, 7, 4, 4], Options::default());
    for values in [&mut case.key, &mut case.value] {
        let first = values[..28].to_vec();
        *values = first.repeat(4);
    }
    case.output_gradient.fill(0.5);
    let expand = |values: &[f64]| {
        Flex::float_expand(floats(&values[..28], [1, 1, 7, 4]), [1, 4, 7, 4].into())
    };
    let operands = Operands {
        key: expand(&case.key),
        value: expand(&case.value),
        ..case.operands()
    };
    let gradient = Flex::float_expand(floats(&[0.5], [1; 4]), case.problem.output_shape().into());
    let got = case.composed_of(operands, gradient, Wanted::ALL, BLOCKS);
    got.assert_near(&case.reference(), Dtype::F32, "expanded");
}

fn data_and_shape(tensor: FloatTensor<Flex>) -> (Vec<f64>, [usize; 4]) {
    let shape = tensor.shape().dims();
    (data(tensor), shape)
}

#[test]
fn only_wanted_gradients_are_computed() {
    let options = Options {
        softcap: Some(3.0),
        ..causal(Alignment::BottomRight)
    };
    let case = Case::with(SIZES, options, None, Some([1, 4, 1, 10]), Dtype::F32);
    let all = case.composed(Wanted::ALL).gradients;
    for choice in 0..16 {
        let has = |bit: u32| choice >> bit & 1 == 1;
        let wanted = Wanted::NONE
            .query(has(0))
            .key(has(1))
            .value(has(2))
            .bias(has(3));
        let got = case.composed(wanted).gradients;
        for (n, (got, all)) in got.into_iter().zip(&all).enumerate() {
            let expected = has(n as u32).then(|| all.clone().unwrap());
            assert_eq!(got, expected, "{wanted:?}");
        }
    }
}

/// Catches a scale that makes the query overflow before the product does, or the product before the
/// scale, though every score is finite.
#[test]
fn scores_of_any_scale_are_finite() {
    // Powers of two: nothing is rounded on the way, and scores are 2^0 or 2^1 times products of numbers.
    for (scale, query, key) in [(120, 9, -129), (-126, 64, 63)] {
        for causally in [false, true] {
            let options = Options {
                scale: Some(2f64.powi(scale)),
                causal: causally,
                ..Options::default()
            };
            let mut case = Case::new(SIZES, options);
            case.query.iter_mut().for_each(|x| *x *= 2f64.powi(query));
            case.key.iter_mut().for_each(|x| *x *= 2f64.powi(key));
            let (mut got, mut exact) = (case.composed(Wanted::ALL), case.reference());
            if scale > 0 {
                // The gradient of the key is not a number of f32 there.
                (got.gradients[1], exact.gradients[1]) = (None, None);
            }
            got.assert_near(&exact, Dtype::F32, &format!("scale 2^{scale}, {causally}"));
        }
    }
}

/// Catches sums of values that overflow, though their weighted mean is as finite as they are.
#[test]
fn means_of_the_largest_values_are_finite() {
    for options in [Options::default(), causal(Alignment::BottomRight)] {
        let mut case = Case::new([1, 2, 1, 50, 50, 4, 4], options);
        case.value
            .iter_mut()
            .for_each(|x| *x = (x.abs() + 0.5) * 2f64.powi(126));
        case.output_gradient
            .iter_mut()
            .for_each(|x| *x *= 2f64.powi(-20));
        case.check(&format!("{options:?}"));
    }
}
