//! What the person at the terminal sees of a training run, and the file of its losses.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::memory::peak_resident_bytes;
use crate::train::Step;

/// Losses whose mean the bar and the summary show: one batch alone is noisy.
const SMOOTHED: usize = 20;

/// Shows a bar while training goes on, a line at each measurement, a summary at the end.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    file: Option<BufWriter<File>>,
    steps: Vec<Step>,
}

impl Progress {
    /// For a run of `steps` steps, whose losses also go to the file at `losses`, if given.
    ///
    /// # Errors
    /// When the file cannot be made; its path is in the error's text.
    pub fn new(steps: usize, losses: Option<&Path>) -> io::Result<Self> {
        let create = |path: &Path| {
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            File::create(path).map_err(named)
        };
        let mut file = losses.map(create).transpose()?.map(BufWriter::new);
        if let Some(file) = &mut file {
            writeln!(file, "step,training_loss,validation_loss,seconds")?;
        }
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}, {eta} left")
            .expect("the template is well formed");
        Ok(Self {
            bar: ProgressBar::new(steps as u64).with_style(style),
            file,
            steps: Vec::with_capacity(steps),
        })
    }

    /// Takes note of one step.
    ///
    /// # Errors
    /// When the file of losses cannot be written.
    pub fn step(&mut self, step: Step) -> io::Result<()> {
        self.steps.push(step);
        self.bar.inc(1);
        self.bar
            .set_message(format!("loss {:.3}", self.recent_loss()));
        if let Some(validation) = step.validation_loss {
            self.bar.suspend(|| {
                println!(
                    "step {:>5}  training loss {:.4}  validation loss {validation:.4}",
                    step.number, step.training_loss
                );
            });
        }
        match &mut self.file {
            Some(file) => writeln!(file, "{}", csv_line(step)),
            None => Ok(()),
        }
    }

    /// Takes the bar away and prints the summary.
    ///
    /// # Errors
    /// When the file of losses cannot be written.
    pub fn finish(mut self) -> io::Result<()> {
        self.bar.finish_and_clear();
        if let Some(file) = &mut self.file {
            file.flush()?;
        }
        if let Some(first) = self.steps.first() {
            let total: Duration = self.steps.iter().map(|step| step.time).sum();
            println!(
                "training loss {:.4} -> {:.4} (mean of the last {}); {:.1} s, {:.0} ms a step",
                first.training_loss,
                self.recent_loss(),
                SMOOTHED.min(self.steps.len()),
                total.as_secs_f64(),
                1e3 * total.as_secs_f64() / self.steps.len() as f64,
            );
        }
        match peak_resident_bytes() {
            Some(bytes) => println!("peak memory of this process {} MiB", bytes >> 20),
            None => println!("peak memory of this process: not known on this system"),
        }
        Ok(())
    }

    fn recent_loss(&self) -> f32 {
        let recent = &self.steps[self.steps.len().saturating_sub(SMOOTHED)..];
        recent.iter().map(|step| step.training_loss).sum::<f32>() / recent.len() as f32
    }
}

fn csv_line(step: Step) -> String {
    let validation = step.validation_loss.map(|loss| loss.to_string());
    format!(
        "{},{},{},{:.6}",
        step.number,
        step.training_loss,
        validation.unwrap_or_default(),
        step.time.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let error = Progress::new(1, Some(Path::new("no/such/losses.csv"))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let text = error.to_string();
        assert!(text.starts_with("no/such/losses.csv: "), "{text}");
    }

    #[test]
    fn a_step_without_validation_leaves_that_column_empty() {
        let mut step = Step {
            number: 3,
            training_loss: 2.5,
            validation_loss: None,
            time: Duration::from_millis(1250),
        };
        assert_eq!(csv_line(step), "3,2.5,,1.250000");
        step.validation_loss = Some(2.75);
        assert_eq!(csv_line(step), "3,2.5,2.75,1.250000");
    }
}
