//! Runs `compare` on a small shape and reads what it prints.

use serde_json::Value;
use std::process::{Command, Output};

/// Runs `compare` with the given arguments, separated by spaces.
fn compare(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_compare"));
    command.args(arguments.split_whitespace());
    command.output().expect("compare starts")
}

fn stdout(arguments: &str) -> String {
    let output = compare(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "compare {arguments}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The line that a run must fail with, exit status 1 and nothing on standard output.
fn error(arguments: &str) -> String {
    let output = compare(arguments);
    assert_eq!(output.status.code(), Some(1), "compare {arguments}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "compare {arguments}: {error}");
    error.trim_end().to_string()
}

#[cfg(feature = "flex")]
#[test]
fn the_table_has_a_line_for_each_and_the_ratio() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("figures.csv");
    let arguments = "--seq 16,32 --pass forward,training,layer --heads 2 --samples 2 --csv";
    let text = stdout(&format!("{arguments} {}", csv.display()));
    assert!(
        text.starts_with("# command: compare --seq 16,32 "),
        "{text}"
    );
    for (seq, pass) in [
        ("16", "forward"),
        ("16", "training"),
        ("16", "layer"),
        ("32", "forward"),
        ("32", "training"),
        ("32", "layer"),
    ] {
        for by in ["flash", "burn", "burn/flash"] {
            let wanted = [seq, pass, by];
            let line = |line: &&str| line.split_whitespace().take(3).eq(wanted);
            assert_eq!(text.lines().filter(line).count(), 1, "{wanted:?} in {text}");
        }
    }
    let agreements = text
        .lines()
        .filter(|line| line.starts_with("# flash differs"));
    assert_eq!(agreements.count(), 6, "{text}");
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 1 + 12, "{csv}");
}

#[cfg(feature = "flex")]
#[test]
fn json_has_figures_of_both_that_fit_together() {
    let text = stdout("--seq 33 --heads 4 --kv-heads 2 --causal false --samples 3 --json");
    let document: Value = serde_json::from_str(&text).unwrap();
    let comparison = &document["comparisons"][0];
    let number = |path: &str| {
        let value = comparison.pointer(path).and_then(Value::as_f64);
        value.unwrap_or_else(|| panic!("{path} in {text}"))
    };
    for (at, by) in ["flash", "burn"].into_iter().enumerate() {
        assert_eq!(comparison["results"][at]["by"], by, "{text}");
        let of = |field: &str| number(&format!("/results/{at}/{field}"));
        assert!(
            0.0 < of("issue_s") && of("issue_s") <= of("max_s"),
            "{text}"
        );
        assert!(
            of("min_s") <= of("median_s") && of("median_s") <= of("max_s"),
            "{text}"
        );
        if cfg!(target_os = "linux") {
            assert!(of("start_bytes") <= of("peak_bytes"), "{text}");
        }
    }
    let ratio = number("/results/1/median_s") / number("/results/0/median_s");
    assert!((number("/burn_over_flash/median") / ratio - 1.0).abs() < 1e-9);
    for output in ["o", "dq", "dk", "dv"] {
        let difference = number(&format!("/agreement/differences/{output}"));
        // Different orders of summation; equal bits would mean that one was compared with itself.
        assert!(
            0.0 < difference && difference < 1e-5,
            "{output}: {difference}"
        );
    }
}

#[test]
fn a_bad_request_is_one_line() {
    assert!(error("--device nowhere").starts_with("error: device nowhere is not compiled in"));
    assert!(error("--seq 0").contains("'--seq <SEQ>'"));
    assert!(error("--sequence 1").contains("--sequence"));
}

#[cfg(feature = "flex")]
#[test]
fn a_bad_shape_is_one_line() {
    let heads = error("--heads 8 --kv-heads 3");
    assert_eq!(heads, "error: 8 heads are no multiple of 3 kv heads");
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("missing/figures.csv");
    assert!(error(&format!("--csv {}", inside.display())).starts_with("error: "));
    // What the measuring process reports comes through, with the line it belongs to.
    let wide = error("--json --seq 4 --head-dim 300");
    assert!(wide.starts_with("error: flash at seq 4: "), "{wide}");
    assert!(wide.contains("256"), "{wide}");
}
