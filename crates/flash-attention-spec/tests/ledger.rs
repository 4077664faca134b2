//! The block ledger against its worked values, against the full row and against the reference.

use approx::assert_abs_diff_eq;
use flash_attention_spec::ledger::{
    self, LedgerError, Rows, WORKED_ROWS, WORKED_SCORES, WORKED_VALUES,
};

/// The sum of `exp(score - 3)` over [`WORKED_SCORES`].
const WORKED_DENOMINATOR: f64 = 2.1778480913772866;
const HIDDEN: f64 = f64::NEG_INFINITY;

fn columns(values: &[f64]) -> Vec<[f64; 1]> {
    values.iter().map(|&v| [v]).collect()
}

#[test]
fn the_worked_row_has_its_statistics_at_every_block_size() {
    let values = columns(&WORKED_VALUES);
    for block in 1..=7 {
        let ledger = ledger::forward(&WORKED_SCORES, &values, block).unwrap();
        assert_eq!(ledger.blocks.len(), 6_usize.div_ceil(block));
        let last = ledger.blocks.last().unwrap();
        assert_eq!(last.running_max, 3.0);
        assert_abs_diff_eq!(last.denominator, WORKED_DENOMINATOR, epsilon = 1e-15);
        assert_abs_diff_eq!(ledger.lse, 3.0 + WORKED_DENOMINATOR.ln(), epsilon = 1e-15);
        assert_abs_diff_eq!(ledger.output[0], ledger.full_output[0], epsilon = 1e-12);
        assert!(ledger.output_difference <= 1e-12 && ledger.lse_difference <= 1e-12);
    }
}

#[test]
fn each_block_of_two_is_as_worked_by_hand() {
    let ledger = ledger::forward(&WORKED_SCORES, &columns(&WORKED_VALUES), 2).unwrap();
    let [first, second, third] = ledger.blocks.as_slice() else {
        panic!("three blocks");
    };
    let e = |x: f64| x.exp();

    assert_eq!(
        (first.keys.clone(), &first.scores[..]),
        (0..2, &[1.0, 2.0][..])
    );
    assert_eq!(
        (first.block_max, first.running_max, first.rescale),
        (2.0, 2.0, 0.0)
    );
    assert_eq!(first.probabilities, [e(-1.0), 1.0]);
    assert_abs_diff_eq!(first.denominator, e(-1.0) + 1.0, epsilon = 1e-15);
    assert_abs_diff_eq!(first.accumulator[0], e(-1.0) + 2.0, epsilon = 1e-15);

    assert_eq!((second.block_max, second.running_max), (3.0, 3.0));
    assert_eq!(second.rescale, e(-1.0));
    assert_eq!(second.probabilities, [e(-4.0), 1.0]);
    let sum = e(-2.0) + e(-1.0) + e(-4.0) + 1.0;
    assert_abs_diff_eq!(second.denominator, sum, epsilon = 1e-15);

    // The running maximum stays although the block's own is lower.
    assert_eq!(
        (third.block_max, third.running_max, third.rescale),
        (2.5, 3.0, 1.0)
    );
    assert_eq!(third.probabilities, [e(-3.0), e(-0.5)]);
}

#[test]
fn a_constant_on_the_whole_row_moves_the_maximum_and_the_lse_only() {
    let values = columns(&WORKED_VALUES);
    let plain = ledger::forward(&WORKED_SCORES, &values, 2).unwrap();
    for shift in [-1000.0, -7.0, 64.0, 1e6] {
        let shifted = ledger::forward(&WORKED_SCORES.map(|s| s + shift), &values, 2).unwrap();
        // Every shifted score is exact, so what depends on differences alone is bit-equal.
        assert_eq!(shifted.output, plain.output);
        assert_abs_diff_eq!(shifted.lse, plain.lse + shift, epsilon = 1e-9);
        for (a, b) in shifted.blocks.iter().zip(&plain.blocks) {
            assert_eq!(a.running_max, b.running_max + shift);
            assert_eq!(a.rescale, b.rescale);
            assert_eq!(a.probabilities, b.probabilities);
            assert_eq!(a.denominator, b.denominator);
            assert_eq!(a.accumulator, b.accumulator);
        }
    }
}

