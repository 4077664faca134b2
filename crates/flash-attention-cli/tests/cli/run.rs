//! `attn run`: the reference against the ledger, and Flex against the reference.

use crate::attn::{json, stdout};
use crate::tensors::{File, random, read, stored, write};
use flash_attention_spec::ledger::{self, WORKED_ROWS};
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tempfile::TempDir;

type Results = BTreeMap<String, (Dtype, Vec<usize>, Vec<f64>)>;

struct Case {
    directory: TempDir,
}

impl Case {
    fn new(file: &File) -> Self {
        let directory = tempfile::tempdir().unwrap();
        write(&directory.path().join("in.safetensors"), file);
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, arguments: &str) -> String {
        let (input, output) = (self.path("in.safetensors"), self.path("out.safetensors"));
        let (input, output) = (input.display(), output.display());
        format!("run --input {input} --output {output} {arguments}")
    }

    fn run(&self, arguments: &str) -> Results {
        stdout(&self.command(arguments));
        read(&self.path("out.safetensors"))
    }
}

/// Grouped heads, unequal lengths, value_dim apart from head_dim, everything a file can hold.
fn everything(dtype: Dtype) -> File {
    let mask = (0..7 * 9).map(|n| f64::from(u8::from(n % 4 == 1)));
    BTreeMap::from([
        ("q", random("q", dtype, &[2, 4, 7, 8])),
        ("k", random("k", dtype, &[2, 2, 9, 8])),
        ("v", random("v", dtype, &[2, 2, 9, 5])),
        ("mask", stored(Dtype::BOOL, &[1, 1, 7, 9], mask)),
        ("bias", random("bias", dtype, &[1, 4, 7, 9])),
        ("do", random("do", dtype, &[2, 4, 7, 5])),
        ("dlse", random("dlse", Dtype::F32, &[2, 4, 7])),
    ])
}

fn assert_close(got: &Results, exact: &Results, dtype: Dtype) {
    let epsilon = match dtype {
        Dtype::F32 => f64::from(f32::EPSILON),
        Dtype::F16 => half::f16::EPSILON.to_f64(),
        _ => half::bf16::EPSILON.to_f64(),
    };
    assert!(got.keys().eq(exact.keys()), "{:?}", got.keys());
    for (name, (got_dtype, shape, got)) in got {
        let expected = if name == "lse" { Dtype::F32 } else { dtype };
        assert_eq!(*got_dtype, expected, "{name}");
        let (exact_dtype, exact_shape, exact) = &exact[name];
        assert_eq!((*exact_dtype, exact_shape), (Dtype::F64, shape), "{name}");
        let size = exact.iter().fold(1.0_f64, |size, x| size.max(x.abs()));
        for (n, (got, exact)) in got.iter().zip(exact).enumerate() {
            // A few roundings of numbers of this size: inputs are at most 1 and sums short.
            let error = (got - exact).abs();
            assert!(
                error <= 8.0 * epsilon * size,
                "{name}[{n}]: {got}, exact {exact}"
            );
        }
    }
}

#[test]
fn the_reference_has_the_gradients_of_the_worked_example() {
    let rows = |rows: &[[f64; 2]]| stored(Dtype::F32, &[1, 1, 5, 2], rows.concat());
    let case = Case::new(&BTreeMap::from([
        ("q", rows(WORKED_ROWS.query)),
        ("k", rows(WORKED_ROWS.key)),
        ("v", rows(WORKED_ROWS.value)),
        ("do", rows(WORKED_ROWS.output_gradient)),
    ]));
    let results = case.run("--device reference --causal bottom-right");
    let ledger = ledger::backward(&WORKED_ROWS, true, 2, 2).unwrap();
    let end = &ledger.blocks.last().unwrap().gradients;
    for (name, expected) in [
        ("o", ledger.output.concat()),
        ("lse", ledger.lse.clone()),
        ("dq", end.query.concat()),
        ("dk", end.key.concat()),
        ("dv", end.value.concat()),
    ] {
        let (dtype, _, got) = &results[name];
        assert_eq!(*dtype, Dtype::F64);
        for (got, expected) in got.iter().zip(expected) {
            // The file holds the example rounded to f32.
            assert!(
                (got - expected).abs() < 1e-6,
                "{name}: {got}, expected {expected}"
            );
        }
    }
}

#[test]
#[cfg(feature = "flex")]
fn flex_is_close_to_the_reference_in_every_type_with_every_tensor_and_option() {
    for (dtype, options) in [
        (Dtype::F32, ""),
        (Dtype::F32, "--causal bottom-right"),
        (Dtype::F32, "--causal top-left --window 3, --scale -0.7"),
        (Dtype::F32, "--window ,2 --softcap 1.5"),
        (Dtype::F16, "--causal bottom-right --window 4,0"),
        (Dtype::BF16, "--softcap 2"),
    ] {
        let case = Case::new(&everything(dtype));
        let exact = case.run(&format!("--device reference {options}"));
        assert_eq!(exact.len(), 6, "{:?}", exact.keys());
        assert_close(
            &case.run(&format!("--device flex {options}")),
            &exact,
            dtype,
        );
    }
}

