//! Every case of the grid on every device and element type, held to the `f64` reference.

use burn_flash_attention::DeviceReport;
use flash_attention_check::{Case, CaseError, Prepared, grid};
use flash_attention_spec::Dtype;
use flash_attention_tests::{full_grid, selected_devices, selected_part};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

const SEED: u64 = 1;

/// A run says how far it is after so long.
const SILENCE: Duration = Duration::from_secs(30);

/// An element type that a device is expected not to compute with.
struct Decline {
    /// What kernels of the device are compiled by.
    compiler: &'static str,
    /// Part of the hardware's name; empty for any.
    hardware: &'static str,
    dtype: Dtype,
    reason: &'static str,
}

/// Every expected decline. One that is not here fails, and so does one that is here and ran.
const DECLINES: &[Decline] = &[
    Decline {
        compiler: "wgsl",
        hardware: "",
        dtype: Dtype::BF16,
        reason: "WGSL has no bf16",
    },
    Decline {
        compiler: "spirv",
        hardware: "",
        dtype: Dtype::BF16,
        reason: "SPIR-V stores and converts bf16 and does not compute with it",
    },
    Decline {
        compiler: "spirv",
        hardware: "SwiftShader",
        dtype: Dtype::F16,
        reason: "this software Vulkan has no f16",
    },
];

/// What happened on one device in one element type.
#[derive(Default)]
struct Tally {
    run: usize,
    failed: usize,
    /// Cases that are not defined for the element type.
    undefined: usize,
    declined: Option<&'static str>,
}

/// Writes past the capture of the test harness: a run of minutes should show where it is.
fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("standard error is open");
}

fn expected_decline(report: &DeviceReport, dtype: Dtype) -> Option<&'static Decline> {
    DECLINES.iter().find(|decline| {
        decline.compiler == report.compiler
            && report.hardware.contains(decline.hardware)
            && decline.dtype == dtype
    })
}

fn attempt(prepared: &Prepared, report: &DeviceReport) -> Result<(), String> {
    let result = catch_unwind(AssertUnwindSafe(|| prepared.run(&report.device)));
    match result {
        Ok(Ok(report)) if report.passed => Ok(()),
        Ok(Ok(report)) => Err(report.to_string()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            Err(format!("panicked: {}", text.unwrap_or("no text")))
        }
    }
}

/// Catches a device that differs from the reference anywhere in the grid, and one that drops out
/// of the matrix unnoticed.
#[test]
fn every_device_meets_the_reference() {
    let devices = selected_devices();
    let cases = selected_part(grid(full_grid()));
    let mut tallies: Vec<[Tally; 3]> = devices.iter().map(|_| Default::default()).collect();
    let mut failures = Vec::new();

    for (report, tallies) in devices.iter().zip(&mut tallies) {
        for (&dtype, tally) in Dtype::ALL.iter().zip(tallies) {
            let has = report.dtypes.contains(&dtype);
            let place = format!("{} ({}) {dtype}", report.name, report.hardware);
            match expected_decline(report, dtype) {
                Some(decline) if has => {
                    let reason = decline.reason;
                    failures.push(format!("{place}: runs, expected a decline: {reason}"));
                }
                Some(decline) => tally.declined = Some(decline.reason),
                None if !has => {
                    tally.declined = Some("unexpected");
                    failures.push(format!(
                        "{place}: declined, expected to run; compiler {}",
                        report.compiler
                    ));
                }
                None => {}
            }
            if tally.declined.is_some()
                && let Err(failure) = is_refused(&cases[0], report, dtype)
            {
                failures.push(format!("{place}: {failure}"));
            }
        }
    }

    let mut said = Instant::now();
    for (done, case) in cases.iter().enumerate() {
        if said.elapsed() >= SILENCE {
            say(&format!("{done} of {} cases", cases.len()));
            said = Instant::now();
        }
        for (n, &dtype) in Dtype::ALL.iter().enumerate() {
            if !case.dtypes.contains(&dtype) {
                tallies.iter_mut().for_each(|tally| tally[n].undefined += 1);
                continue;
            }
            let prepared = Prepared::new(case, dtype, SEED).expect("a case is a valid problem");
            for (report, tallies) in devices.iter().zip(&mut tallies) {
                let tally = &mut tallies[n];
                if tally.declined.is_some() {
                    continue;
                }
                tally.run += 1;
                if let Err(failure) = attempt(&prepared, report) {
                    tally.failed += 1;
                    let failure = format!(
                        "{} {dtype}, {failure}\n    catches: {}",
                        report.name, case.catches
                    );
                    say(&failure);
                    failures.push(failure);
                }
            }
        }
    }

    let mut run = 0;
    for (report, tallies) in devices.iter().zip(&tallies) {
        for (dtype, tally) in Dtype::ALL.iter().zip(tallies) {
            run += tally.run;
            let place = format!("{:10} {:5}", report.name, dtype.to_string());
            say(&match tally.declined {
                Some(reason) => format!("{place} {} declined: {reason}", cases.len()),
                None => format!(
                    "{place} {} run, {} failed, {} not defined in {dtype}, on {} by {}",
                    tally.run, tally.failed, tally.undefined, report.hardware, report.compiler
                ),
            });
        }
    }
    assert!(run > 0, "no case ran");
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// A device without an element type has to say so by a typed error.
fn is_refused(case: &Case, report: &DeviceReport, dtype: Dtype) -> Result<(), String> {
    let prepared = Prepared::new(case, dtype, SEED).expect("a case is a valid problem");
    match catch_unwind(AssertUnwindSafe(|| prepared.run(&report.device))) {
        Ok(Err(CaseError::Declined(_))) => Ok(()),
        Ok(Err(error)) => Err(format!("expected a typed refusal, got {error}")),
        Ok(Ok(_)) => Err("expected a typed refusal, got a result".into()),
        Err(_) => Err("expected a typed refusal, got a panic".into()),
    }
}
