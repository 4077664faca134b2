//! `attn devices` and the help texts.

#[cfg(not(any(feature = "cuda", feature = "cuda-nvrtc")))]
use crate::attn::error;
use crate::attn::{json, stdout, usage};

#[test]
#[cfg(feature = "flex")]
fn flex_is_listed_with_what_serves_it() {
    let devices = json("devices");
    let listed = devices["devices"].as_array().unwrap();
    let flex = listed
        .iter()
        .find(|device| device["name"] == "flex")
        .unwrap();
    assert_eq!(flex["compiler"], "rust");
    assert_eq!(flex["processor"], true);
    assert_eq!(flex["forward"]["f32"], "composed");
    assert!(flex["dtypes"].as_array().unwrap().contains(&"f32".into()));
    let text = stdout("devices");
    assert!(
        text.starts_with("flex\n") && text.contains("  forward         composed"),
        "{text}"
    );
}

#[test]
#[cfg(not(feature = "metal"))]
fn backends_that_are_left_out_are_listed_as_features() {
    let devices = json("devices");
    let absent = devices["not_compiled_in"].as_array().unwrap();
    assert!(absent.contains(&"metal".into()));
    assert!(stdout("devices").contains("Not compiled in, each a cargo feature:"));
}

/// Catches the slower of two features for the same device as the only one that is named.
#[test]
#[cfg(not(any(feature = "cuda", feature = "cuda-nvrtc")))]
fn both_features_of_the_device_cuda_are_listed() {
    let devices = json("devices");
    let absent = devices["not_compiled_in"].as_array().unwrap();
    for feature in ["cuda", "cuda-nvrtc"] {
        assert!(absent.contains(&feature.into()), "{devices}");
    }
    let about = "cuda-nvrtc serves the device cuda too";
    let text = stdout("devices");
    assert!(text.contains("cuda, cuda-nvrtc, "), "{text}");
    assert!(text.contains(about), "{text}");
    for (device, says) in [
        (
            "cuda",
            "is not compiled in, cargo feature `cuda` or `cuda-nvrtc` brings it",
        ),
        ("cuda-nvrtc", "is a cargo feature, whose device is cuda"),
    ] {
        let line = error(&format!("check --device {device}"));
        assert!(line.contains(says) && line.contains(about), "{line}");
    }
}

/// Catches a feature that brings a device and has it reported as left out.
#[test]
#[cfg(feature = "cuda-nvrtc")]
fn the_device_of_cuda_nvrtc_is_compiled_in() {
    let devices = json("devices");
    let absent = devices["not_compiled_in"].as_array().unwrap();
    for feature in ["cuda", "cuda-nvrtc"] {
        assert!(!absent.contains(&feature.into()), "{devices}");
    }
    assert!(!stdout("devices").contains("serves the device cuda too"));
}

#[test]
fn help_is_there_for_every_subcommand() {
    for (subcommand, says) in [
        ("", "ledger"),
        ("devices", "matrix-unit shapes"),
        ("check", "two roundings"),
        ("run", "sum(o * do) + sum(lse * dlse)"),
        ("bench", "half if causal, 2.5 times as many backward"),
        ("ledger", "alpha = exp(m - m')"),
    ] {
        let help = stdout(&format!("{subcommand} --help"));
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(says), "{help}");
        assert!(help.contains("--json"), "{help}");
    }
}

#[test]
fn a_subcommand_is_required_and_known() {
    assert!(usage("").contains("subcommand"));
    assert!(usage("abacus").contains("abacus"));
}

/// Catches errors that keep what was meant to themselves.
#[test]
fn a_misspelt_argument_gets_a_hint() {
    for (arguments, tips) in [
        ("devicse", "a similar subcommand exists: 'devices'"),
        ("run --softcup 2", "a similar argument exists: '--softcap'"),
        ("check --dtype f32x", "possible values: f32, f16, bf16"),
        ("bench --grid smallest", "a similar value exists: 'small'"),
    ] {
        let error = usage(arguments);
        assert!(error.contains(tips), "attn {arguments}: {error}");
        assert!(error.starts_with("error: "), "{error}");
    }
}
