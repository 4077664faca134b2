//! What a run of `attn bench` prints at its end.

use super::grid::{Grid, Point};
use super::peers::{self, Peers};
use super::record::{Measured, TITLES, point_json};
use crate::Outcome;
use crate::report::{Report, Table};
use burn_flash_attention::{DeviceReport, Dtype, F32Precision, Summation};
use serde_json::json;
use std::fmt::Write;

/// What was asked for.
pub struct About<'a> {
    pub device: &'a DeviceReport,
    pub grid: Grid,
    /// Whether the device chose the grid.
    pub grid_is_default: bool,
    pub dtype: Dtype,
    /// Of each point.
    pub samples: usize,
    /// Of gradients.
    pub summation: Summation,
    /// Of products of `f32` operands.
    pub f32_precision: F32Precision,
}

/// What became of a point.
pub enum Found {
    Measured(Box<Measured>),
    Failed(String),
    /// It would have gone past the time limit.
    NotReached,
    /// The time was up before the first sample of it.
    CutOff,
}

/// The points that were measured.
pub fn measured(found: &[(Point, Found)]) -> Vec<Measured> {
    let measured = found.iter().filter_map(|(_, found)| match found {
        Found::Measured(measured) => Some((**measured).clone()),
        Found::Failed(_) | Found::NotReached | Found::CutOff => None,
    });
    measured.collect()
}

/// All of it, as text and as JSON.
pub fn report(about: &About, found: &[(Point, Found)], peers: Option<&Peers>) -> Outcome<Report> {
    let device = about.device;
    let measured = measured(found);
    let ratios = |measured: &Measured| peers.map_or(Vec::new(), |peers| peers.ratios(measured));
    let mut failures = Vec::new();
    let (mut not_reached, mut cut_off) = (Vec::new(), Vec::new());
    for (point, found) in found {
        match found {
            Found::Measured(_) => {}
            Found::Failed(message) => failures.push((point, message)),
            Found::NotReached => not_reached.push(point),
            Found::CutOff => cut_off.push(point),
        }
    }
    let failed = failures.iter().map(|(point, message)| {
        let mut document = point_json(point);
        document["message"] = message.as_str().into();
        document
    });
    let text = text(about, &measured, peers)?;
    Ok(Report {
        text: text + &left_out(about, &measured, &failures, &not_reached, &cut_off)?,
        json: json!({
            "device": device.name,
            "hardware": device.hardware,
            "compiler": device.compiler,
            "build": build(),
            "grid": about.grid.to_string(),
            "grid_is_default": about.grid_is_default,
            "dtype": about.dtype.to_string(),
            "unordered_gradients": about.summation == Summation::Unordered,
            "tf32": about.f32_precision == F32Precision::Tf32,
            "points": measured.iter().map(|it| it.json(&ratios(it))).collect::<Vec<_>>(),
            "failures": failed.collect::<Vec<_>>(),
            "not_reached": not_reached.iter().map(|point| point_json(point)).collect::<Vec<_>>(),
            "cut_off": cut_off.iter().map(|point| point_json(point)).collect::<Vec<_>>(),
        }),
        failure: failure(found.len(), &failures, not_reached.len() + cut_off.len()),
    })
}

fn build() -> &'static str {
    match cfg!(debug_assertions) {
        true => "dev",
        false => "release",
    }
}

/// What was measured.
fn text(about: &About, measured: &[Measured], peers: Option<&Peers>) -> Outcome<String> {
    let About {
        device,
        grid,
        dtype,
        ..
    } = about;
    let (name, hardware, compiler) = (&device.name, &device.hardware, device.compiler);
    let default = match (about.grid_is_default, device.processor) {
        (false, _) => "",
        (true, true) => " (the default of a processor)",
        (true, false) => " (the default)",
    };
    let order = match about.summation {
        Summation::Reproducible => "",
        Summation::Unordered => ", gradients summed in any order",
    };
    let rounded = match (dtype, about.f32_precision) {
        (Dtype::F32, F32Precision::Tf32) => " rounded to TF32 where there are kernels for that",
        _ => "",
    };
    let mut text = format!(
        "{name}: {hardware}, compiler {compiler}, {} build; {grid} grid{default}, {dtype}{rounded}{order}\n",
        build(),
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
    Ok(text)
}

/// What was not, or not as often as was asked for.
fn left_out(
    about: &About,
    measured: &[Measured],
    failures: &[(&Point, &String)],
    not_reached: &[&Point],
    cut_off: &[&Point],
) -> Outcome<String> {
    let mut text = String::new();
    for (point, message) in failures {
        writeln!(text, "  FAILED {point}: {message}")?;
    }
    for Measured { point, timing, .. } in measured {
        let samples = timing.seconds.len();
        if samples < about.samples {
            writeln!(
                text,
                "  {samples} of {} samples in time: {point}",
                about.samples
            )?;
        }
    }
    for point in cut_off {
        writeln!(text, "  begun and not measured in time: {point}")?;
    }
    for point in not_reached {
        writeln!(text, "  not reached in time: {point}")?;
    }
    if !text.is_empty() {
        text.insert(0, '\n');
    }
    Ok(text)
}

/// Why the exit status is not 0.
fn failure(points: usize, failures: &[(&Point, &String)], left_out: usize) -> Option<String> {
    match (failures.first(), left_out) {
        (Some((point, message)), _) => Some(format!(
            "{} of {points} points failed; the first, {point}: {message}",
            failures.len()
        )),
        (None, 0) => None,
        (None, _) => Some(format!(
            "{left_out} of {points} points were not measured within the time limit"
        )),
    }
}