#[test]
fn every_option_changes_the_result() {
    let case = Case::new(&everything(Dtype::F32));
    let plain = case.run("--device reference");
    for option in [
        "--causal bottom-right",
        "--causal top-left",
        "--window 2,",
        "--window ,2",
        "--scale 1",
        "--softcap 0.5",
    ] {
        let changed = case.run(&format!("--device reference {option}"));
        for (name, tensor) in &changed {
            assert_ne!(*tensor, plain[name], "{name} under {option}");
        }
    }
}

#[test]
fn every_optional_tensor_changes_the_result() {
    let whole = everything(Dtype::F32);
    let all = Case::new(&whole).run("--device reference");
    for name in ["mask", "bias", "do", "dlse"] {
        let mut file = whole.clone();
        file.remove(name);
        assert_ne!(
            Case::new(&file).run("--device reference"),
            all,
            "without {name}"
        );
    }
}

#[test]
#[cfg(feature = "flex")]
fn gradients_come_only_when_asked_for() {
    let mut file = everything(Dtype::F32);
    file.remove("dlse");
    let names = |results: &Results| results.keys().cloned().collect::<Vec<_>>().join(" ");
    for device in ["flex", "reference"] {
        let device = format!("--device {device}");
        assert_eq!(
            names(&Case::new(&file).run(&device)),
            "dbias dk do dq dv lse o".replace("do ", "")
        );
        let mut plain = file.clone();
        plain.remove("do");
        assert_eq!(names(&Case::new(&plain).run(&device)), "lse o");
        plain.insert("dlse", random("dlse", Dtype::F32, &[2, 4, 7]));
        let lse_only = Case::new(&plain).run(&device);
        assert_eq!(names(&lse_only), "dbias dk dq dv lse o");
        // lse does not depend on the values.
        assert!(lse_only["dv"].2.iter().all(|&x| x == 0.0));
        assert!(lse_only["dq"].2.iter().any(|&x| x != 0.0));
    }
}

#[test]
#[cfg(feature = "flex")]
fn a_mask_of_bytes_is_a_mask_of_booleans() {
    let mut file = everything(Dtype::F32);
    let booleans = Case::new(&file).run("--device flex");
    file.get_mut("mask").unwrap().dtype = Dtype::U8;
    assert_eq!(Case::new(&file).run("--device flex"), booleans);
}

#[test]
#[cfg(feature = "flex")]
fn nothing_visible_is_zero_and_empty_is_empty() {
    let mut file = BTreeMap::from([
        ("q", random("q", Dtype::F32, &[1, 2, 3, 4])),
        ("k", random("k", Dtype::F32, &[1, 1, 0, 4])),
        ("v", random("v", Dtype::F32, &[1, 1, 0, 5])),
        ("do", random("do", Dtype::F32, &[1, 2, 3, 5])),
    ]);
    for device in ["flex", "reference"] {
        let results = Case::new(&file).run(&format!("--device {device}"));
        assert!(results["o"].2.iter().all(|&x| x == 0.0));
        assert_eq!(results["lse"].2, [f64::NEG_INFINITY; 6]);
        assert_eq!(results["dq"].2, [0.0; 24]);
        assert_eq!(results["dk"].1, [1, 1, 0, 4]);
    }
    file.insert("q", random("q", Dtype::F32, &[0, 2, 3, 4]));
    file.insert("k", random("k", Dtype::F32, &[0, 1, 6, 4]));
    file.insert("v", random("v", Dtype::F32, &[0, 1, 6, 5]));
    file.insert("do", random("do", Dtype::F32, &[0, 2, 3, 5]));
    for device in ["flex", "reference"] {
        let results = Case::new(&file).run(&format!("--device {device}"));
        assert_eq!(results["o"].1, [0, 2, 3, 5]);
    }
}

#[test]
#[cfg(feature = "flex")]
fn a_nan_that_no_query_sees_is_padding() {
    let mut file = everything(Dtype::F32);
    // Row 8 of every key head: bytes of the last of 9 rows of 8 numbers.
    let key = file.get_mut("k").unwrap();
    for head in 0..4 {
        let at = 4 * (head * 9 * 8 + 8 * 8);
        key.bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let case = Case::new(&file);
    // Top-left: query i sees keys up to i + 1 <= 7, so that key 8 is hidden from all.
    for device in ["flex", "reference"] {
        let results = case.run(&format!("--device {device} --causal top-left"));
        assert!(
            results
                .values()
                .all(|(_, _, values)| values.iter().all(|x| !x.is_nan()))
        );
    }
}

#[test]
fn what_is_ignored_and_written_is_said() {
    let mut file = everything(Dtype::F32);
    file.insert("extra", random("extra", Dtype::F32, &[3]));
    let case = Case::new(&file);
    let report = json(&case.command("--device reference"));
    assert_eq!(report["device"], "reference");
    assert_eq!(report["ignored"], serde_json::json!(["extra"]));
    let tensors = report["tensors"].as_array().unwrap();
    let (_, shape, values) = &read(&case.path("out.safetensors"))["o"];
    assert_eq!(tensors[0]["name"], "o");
    assert_eq!(tensors[0]["shape"], serde_json::json!(shape));
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(tensors[0]["least"].as_f64().unwrap(), least);
    assert!(stdout(&case.command("--device reference")).contains("extra"));
}

#[test]
#[cfg(unix)]
fn the_output_has_the_permissions_of_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let case = Case::new(&everything(Dtype::F32));
    case.run("--device reference");
    let mode = |name: &str| case.path(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("out.safetensors"), mode("in.safetensors"));
}
