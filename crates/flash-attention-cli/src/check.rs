//! `attn check`: the case grid on devices, against the f64 reference.

use crate::devices::find;
use crate::failure::guard;
use crate::report::{Report, Table, json_number};
use crate::{Outcome, devices};
use burn_flash_attention::{DeviceReport, Dtype, explain};
use clap::{Args, ValueEnum};
use flash_attention_check::{Case, CaseReport, OutputVerdict, Prepared, grid};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Data are drawn from this and the name of the case, so that every run sees the same.
const SEED: u64 = 1;

/// Outputs in the order in which they are reported.
const OUTPUTS: [&str; 6] = ["o", "lse", "dq", "dk", "dv", "dbias"];

/// Hold devices to the f64 reference, case by case
///
/// Runs a grid of cases, one for each kind of fault that attention kernels are known for, forward
/// and backward. An output passes when its largest error is at most twice (gradients: three times)
/// that of the same formula done unfused in the input's type, plus two roundings. In f32 the relative
/// Frobenius error must stay under 5e-6 for o and 2e-5 for gradients too.
///
/// Some cases are made for certain element types only, for example of numbers that f16 cannot hold or
/// of scores that bounds of f32 are too narrow for; the others leave them out, and say how many.
///
/// For every output the table shows the error that came closest to its bound. A device that lacks
/// an element type is listed as declined. The exit status is 1 if any case fails or none could run.
#[derive(Args)]
pub struct CheckArgs {
    /// A name that `attn devices` lists [default: every device]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Element type [default: each]
    #[arg(long, value_name = "T")]
    dtype: Option<Element>,
    /// Add the complete products of lengths, head dims, options, broadcasts and layouts
    #[arg(long)]
    full: bool,
    /// Print for each case which kernel family serves it, and why faster ones do not
    #[arg(long)]
    explain: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Element {
    F32,
    F16,
    Bf16,
}

/// What one device made of the grid in one element type.
struct Tally {
    dtype: Dtype,
    /// Index into the devices.
    device: usize,
    /// Why the device takes no part.
    declined: Option<String>,
    cases: usize,
    /// Cases that are made for other element types only.
    undefined: usize,
    failures: Vec<Failure>,
    /// For each of [`OUTPUTS`] the error that came closest to its bound.
    closest: [Option<Closest>; OUTPUTS.len()],
    /// Which family serves each case.
    explained: Vec<(String, String)>,
}

struct Failure {
    case: String,
    message: String,
}

struct Closest {
    case: String,
    error: f64,
    bound: f64,
}

impl Closest {
    /// How much of the bound is used up.
    fn share(&self) -> f64 {
        if self.error == 0.0 {
            0.0
        } else {
            self.error / self.bound
        }
    }
}

pub fn execute(args: CheckArgs) -> Outcome<Report> {
    let devices = match &args.device {
        Some(name) => vec![find(Some(name))?],
        None => devices::all()?,
    };
    let dtypes: &[Dtype] = match args.dtype {
        None => &Dtype::ALL,
        Some(Element::F32) => &[Dtype::F32],
        Some(Element::F16) => &[Dtype::F16],
        Some(Element::Bf16) => &[Dtype::BF16],
    };
    let cases = grid(args.full);
    let mut tallies: Vec<Tally> = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        tallies.extend(dtypes.iter().map(|&dtype| Tally::new(at, device, dtype)));
    }
    let bar = progress(&cases, &tallies);
    for case in &cases {
        bar.set_message(case.name.clone());
        for &dtype in dtypes {
            let mut takes_part: Vec<&mut Tally> = tallies
                .iter_mut()
                .filter(|tally| tally.dtype == dtype && tally.declined.is_none())
                .collect();
            if !case.dtypes.contains(&dtype) {
                takes_part.iter_mut().for_each(|tally| tally.undefined += 1);
                continue;
            }
            if takes_part.is_empty() {
                continue;
            }
            let prepared = Prepared::new(case, dtype, SEED)?;
            for tally in takes_part {
                let device = &devices[tally.device];
                tally.run(&prepared, case, device);
                if args.explain {
                    let served = explain(&case.problem(dtype)?, &device.device);
                    let served = served.map_or_else(|e| e.to_string(), |e| e.to_string());
                    tally.explained.push((case.name.clone(), served));
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(Report {
        text: text(&tallies, &devices, args.explain)?,
        json: json!({
            "full": args.full,
            "passed": failure(&tallies, &devices).is_none(),
            "runs": tallies.iter().map(|t| t.json(&devices[t.device], args.explain)).collect::<Vec<_>>(),
        }),
        failure: failure(&tallies, &devices),
    })
}

/// On standard error, and only where that is a terminal.
fn progress(cases: &[Case], tallies: &[Tally]) -> ProgressBar {
    let takes_part = tallies.iter().filter(|tally| tally.declined.is_none());
    let runs = takes_part.map(|tally| {
        let defined = cases
            .iter()
            .filter(|case| case.dtypes.contains(&tally.dtype));
        defined.count() as u64
    });
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {eta} {msg}");
    let bar = ProgressBar::new(runs.sum());
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

impl Tally {
    fn new(at: usize, device: &DeviceReport, dtype: Dtype) -> Self {
        let has: Vec<String> = device.dtypes.iter().map(ToString::to_string).collect();
        let lacks = !device.dtypes.contains(&dtype);
        Self {
            dtype,
            device: at,
            declined: lacks.then(|| format!("the device computes with {} only", has.join(", "))),
            cases: 0,
            undefined: 0,
            failures: Vec::new(),
            closest: Default::default(),
            explained: Vec::new(),
        }
    }

    fn run(&mut self, prepared: &Prepared, case: &Case, device: &DeviceReport) {
        let outcome = guard(|| Ok(prepared.run(&device.device)?));
        self.record(case, outcome);
    }

    fn record(&mut self, case: &Case, outcome: Outcome<CaseReport>) {
        self.cases += 1;
        let message = match outcome {
            Ok(report) => {
                report
                    .outputs
                    .iter()
                    .for_each(|verdict| self.note(case, verdict));
                let failed = report.outputs.into_iter().find(|verdict| !verdict.passed);
                failed.map(|verdict| verdict.message)
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(message) = message {
            let case = case.name.clone();
            self.failures.push(Failure { case, message });
        }
    }

    fn note(&mut self, case: &Case, verdict: &OutputVerdict) {
        let Some(at) = OUTPUTS.iter().position(|name| *name == verdict.output) else {
            return;
        };
        let new = Closest {
            case: case.name.clone(),
            error: verdict.worst,
            bound: verdict.bound,
        };
        let closer = |old: &Closest| new.share() > old.share();
        if self.closest[at].as_ref().is_none_or(closer) {
            self.closest[at] = Some(new);
        }
    }

    fn json(&self, device: &DeviceReport, explain: bool) -> Value {
        let mut closest = Map::new();
        for (output, found) in OUTPUTS.into_iter().zip(&self.closest) {
            let Some(found) = found else { continue };
            let entry = json!({
                "error": json_number(found.error),
                "bound": json_number(found.bound),
                "case": found.case,
            });
            closest.insert(output.to_string(), entry);
        }
        let failures = self
            .failures
            .iter()
            .map(|failure| json!({ "case": failure.case, "message": failure.message }));
        let mut run = json!({
            "device": device.name,
            "hardware": device.hardware,
            "dtype": self.dtype.to_string(),
            "declined": self.declined,
            "cases": self.cases,
            "undefined": self.undefined,
            "closest": closest,
            "failures": failures.collect::<Vec<_>>(),
        });
        if explain {
            let served = self.explained.iter();
            let served = served.map(|(case, by)| json!({ "case": case, "served_by": by }));
            run["explained"] = served.collect();
        }
        run
    }
}

fn text(tallies: &[Tally], devices: &[DeviceReport], explain: bool) -> Outcome<String> {
    let mut text = String::new();
    for tally in tallies {
        let (device, dtype) = (&devices[tally.device].name, tally.dtype);
        if let Some(reason) = &tally.declined {
            writeln!(text, "{device} {dtype}: declined, {reason}\n")?;
            continue;
        }
        if explain {
            let mut table = Table::new(["<case", "<served by"]);
            for (case, served) in &tally.explained {
                table.row([case.clone(), served.clone()]);
            }
            writeln!(text, "{device} {dtype}\n{table}")?;
        }
        let passed = tally.cases - tally.failures.len();
        write!(
            text,
            "{device} {dtype}: {passed} of {} cases passed",
            tally.cases
        )?;
        match tally.undefined {
            0 => writeln!(text)?,
            n => writeln!(
                text,
                "; {n} left out, which are made for other element types only"
            )?,
        }
        let mut table = Table::new(["<output", "worst error", "bound", "share", "<case"]);
        for (output, found) in OUTPUTS.into_iter().zip(&tally.closest) {
            let Some(found) = found else { continue };
            table.row([
                output.to_string(),
                format!("{:.2e}", found.error),
                format!("{:.2e}", found.bound),
                format!("{:.2}", found.share()),
                found.case.clone(),
            ]);
        }
        writeln!(text, "{table}")?;
        for failure in &tally.failures {
            writeln!(text, "  FAILED {}: {}", failure.case, failure.message)?;
        }
        if !tally.failures.is_empty() {
            writeln!(text)?;
        }
    }
    Ok(text)
}

/// Why the exit status is not 0: the first failure, and how many there are.
fn failure(tallies: &[Tally], devices: &[DeviceReport]) -> Option<String> {
    let total: usize = tallies.iter().map(|tally| tally.cases).sum();
    let failed: usize = tallies.iter().map(|tally| tally.failures.len()).sum();
    let first = tallies
        .iter()
        .find_map(|tally| Some((tally, tally.failures.first()?)));
    match first {
        Some((tally, first)) => Some(format!(
            "{failed} of {total} cases failed; the first on {} in {}: {}: {}",
            devices[tally.device].name, tally.dtype, first.case, first.message
        )),
        None if total == 0 => {
            let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
            let dtypes: Vec<String> = tallies
                .iter()
                .map(|tally| tally.dtype.to_string())
                .collect();
            let (names, dtypes) = (names.join(", "), dtypes.join(", "));
            Some(format!("no case could run: {names} declined {dtypes}"))
        }
        None => None,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn flex_tally(devices: &[DeviceReport]) -> Tally {
        Tally::new(0, &devices[0], Dtype::F32)
    }

    fn case() -> Case {
        Case::new(
            "small",
            "A wrong result that counts as right.",
            [1, 1, 1, 2, 3, 4, 4],
        )
    }

    #[test]
    fn a_wrong_result_is_counted_and_named() {
        let devices = [find(Some("flex")).unwrap()];
        let mut tally = flex_tally(&devices);
        let right = Prepared::new(&case(), Dtype::F32, SEED).unwrap();
        tally.run(&right, &case(), &devices[0]);
        assert!(failure(&[tally], &devices).is_none());

        // Judged by the data of another draw, the device is wrong.
        let mut tally = flex_tally(&devices);
        let other = Prepared::new(&case(), Dtype::F32, SEED + 1).unwrap();
        let outputs = right.outputs(&devices[0].device).unwrap();
        let report = other.judge(&outputs).unwrap();
        tally.record(&case(), Ok(report));
        let named = failure(std::slice::from_ref(&tally), &devices).unwrap();
        let start = "1 of 1 cases failed; the first on flex in f32: small: o: ";
        assert!(named.starts_with(start), "{named}");
        let text = text(&[tally], &devices, false).unwrap();
        assert!(text.contains("flex f32: 0 of 1 cases passed"), "{text}");
        assert!(text.contains("FAILED small: o: "), "{text}");
    }

    #[test]
    fn a_device_without_the_type_declines_and_checks_nothing() {
        let mut devices = [find(Some("flex")).unwrap()];
        devices[0].dtypes = vec![Dtype::F16];
        let tallies = [flex_tally(&devices)];
        let text = text(&tallies, &devices, false).unwrap();
        assert!(
            text.contains("flex f32: declined, the device computes with f16 only"),
            "{text}"
        );
        let failure = failure(&tallies, &devices).unwrap();
        assert_eq!(failure, "no case could run: flex declined f32");
    }
}
