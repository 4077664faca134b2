//! `attn run` on broken input: one line that names the culprit, and no file left behind.

use crate::attn::{error, stdout, usage};
use crate::tensors::{File, Stored, random, stored, write};
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn good() -> File {
    BTreeMap::from([
        ("q", random("q", Dtype::F32, &[1, 2, 3, 4])),
        ("k", random("k", Dtype::F32, &[1, 2, 5, 4])),
        ("v", random("v", Dtype::F32, &[1, 2, 5, 6])),
        ("mask", stored(Dtype::BOOL, &[1, 1, 1, 5], [0.0; 5])),
        ("bias", random("bias", Dtype::F32, &[1, 2, 3, 5])),
        ("do", random("do", Dtype::F32, &[1, 2, 3, 6])),
        ("dlse", random("dlse", Dtype::F32, &[1, 2, 3])),
    ])
}

/// Runs on a file in a directory of its own, and checks that nothing else is in there afterwards.
fn fails(directory: &TempDir, arguments: &str) -> String {
    let path = directory.path().display();
    let line = error(&format!(
        "run --input {path}/in.safetensors --output {path}/out.safetensors {arguments}"
    ));
    assert_eq!(names(directory.path()), ["in.safetensors"], "{line}");
    line
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn directory_with(file: &File) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(&directory.path().join("in.safetensors"), file);
    directory
}

/// The good file with one tensor exchanged.
fn with(name: &'static str, tensor: Stored) -> File {
    let mut file = good();
    file.insert(name, tensor);
    file
}