#[test]
fn hidden_keys_leave_the_row() {
    let scores = [HIDDEN, HIDDEN, HIDDEN, 1.0, HIDDEN, 2.5, HIDDEN];
    let values = columns(&[9.0, 9.0, 9.0, 4.0, 9.0, -2.0, 9.0]);
    let packed = ledger::forward(&[1.0, 2.5], &columns(&[4.0, -2.0]), 2).unwrap();
    for block in 1..=8 {
        let ledger = ledger::forward(&scores, &values, block).unwrap();
        assert_abs_diff_eq!(ledger.output[0], packed.output[0], epsilon = 1e-15);
        assert_abs_diff_eq!(ledger.lse, packed.lse, epsilon = 1e-15);
        assert!(ledger.output_difference <= 1e-12 && ledger.lse_difference <= 1e-12);
        for b in &ledger.blocks {
            for (s, p) in b.scores.iter().zip(&b.probabilities) {
                assert!(*s != HIDDEN || *p == 0.0, "{b:?}");
            }
            assert!(!b.rescale.is_nan() && !b.denominator.is_nan(), "{b:?}");
        }
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero_with_an_infinite_lse() {
    for block in 1..=4 {
        let ledger = ledger::forward(&[HIDDEN; 3], &[[1.0, 2.0]; 3], block).unwrap();
        assert_eq!(ledger.output, [0.0, 0.0]);
        assert_eq!(ledger.lse, HIDDEN);
        assert_eq!(
            (ledger.output_difference, ledger.lse_difference),
            (0.0, 0.0)
        );
        for b in &ledger.blocks {
            assert_eq!(
                (b.rescale, b.denominator, b.accumulator),
                (0.0, 0.0, [0.0; 2])
            );
        }
    }
}

#[test]
fn the_worked_head_has_its_counts_kept_apart() {
    let counts = ledger::backward(&WORKED_ROWS, true, 2, 2).unwrap().counts;
    assert_eq!(counts.full_probabilities, 25);
    assert_eq!(counts.saved_statistics, 5);
    assert_eq!(counts.largest_block, 4);
    assert_eq!(counts.forward_dot_products, 15);
    assert_eq!(counts.backward_dot_products, 15);
    assert_eq!((counts.visited_blocks, counts.skipped_blocks), (6, 3));

    let full = ledger::backward(&WORKED_ROWS, false, 2, 3).unwrap().counts;
    assert_eq!(
        (full.forward_dot_products, full.backward_dot_products),
        (25, 25)
    );
    assert_eq!((full.visited_blocks, full.skipped_blocks), (6, 0));
    assert_eq!(full.largest_block, 6);
}

#[test]
fn every_block_size_ends_at_the_reference_gradients() {
    for causal in [true, false] {
        for (block_q, block_kv) in (1..=6).flat_map(|q| (1..=6).map(move |kv| (q, kv))) {
            let ledger = ledger::backward(&WORKED_ROWS, causal, block_q, block_kv).unwrap();
            assert!(
                ledger.difference <= 1e-12,
                "causal {causal}, {block_q} x {block_kv}: {}",
                ledger.difference
            );
            let last = &ledger.blocks.last().unwrap().gradients;
            assert_abs_diff_eq!(last.value[4][1], ledger.full.value[4][1], epsilon = 1e-12);
            // The difference would be 0 too if neither side had done anything.
            assert!(ledger.full.query[4][0].abs() > 1e-3);
        }
    }
}

#[test]
fn differences_are_measured() {
    // Long enough for the two orders of summation to round differently.
    let scores: Vec<f64> = (0..97).map(|n| 3.0 * (0.7 * n as f64).sin()).collect();
    let values: Vec<_> = (0..97).map(|n| [(1.3 * n as f64).cos()]).collect();
    let row = ledger::forward(&scores, &values, 5).unwrap();
    assert_eq!(
        row.output_difference,
        (row.output[0] - row.full_output[0]).abs()
    );
    assert_eq!(row.lse_difference, (row.lse - row.full_lse).abs());
    assert!(row.output_difference > 0.0 && row.output_difference <= 1e-12);

    let head = ledger::backward(&WORKED_ROWS, true, 1, 1).unwrap();
    let last = &head.blocks.last().unwrap().gradients;
    let pairs = [
        (&last.query, &head.full.query),
        (&last.key, &head.full.key),
        (&last.value, &head.full.value),
    ];
    let differences = pairs.into_iter().flat_map(|(got, full)| {
        let pairs = got.as_flattened().iter().zip(full.as_flattened());
        pairs.map(|(a, b)| (a - b).abs()).collect::<Vec<_>>()
    });
    assert_eq!(head.difference, differences.fold(0.0, f64::max));
    assert!(head.difference > 0.0);

    // A sum past the largest number is reported, not hidden by the comparison.
    let overflow = ledger::forward(&[0.0, 0.0, 1000.0], &[[f64::MAX], [f64::MAX], [1.0]], 1);
    assert!(overflow.unwrap().output_difference.is_nan());
}

#[test]
fn rebuilt_rows_are_the_softmax_of_the_forward_pass() {
    let ledger = ledger::backward(&WORKED_ROWS, true, 2, 2).unwrap();
    let mut table = [[0.0; 5]; 5];
    for block in &ledger.blocks {
        for (row, i) in block.queries.clone().enumerate() {
            for (column, j) in block.keys.clone().enumerate() {
                table[i][j] += block.probabilities[row][column];
            }
        }
    }
    for (i, row) in table.iter().enumerate() {
        assert_abs_diff_eq!(row.iter().sum::<f64>(), 1.0, epsilon = 1e-12);
        assert!(row[i + 1..].iter().all(|&p| p == 0.0), "query {i}: {row:?}");
        let output: f64 = row
            .iter()
            .zip(WORKED_ROWS.value)
            .map(|(p, v)| p * v[0])
            .sum();
        assert_abs_diff_eq!(output, ledger.output[i][0], epsilon = 1e-12);
    }
    // The first query sees one key: its output is that key's value, and D is 0.2 * 1 - 0.1 * 0.
    assert_eq!(ledger.output[0], WORKED_ROWS.value[0]);
    assert_eq!(ledger.blocks[0].delta[0], 0.2);
}

#[test]
fn queries_before_the_first_key_see_nothing() {
    let long = Rows {
        key: &WORKED_ROWS.key[..2],
        value: &WORKED_ROWS.value[..2],
        ..WORKED_ROWS
    };
    let ledger = ledger::backward(&long, true, 2, 2).unwrap();
    assert_eq!(ledger.lse[..3], [HIDDEN; 3]);
    assert_eq!(ledger.output[..3], [[0.0; 2]; 3]);
    let last = &ledger.blocks.last().unwrap().gradients;
    assert_eq!(last.query[..3], [[0.0; 2]; 3]);
    assert_eq!(ledger.counts.forward_dot_products, 3);
    assert!(ledger.difference <= 1e-12);
}

#[test]
fn refusals_name_the_list() {
    let text = |error: LedgerError| error.to_string();
    let row = |scores: &[f64], values: &[f64], block| {
        text(ledger::forward(scores, &columns(values), block).unwrap_err())
    };
    assert_eq!(row(&[1.0], &[1.0], 0), "block is 0, expected at least 1");
    assert_eq!(
        row(&[], &[], 2),
        "scores is empty, expected at least one entry"
    );
    assert_eq!(
        row(&[1.0, 2.0], &[1.0], 2),
        "values has 1 entries, expected 2 as in scores"
    );
    assert_eq!(
        row(&[1.0, f64::NAN], &[1.0, 1.0], 2),
        "scores[1] is NaN, expected a finite number or -inf"
    );
    assert_eq!(
        row(&[f64::INFINITY], &[1.0], 2),
        "scores[0] is inf, expected a finite number or -inf"
    );
    assert_eq!(
        row(&[1.0], &[f64::NAN], 2),
        "values[0] is NaN, expected a finite number"
    );

    let head = |rows: Rows<'_, 2>, block_q, block_kv| {
        text(ledger::backward(&rows, true, block_q, block_kv).unwrap_err())
    };
    assert_eq!(head(WORKED_ROWS, 0, 2), "block_q is 0, expected at least 1");
    assert_eq!(
        head(WORKED_ROWS, 2, 0),
        "block_kv is 0, expected at least 1"
    );
    let no_key = Rows {
        key: &[],
        ..WORKED_ROWS
    };
    assert_eq!(
        head(no_key, 2, 2),
        "key is empty, expected at least one entry"
    );
    let short = Rows {
        value: &[[0.0; 2]; 4],
        ..WORKED_ROWS
    };
    assert_eq!(
        head(short, 2, 2),
        "value has 4 entries, expected 5 as in key"
    );
    let broken = Rows {
        query: &[[0.0, f64::NAN]; 5],
        ..WORKED_ROWS
    };
    assert_eq!(
        head(broken, 2, 2),
        "query[1] is NaN, expected a finite number"
    );

    let wide = [[0.0; 257]];
    let wide = Rows {
        query: &wide,
        key: &wide,
        value: &wide,
        output_gradient: &wide,
    };
    let error = ledger::backward(&wide, true, 2, 2).unwrap_err();
    assert!(text(error).starts_with("query has head_dim 257, expected 1 to 256"));
}
