//! `attn bench` on small problems: what it writes, and what it refuses. No time is asserted.

use crate::attn::{error, json, stdout, usage};
use std::fs;
use std::path::Path;

/// Every variant of the `masks` grid, as small as they come.
const MASKS: &str = "bench --device flex --grid masks --seq 64 --head-dim 16 --samples 2";

/// One point of the `small` grid.
const SMALL: &str = "bench --device flex --grid small --seq 64 --samples 2";

/// The columns of figures that a file of peers must have.
const PEER_COLUMNS: &str =
    "variant,pass,dtype,batch,heads,kv_heads,seq,head_dim,causal,kernel,median_ms";

fn in_folder(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_string()
}

#[test]
#[cfg(feature = "flex")]
fn every_variant_is_verified_in_every_pass() {
    let bench = json(&format!("{MASKS} --pass forward,backward,training"));
    assert_eq!(bench["failures"], serde_json::json!([]));
    let points = bench["points"].as_array().unwrap();
    assert_eq!(points.len(), 3 * 7);
    for point in points {
        let pass = point["pass"].as_str().unwrap();
        let expected: &[&str] = match pass {
            "forward" => &["o"],
            "backward" => &["dq", "dk", "dv"],
            _ => &["o", "dq", "dk", "dv"],
        };
        let verified = point["verified"].as_array().unwrap();
        let outputs: Vec<&str> = verified
            .iter()
            .filter_map(|it| it["output"].as_str())
            .collect();
        assert_eq!(outputs, expected, "{point}");
        for verdict in verified {
            let (error, bound) = (verdict["error"].as_f64(), verdict["bound"].as_f64());
            assert!(error.unwrap() > 0.0 && error <= bound, "{point}");
        }
        assert_eq!(point["kernel"], "composed");
        assert_eq!(point["clock"], "host");
        assert_eq!(point["samples"], 2);
        assert!(point["tflops"].as_f64().unwrap() > 0.0);
    }
}

#[test]
#[cfg(feature = "flex")]
fn the_order_of_sums_is_said() {
    let pass = format!("{SMALL} --pass backward");
    assert_eq!(json(&pass)["unordered_gradients"], false);
    assert!(!stdout(&pass).contains("in any order"));
    let pass = format!("{pass} --unordered-gradients");
    assert_eq!(json(&pass)["unordered_gradients"], true);
    assert!(stdout(&pass).contains("gradients summed in any order"));
}

#[test]
#[cfg(feature = "flex")]
fn products_that_may_be_rounded_are_said() {
    assert_eq!(json(SMALL)["tf32"], false);
    assert!(!stdout(SMALL).contains("TF32"));
    let rounded = format!("{SMALL} --f32-precision tf32");
    assert_eq!(json(&rounded)["tf32"], true);
    assert!(stdout(&rounded).contains("f32 rounded to TF32"));
}

#[test]
#[cfg(feature = "flex")]
fn a_run_writes_rows_a_drawing_and_ratios() {
    let folder = tempfile::tempdir().unwrap();
    let [csv, plot, peers] =
        ["a.csv", "a.svg", "peers.csv"].map(|name| in_folder(folder.path(), name));
    let row = "causal,training,f32,1,8,8,64,64,true,torch-flash,1e9";
    fs::write(&peers, format!("{PEER_COLUMNS}\n{row}\n")).unwrap();
    let text = stdout(&format!(
        "{SMALL} --peak 1000 --csv {csv} --plot {plot} --peers {peers}"
    ));
    assert!(
        text.starts_with("flex: host processor, compiler rust"),
        "{text}"
    );
    assert!(
        text.contains("training  causal         64   64      1      8"),
        "{text}"
    );
    assert!(text.contains("torch-flash"), "{text}");

    let rows = fs::read_to_string(&csv).unwrap();
    let rows: Vec<Vec<&str>> = rows.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!((rows.len(), rows[0].len(), rows[1].len()), (2, 27, 27));
    let cell = |name: &str| rows[1][rows[0].iter().position(|title| *title == name).unwrap()];
    assert_eq!(cell("pass"), "training");
    assert_eq!(cell("kernel"), "composed");
    assert!(cell("median_ms").parse::<f64>().unwrap() > 0.0);
    assert!(cell("peak_share").parse::<f64>().is_ok());

    let plot = fs::read_to_string(&plot).unwrap();
    assert!(plot.starts_with("<svg ") && plot.ends_with("</svg>\n"));
    assert!(plot.contains(">composed</text>") && plot.contains(">torch-flash</text>"));

    // What was written can be a peer, of itself here.
    let again = json(&format!("{SMALL} --peers {csv}"));
    assert_eq!(again["points"][0]["peers"][0]["kernel"], "composed");
}

