//! `attn run`: attention on a file of tensors.

mod array;
mod compute;
mod input;
mod output;
mod seen;

use crate::Outcome;
use crate::devices;
use crate::precision::Precision;
use crate::report::{Report, Table, json_number, number};
use array::{Array, type_name};
use burn_flash_attention::{Alignment, Options, Window, explain};
use clap::{Args, ValueEnum};
use input::Inputs;
use serde_json::{Value, json};
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

/// The name that stands for the `f64` reference where a device is expected.
const REFERENCE: &str = "reference";

/// Run attention on a safetensors file
///
/// Reads q [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_kv, head_dim] and
/// v [batch, kv_heads, seq_kv, value_dim], all f32, f16 or bf16, and where they are there: mask
/// (bool or u8, 1 hides) and bias, which broadcast to [batch, heads, seq_q, seq_kv]; do, the
/// gradient of a loss with respect to the output; dlse, f32 [batch, heads, seq_q], its gradient
/// with respect to lse. Other tensors are ignored, and named.
///
/// Writes o and lse (natural logarithm, f32) and, where do or dlse is there, dq, dk, dv and, with a
/// bias, dbias. The loss is sum(o * do) + sum(lse * dlse).
///
/// The output file appears only when everything went well.
#[derive(Args)]
pub struct RunArgs {
    /// File to read
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// File to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// A name that `attn devices` lists, or reference for the f64 reference, which writes f64
    /// [default: the first device with kernels, else the first]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Hide keys after the query's position; names the corner where the diagonal ends or starts
    #[arg(long)]
    causal: Option<Causal>,
    /// Keep L keys before and R keys after the query's position; an empty side is unbounded
    #[arg(long, value_name = "L,R", allow_hyphen_values = true, value_parser = parse_window)]
    window: Option<Window>,
    /// Factor on q . k [default: 1 / sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = parse_scale)]
    scale: Option<f64>,
    /// Cap scores softly: C * tanh(score / C)
    #[arg(long, value_name = "C", allow_hyphen_values = true, value_parser = parse_softcap)]
    softcap: Option<f64>,
    /// Products of f32 operands; other element types have but one form
    #[arg(long, value_name = "P", default_value = "full")]
    f32_precision: Precision,
}

#[derive(Clone, Copy, ValueEnum)]
enum Causal {
    /// The last query lines up with the last key
    BottomRight,
    /// The first query lines up with the first key
    TopLeft,
}

fn parse_window(text: &str) -> Result<Window, String> {
    let side = |side: &str| match side {
        "" => Ok(None),
        _ => side
            .parse()
            .map(Some)
            .map_err(|_| format!("{side:?} is not a whole number of keys")),
    };
    match text.split_once(',') {
        Some((left, right)) => Ok(Window {
            left: side(left)?,
            right: side(right)?,
        }),
        None => Err("expected two numbers with a comma between them".to_string()),
    }
}

fn parse_scale(text: &str) -> Result<f64, String> {
    let scale = parse_number(text)?;
    let checked = Options::new().scale(scale).check();
    checked.map(|()| scale).map_err(|error| error.to_string())
}

fn parse_softcap(text: &str) -> Result<f64, String> {
    let softcap = parse_number(text)?;
    let checked = Options::new().softcap(softcap).check();
    checked.map(|()| softcap).map_err(|error| error.to_string())
}

fn parse_number(text: &str) -> Result<f64, String> {
    let wrong = |_| "expected a number, such as 50 or 0.125 or 1e-3".to_string();
    text.parse().map_err(wrong)
}

pub fn execute(args: RunArgs) -> Outcome<Report> {
    let mut options = Options::new().alignment(match args.causal {
        Some(Causal::TopLeft) => Alignment::TopLeft,
        _ => Alignment::BottomRight,
    });
    options.causal = args.causal.is_some();
    options.scale = args.scale;
    options.softcap = args.softcap;
    options.window = args.window.unwrap_or_default();
    options.f32_precision = args.f32_precision.into();
    let path = args.input.display();
    let bytes = fs::read(&args.input).map_err(|error| format!("input {path}: {error}"))?;
    let inputs =
        Inputs::read(&bytes, &options).map_err(|error| format!("input {path}: {error}"))?;
    drop(bytes);
    output::check_path(&args.output, &args.input)?;

    let (device, by, arrays) = if args.device.as_deref() == Some(REFERENCE) {
        let by = "the full table in f64".to_string();
        (REFERENCE.to_string(), by, compute::by_reference(&inputs))
    } else {
        let device = devices::find(args.device.as_deref())
            .map_err(|error| format!("{error}; or {REFERENCE}"))?;
        let arrays = compute::on_device(&inputs, &options, &device)?;
        let by = explain(&inputs.problem, &device.device)?;
        (device.name, by.to_string(), arrays)
    };
    output::check_numbers(&arrays)?;
    output::write(&args.output, &arrays)?;

    let output = args.output.display().to_string();
    let mut table = Table::new(["<tensor", "<dtype", "<shape", "least", "largest"]);
    for array in &arrays {
        let [least, largest] = match array.range() {
            Some((least, largest)) => [number(least), number(largest)],
            None => ["-".to_string(), "-".to_string()],
        };
        let shape = format!("{:?}", array.shape);
        table.row([
            array.name.to_string(),
            type_name(array.stored),
            shape,
            least,
            largest,
        ]);
    }
    let mut text = String::new();
    writeln!(text, "{device}: {by}")?;
    if !inputs.ignored.is_empty() {
        writeln!(text, "ignored in {path}: {}", inputs.ignored.join(", "))?;
    }
    write!(text, "wrote {output}\n\n{table}")?;
    Ok(Report {
        text,
        json: json!({
            "device": device,
            "computed_by": by,
            "input": path.to_string(),
            "output": output,
            "ignored": inputs.ignored,
            "tensors": arrays.iter().map(tensor_json).collect::<Vec<_>>(),
        }),
        failure: None,
    })
}

fn tensor_json(array: &Array) -> Value {
    json!({
        "name": array.name,
        "dtype": type_name(array.stored),
        "shape": array.shape,
        "least": array.range().map(|(least, _)| json_number(least)),
        "largest": array.range().map(|(_, largest)| json_number(largest)),
    })
}
