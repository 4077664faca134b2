//! Trains a small causal transformer on the characters of a text and lets it write.
//!
//! ```sh
//! cargo run --release --example train_char_lm
//! cargo run --release --example train_char_lm -- --attention burn
//! ```

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::Device;
use burn_flash_attention::devices;
use char_lm::model::{AttentionKind, CharTransformerConfig};
use char_lm::progress::Progress;
use char_lm::sample::generate;
use char_lm::text::Corpus;
use char_lm::train::Training;
use clap::Parser;
use rand::{SeedableRng, rngs::StdRng};

/// Genesis and Exodus; `data/README.md` says where they come from.
const TEXT: &str = include_str!("data/genesis-exodus.txt");
/// Characters of validation text that the sample continues.
const PROMPT: usize = 64;

/// Train a small causal transformer on the characters of Genesis and Exodus, then let it write.
#[derive(Debug, Parser)]
struct Arguments {
    /// Which code computes the attention.
    #[arg(long, value_enum, default_value_t = AttentionKind::Flash)]
    attention: AttentionKind,
    /// Updates of the parameters.
    #[arg(long, default_value_t = 600, value_parser = positive)]
    steps: usize,
    /// Windows of text in a step.
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Characters in a window.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    context: usize,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 3, value_parser = positive)]
    layers: usize,
    /// Attention heads of a block; divides --dim.
    #[arg(long, default_value_t = 4, value_parser = positive)]
    heads: usize,
    /// Width of the hidden state; even.
    #[arg(long, default_value_t = 128, value_parser = positive)]
    dim: usize,
    /// Learning rate of the first step; it falls to a tenth on a cosine.
    #[arg(long, default_value_t = 3e-3, value_parser = over_zero)]
    lr: f64,
    /// Chooses parameters, windows and the sample.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Device to train on, by its name in `attn devices`; Burn's default if left out.
    #[arg(long)]
    device: Option<String>,
    /// Write step, training loss, validation loss and seconds of every step to this file.
    #[arg(long, value_name = "FILE")]
    loss_csv: Option<PathBuf>,
    /// Characters to write at the end.
    #[arg(long, default_value_t = 400)]
    sample: usize,
    /// Below 1 the sample keeps to likely characters, above 1 it strays.
    #[arg(long, default_value_t = 0.7, value_parser = over_zero)]
    temperature: f64,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = find_device(arguments.device.as_deref())?;
    let corpus = Corpus::new(TEXT, arguments.context)?;
    let vocabulary = corpus.vocabulary();
    let size = CharTransformerConfig::new(
        vocabulary.len(),
        arguments.context,
        arguments.layers,
        arguments.heads,
        arguments.dim,
    );
    if let Some(fault) = size.fault() {
        return Err(fault.into());
    }
    let mut progress = Progress::new(arguments.steps, arguments.loss_csv.as_deref())
        .map_err(|error| format!("the file of --loss-csv cannot be made: {error}"))?;

    let training_device = device.clone().autodiff();
    training_device.seed(arguments.seed);
    let model = size.init(&training_device);
    println!(
        "{} characters, {} distinct; {} parameters; attention {:?} on {device:?}",
        TEXT.len(),
        vocabulary.len(),
        model.num_params(),
        arguments.attention,
    );

    let training = Training {
        steps: arguments.steps,
        batch: arguments.batch,
        learning_rate: arguments.lr,
        validate_every: arguments.steps.div_ceil(8),
        seed: arguments.seed,
    };
    let kind = arguments.attention;
    let model = training.run(model, kind, &corpus, |step| progress.step(step))?;
    progress.finish()?;

    let prompt = &corpus.validation()[..PROMPT];
    let written = generate(
        &model.valid(),
        kind,
        prompt,
        arguments.sample,
        arguments.temperature,
        &mut StdRng::seed_from_u64(arguments.seed),
    );
    println!("\nprompt:  {}", vocabulary.decode(prompt));
    println!("written: {}", vocabulary.decode(&written));
    Ok(())
}

/// The device called `name` in `devices()`, or Burn's default.
fn find_device(name: Option<&str>) -> Result<Device, String> {
    let Some(name) = name else {
        return Ok(Device::default());
    };
    let reports = devices();
    if let Some(report) = reports.iter().find(|report| report.name == name) {
        return Ok(report.device.clone());
    }
    let known: Vec<&str> = reports.iter().map(|report| report.name.as_str()).collect();
    Err(format!(
        "no device {name:?} in this build; there is {}",
        known.join(", ")
    ))
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number of at least 1".into()),
    }
}

fn over_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a finite number over 0".into()),
    }
}
