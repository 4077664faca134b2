//! Rows that see nothing, keys that nobody sees, and numbers at the edge of what a type can hold.

use super::{Case, causal, window};
use flash_attention_spec::{Alignment, Dtype, Options, Wanted};

#[test]
fn rows_that_see_nothing() {
    // By the band: rows 0 to 2 of 5 come before the first key.
    let case = Case::new([1, 2, 2, 5, 2, 8, 8], causal(Alignment::BottomRight));
    case.check("band");
    // By mask and band together: rows see keys up to their own, and keys up to 3 are hidden.
    let mut case = Case::with(
        [1, 1, 1, 7, 7, 4, 4],
        causal(Alignment::BottomRight),
        Some([1, 1, 1, 7]),
        None,
        Dtype::F32,
    );
    case.mask = Some((0..7).map(|j| j < 4).collect());
    case.check("mask and band");
    let got = case.composed(Wanted::ALL);
    assert_eq!(got.output[..16], [0.0; 16]);
    assert_eq!(got.lse[..4], [f64::NEG_INFINITY; 4]);
    let [query, key, value, _] = got.gradients.map(Option::unwrap_or_default);
    assert_eq!(query[..16], [0.0; 16]);
    // Nor does anyone see these keys.
    assert_eq!(key[..16], [0.0; 16]);
    assert_eq!(value[..16], [0.0; 16]);
}

#[test]
fn a_bias_of_minus_infinity_hides() {
    let mut case = Case::with(
        [1, 1, 1, 5, 12, 4, 4],
        Options::default(),
        None,
        Some([1, 1, 1, 12]),
        Dtype::F32,
    );
    let bias = case.bias.as_mut().unwrap();
    bias[..7].fill(f64::NEG_INFINITY);
    case.check("seven of twelve keys");
    case.bias.as_mut().unwrap().fill(f64::NEG_INFINITY);
    case.check("all keys");
    assert_eq!(case.composed(Wanted::ALL).lse, [f64::NEG_INFINITY; 5]);
}

#[test]
fn a_low_bias_on_a_whole_row_does_not_hide() {
    let mut case = Case::with(
        [1, 1, 1, 4, 9, 4, 4],
        Options::default(),
        None,
        Some([1, 1, 4, 1]),
        Dtype::F32,
    );
    case.bias = Some(vec![-2e4, -6e4, -1e6, f64::from(f32::MIN)]);
    let got = case.composed(Wanted::ALL);
    case.bias = Some(vec![0.0; 4]);
    let unbiased = case.composed(Wanted::ALL);
    // The bias takes the low digits of the scores: its own rounding bounds what is left of them.
    for (row, tolerance) in [2e-3, 4e-3, 0.07].into_iter().enumerate() {
        for n in row * 4..row * 4 + 4 {
            let error = (got.output[n] - unbiased.output[n]).abs();
            assert!(error < tolerance, "row {row}: {error}");
        }
    }
    assert!(got.output.iter().all(|x| x.is_finite()));
    assert!(
        got.gradients[0]
            .as_ref()
            .unwrap()
            .iter()
            .all(|x| x.is_finite())
    );
}

#[test]
fn what_is_not_finite_reaches_only_those_that_see_it() {
    let options = [
        causal(Alignment::BottomRight),
        window(Some(2), Some(1)),
        Options {
            softcap: Some(2.0),
            ..causal(Alignment::BottomRight)
        },
    ];
    for options in options {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let clean = Case::with(
                [1, 2, 1, 10, 11, 4, 4],
                options,
                Some([1, 1, 1, 11]),
                None,
                Dtype::F32,
            );
            let place = |values: &mut Vec<f64>, row: usize| values[row * 4 + 1] = bad;
            let mut cases = vec![clean.clone(); 4];
            place(&mut cases[0].query, 4);
            place(&mut cases[1].key, 7);
            place(&mut cases[2].value, 7);
            place(&mut cases[3].output_gradient, 5);
            for (case, operand) in cases.iter().zip(["query", "key", "value", "gradient"]) {
                case.check(&format!("{options:?}: {bad} in {operand}"));
            }
        }
    }
}

#[test]
fn a_visible_bias_that_is_not_finite_stays_in_its_row() {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut case = Case::with(
            [1, 2, 1, 10, 11, 4, 4],
            causal(Alignment::BottomRight),
            None,
            Some([1, 1, 10, 11]),
            Dtype::F32,
        );
        case.bias.as_mut().unwrap()[5 * 11 + 3] = bad;
        case.check(&format!("{bad} in the bias"));
    }
}

#[test]
fn hidden_padding_does_not_count() {
    let mut case = Case::with(
        [1, 2, 2, 6, 11, 4, 4],
        Options::default(),
        Some([1, 1, 1, 11]),
        None,
        Dtype::F32,
    );
    case.mask = Some((0..11).map(|j| j >= 7).collect());
    let clean = case.composed(Wanted::ALL);
    for bad in [f64::NAN, f64::INFINITY, 3e38] {
        let mut case = case.clone();
        for head in 0..2 {
            let padding = (head * 11 + 7) * 4..(head * 11 + 11) * 4;
            case.key[padding.clone()].fill(bad);
            case.value[padding].fill(bad);
        }
        assert!(
            case.composed(Wanted::ALL) == clean,
            "{bad} reaches a result"
        );
    }
}

#[test]
fn probabilities_of_large_scores() {
    for size in [1e3, 1e4] {
        let mut case = Case::new([1, 1, 1, 3, 50, 64, 4], Options::default());
        case.query.fill(size);
        case.key.fill(size);
        case.lse_gradient = None;
        let value = case.composed(Wanted::ALL).gradients[2].clone().unwrap();
        // Every probability is 1/50, so each row of dv is the sum of the gradient's rows over 50.
        for (n, got) in value.into_iter().enumerate() {
            let sum: f64 = (0..3).map(|i| case.output_gradient[i * 4 + n % 4]).sum();
            assert!(
                (got - sum / 50.0).abs() < 1e-6,
                "{size}: {got}, expected {}",
                sum / 50.0
            );
        }
    }
}

#[test]
fn range_of_f16() {
    let mut case = Case::with(
        [1, 1, 1, 2, 64, 8, 8],
        Options::default(),
        None,
        None,
        Dtype::F16,
    );
    case.query.fill(0.0);
    case.value.fill(30000.0);
    let got = case.composed(Wanted::ALL);
    assert_eq!(got.output, [30000.0; 16]);
    assert!(
        got.gradients
            .iter()
            .flatten()
            .flatten()
            .all(|x| x.is_finite())
    );
}
