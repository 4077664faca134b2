//! The reference where rows see nothing, hidden keys hold garbage, scores are extreme, heads are
//! shared, lengths are zero or arrays do not fit.

mod case;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use case::{Case, Sizes};
use flash_attention_spec::reference::probabilities;
use flash_attention_spec::{Alignment, Options, Window};
use std::panic::{AssertUnwindSafe, catch_unwind};

const SIZES: Sizes = Sizes {
    batch: 1,
    heads: 2,
    kv_heads: 2,
    seq_q: 5,
    seq_kv: 4,
    head_dim: 3,
    value_dim: 2,
};

/// Numbers from -1 to 1 without a pattern.
fn numbers(count: usize, seed: f64) -> Vec<f64> {
    (0..count)
        .map(|n| (n as f64 * 12.9898 + seed).sin())
        .collect()
}

/// A case with mask and bias of full shape, if at all.
fn case(sizes: Sizes, mask: Option<Vec<bool>>, bias: Option<Vec<f64>>, options: Options) -> Case {
    let full = [sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv];
    let mask_shape = mask.as_ref().map(|_| full);
    let bias_shape = bias.as_ref().map(|_| full);
    let queries = sizes.batch * sizes.heads * sizes.seq_q;
    let keys = sizes.batch * sizes.kv_heads * sizes.seq_kv;
    Case {
        problem: sizes.problem(mask_shape, bias_shape, &options),
        query: numbers(queries * sizes.head_dim, 0.1),
        key: numbers(keys * sizes.head_dim, 0.2),
        value: numbers(keys * sizes.value_dim, 0.3),
        mask,
        bias,
        output_gradient: numbers(queries * sizes.value_dim, 0.4),
        lse_gradient: Some(numbers(queries, 0.5)),
    }
}

/// One flag or number per query and key of [`SIZES`], the same for each head.
fn per_pair<T>(of: impl Fn(usize, usize) -> T) -> Option<Vec<T>> {
    let positions = 0..SIZES.heads * SIZES.seq_q * SIZES.seq_kv;
    let pairs = positions.map(|n| (n / SIZES.seq_kv % SIZES.seq_q, n % SIZES.seq_kv));
    Some(pairs.map(|(i, j)| of(i, j)).collect())
}

/// A bias of minus infinity where `out` says so and 0 elsewhere.
fn infinite(out: impl Fn(usize, usize) -> bool) -> Option<Vec<f64>> {
    per_pair(|i, j| if out(i, j) { f64::NEG_INFINITY } else { 0.0 })
}

fn rows(array: &[f64], head: usize, length: usize, at: usize) -> &[f64] {
    let width = array.len() / (SIZES.heads * length);
    &array[(head * length + at) * width..][..width]
}

