//! Runs `attn` and reads what it prints.

use serde_json::Value;
use std::process::{Command, Output};

/// Runs `attn` with the given arguments, separated by spaces.
fn attn(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attn"));
    command.args(arguments.split(' ').filter(|argument| !argument.is_empty()));
    command.output().expect("attn starts")
}

/// Standard output of a run that must succeed, and say nothing on standard error.
pub fn stdout(arguments: &str) -> String {
    let output = attn(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "attn {arguments}: {error}");
    assert_eq!(error, "", "attn {arguments}");
    String::from_utf8(output.stdout).unwrap()
}

/// The same with `--json`, parsed.
pub fn json(arguments: &str) -> Value {
    serde_json::from_str(&stdout(&format!("{arguments} --json"))).unwrap()
}

/// The line on standard error of a run that must fail and print nothing else.
pub fn error(arguments: &str) -> String {
    let output = attn(arguments);
    let code = output.status.code();
    assert_eq!(code, Some(1), "attn {arguments}");
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "",
        "attn {arguments}"
    );
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "attn {arguments}: {error}");
    error.trim_end().to_string()
}

/// Standard error of a run with a wrong command line: status 2, and a pointer to the help or to what
/// was meant.
pub fn usage(arguments: &str) -> String {
    let output = attn(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "attn {arguments}: {error}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "");
    assert!(error.contains("\n\n"), "attn {arguments}: {error}");
    let hint = error.contains("--help") || error.contains("Usage:");
    assert!(hint, "attn {arguments}: {error}");
    error
}

/// Standard output and the line on standard error of a run that fails with something to print.
#[cfg(feature = "flex")]
pub fn failing(arguments: &str) -> (String, String) {
    let output = attn(arguments);
    assert!(!output.status.success(), "attn {arguments} succeeds");
    let [out, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (out, error.trim_end().to_string())
}
