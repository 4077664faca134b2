//! `attn bench`: time and memory on a grid of points, each verified before it is timed.

mod call;
mod grid;
mod memory;
mod peak;
mod peers;
mod plot;
mod record;
mod timing;
mod verify;

use crate::Outcome;
use crate::devices;
use crate::failure::guard;
use crate::report::{Report, Table};
use burn_flash_attention::{DeviceReport, Dtype, Explanation, explain};
use call::Operands;
use clap::{ArgAction, Args};
use grid::{Choice, Element, Grid, Pass, Point};
use indicatif::{ProgressBar, ProgressStyle};
use memory::Gauge;
use peers::Peers;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use record::{Measured, POINT, RESULT, TITLES, csv_line, point_csv, point_json};
use serde_json::json;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Measure time, throughput and memory on a grid of problems
///
/// Every point draws fresh random data and is held to the f64 reference on sampled rows and keys
/// before it is timed; one that is wrong is not timed. A sample is as many calls as fill 10 ms, at
/// most 64, on sets of inputs in turn that are larger than a cache. Times are of one call.
///
/// forward times the call of the op without autodiff. backward times the op that autodiff runs for
/// a backward pass: dq, dk and dv from kept operands, output and row statistics and a given output
/// gradient; the forward pass before it is not in it. Both are read from the device's events where
/// it has them. training is host time: output and gradients through autodiff (output.backward(),
/// an output gradient of ones), issued call after call, until the device is done.
///
/// TFLOP/s count 4 * batch * heads * seq^2 * head_dim operations forward, half if causal, 2.5 times
/// as many backward. Memory is what one call and its inputs take of the device; on the host, all that
/// the process holds. The exit status is 0 only when every point was right and was measured.
#[derive(Args)]
pub struct BenchArgs {
    /// A name that `attn devices` lists [default: the first device with kernels, else the first]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Which points
    #[arg(long, default_value = "paper")]
    grid: Grid,
    /// Passes, separated by commas [default: the grid's]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    pass: Vec<Pass>,
    /// Element type [default: bf16 on a device with kernels that has it, else f32]
    #[arg(long, value_name = "T")]
    dtype: Option<Element>,
    /// Head dimensions instead of the grid's, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',')]
    head_dim: Vec<NonZeroUsize>,
    /// Sequence lengths instead of the grid's, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',')]
    seq: Vec<NonZeroUsize>,
    /// Only points with a causal mask, or only those without
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    causal: Option<bool>,
    /// Timed samples of each point
    #[arg(long, value_name = "N", default_value = "20")]
    samples: NonZeroUsize,
    /// Start no point that would not be done this long after the start; those count as failed
    #[arg(long, value_name = "SECONDS", value_parser = parse_positive)]
    time_limit: Option<f64>,
    /// What the device could do at most [default: its data sheet's, where that is known]
    #[arg(long, value_name = "TFLOPS", value_parser = parse_positive)]
    peak: Option<f64>,
    /// Write a row for each point to this file, as soon as it is measured
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw TFLOP/s over the sequence length to this SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Compare with the figures in this CSV file, which scripts/bench_nvidia.py writes
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// List the points and measure nothing
    #[arg(long, conflicts_with_all = ["plot", "peers"])]
    list: bool,
}

fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("expected a positive number".to_string()),
    }
}

/// What became of a point.
enum Found {
    Measured(Box<Measured>),
    Failed(String),
    /// It would have gone past the time limit.
    NotReached,
}