/// The good file with one number of a tensor exchanged.
fn with_number(name: &'static str, at: usize, number: f32) -> File {
    let mut file = good();
    let bytes = &mut file.get_mut(name).unwrap().bytes;
    bytes[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
    file
}

#[test]
fn the_good_file_is_good() {
    let directory = directory_with(&good());
    let path = directory.path().display();
    stdout(&format!(
        "run --input {path}/in.safetensors --output {path}/out.safetensors --device reference"
    ));
    assert_eq!(
        names(directory.path()),
        ["in.safetensors", "out.safetensors"]
    );
}

#[test]
fn a_missing_tensor_is_named_with_those_that_are_there() {
    for name in ["q", "k", "v"] {
        let mut file = good();
        file.remove(name);
        let there: Vec<&str> = file.keys().copied().collect();
        let line = fails(&directory_with(&file), "--device reference");
        let says = format!(
            "tensor {name} is missing: the file has {}; expected q, k, v, optional mask, bias, do, dlse",
            there.join(", ")
        );
        assert!(line.ends_with(&says), "{line}");
    }
    let named = |names: &[&'static str]| {
        let tensor = |name: &&'static str| (*name, random("x", Dtype::F32, &[1]));
        let file: File = names.iter().map(tensor).collect();
        fails(&directory_with(&file), "--device reference")
    };
    let line = named(&["key", "query", "v"]);
    let says = "tensors q, k are missing: the file has key, query, v; expected";
    assert!(line.contains(says), "{line}");
    let line = named(&[]);
    assert!(
        line.contains("tensors q, k, v are missing: the file has no tensor; "),
        "{line}"
    );
    let line = named(&[
        "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "l", "m", "n", "o",
    ]);
    assert!(line.contains("i, j, l, m and 2 more; expected"), "{line}");
}

#[test]
fn a_misshapen_or_mistyped_tensor_is_named() {
    let f32 = |shape: &[usize]| random("x", Dtype::F32, shape);
    for (name, tensor, says) in [
        (
            "q",
            f32(&[2, 3, 4]),
            "tensor q: query has shape [2, 3, 4] with 3 dimensions",
        ),
        ("q", f32(&[1, 3, 3, 4]), "tensor q: query has 3 heads"),
        (
            "q",
            f32(&[1, 2, 3, 0]),
            "tensor k: key has head_dim 4, expected 0",
        ),
        (
            "q",
            random("x", Dtype::F64, &[1, 2, 3, 4]),
            "tensor q: query has element type f64",
        ),
        (
            "k",
            f32(&[2, 2, 5, 4]),
            "tensor k: key has batch 2, expected 1 as in query",
        ),
        (
            "k",
            f32(&[1, 2, 5, 3]),
            "tensor k: key has head_dim 3, expected 4 as in query",
        ),
        (
            "k",
            random("x", Dtype::F16, &[1, 2, 5, 4]),
            "tensor k: key has element type f16",
        ),
        (
            "v",
            f32(&[1, 2, 4, 6]),
            "tensor v: value has seq_kv 4, expected 5 as in key",
        ),
        (
            "v",
            f32(&[1, 1, 5, 6]),
            "tensor v: value has heads 1, expected 2 as in key",
        ),
        (
            "v",
            f32(&[1, 2, 5, 300]),
            "tensor v: value has value_dim 300, expected 1 to 256",
        ),
        (
            "mask",
            stored(Dtype::BOOL, &[1, 1, 1, 4], [0.0; 4]),
            "tensor mask: mask has shape",
        ),
        (
            "mask",
            f32(&[1, 1, 1, 5]),
            "tensor mask: mask has element type f32, expected bool or u8",
        ),
        (
            "mask",
            stored(Dtype::U8, &[1, 1, 1, 5], [2.0; 5]),
            "tensor mask holds the byte 2",
        ),
        (
            "bias",
            f32(&[1, 2, 2, 5]),
            "tensor bias: bias has shape [1, 2, 2, 5]",
        ),
        (
            "bias",
            random("x", Dtype::BF16, &[1, 2, 3, 5]),
            "tensor bias: bias has element type",
        ),
        (
            "do",
            f32(&[1, 2, 3, 5]),
            "tensor do has shape [1, 2, 3, 5], expected [1, 2, 3, 6]",
        ),
        (
            "do",
            random("x", Dtype::F16, &[1, 2, 3, 6]),
            "tensor do has element type f16",
        ),
        (
            "dlse",
            f32(&[1, 2, 3, 1]),
            "tensor dlse has shape [1, 2, 3, 1]",
        ),
        (
            "dlse",
            random("x", Dtype::BF16, &[1, 2, 3]),
            "tensor dlse has element type bf16",
        ),
    ] {
        let line = fails(&directory_with(&with(name, tensor)), "--device reference");
        assert!(line.contains(says), "{line}");
    }
}

#[test]
fn a_number_that_would_reach_the_result_is_named_with_its_place() {
    for (name, at, number, says) in [
        ("q", 5, f32::NAN, "tensor q is NaN at [0, 0, 1, 1]"),
        ("k", 39, f32::INFINITY, "tensor k is inf at [0, 1, 4, 3]"),
        (
            "v",
            30,
            f32::NEG_INFINITY,
            "tensor v is -inf at [0, 1, 0, 0]",
        ),
        ("bias", 29, f32::NAN, "tensor bias is NaN at [0, 1, 2, 4]"),
        (
            "bias",
            0,
            f32::INFINITY,
            "tensor bias is inf at [0, 0, 0, 0]",
        ),
        ("do", 0, f32::NAN, "tensor do is NaN at [0, 0, 0, 0]"),
        ("dlse", 4, f32::NAN, "tensor dlse is NaN at [0, 1, 1]"),
    ] {
        let line = fails(
            &directory_with(&with_number(name, at, number)),
            "--device reference",
        );
        assert!(line.contains(says), "{line}");
    }
}

#[test]
fn padding_is_told_apart_head_by_head() {
    // Query heads 0 and 1 read key head 0, 2 and 3 key head 1; only head 3 sees anything.
    let file = |at: usize| {
        let mut file = BTreeMap::from([
            ("q", random("q", Dtype::F32, &[1, 4, 3, 4])),
            ("k", random("k", Dtype::F32, &[1, 2, 5, 4])),
            ("v", random("v", Dtype::F32, &[1, 2, 5, 6])),
            (
                "mask",
                stored(Dtype::BOOL, &[1, 4, 1, 1], [1.0, 1.0, 1.0, 0.0]),
            ),
        ]);
        let bytes = &mut file.get_mut("k").unwrap().bytes;
        bytes[4 * at..4 * at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        directory_with(&file)
    };
    let hidden = file(7);
    let path = hidden.path().display();
    stdout(&format!(
        "run --input {path}/in.safetensors --output {path}/out.safetensors --device reference"
    ));
    let line = fails(&file(27), "--device reference");
    assert!(line.contains("tensor k is NaN at [0, 1, 1, 3]"), "{line}");
}

/// Catches padding that a bias hides and that is taken for seen: a value, and the gradients of a row
/// that sees nothing. A key is seen, whose product with a query meets the bias.
#[test]
fn a_bias_of_minus_infinity_hides_what_weights_multiply() {
    let nan = |tensor: &mut Stored, at: usize| {
        tensor.bytes[4 * at..4 * at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    let file = |name: &'static str, at: usize| {
        // Key 0 is hidden from every query by the bias; query 0 sees nothing, for the bias hides keys
        // up to 2 from it and the mask the others.
        let mut bias = [0.0; 15];
        for hidden in [0, 1, 2, 5, 10] {
            bias[hidden] = f64::NEG_INFINITY;
        }
        let mut file = good();
        file.insert("bias", stored(Dtype::F32, &[1, 1, 3, 5], bias));
        file.insert(
            "mask",
            stored(Dtype::BOOL, &[1, 1, 1, 5], [0.0, 0.0, 0.0, 1.0, 1.0]),
        );
        nan(file.get_mut(name).unwrap(), at);
        directory_with(&file)
    };
    let devices = ["reference", "flex"];
    let devices = &devices[..if cfg!(feature = "flex") { 2 } else { 1 }];
    for device in devices {
        for (name, at) in [("v", 3), ("v", 33), ("do", 0), ("do", 23), ("dlse", 3)] {
            let directory = file(name, at);
            let path = directory.path().display();
            stdout(&format!(
                "run --input {path}/in.safetensors --output {path}/out.safetensors --device {device}"
            ));
        }
        for (name, at, says) in [
            ("v", 6, "tensor v is NaN at [0, 0, 1, 0]"),
            ("do", 6, "tensor do is NaN at [0, 0, 1, 0]"),
            ("k", 0, "tensor k is NaN at [0, 0, 0, 0]"),
            ("q", 0, "tensor q is NaN at [0, 0, 0, 0]"),
        ] {
            let line = fails(&file(name, at), &format!("--device {device}"));
            assert!(line.contains(says), "{line}");
        }
    }
}

/// Catches a product of dimensions that overflows though the tensor holds nothing.
#[test]
fn a_shape_that_cannot_be_addressed_is_named() {
    let empty = |shape: [usize; 4]| stored(Dtype::F32, &shape, []);
    let file = BTreeMap::from([
        ("q", empty([0, 1 << 62, 3, 4])),
        ("k", empty([0, 1 << 62, 5, 4])),
        ("v", empty([0, 1 << 62, 5, 6])),
    ]);
    let line = fails(&directory_with(&file), "");
    let says = "tensor q: query has shape [0, 4611686018427387904, 3, 4], expected a product";
    assert!(line.contains(says), "{line}");
}

#[test]
#[cfg(feature = "flex")]
fn a_result_that_is_not_finite_is_not_written() {
    // Scores of 4e50 are finite in the file's numbers, not in the f32 of a device.
    let mut file = good();
    for (name, length) in [("q", 3), ("k", 5)] {
        file.insert(
            name,
            stored(Dtype::F32, &[1, 2, length, 4], vec![1e25; 8 * length]),
        );
    }
    let line = fails(&directory_with(&file), "--device flex");
    assert!(line.contains("tensor o comes out as"), "{line}");
}

#[test]
fn a_broken_file_is_refused_and_its_tensor_named() {
    let directory = directory_with(&good());
    let path = directory.path().join("in.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = |text: &str, data: usize| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let entry = |dtype: &str, shape: &str, end: usize| {
        format!(r#"{{"k":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    for (bytes, says) in [
        (vec![], "no safetensors file: header too small"),
        (
            b"no tensors here, only text".to_vec(),
            "no safetensors file: header too large",
        ),
        (header("nonsense", 0), "no safetensors file: invalid JSON"),
        (
            whole[..whole.len() - 1].to_vec(),
            "tensor mask is broken: its bytes are 784..789 of 788",
        ),
        (
            header(&entry("F32", "[1,1,2,2]", 12), 12),
            "tensor k is broken: shape [1, 1, 2, 2]",
        ),
        (
            header(&entry("F99", "[1]", 4), 4),
            "tensor k is broken: unknown variant `F99`",
        ),
        (
            header(&entry("F32", "[-1]", 4), 4),
            "tensor k is broken: invalid value",
        ),
        (
            header(&entry("F32", "[4294967296,4294967296,4]", 4), 4),
            "tensor k is broken: shape",
        ),
        // The same tensor by an escape.
        (
            header(
                r#"{"k":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"\u006b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
                4,
            ),
            "tensor k is in the header twice",
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        let line = fails(&directory, "--device reference");
        assert!(
            line.contains(says) && line.contains("in.safetensors"),
            "{line}"
        );
    }
}

#[test]
fn options_and_devices_that_make_no_sense_are_named() {
    let directory = directory_with(&good());
    for (arguments, says) in [
        ("--device tpu", "device tpu is unknown; devices found: "),
        ("--device reference:1", "device reference:1 is unknown"),
    ] {
        let line = fails(&directory, arguments);
        assert!(line.contains(says), "{arguments}: {line}");
    }
    for (arguments, says) in [
        (
            "--softcap 0",
            "'0' for '--softcap <C>': softcap is 0.0, expected a positive number from 1.18e-38 to 3.40e38",
        ),
        (
            "--softcap -2",
            "softcap is -2.0, expected a positive number",
        ),
        (
            "--softcap 1e-40",
            "softcap is 1e-40, expected a positive number from",
        ),
        (
            "--softcap much",
            "'much' for '--softcap <C>': expected a number, such as",
        ),
        (
            "--scale nan",
            "scale is NaN, expected a finite number of at most",
        ),
        (
            "--scale 1e39",
            "scale is 1e39, expected a finite number of at most 3.40e38",
        ),
        (
            "--scale big",
            "'big' for '--scale <X>': expected a number, such as",
        ),
        (
            "--window 3",
            "'3' for '--window <L,R>': expected two numbers",
        ),
        ("--window -1,2", "--window"),
        ("--window 1,2,3", "--window"),
        ("--causal middle", "possible values: bottom-right, top-left"),
    ] {
        let path = directory.path().display();
        let text = usage(&format!(
            "run --input {path}/in.safetensors --output {path}/out.safetensors {arguments}"
        ));
        assert!(text.contains(says), "{arguments}: {text}");
    }
    assert_eq!(names(directory.path()), ["in.safetensors"]);
}

#[test]
#[cfg(not(feature = "metal"))]
fn a_device_that_is_not_compiled_in_names_its_feature() {
    let line = fails(&directory_with(&good()), "--device metal:1");
    assert!(line.contains("device metal:1 is not compiled in, cargo feature `metal` brings it"));
    assert!(line.ends_with("or reference"), "{line}");
}

#[test]
fn paths_that_cannot_be_used_are_named() {
    let directory = directory_with(&good());
    let path = directory.path().display();
    let run = |input: &str, output: &str| {
        error(&format!(
            "run --device reference --input {path}/{input} --output {path}/{output}"
        ))
    };
    assert!(run("absent.safetensors", "out").contains("absent.safetensors"));
    assert!(run("in.safetensors", "no/such/out").contains("no/such is not a directory"));
    assert!(run("in.safetensors", "../").contains("is a directory"));
    assert!(run("in.safetensors", "./in.safetensors").contains("is the input file"));
    assert_eq!(names(directory.path()), ["in.safetensors"]);
    assert!(usage("run").contains("--input <FILE> --output <FILE>"));
}

/// Catches an error about a file that the user has never heard of.
#[test]
#[cfg(target_os = "linux")]
fn an_output_that_cannot_be_made_is_named_as_given() {
    let directory = directory_with(&good());
    let path = directory.path().display();
    let line = error(&format!(
        "run --device reference --input {path}/in.safetensors --output /proc/o.safetensors"
    ));
    assert!(
        line.starts_with("error: output /proc/o.safetensors: "),
        "{line}"
    );
    assert!(!line.contains("/proc/."), "{line}");
}

/// Catches a link that is replaced by a file, or followed to where nothing was.
#[test]
#[cfg(unix)]
fn a_link_to_nothing_is_left_alone() {
    let directory = directory_with(&good());
    let path = directory.path().display();
    let link = directory.path().join("out.safetensors");
    std::os::unix::fs::symlink(directory.path().join("absent"), &link).unwrap();
    let line = error(&format!(
        "run --device reference --input {path}/in.safetensors --output {path}/out.safetensors"
    ));
    assert!(
        line.ends_with("out.safetensors is a link to a file that is not there"),
        "{line}"
    );
    assert!(link.is_symlink());
    assert_eq!(
        names(directory.path()),
        ["in.safetensors", "out.safetensors"]
    );
}

#[test]
fn a_failure_leaves_an_earlier_output_as_it_was() {
    let directory = directory_with(&with_number("q", 0, f32::NAN));
    let output = directory.path().join("out.safetensors");
    fs::write(&output, "earlier").unwrap();
    let path = directory.path().display();
    error(&format!(
        "run --device reference --input {path}/in.safetensors --output {path}/out.safetensors"
    ));
    assert_eq!(fs::read_to_string(&output).unwrap(), "earlier");
    assert_eq!(names(directory.path()).len(), 2);
}
