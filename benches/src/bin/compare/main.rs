//! `compare`: time and memory of burn-flash-attention beside Burn's own attention, in one run.
//!
//! Each line is measured in a process of its own, this program again, which writes what it computed
//! to a file; a workload on which the two do not agree is not reported.

mod agreement;
mod layer;
mod measure;
mod memory;
mod report;
mod setting;
mod workload;

use agreement::Agreement;
use burn_flash_attention::{DeviceReport, devices};
use clap::{ArgAction, Parser, Subcommand};
use measure::{Measurement, Request, SETS};
use report::{CSV_HEADER, Comparison, Figures};
use serde_json::json;
use setting::Setting;
use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};
use workload::{Element, Implementation, Pass, Workload};

/// Any error is printed as one line.
type Outcome<T> = Result<T, Box<dyn Error>>;

/// What a line on standard error begins with that says why a run failed.
const ERROR: &str = "error: ";

/// Measure burn-flash-attention beside Burn's own attention
///
/// Prints a table with the ratio burn/flash of time and memory, under lines that say what was
/// measured where, so that the output is a record. Burn's own attention is what
/// burn::tensor::module::attention runs: for --pass training, its operations under autodiff. A layer
/// is a transformer layer around either, trained for a step.
///
/// Build with --release, and with the features `autotune` and that of the device for a GPU.
#[derive(Parser)]
#[command(
    name = "compare",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(flatten)]
    compare: Compare,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(clap::Args)]
struct Compare {
    /// A backend's cargo feature, with :N for the device N after the first
    #[arg(long, default_value = "flex")]
    device: String,
    #[arg(long, default_value = "1")]
    batch: NonZeroUsize,
    /// Heads of the query
    #[arg(long, default_value = "8")]
    heads: NonZeroUsize,
    /// Heads of key and value [default: as many as the query has]
    #[arg(long)]
    kv_heads: Option<NonZeroUsize>,
    /// Numbers of queries, and as many keys
    #[arg(long, default_value = "2048", value_delimiter = ',')]
    seq: Vec<NonZeroUsize>,
    /// Width of query, key and value
    #[arg(long, default_value = "64")]
    head_dim: NonZeroUsize,
    #[arg(long, default_value = "f32")]
    dtype: Element,
    /// Whether a query sees only the keys up to its own position
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    causal: bool,
    #[arg(long, default_value = "training", value_delimiter = ',')]
    pass: Vec<Pass>,
    /// Whom to measure, in this order; named again, again, which shows the noise
    #[arg(long, default_value = "flash,burn", value_delimiter = ',')]
    implementation: Vec<Implementation>,
    /// Timed calls, after the first and a warm-up
    #[arg(long, default_value = "5")]
    samples: NonZeroUsize,
    /// Print JSON instead of the table, once all is measured
    #[arg(long)]
    json: bool,
    /// Write the figures to this file too
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Part {
    /// The measuring process: prints a measurement as JSON, and writes outputs to a file
    #[command(hide = true)]
    Measure { request: String, outputs: PathBuf },
}

fn main() -> ExitCode {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(|place| format!(" ({place})"));
        let text = info.payload_as_str().unwrap_or("panic");
        eprintln!("{ERROR}{}{}", one_line(text), place.unwrap_or_default());
    }));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            let text = error.render().to_string();
            let end = text
                .find("\nUsage:")
                .or(text.find("\nFor more information"));
            eprintln!("{}", one_line(&text[..end.unwrap_or(text.len())]));
            return ExitCode::FAILURE;
        }
        Err(help) => {
            print!("{}", help.render());
            return ExitCode::SUCCESS;
        }
    };
    // Nothing that a panic could leave half done is used again.
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| match cli.part {
        Some(Part::Measure { request, outputs }) => {
            let measurement = measure::measure(&serde_json::from_str(&request)?, &outputs)?;
            println!("{}", serde_json::to_string(&measurement)?);
            Ok(())
        }
        None => compare(&cli.compare),
    }));
    match outcome {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            let error: Box<dyn Error> = error;
            eprintln!("{ERROR}{}", one_line(&error.to_string()));
            ExitCode::FAILURE
        }
        // The hook has said why.
        Err(_) => ExitCode::FAILURE,
    }
}