#[test]
fn a_row_that_sees_nothing_is_zero_by_every_rule_that_hides_it() {
    let causal = Options {
        causal: true,
        ..Options::default()
    };
    let window = Options {
        alignment: Alignment::TopLeft,
        window: Window {
            left: Some(0),
            right: None,
        },
        ..Options::default()
    };
    let plain = Options::default();
    // Five queries over four keys: bottom-right causal leaves nothing to the first, and a window
    // that only looks right from the top-left diagonal leaves nothing to the last.
    let mask = per_pair(|i, _| i == 2);
    let bias = infinite(|i, _| i == 3);
    let half_of_mask = per_pair(|_, j| j < 2);
    let half_of_bias = infinite(|i, j| i == 1 && j >= 2);
    let cases = [
        ("causal", 0, case(SIZES, None, None, causal)),
        ("window", 4, case(SIZES, None, None, window)),
        ("mask", 2, case(SIZES, mask, None, plain)),
        ("bias", 3, case(SIZES, None, bias, plain)),
        ("both", 1, case(SIZES, half_of_mask, half_of_bias, plain)),
    ];
    for (rule, hidden, mut case) in cases {
        let clean = case.backward();
        for head in 0..SIZES.heads {
            let at = head * SIZES.seq_q + hidden;
            // Whatever arrives for the row must not get through it.
            case.output_gradient[at * 2..][..2].fill(f64::NAN);
            case.lse_gradient.as_mut().unwrap()[at] = f64::INFINITY;
            // Minus infinity takes a number out of the row; a NaN it cannot reach.
            if case.bias.is_none() {
                case.query[at * 3..][..3].fill(f64::NAN);
            }
        }
        let result = case.forward();
        let gradients = case.backward();
        assert_eq!(gradients, clean, "{rule}");
        for head in 0..SIZES.heads {
            for i in 0..SIZES.seq_q {
                let output = rows(&result.output, head, SIZES.seq_q, i);
                let lse = rows(&result.lse, head, SIZES.seq_q, i);
                let dq = rows(&gradients.query, head, SIZES.seq_q, i);
                if i == hidden {
                    assert_eq!(output, [0.0; 2], "{rule}");
                    assert_eq!(lse, [f64::NEG_INFINITY], "{rule}");
                    assert_eq!(dq, [0.0; 3], "{rule}");
                } else {
                    assert!(output.iter().all(|x| *x != 0.0), "{rule}, row {i}");
                    assert!(lse[0].is_finite(), "{rule}, row {i}");
                }
            }
        }
    }
}

#[test]
fn garbage_in_a_key_nobody_sees_reaches_nothing_and_gets_no_gradient() {
    for garbage in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let hides = per_pair(|_, j| j == 1);
        let clean = case(SIZES, hides, Some(numbers(40, 0.6)), Options::default());
        let mut dirty = clean.clone();
        for head in 0..SIZES.heads {
            let at = head * SIZES.seq_kv + 1;
            dirty.key[at * 3..][..3].fill(garbage);
            dirty.value[at * 2..][..2].fill(garbage);
            for i in 0..SIZES.seq_q {
                let at = (head * SIZES.seq_q + i) * SIZES.seq_kv + 1;
                dirty.bias.as_mut().unwrap()[at] = garbage;
            }
        }
        assert_eq!(dirty.forward(), clean.forward());
        let gradients = dirty.backward();
        assert_eq!(gradients, clean.backward());
        for head in 0..SIZES.heads {
            assert_eq!(rows(&gradients.key, head, SIZES.seq_kv, 1), [0.0; 3]);
            assert_eq!(rows(&gradients.value, head, SIZES.seq_kv, 1), [0.0; 2]);
            for i in 0..SIZES.seq_q {
                let bias = gradients.bias.as_ref().unwrap();
                assert_eq!(rows(bias, head, SIZES.seq_q, i)[1], 0.0);
            }
        }
    }
}

#[test]
fn garbage_in_a_value_that_minus_infinity_takes_out_reaches_nothing() {
    let clean = case(SIZES, None, infinite(|_, j| j == 2), Options::default());
    let mut dirty = clean.clone();
    for head in 0..SIZES.heads {
        let at = head * SIZES.seq_kv + 2;
        dirty.value[at * 2..][..2].fill(f64::NAN);
    }
    assert_eq!(dirty.forward(), clean.forward());
    assert_eq!(dirty.backward(), clean.backward());
}

#[test]
fn a_nan_in_a_visible_key_shows_in_the_rows_that_see_it_only() {
    let causal = Options {
        causal: true,
        ..Options::default()
    };
    let mut case = case(SIZES, None, None, causal);
    // The third key of the first head: seen by the queries 3 and 4.
    case.key[2 * 3] = f64::NAN;
    let result = case.forward();
    let dq = case.backward().query;
    for head in 0..SIZES.heads {
        for i in 0..SIZES.seq_q {
            let sees = head == 0 && i >= 3;
            for array in [&result.output, &result.lse, &dq] {
                let row = rows(array, head, SIZES.seq_q, i);
                assert!(row.iter().all(|x| x.is_nan() == sees), "{head} {i} {row:?}");
            }
        }
    }
}

