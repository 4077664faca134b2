//! The two worked examples, computed by the reference and checked by properties that hold for any
//! softmax and by hand where the numbers are few.

mod case;

use approx::assert_relative_eq;
use case::{Case, Sizes};
use flash_attention_spec::reference::probabilities;
use flash_attention_spec::{Options, Problem};

/// Positions, and width of queries, keys and values.
const N: usize = 5;
const D: usize = 2;

const TIGHT: f64 = 1e-14;

fn problem(seq_q: usize, seq_kv: usize, dim: usize, options: &Options) -> Problem {
    let sizes = Sizes {
        batch: 1,
        heads: 1,
        kv_heads: 1,
        seq_q,
        seq_kv,
        head_dim: dim,
        value_dim: dim,
    };
    sizes.problem(None, None, options)
}

/// Five positions under a causal rule, with loss `sum(output * g)`.
fn five_positions() -> Case {
    let causal = Options {
        causal: true,
        ..Options::default()
    };
    Case {
        problem: problem(N, N, D, &causal),
        query: vec![0.2, -0.3, 0.5, 0.1, -0.4, 0.7, 0.6, -0.2, 0.1, 0.8],
        key: vec![0.3, 0.5, -0.2, 0.4, 0.7, -0.1, 0.1, -0.6, -0.5, 0.2],
        value: vec![1.0, 0.0, 0.0, 2.0, -1.0, 1.0, 2.0, -1.0, 0.5, 0.3],
        mask: None,
        bias: None,
        output_gradient: vec![0.2, -0.1, 0.3, 0.5, -0.4, 0.2, 0.1, -0.3, 0.6, 0.4],
        lse_gradient: None,
    }
}

/// Sums of each channel over the positions.
fn channel_sums(rows: &[f64]) -> [f64; D] {
    let (rows, _) = rows.as_chunks::<D>();
    rows.iter()
        .fold([0.0; D], |s, r| [s[0] + r[0], s[1] + r[1]])
}

#[test]
fn six_scores_have_the_maximum_denominator_and_lse_of_the_worked_example() {
    let scores = [1.0, 2.0, -1.0, 3.0, 0.0, 2.5];
    let case = Case {
        problem: problem(1, 6, 1, &Options::default()),
        query: vec![1.0],
        key: scores.to_vec(),
        value: vec![1.0; 6],
        mask: None,
        bias: None,
        output_gradient: vec![0.0],
        lse_gradient: None,
    };
    let denominator = 2.177_848_091_377_286_6_f64;
    let lse = case.forward().lse[0];
    assert_relative_eq!(lse, 3.0 + denominator.ln(), max_relative = TIGHT);
    let p = probabilities(&case.problem, &case.inputs(), 0, 0);
    for (p, score) in p.iter().zip(scores) {
        let expected = (score - 3.0).exp() / denominator;
        assert_relative_eq!(*p, expected, max_relative = TIGHT);
    }
}

#[test]
fn five_positions_make_fifteen_probabilities_of_twenty_five() {
    let case = five_positions();
    let p = probabilities(&case.problem, &case.inputs(), 0, 0);
    assert_eq!(p.len(), 25);
    for (i, row) in p.chunks_exact(N).enumerate() {
        assert_relative_eq!(row.iter().sum::<f64>(), 1.0, max_relative = TIGHT);
        assert!(row[..=i].iter().all(|p| *p > 0.0));
        assert!(row[i + 1..].iter().all(|p| *p == 0.0));
    }
    assert_eq!(p.iter().filter(|p| **p > 0.0).count(), 15);
}

#[test]
fn first_two_positions_agree_with_a_computation_by_hand() {
    let case = five_positions();
    let result = case.forward();
    let scale = 0.5_f64.sqrt();
    // The first query sees the first key alone.
    assert_eq!(result.output[..2], [1.0, 0.0]);
    assert_relative_eq!(result.lse[0], scale * -0.09, max_relative = TIGHT);
    // The second sees two, of values [1, 0] and [0, 2]: a logistic function of the scores 0.2
    // and -0.06 times the scale.
    let p = 1.0 / (1.0 + (scale * -0.26).exp());
    assert_relative_eq!(result.output[2], p, max_relative = TIGHT);
    assert_relative_eq!(result.output[3], 2.0 - 2.0 * p, max_relative = TIGHT);

    let dq = case.backward().query;
    assert_eq!(dq[..2], [0.0, 0.0]);
    // dL/dp = 0.3 - 2 * 0.5, dp = p (1 - p) d(s0 - s1), and s0 - s1 = scale * q . [0.5, 0.1].
    let slope = scale * p * (1.0 - p) * (0.3 - 2.0 * 0.5);
    assert_relative_eq!(dq[2], slope * 0.5, max_relative = 10.0 * TIGHT);
    assert_relative_eq!(dq[3], slope * 0.1, max_relative = 10.0 * TIGHT);
}

#[test]
fn gradients_keep_the_sums_that_a_softmax_keeps() {
    let case = five_positions();
    let gradients = case.backward();
    // Rows of P sum to 1, so a value common to all keys is passed on as it is.
    let expected = channel_sums(&case.output_gradient);
    let sums = channel_sums(&gradients.value);
    for (sum, expected) in sums.into_iter().zip(expected) {
        assert_relative_eq!(sum, expected, max_relative = 10.0 * TIGHT);
    }
    // Adding one vector to all keys shifts whole rows of scores, which changes no probability.
    for sum in channel_sums(&gradients.key) {
        assert!(sum.abs() < TIGHT, "{sum:e}");
    }
}

#[test]
fn later_positions_leave_earlier_ones_bit_equal() {
    let case = five_positions();
    let whole = case.forward();
    let mut changed = case.clone();
    changed.key[4 * D..].fill(9.0);
    changed.value[4 * D..].fill(f64::NAN);
    let result = changed.forward();
    assert_eq!(result.output[..4 * D], whole.output[..4 * D]);
    assert_eq!(result.lse[..4], whole.lse[..4]);
    assert!(result.output[4 * D..].iter().all(|x| x.is_nan()));
}
