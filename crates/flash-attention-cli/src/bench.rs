//! `attn bench`: time and memory on a grid of points, each verified before it is timed.

mod call;
mod grid;
mod limit;
mod memory;
mod peak;
mod peers;
mod plot;
mod record;
mod summary;
mod timing;
mod verify;

use crate::Outcome;
use crate::devices;
use crate::failure::{Usage, guard, parse_count};
use crate::precision::Precision;
use crate::report::Report;
use burn_flash_attention::{DeviceReport, Dtype, Explanation, Summation, explain};
use call::Operands;
use clap::{ArgAction, Args};
use grid::{Choice, Element, Grid, Pass, Point};
use indicatif::{ProgressBar, ProgressStyle};
use limit::Limit;
use memory::Gauge;
use peers::Peers;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use record::{Measured, POINT, RESULT, csv_line, point_csv, point_json};
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use summary::{About, Found, measured, report};

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
///
/// With --time-limit no point is begun that would not be done in time, by the rate of points before
/// it or, where there is none, of smaller ones that are tried first; the limit is looked at again
/// before each step and each sample of a point, so that no more than one step runs past it. What was left
/// out is named, and points with fewer samples than asked for are.
#[derive(Args)]
pub struct BenchArgs {
    /// A name that `attn devices` lists [default: the first device with kernels, else the first]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Which points [default: paper, which would take a processor hours: small there]
    #[arg(long)]
    grid: Option<Grid>,
    /// Passes, separated by commas [default: the grid's]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    pass: Vec<Pass>,
    /// Element type [default: bf16 on a device with kernels that has it, else f32]
    #[arg(long, value_name = "T")]
    dtype: Option<Element>,
    /// Head dimensions instead of the grid's, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse_count)]
    head_dim: Vec<NonZeroUsize>,
    /// Sequence lengths instead of the grid's, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse_count)]
    seq: Vec<NonZeroUsize>,
    /// Only points with a causal mask, or only those without
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    causal: Option<bool>,
    /// Let backward passes add the parts of gradients in any order, instead of one that reruns repeat
    #[arg(long)]
    unordered_gradients: bool,
    /// Products of f32 operands; other element types have but one form
    #[arg(long, value_name = "P", default_value = "full")]
    f32_precision: Precision,
    /// Timed samples of each point
    #[arg(long, value_name = "N", default_value = "20", value_parser = parse_count)]
    samples: NonZeroUsize,
    /// Begin no point that would not be done this long after the start; those count as failed
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

pub fn execute(args: BenchArgs) -> Outcome<Report> {
    let start = Instant::now();
    let device = devices::find(args.device.as_deref())?;
    let dtype = dtype(&args, &device)?;
    let grid = args.grid.unwrap_or(match device.processor {
        true => Grid::Small,
        false => Grid::Paper,
    });
    let points = points(&args, grid, dtype)?;
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

    let mut limit = Limit::new(start, args.time_limit)?;
    let peak = args.peak.or(peak::known(&device.hardware, dtype));
    let bar = progress(points.len());
    let mut found = Vec::new();
    for point in points {
        bar.set_message(point.to_string());
        let outcome = guard(|| {
            if !limit.allows(&point, |smaller| probe(smaller, &device))? {
                return Ok(Found::NotReached);
            }
            Ok(
                match measure(&point, &device, args.samples.get(), peak, &limit)? {
                    Some(measured) => Found::Measured(Box::new(measured)),
                    None => Found::CutOff,
                },
            )
        });
        let outcome = outcome.unwrap_or_else(|error| Found::Failed(error.to_string()));
        if let Found::Measured(measured) = &outcome {
            limit.learn(&point, measured.median());
            if let Some(csv) = &mut csv {
                csv.write_all(csv_line(&measured.csv(&device)).as_bytes())?;
            }
        }
        found.push((point, outcome));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(mut plot) = plot {
        let title = format!("{}, {dtype}, {grid} grid", device.hardware);
        let none = Peers::default();
        let svg = plot::svg(&title, &measured(&found), peers.as_ref().unwrap_or(&none));
        plot.write_all(svg.as_bytes())?;
    }
    let about = About {
        device: &device,
        grid,
        grid_is_default: args.grid.is_none(),
        dtype,
        samples: args.samples.get(),
        summation: summation(&args),
        f32_precision: args.f32_precision.into(),
    };
    report(&about, &found, peers.as_ref())
}

fn summation(args: &BenchArgs) -> Summation {
    if args.unordered_gradients {
        Summation::Unordered
    } else {
        Summation::Reproducible
    }
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
fn points(args: &BenchArgs, grid: Grid, dtype: Dtype) -> Outcome<Vec<Point>> {
    let numbers = |given: &[NonZeroUsize]| given.iter().map(|n| n.get()).collect();
    let choice = Choice {
        passes: args.pass.clone(),
        head_dims: numbers(&args.head_dim),
        seqs: numbers(&args.seq),
        causal: args.causal,
        summation: summation(args),
        f32_precision: args.f32_precision.into(),
    };
    let points = grid.points(&choice, dtype);
    if points.is_empty() {
        let hint = match args.grid {
            Some(_) => "",
            None => ", and is the default of this device; --grid takes another",
        };
        return Err(Usage::new(format!("the {grid} grid has no such point{hint}")).into());
    }
    for point in &points {
        call::problem(point).map_err(Usage::new)?;
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

/// Seconds of one call of a point, after another one. Nothing is kept of either.
fn probe(point: &Point, device: &DeviceReport) -> Outcome<f64> {
    let problem = call::problem(point)?;
    let device = &device.device;
    let operands = Operands::draw(point, &problem, device, None)?;
    operands.run(point, &problem)?;
    device.sync()?;
    let start = Instant::now();
    operands.run(point, &problem)?;
    device.sync()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Draws, verifies and times one point; `None` if the time is up before the first sample.
fn measure(
    point: &Point,
    device: &DeviceReport,
    samples: usize,
    peak: Option<f64>,
    limit: &Limit,
) -> Outcome<Option<Measured>> {
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
    let verdicts = verify::verify(point, &problem, &first, &outputs, limit, &mut rng)?;
    let Some(verdicts) = verdicts else {
        return Ok(None);
    };
    drop(outputs);

    let count = timing::sets(point);
    let mut sets = vec![first];
    while sets.len() < count && !limit.is_over() {
        sets.push(Operands::draw(point, &problem, device, Some(&sets[0]))?);
    }
    let timing = timing::time(point, &problem, device, &sets, samples, limit)?;
    Ok(timing.map(|timing| Measured {
        point: point.clone(),
        kernel: kernel(point.pass, &explanation),
        explanation: explanation.to_string(),
        timing,
        sets: sets.len(),
        memory,
        verdicts,
        peak,
    }))
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

/// On standard error, and only where that is a terminal.
fn progress(points: usize) -> ProgressBar {
    let bar = ProgressBar::new(points as u64);
    match ProgressStyle::with_template("{wide_bar} {pos}/{len} {eta} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