#[test]
fn a_row_of_nan_scores_alone_is_not_taken_for_an_empty_one() {
    let mut case = case(SIZES, None, None, Options::default());
    case.key.fill(f64::NAN);
    let result = case.forward();
    assert!(result.output.iter().chain(&result.lse).all(|x| x.is_nan()));
}

#[test]
fn a_large_bias_on_whole_rows_shifts_lse_and_nothing_else() {
    let zero = case(SIZES, None, Some(vec![0.0; 40]), Options::default());
    for shift in [-2e4, -6e4, -1e6] {
        let shifted = case(SIZES, None, Some(vec![shift; 40]), Options::default());
        let (result, expected) = (shifted.forward(), zero.forward());
        // Adding 1e6 to a score rounds it by up to 6e-11.
        for (got, expected) in result.output.iter().zip(&expected.output) {
            assert_abs_diff_eq!(*got, *expected, epsilon = 1e-9);
        }
        for (got, expected) in result.lse.iter().zip(&expected.lse) {
            assert_abs_diff_eq!(*got, expected + shift, epsilon = 1e-9);
        }
    }
}

#[test]
fn equal_keys_share_evenly_at_any_size_of_score() {
    let sizes = Sizes {
        heads: 1,
        kv_heads: 1,
        seq_q: 1,
        seq_kv: 50,
        ..SIZES
    };
    for size in [1e3, 1e4, 1e150] {
        let mut case = case(sizes, None, None, Options::default());
        case.query.fill(size);
        case.key.fill(size);
        let p = probabilities(&case.problem, &case.inputs(), 0, 0);
        assert!(p.iter().all(|p| *p == 1.0 / 50.0));
        let g = &case.output_gradient;
        for dv in case.backward().value.chunks_exact(2) {
            assert_eq!(dv, [g[0] / 50.0, g[1] / 50.0]);
        }
    }
}

#[test]
fn a_saturated_soft_cap_stops_the_gradient_of_the_scores() {
    let capped = Options {
        softcap: Some(50.0),
        ..Options::default()
    };
    let mut case = case(SIZES, None, Some(vec![0.0; 40]), capped);
    case.query.fill(1e4);
    case.key.fill(1e4);
    let result = case.forward();
    for lse in result.lse {
        assert_relative_eq!(lse, 50.0 + 4_f64.ln(), max_relative = 1e-14);
    }
    let gradients = case.backward();
    assert!(
        gradients
            .query
            .iter()
            .chain(&gradients.key)
            .all(|x| *x == 0.0)
    );
    // The bias is added after the cap and still gets its own.
    assert!(gradients.bias.unwrap().iter().all(|x| *x != 0.0));
}

#[test]
fn shared_heads_equal_repeated_ones_with_their_gradients_summed() {
    for kv_heads in [1, 2, 3, 6] {
        let shared_sizes = Sizes {
            batch: 2,
            heads: 6,
            kv_heads,
            ..SIZES
        };
        let repeated_sizes = Sizes {
            kv_heads: 6,
            ..shared_sizes
        };
        let shared = case(shared_sizes, None, None, Options::default());
        let mut repeated = case(repeated_sizes, None, None, Options::default());
        let group = 6 / kv_heads;
        let repeat = |array: &[f64], width: usize| -> Vec<f64> {
            let heads = array.chunks_exact(SIZES.seq_kv * width);
            heads.flat_map(|head| head.repeat(group)).collect()
        };
        repeated.key = repeat(&shared.key, 3);
        repeated.value = repeat(&shared.value, 2);
        assert_eq!(shared.forward(), repeated.forward());
        let [got, parts] = [shared.backward(), repeated.backward()];
        assert_eq!(got.query, parts.query);
        for (got, parts, width) in [(got.key, parts.key, 3), (got.value, parts.value, 2)] {
            let head = SIZES.seq_kv * width;
            for (n, got) in got.iter().enumerate() {
                let first = n / head * group * head + n % head;
                let sum: f64 = (0..group).map(|part| parts[first + part * head]).sum();
                assert_abs_diff_eq!(*got, sum, epsilon = 1e-14);
            }
        }
    }
}

