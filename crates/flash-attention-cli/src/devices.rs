//! `attn devices`, and how a device is found by its name.

use crate::Outcome;
use crate::report::Report;
use burn_flash_attention::{DeviceReport, Dtype, device, devices};
use clap::Args;
use serde_json::{Value, json};
use std::fmt::Write;

/// A cargo feature that brings a device, or another way to compile for one.
struct Backend {
    feature: &'static str,
    /// The device's name, without its index.
    device: &'static str,
    compiled_in: bool,
}

impl Backend {
    /// One whose feature is called like its device.
    const fn new(name: &'static str, compiled_in: bool) -> Self {
        Self {
            feature: name,
            device: name,
            compiled_in,
        }
    }
}

/// CUDA by another compiler, on the same device; brings `cuda` too.
const NVRTC: Backend = Backend {
    feature: "cuda-nvrtc",
    device: "cuda",
    compiled_in: cfg!(feature = "cuda-nvrtc"),
};

/// Every backend.
const BACKENDS: [Backend; 9] = [
    Backend::new("flex", cfg!(feature = "flex")),
    Backend::new("cuda", cfg!(any(feature = "cuda", feature = "cuda-nvrtc"))),
    NVRTC,
    Backend::new("rocm", cfg!(feature = "rocm")),
    Backend::new("metal", cfg!(feature = "metal")),
    Backend::new("vulkan", cfg!(feature = "vulkan")),
    Backend::new("webgpu", cfg!(feature = "webgpu")),
    Backend::new("wgpu", cfg!(feature = "wgpu")),
    Backend::new("cpu", cfg!(feature = "cpu")),
];

/// What [`NVRTC`] is, for those who lack it.
const ABOUT_NVRTC: &str = "cuda-nvrtc serves the device cuda too, compiled by NVRTC: \
     with the hopper kernels for H100 and H200, and f32 on matrix units";

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
        if !NVRTC.compiled_in {
            writeln!(text, "{ABOUT_NVRTC}")?;
        }
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

/// Cargo features that are off.
fn absent() -> impl Iterator<Item = &'static str> {
    let off = BACKENDS.into_iter().filter(|backend| !backend.compiled_in);
    off.map(|backend| backend.feature)
}

/// Devices that are compiled in and were not found.
fn missing(found: &[DeviceReport]) -> impl Iterator<Item = &'static str> {
    let is_found = |name| {
        let mut reports = found.iter();
        reports.any(|report| backend(&report.name) == name)
    };
    BACKENDS
        .into_iter()
        // The other way to the same device is no second one.
        .filter(|backend| backend.compiled_in && backend.feature == backend.device)
        .map(|backend| backend.device)
        .filter(move |&device| !is_found(device))
}

/// The backend of a device name, which is what stands before the `:index`.
fn backend(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

fn unknown(name: &str, found: &[DeviceReport]) -> String {
    let device = backend(name);
    let of_device = || BACKENDS.iter().filter(|known| known.device == device);
    let features: Vec<String> = of_device()
        .map(|known| format!("`{}`", known.feature))
        .collect();
    let why = if device == NVRTC.feature {
        format!("is a cargo feature, whose device is {}", NVRTC.device)
    } else if features.is_empty() {
        "is unknown".to_string()
    } else if of_device().any(|known| known.compiled_in) {
        "is compiled in but was not found".to_string()
    } else {
        let features = features.join(" or ");
        format!("is not compiled in, cargo feature {features} brings it")
    };
    let about = match device == NVRTC.device || device == NVRTC.feature {
        true if !NVRTC.compiled_in => format!(" ({ABOUT_NVRTC})"),
        _ => String::new(),
    };
    format!("device {name} {why}{about}; {}", no_device(found))
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