fn compare(args: &Compare) -> Outcome<()> {
    let device = find(&args.device)?;
    let workloads = workloads(args, &device)?;
    let setting = Setting::new(&device);
    let samples = args.samples.get();
    let mut csv = args.csv.as_ref().map(File::create).transpose()?;
    if let Some(csv) = &mut csv {
        writeln!(csv, "{CSV_HEADER}")?;
    }
    let mut out = io::stdout().lock();
    if !args.json {
        let heading = report::heading(&setting, &workloads[0], samples, SETS);
        write!(out, "{heading}")?;
        out.flush()?;
    }
    let mut documents = Vec::new();
    for workload in workloads {
        let comparison = run(args, workload)?;
        if let Some(csv) = &mut csv {
            write!(csv, "{}", comparison.csv(&setting))?;
        }
        match args.json {
            true => documents.push(comparison.json()),
            false => write!(out, "{comparison}")?,
        }
        out.flush()?;
    }
    if args.json {
        let document = json!({
            "setting": setting,
            "samples": samples,
            "comparisons": documents,
        });
        writeln!(out, "{document:#}")?;
    }
    Ok(())
}

fn find(name: &str) -> Outcome<DeviceReport> {
    let mut found = devices();
    match found.iter().position(|device| device.name == name) {
        Some(at) => Ok(found.swap_remove(at)),
        None => {
            let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
            let names = names.join(", ");
            Err(format!("device {name} is not compiled in or was not found, found: {names}").into())
        }
    }
}

/// Every combination of sequence length and pass, one at least.
fn workloads(args: &Compare, device: &DeviceReport) -> Outcome<Vec<Workload>> {
    let (heads, dtype) = (args.heads.get(), args.dtype);
    let kv_heads = args.kv_heads.map_or(heads, NonZeroUsize::get);
    if heads % kv_heads != 0 {
        return Err(format!("{heads} heads are no multiple of {kv_heads} kv heads").into());
    }
    if !device.dtypes.contains(&dtype.into()) {
        let has: Vec<String> = device.dtypes.iter().map(ToString::to_string).collect();
        let (name, has) = (&device.name, has.join(", "));
        return Err(format!("device {name} computes with {has}, not with {dtype}").into());
    }
    let mut workloads = Vec::new();
    for &seq in &args.seq {
        for &pass in &args.pass {
            workloads.push(Workload {
                batch: args.batch.get(),
                heads,
                kv_heads,
                seq: seq.get(),
                head_dim: args.head_dim.get(),
                dtype,
                causal: args.causal,
                pass,
            });
        }
    }
    Ok(workloads)
}

/// Measures one workload by every implementation asked for, and holds them to each other.
fn run(args: &Compare, workload: Workload) -> Outcome<Comparison> {
    let folder = tempfile::tempdir()?;
    let file = |who: Implementation| folder.path().join(who.to_string());
    // Other inputs in each run: its lowest bits, the nanoseconds, change fastest.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let mut results = Vec::new();
    for &implementation in &args.implementation {
        let request = Request {
            device: args.device.clone(),
            implementation,
            workload: workload.clone(),
            samples: args.samples.get(),
            seed,
        };
        let measurement = in_new_process(&request, &file(implementation))
            .map_err(|error| format!("{implementation} at seq {}: {error}", workload.seq))?;
        results.push((implementation, Figures::of(&measurement)));
    }
    let (flash, burn) = (file(Implementation::Flash), file(Implementation::Burn));
    let agreement = match flash.exists() && burn.exists() {
        true => Some(
            Agreement::of(&workload, &flash, &burn)
                .map_err(|error| format!("seq {}, {}: {error}", workload.seq, workload.pass))?,
        ),
        false => None,
    };
    Ok(Comparison {
        workload,
        results,
        agreement,
    })
}

fn in_new_process(request: &Request, outputs: &Path) -> Outcome<Measurement> {
    let output = Command::new(std::env::current_exe()?)
        .arg("measure")
        .arg(serde_json::to_string(request)?)
        .arg(outputs)
        .output()?;
    if !output.status.success() {
        // The first of several panics is the cause of the others. A process that was ended, for want
        // of memory for example, has no such line.
        let said = String::from_utf8_lossy(&output.stderr);
        let reason = said.lines().find_map(|line| line.strip_prefix(ERROR));
        let ended = || {
            format!(
                "{}, {}",
                output.status,
                said.lines().next().unwrap_or("silent")
            )
        };
        return Err(reason.map_or_else(ended, String::from).into());
    }
    // Drivers may have written to standard output before.
    let said = String::from_utf8(output.stdout)?;
    Ok(serde_json::from_str(
        said.lines().last().unwrap_or_default(),
    )?)
}

/// Text without line breaks.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}