#[test]
fn a_loss_on_lse_alone_leaves_the_values_without_gradient() {
    let mut case = case(SIZES, None, None, Options::default());
    case.output_gradient.fill(0.0);
    let gradients = case.backward();
    assert!(gradients.value.iter().all(|x| *x == 0.0));
    assert!(gradients.query.iter().all(|x| *x != 0.0));
}

#[test]
fn empty_lengths_give_empty_or_zero_arrays() {
    let no_keys = case(Sizes { seq_kv: 0, ..SIZES }, None, None, Options::default());
    let result = no_keys.forward();
    assert_eq!(result.output, [0.0; 2 * 5 * 2]);
    assert_eq!(result.lse, [f64::NEG_INFINITY; 2 * 5]);
    assert_eq!(no_keys.backward().query, [0.0; 2 * 5 * 3]);

    let no_queries = case(Sizes { seq_q: 0, ..SIZES }, None, None, Options::default());
    assert!(no_queries.forward().output.is_empty());
    let gradients = no_queries.backward();
    assert!(gradients.query.is_empty() && gradients.bias.is_none());
    assert_eq!(gradients.key, [0.0; 2 * 4 * 3]);
    assert_eq!(gradients.value, [0.0; 2 * 4 * 2]);

    let no_batch = case(Sizes { batch: 0, ..SIZES }, None, None, Options::default());
    assert!(no_batch.forward().lse.is_empty());
    assert!(no_batch.backward().key.is_empty());
}

#[test]
fn an_array_that_does_not_fit_is_named() {
    let mask = || Some(vec![false; 40]);
    let bias = || Some(vec![0.0; 40]);
    let whole = || case(SIZES, mask(), bias(), Options::default());
    let plain = || case(SIZES, None, None, Options::default());
    let broken = |mut case: Case, edit: fn(&mut Case)| {
        edit(&mut case);
        case
    };
    let cases = [
        (
            broken(whole(), |c| c.query.truncate(29)),
            "query has 29 elements, expected 30 for shape [1, 2, 5, 3]",
        ),
        (
            broken(whole(), |c| c.key.push(0.0)),
            "key has 25 elements, expected 24 for shape [1, 2, 4, 3]",
        ),
        (
            broken(whole(), |c| c.value.clear()),
            "value has 0 elements, expected 16 for shape [1, 2, 4, 2]",
        ),
        (
            broken(whole(), |c| c.mask = Some(vec![true])),
            "mask has 1 elements, expected 40 for shape [1, 2, 5, 4]",
        ),
        (
            broken(whole(), |c| c.bias = None),
            "bias is missing, the problem has one of shape [1, 2, 5, 4]",
        ),
        (
            broken(plain(), |c| c.mask = Some(vec![])),
            "mask is given, but the problem has none",
        ),
        (
            broken(whole(), |c| c.output_gradient.push(0.0)),
            "output gradient has 21 elements, expected 20 for shape [1, 2, 5, 2]",
        ),
        (
            broken(whole(), |c| c.lse_gradient = Some(vec![])),
            "lse gradient has 0 elements, expected 10 for shape [1, 2, 5]",
        ),
    ];
    for (case, expected) in cases {
        assert_eq!(message(|| drop(case.backward())), expected);
        if !expected.contains("gradient") {
            assert_eq!(message(|| drop(case.forward())), expected);
        }
    }
    let case = plain();
    assert_eq!(
        message(|| drop(probabilities(&case.problem, &case.inputs(), 0, 2))),
        "batch 0, head 2 is outside of 1 batches of 2 heads"
    );
}

/// The message `action` panics with.
fn message(action: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(action)).unwrap_err();
    *payload.downcast().unwrap()
}
