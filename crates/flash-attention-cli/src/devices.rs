//! `attn devices`, and how a device is found by its name.

use crate::Outcome;
use crate::report::Report;
use burn_flash_attention::{DeviceReport, Dtype, device, devices};
use clap::Args;
use serde_json::{Value, json};
use std::fmt::Write;

/// Every backend by its cargo feature, which is its device name too, and whether it is on.
const BACKENDS: [(&str, bool); 8] = [
    ("flex", cfg!(feature = "flex")),
    ("cuda", cfg!(feature = "cuda")),
    ("rocm", cfg!(feature = "rocm")),
    ("metal", cfg!(feature = "metal")),
    ("vulkan", cfg!(feature = "vulkan")),
    ("webgpu", cfg!(feature = "webgpu")),
    ("wgpu", cfg!(feature = "wgpu")),
    ("cpu", cfg!(feature = "cpu")),
];

/// List the devices that are compiled in and found
///
/// For each: the name that --device takes, the hardware, what its kernels are compiled by, element
/// types, plane (warp, subgroup) size, shared memory, bindings, matrix-unit shapes, and which
/// kernel family serves the forward and the backward pass. Backends that are not compiled in are
/// listed with the cargo feature that brings them.
#[derive(Args)]
pub struct DevicesArgs {}

pub fn execute(_: DevicesArgs) -> Outcome<Report> {
    let found = devices();
    let absent: Vec<&str> = absent().collect();
    let missing: Vec<&str> = missing(&found).collect();
    let mut text = String::new();
    for report in &found {
        writeln!(text, "{}", report.name)?;
        for (what, value) in lines(report) {
            writeln!(text, "  {what:<16}{value}")?;
        }
        writeln!(text)?;
    }
    for name in &missing {
        writeln!(text, "{name}: compiled in, no device found")?;
    }
    if !absent.is_empty() {
        let names = absent.join(", ");
        writeln!(text, "Not compiled in, each a cargo feature: {names}")?;
    }
    Ok(Report {
        text,
        json: json!({
            "devices": found.iter().map(to_json).collect::<Vec<_>>(),
            "not_found": missing,
            "not_compiled_in": absent,
        }),
        failure: found.is_empty().then(|| no_device(&found)),
    })
}

/// Every device found, of which there must be one.
pub fn all() -> Outcome<Vec<DeviceReport>> {
    let found = devices();
    if found.is_empty() {
        return Err(no_device(&found).into());
    }
    Ok(found)
}

/// The device called `name`, without a look at other backends; without a name the first that runs
/// kernels, else the first.
pub fn find(name: Option<&str>) -> Outcome<DeviceReport> {
    if let Some(name) = name {
        return device(name).ok_or_else(|| unknown(name, &devices()).into());
    }
    let mut found = all()?;
    let kernels = found.iter().position(|report| report.compiler != "rust");
    Ok(found.swap_remove(kernels.unwrap_or(0)))
}

fn absent() -> impl Iterator<Item = &'static str> {
    BACKENDS
        .into_iter()
        .filter(|&(_, on)| !on)
        .map(|(name, _)| name)
}

fn missing(found: &[DeviceReport]) -> impl Iterator<Item = &'static str> {
    let on = BACKENDS.into_iter().filter(|&(_, on)| on);
    on.map(|(name, _)| name)
        .filter(|name| !found.iter().any(|report| backend(&report.name) == *name))
}

/// The backend of a device name, which is what stands before the `:index`.
fn backend(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

fn unknown(name: &str, found: &[DeviceReport]) -> String {
    let feature = backend(name);
    let why = match BACKENDS.into_iter().find(|(known, _)| *known == feature) {
        Some((_, true)) => "is compiled in but was not found".to_string(),
        Some((_, false)) => format!("is not compiled in, cargo feature `{feature}` brings it"),
        None => "is unknown".to_string(),
    };
    format!("device {name} {why}; {}", no_device(found))
}

/// What there is instead.
fn no_device(found: &[DeviceReport]) -> String {
    let names: Vec<&str> = found.iter().map(|report| report.name.as_str()).collect();
    let names = if names.is_empty() {
        "none".to_string()
    } else {
        names.join(", ")
    };
    let absent: Vec<&str> = absent().collect();
    match absent.as_slice() {
        [] => format!("devices found: {names}"),
        absent => format!(
            "devices found: {names}; by cargo feature: {}",
            absent.join(", ")
        ),
    }
}

fn lines(report: &DeviceReport) -> [(&'static str, String); 9] {
    let or_dash = |text: Option<String>| text.unwrap_or("-".to_string());
    [
        ("hardware", report.hardware.clone()),
        ("compiler", report.compiler.to_string()),
        ("dtypes", dtypes(report).join(", ")),
        (
            "plane size",
            or_dash(report.plane_size.map(|(least, most)| match least == most {
                true => least.to_string(),
                false => format!("{least} to {most}"),
            })),
        ),
        (
            "shared memory",
            or_dash(report.shared_memory.map(|bytes| format!("{bytes} bytes"))),
        ),
        (
            "bindings",
            or_dash(report.max_bindings.map(|n| n.to_string())),
        ),
        (
            "matrix shapes",
            or_dash((!report.matrix_shapes.is_empty()).then(|| report.matrix_shapes.join(", "))),
        ),
        ("forward", families(&report.forward)),
        ("backward", families(&report.backward)),
    ]
}

/// The one family of every element type, or each family with its element types.
fn families(served: &[(Dtype, &'static str)]) -> String {
    let mut grouped: Vec<(&str, Vec<String>)> = Vec::new();
    for (dtype, family) in served {
        match grouped.iter_mut().find(|(known, _)| known == family) {
            Some((_, dtypes)) => dtypes.push(dtype.to_string()),
            None => grouped.push((family, vec![dtype.to_string()])),
        }
    }
    if let [(family, _)] = grouped[..] {
        return family.to_string();
    }
    let parts = grouped.iter();
    let parts: Vec<String> = parts
        .map(|(family, dtypes)| format!("{family} ({})", dtypes.join(", ")))
        .collect();
    parts.join(", ")
}

fn dtypes(report: &DeviceReport) -> Vec<String> {
    report.dtypes.iter().map(ToString::to_string).collect()
}

fn to_json(report: &DeviceReport) -> Value {
    json!({
        "name": report.name,
        "hardware": report.hardware,
        "compiler": report.compiler,
        "processor": report.processor,
        "dtypes": dtypes(report),
        "plane_size": report.plane_size.map(|(least, most)| [least, most]),
        "shared_memory": report.shared_memory,
        "max_bindings": report.max_bindings,
        "matrix_shapes": report.matrix_shapes,
        "forward": by_dtype(&report.forward),
        "backward": by_dtype(&report.backward),
    })
}

fn by_dtype(served: &[(Dtype, &'static str)]) -> Value {
    let served = served.iter();
    served
        .map(|(dtype, family)| (dtype.to_string(), Value::from(*family)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
