//! `attn ledger` on the worked examples, on other rows and on arguments that make no sense.

use crate::attn::{json, stdout, usage};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|n| n.as_f64().unwrap()).collect()
}

#[test]
fn the_default_is_the_worked_row() {
    let ledger = json("ledger");
    let blocks = ledger["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 3);
    assert_eq!(numbers(&blocks[0]["scores"]), [1.0, 2.0]);
    assert_eq!(blocks[0]["rescale"], 0.0);
    assert_eq!(blocks[1]["rescale"].as_f64().unwrap(), (-1.0_f64).exp());
    assert_eq!(blocks[2]["block_max"], 2.5);
    assert_eq!(blocks[2]["running_max"], 3.0);
    let denominator = blocks[2]["denominator"].as_f64().unwrap();
    assert!((denominator - 2.1778480913772866).abs() < 1e-15);
    let lse = ledger["lse"].as_f64().unwrap();
    assert!((lse - (3.0 + denominator.ln())).abs() < 1e-15);
    assert!(ledger["difference"]["o"].as_f64().unwrap() < 1e-12);
}

#[test]
fn every_block_size_ends_alike() {
    let o = |block| {
        json(&format!("ledger --block {block}"))["o"]
            .as_f64()
            .unwrap()
    };
    let full = json("ledger")["full"]["o"].as_f64().unwrap();
    for block in 1..=7 {
        assert!((o(block) - full).abs() < 1e-12, "block {block}");
    }
}

#[test]
fn scores_and_values_are_taken_from_the_command_line() {
    let ledger = json("ledger --scores -inf,0,-inf,0 --values 9,1,9,-3 --block 1");
    assert_eq!(ledger["o"], -1.0);
    assert_eq!(ledger["blocks"][0]["running_max"], "-inf");
    assert_eq!(ledger["blocks"][0]["denominator"], 0.0);
    assert!((ledger["lse"].as_f64().unwrap() - 2_f64.ln()).abs() < 1e-15);

    // The default values are positions, so equal scores give the mean position.
    assert_eq!(json("ledger --scores 5,5,5")["o"], 2.0);

    let nothing = json("ledger --scores=-inf,-inf");
    assert_eq!(
        (&nothing["o"], &nothing["lse"]),
        (&0.0.into(), &"-inf".into())
    );
}

#[test]
fn the_text_is_an_aligned_table_with_the_same_numbers() {
    let text = stdout("ledger");
    let line = |starts: &str| {
        let mut lines = text
            .lines()
            .filter(|line| line.trim_start().starts_with(starts));
        lines.next().unwrap_or_else(|| panic!("{starts} in {text}"))
    };
    let lse = line("lse = m + ln l")
        .split_whitespace()
        .collect::<Vec<_>>();
    assert_eq!(lse[6..8], ["3.778337", "3.778337"]);
    let widths: Vec<usize> = text
        .lines()
        .skip_while(|line| !line.contains("block max"))
        .take(4)
        .map(|line| line.chars().count())
        .collect();
    assert_eq!(widths.len(), 4);
    assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
}

#[test]
fn the_backward_ledger_keeps_its_counts_apart() {
    let ledger = json("ledger --backward");
    let counts = &ledger["counts"];
    assert_eq!(counts["full_probabilities"], 25);
    assert_eq!(counts["saved_statistics"], 5);
    assert_eq!(counts["largest_block"], 4);
    assert_eq!(counts["forward_dot_products"], 15);
    assert_eq!(counts["backward_dot_products"], 15);
    let blocks = ledger["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 6);
    assert_eq!(numbers(&blocks[0]["probabilities"][0]), [1.0, 0.0]);
    assert!(ledger["difference"].as_f64().unwrap() < 1e-12);
    let last = &blocks[5]["gradients_so_far"];
    for (name, rows) in ledger["full_gradients"].as_object().unwrap() {
        for (row, full) in rows.as_array().unwrap().iter().enumerate() {
            for (got, full) in numbers(&last[name][row]).iter().zip(numbers(full)) {
                assert!((got - full).abs() < 1e-12, "{name} {row}");
            }
        }
    }
    let text = stdout("ledger --backward");
    let line = text
        .lines()
        .find(|line| line.contains("dot products again backward"));
    assert_eq!(
        line.unwrap().split_whitespace().last(),
        Some("15"),
        "{text}"
    );
}

#[test]
fn backward_takes_block_sizes_and_causal() {
    assert_eq!(
        json("ledger --backward --causal"),
        json("ledger --backward")
    );
    let all = json("ledger --backward --causal=false --block-q 5 --block-kv 1");
    assert_eq!(all["counts"]["forward_dot_products"], 25);
    assert_eq!(all["counts"]["largest_block"], 5);
    assert_eq!(all["blocks"].as_array().unwrap().len(), 5);
}

#[test]
fn a_result_that_is_lost_to_overflow_is_a_failure() {
    // The output is printed, so this is not `error`, which wants nothing on standard output.
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_attn"))
        .args([
            "ledger",
            "--scores",
            "0,0,1000",
            "--values",
            "1e308,1e308,1",
            "--block",
            "1",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("the output by blocks and by the full row differ"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
}

/// Catches two options that are described alike, and those that are of no use alone.
#[test]
fn help_tells_the_options_of_either_pass_apart() {
    let help = stdout("ledger --help");
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for says in [
        "--block <N> Scores in a block",
        "--block-q <N> With --backward: queries in a block",
        "--block-kv <N> With --backward: keys in a block",
        "With --backward: whether a query sees",
        "which takes no --scores, --values, --block",
    ] {
        assert!(words.contains(says), "{says}: {help}");
    }
}

#[test]
fn refusals_are_usage_errors_that_name_the_culprit() {
    const COUNT: &str = "expected a whole number of at least 1";
    for (arguments, names) in [
        ("ledger --block 0", "'0' for '--block <N>'"),
        ("ledger --block 0", COUNT),
        ("ledger --block=-1", COUNT),
        ("ledger --block two", COUNT),
        ("ledger --scores 1,nan", "scores[1] is NaN"),
        ("ledger --scores 1,2,inf", "scores[2] is inf"),
        ("ledger --scores=-1,2 --values 1", "values has 1 entries"),
        ("ledger --values 1", "values has 1 entries"),
        ("ledger --values=1,2,3,4,5,inf", "values[5] is inf"),
        ("ledger --values 1", "Usage: attn ledger"),
        ("ledger --backward --block-q 0", "'0' for '--block-q <N>'"),
        ("ledger --backward --block-kv 0", "'0' for '--block-kv <N>'"),
        ("ledger --scores 1,x", "--scores"),
        ("ledger --backward --block 3", "--block <N>"),
        ("ledger --block-q 3", "--backward"),
        ("ledger --causal", "--backward"),
        ("ledger --backward --causal=maybe", "--causal"),
        ("ledger --nonsense", "--nonsense"),
    ] {
        let text = usage(arguments);
        assert!(text.contains(names), "attn {arguments}: {text}");
    }
}