#[test]
#[cfg(feature = "flex")]
fn points_are_listed_without_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let csv = in_folder(folder.path(), "points.csv");
    let text = stdout(&format!(
        "bench --device flex --list --grid paper --causal false --csv {csv}"
    ));
    assert_eq!(text, fs::read_to_string(&csv).unwrap());
    let lines: Vec<&str> = text.lines().collect();
    // Two passes, three head dimensions, six lengths.
    assert_eq!(lines.len(), 1 + 36);
    assert_eq!(lines[1], "paper,full,forward,f32,32,32,32,512,64,false");
    let listed = json("bench --device flex --list --grid long --dtype f32");
    assert_eq!(listed["points"].as_array().unwrap().len(), 6 + 3);
}

#[test]
#[cfg(feature = "flex")]
fn bad_arguments_are_named_before_anything_is_measured() {
    let wrong = |arguments: &str, says: &str| {
        let error = usage(&format!("bench --device flex {arguments}"));
        assert!(error.contains(says), "{arguments}: {error}");
    };
    wrong("--grid huge", "'huge' for '--grid <GRID>'");
    wrong("--pass sideways", "'sideways' for '--pass <P>'");
    wrong("--seq 0", "'0' for '--seq <N>'");
    wrong("--seq 0", "expected a whole number of at least 1");
    wrong("--head-dim 0", "expected a whole number of at least 1");
    wrong("--samples 0", "'0' for '--samples <N>'");
    wrong("--time-limit -1", "");
    wrong("--time-limit 0", "expected a positive number");
    wrong("--peak inf", "expected a positive number");
    wrong("--causal maybe", "'maybe' for '--causal <BOOL>'");
    wrong("--list --plot a.svg", "--plot");
    wrong(
        "--causal false",
        "the small grid has no such point, and is the default of this device; --grid takes another",
    );
    wrong(
        "--grid small --causal false",
        "the small grid has no such point",
    );
    wrong("--grid small --seq 64 --head-dim 300", "head_dim 300");
    wrong("--head-dim 512", "Usage: attn bench");
    let refused = |arguments: &str, says: &str| {
        let error = error(&format!("bench --device flex {arguments}"));
        assert!(error.contains(says), "{arguments}: {error}");
    };
    refused("--csv no/such/folder.csv", "output no/such/folder.csv");
    refused("--plot no/such/folder.svg", "output no/such/folder.svg");
    refused("--peers no-such-file.csv", "peers no-such-file.csv");
    let error = error("bench --device abacus");
    assert!(error.contains("device abacus is unknown"), "{error}");
}

#[test]
#[cfg(feature = "flex")]
fn points_past_the_time_limit_are_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let peers = in_folder(folder.path(), "peers.csv");
    fs::write(&peers, "a,b\n").unwrap();
    let refused = error(&format!("{SMALL} --peers {peers}"));
    assert!(refused.ends_with("has no column variant"), "{refused}");
    let output = crate::attn::failing(&format!("{SMALL} --time-limit 1e-9"));
    assert!(
        output.0.contains("not reached in time: causal training"),
        "{}",
        output.0
    );
    let expected = "error: 1 of 1 points were not measured within the time limit";
    assert_eq!(output.1, expected);
}

/// Catches a grid that takes a processor hours, and one that is chosen in silence.
#[test]
#[cfg(feature = "flex")]
fn a_processor_measures_the_small_grid_and_says_so() {
    let text = stdout("bench --device flex --seq 64 --samples 2");
    let first = text.lines().next().unwrap();
    let says = "build; small grid (the default of a processor), f32";
    assert!(first.ends_with(says), "{text}");
    let points = stdout("bench --device flex --list");
    assert!(
        points
            .lines()
            .skip(1)
            .all(|line| line.starts_with("small,")),
        "{points}"
    );
}

/// Catches a first point, of which nothing is known, that runs for hours past the limit.
#[test]
#[cfg(feature = "flex")]
fn a_point_that_takes_longer_than_the_limit_is_not_begun() {
    let start = std::time::Instant::now();
    let arguments = "bench --device flex --grid long --seq 1048576 --pass forward --time-limit 2";
    let (text, error) = crate::attn::failing(arguments);
    // Half a minute is for a machine that does other things too: the point itself takes hours.
    assert!(start.elapsed().as_secs() < 30, "{text}");
    assert!(
        text.contains("  not reached in time: causal forward"),
        "{text}"
    );
    let says = "error: 1 of 1 points were not measured within the time limit";
    assert_eq!(error, says);
}

/// Catches samples that go on past the limit, and a point that hides how few it has.
#[test]
#[cfg(feature = "flex")]
fn samples_end_with_the_time_and_are_counted() {
    let start = std::time::Instant::now();
    let text = stdout("bench --device flex --seq 64 --samples 1000000 --time-limit 5");
    assert!(start.elapsed().as_secs() < 30, "{text}");
    assert!(
        text.contains(" of 1000000 samples in time: causal training"),
        "{text}"
    );
}