pub fn execute(args: BenchArgs) -> Outcome<Report> {
    let start = Instant::now();
    let device = devices::find(args.device.as_deref())?;
    let dtype = dtype(&args, &device)?;
    let points = points(&args, dtype)?;
    // Before anything is written: the file of peers may be the one that is replaced.
    let peers = args.peers.as_deref().map(Peers::read).transpose()?;
    let mut csv = args.csv.as_deref().map(create).transpose()?;
    if args.list {
        return list(&points, csv);
    }
    let plot = args.plot.as_deref().map(create).transpose()?;
    if let Some(csv) = &mut csv {
        csv.write_all(csv_line(&[POINT.as_slice(), RESULT.as_slice()].concat()).as_bytes())?;
    }

    let limit = args
        .time_limit
        .map(Duration::try_from_secs_f64)
        .transpose()?;
    let mut clock = Limit {
        deadline: limit.and_then(|limit| start.checked_add(limit)),
        rates: Vec::new(),
    };
    let peak = args.peak.or(peak::known(&device.hardware, dtype));
    let bar = progress(points.len());
    let mut found = Vec::new();
    for point in points {
        bar.set_message(point.to_string());
        let outcome = if clock.allows(&point) {
            let samples = args.samples.get();
            match guard(|| measure(&point, &device, samples, peak, clock.deadline)) {
                Ok(measured) => {
                    clock.learn(&measured);
                    if let Some(csv) = &mut csv {
                        csv.write_all(csv_line(&measured.csv(&device)).as_bytes())?;
                    }
                    Found::Measured(Box::new(measured))
                }
                Err(error) => Found::Failed(error.to_string()),
            }
        } else {
            Found::NotReached
        };
        found.push((point, outcome));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(mut plot) = plot {
        let title = format!("{}, {dtype}, {} grid", device.hardware, args.grid);
        let none = Peers::default();
        let svg = plot::svg(&title, &measured(&found), peers.as_ref().unwrap_or(&none));
        plot.write_all(svg.as_bytes())?;
    }
    report(&args, &device, dtype, &found, peers.as_ref())
}

fn dtype(args: &BenchArgs, device: &DeviceReport) -> Outcome<Dtype> {
    let has_bf16 = device.compiler != "rust" && device.dtypes.contains(&Dtype::BF16);
    let dtype = match args.dtype {
        Some(element) => element.into(),
        None if has_bf16 => Dtype::BF16,
        None => Dtype::F32,
    };
    if !device.dtypes.contains(&dtype) {
        let has: Vec<String> = device.dtypes.iter().map(ToString::to_string).collect();
        let (name, has) = (&device.name, has.join(", "));
        return Err(format!("device {name} computes with {has}, not with {dtype}").into());
    }
    Ok(dtype)
}

/// The points asked for, every one of which is a valid problem, and one at least.
fn points(args: &BenchArgs, dtype: Dtype) -> Outcome<Vec<Point>> {
    let numbers = |given: &[NonZeroUsize]| given.iter().map(|n| n.get()).collect();
    let choice = Choice {
        passes: args.pass.clone(),
        head_dims: numbers(&args.head_dim),
        seqs: numbers(&args.seq),
        causal: args.causal,
    };
    let points = args.grid.points(&choice, dtype);
    if points.is_empty() {
        return Err(format!("the {} grid has no such point", args.grid).into());
    }
    for point in &points {
        call::problem(point)?;
    }
    Ok(points)
}

fn create(path: &Path) -> Outcome<File> {
    File::create(path).map_err(|error| format!("output {}: {error}", path.display()).into())
}

fn list(points: &[Point], csv: Option<File>) -> Outcome<Report> {
    let mut table = String::new();
    for row in std::iter::once(POINT.map(String::from).to_vec()).chain(points.iter().map(point_csv))
    {
        table += &csv_line(&row);
    }
    if let Some(mut csv) = csv {
        csv.write_all(table.as_bytes())?;
    }
    Ok(Report {
        text: table,
        json: json!({ "points": points.iter().map(point_json).collect::<Vec<_>>() }),
        failure: None,
    })
}

/// Draws, verifies and times one point.
fn measure(
    point: &Point,
    device: &DeviceReport,
    samples: usize,
    peak: Option<f64>,
    deadline: Option<Instant>,
) -> Outcome<Measured> {
    let problem = call::problem(point)?;
    let explanation = explain(&problem, &device.device)?;
    let device = &device.device;
    let mut rng = StdRng::from_os_rng();
    device.seed(rng.random());

    let gauge = Gauge::start(device);
    let first = Operands::draw(point, &problem, device, None)?;
    gauge.forget();
    let outputs = first.run(point, &problem)?;
    device.sync()?;
    let memory = gauge.peak();
    let verdicts = verify::verify(point, &problem, &first, &outputs, &mut rng)?;
    drop(outputs);

    let count = timing::sets(point);
    let mut sets = vec![first];
    while sets.len() < count {
        sets.push(Operands::draw(point, &problem, device, Some(&sets[0]))?);
    }
    let timing = timing::time(point, &problem, device, &sets, samples, deadline)?;
    Ok(Measured {
        point: point.clone(),
        kernel: kernel(point.pass, &explanation),
        explanation: explanation.to_string(),
        timing,
        sets: count,
        memory,
        verdicts,
        peak,
    })
}

/// The family that serves a pass; of training both, where they differ.
fn kernel(pass: Pass, explanation: &Explanation) -> String {
    let (forward, backward) = (explanation.forward.family, explanation.backward.family);
    match pass {
        Pass::Forward => forward.to_string(),
        Pass::Backward => backward.to_string(),
        Pass::Training if forward == backward => forward.to_string(),
        Pass::Training => format!("{forward} + {backward}"),
    }
}

/// Which points there is time for.
struct Limit {
    deadline: Option<Instant>,
    /// Seconds an operation, of the latest point of each pass.
    rates: Vec<(Pass, f64)>,
}

impl Limit {
    /// Whether the point would be done in time, by the rate of the one before it: each is called
    /// three times at least, to be verified, to warm up and to be timed.
    fn allows(&self, point: &Point) -> bool {
        let Some(deadline) = self.deadline else {
            return true;
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let rate = self.rates.iter().find(|(pass, _)| *pass == point.pass);
        let needed = rate.map_or(0.0, |(_, rate)| 3.0 * rate * point.operations());
        needed < left.as_secs_f64()
    }

    fn learn(&mut self, measured: &Measured) {
        let pass = measured.point.pass;
        self.rates.retain(|(known, _)| *known != pass);
        let rate = measured.median() / measured.point.operations();
        self.rates.push((pass, rate));
    }
}

/// On standard error, and only where that is a terminal.
fn progress(points: usize) -> ProgressBar {
    let bar = ProgressBar::new(points as u64);
    match ProgressStyle::with_template("{wide_bar} {pos}/{len} {eta} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn measured(found: &[(Point, Found)]) -> Vec<Measured> {
    let measured = found.iter().filter_map(|(_, found)| match found {
        Found::Measured(measured) => Some((**measured).clone()),
        Found::Failed(_) | Found::NotReached => None,
    });
    measured.collect()
}

fn report(
    args: &BenchArgs,
    device: &DeviceReport,
    dtype: Dtype,
    found: &[(Point, Found)],
    peers: Option<&Peers>,
) -> Outcome<Report> {
    let measured = measured(found);
    let ratios = |measured: &Measured| peers.map_or(Vec::new(), |peers| peers.ratios(measured));
    let mut failures = Vec::new();
    let mut not_reached = Vec::new();
    for (point, found) in found {
        match found {
            Found::Measured(_) => {}
            Found::Failed(message) => failures.push((point, message)),
            Found::NotReached => not_reached.push(point),
        }
    }
    let failed = failures.iter().map(|(point, message)| {
        let mut document = point_json(point);
        document["message"] = message.as_str().into();
        document
    });
    Ok(Report {
        text: text(
            args,
            device,
            dtype,
            &measured,
            &failures,
            &not_reached,
            peers,
        )?,
        json: json!({
            "device": device.name,
            "hardware": device.hardware,
            "compiler": device.compiler,
            "build": build(),
            "grid": args.grid.to_string(),
            "dtype": dtype.to_string(),
            "points": measured.iter().map(|it| it.json(&ratios(it))).collect::<Vec<_>>(),
            "failures": failed.collect::<Vec<_>>(),
            "not_reached": not_reached.iter().map(|point| point_json(point)).collect::<Vec<_>>(),
        }),
        failure: failure(found.len(), &failures, not_reached.len()),
    })
}

fn build() -> &'static str {
    match cfg!(debug_assertions) {
        true => "dev",
        false => "release",
    }
}

fn text(
    args: &BenchArgs,
    device: &DeviceReport,
    dtype: Dtype,
    measured: &[Measured],
    failures: &[(&Point, &String)],
    not_reached: &[&Point],
    peers: Option<&Peers>,
) -> Outcome<String> {
    let (name, hardware, compiler) = (&device.name, &device.hardware, device.compiler);
    let mut text = format!(
        "{name}: {hardware}, compiler {compiler}, {} build; {} grid, {dtype}\n",
        build(),
        args.grid,
    );
    if !measured.is_empty() {
        let mut clocks: Vec<String> = measured
            .iter()
            .map(|it| it.timing.clock.to_string())
            .collect();
        clocks.sort();
        clocks.dedup();
        writeln!(
            text,
            "times in ms a call, {} clock; memory in MiB",
            clocks.join(" and ")
        )?;
        let mut table = Table::new(TITLES);
        measured.iter().for_each(|it| table.row(it.cells()));
        write!(text, "\n{table}")?;
    }
    if let Some(peers) = peers {
        write!(text, "\n{}", peers::text(measured, peers))?;
    }
    if !failures.is_empty() || !not_reached.is_empty() {
        writeln!(text)?;
    }
    for (point, message) in failures {
        writeln!(text, "  FAILED {point}: {message}")?;
    }
    for point in not_reached {
        writeln!(text, "  not reached in time: {point}")?;
    }
    Ok(text)
}

/// Why the exit status is not 0.
fn failure(points: usize, failures: &[(&Point, &String)], not_reached: usize) -> Option<String> {
    match (failures.first(), not_reached) {
        (Some((point, message)), _) => Some(format!(
            "{} of {points} points failed; the first, {point}: {message}",
            failures.len()
        )),
        (None, 0) => None,
        (None, _) => Some(format!(
            "{not_reached} of {points} points were not reached within the time limit"
        )),
    }
}
