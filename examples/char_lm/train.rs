//! The training loop: AdamW, gradients clipped to norm 1, a learning rate that falls on a cosine.

use std::io;
use std::time::{Duration, Instant};

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;
use rand::{SeedableRng, rngs::StdRng};

use crate::model::{AttentionKind, CharTransformer};
use crate::text::{Batch, Corpus};

/// Windows of validation text measured at once.
const VALIDATION_WINDOWS: usize = 16;

/// How to train.
#[derive(Clone, Debug)]
pub struct Training {
    /// How often the parameters are updated.
    pub steps: usize,
    /// Windows of text in one step.
    pub batch: usize,
    /// The learning rate of the first step, over 0 and at most 1; the last one is a tenth of it.
    pub learning_rate: f64,
    /// Steps between two measurements of the validation loss; the first and the last step are
    /// always measured.
    pub validate_every: usize,
    /// Chooses the windows.
    pub seed: u64,
}

/// Why a training run did not reach its end.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// The learning rate or the number of steps is out of range; the text is Burn's.
    #[error("{0}")]
    Schedule(String),
    /// A step could not be reported.
    #[error("a step could not be recorded: {0}")]
    Report(#[from] io::Error),
}

/// What one step did. Losses are nats per character.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// 1 for the first.
    pub number: usize,
    /// The loss of this step's batch, before its update.
    pub training_loss: f32,
    /// The loss on the validation text after the update, when it was measured.
    pub validation_loss: Option<f32>,
    /// The time of forward, backward and update; measuring is not in it.
    pub time: Duration,
}

impl Training {
    /// Trains `model`, which lies on an autodiff device, and reports every step to
    /// `on_step`.
    ///
    /// # Errors
    /// [`TrainingError`]: a setting is out of range, or `on_step` failed.
    pub fn run(
        &self,
        mut model: CharTransformer,
        kind: AttentionKind,
        corpus: &Corpus,
        mut on_step: impl FnMut(Step) -> io::Result<()>,
    ) -> Result<CharTransformer, TrainingError> {
        // Burn's default epsilon of 1e-5 is of the size of the gradients of the query and key
        // projections and would hold them back.
        let mut optimizer = AdamWConfig::new()
            .with_beta_2(0.99)
            .with_epsilon(1e-8)
            .with_weight_decay(0.01)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
            .init();
        let mut schedule = CosineAnnealingLrSchedulerConfig::new(self.learning_rate, self.steps)
            .with_min_lr(self.learning_rate / 10.0)
            .init()
            .map_err(TrainingError::Schedule)?;
        let mut random = StdRng::seed_from_u64(self.seed);
        let validation = corpus.validation_batch(VALIDATION_WINDOWS);

        for number in 1..=self.steps {
            let start = Instant::now();
            let batch = corpus.training_batch(self.batch, &mut random);
            let loss = loss(&model, &batch, kind);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(schedule.step(), model, gradients);
            // Reading the loss last waits for the device, so the time covers the whole step.
            let training_loss = loss.into_scalar();
            let time = start.elapsed();

            let measured =
                number == 1 || number == self.steps || number.is_multiple_of(self.validate_every);
            on_step(Step {
                number,
                training_loss,
                validation_loss: measured
                    .then(|| self::loss(&model.valid(), &validation, kind).into_scalar()),
                time,
            })?;
        }
        Ok(model)
    }
}

/// The mean cross entropy of `batch` under `model`, in nats per character.
pub fn loss(model: &CharTransformer, batch: &Batch, kind: AttentionKind) -> Tensor<1> {
    let device = &model.device();
    let scores = model.forward(batch.inputs(device), kind);
    CrossEntropyLossConfig::new()
        .init(device)
        .forward(scores.flatten(0, 1), batch.targets(device).flatten(0, 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::CharTransformerConfig;
    use burn::tensor::Device;

    const TEXT: &str = "The quick brown fox jumps over the lazy dog. ";

    fn tiny() -> (Corpus, CharTransformer) {
        let corpus = Corpus::new(&TEXT.repeat(20), 24).unwrap();
        let device = Device::default().autodiff();
        let model =
            CharTransformerConfig::new(corpus.vocabulary().len(), 24, 2, 2, 32).init(&device);
        (corpus, model)
    }

    fn training() -> Training {
        Training {
            steps: 25,
            batch: 8,
            learning_rate: 5e-3,
            validate_every: 10,
            seed: 3,
        }
    }

    /// An untrained model knows nothing, so its loss is about the logarithm of the vocabulary; the
    /// text repeats itself, so a few steps must take most of that away, on both parts of it.
    #[test]
    fn the_loss_falls_with_either_attention() {
        let (corpus, model) = tiny();
        for kind in [AttentionKind::Flash, AttentionKind::Burn] {
            let mut steps = Vec::new();
            training()
                .run(model.clone(), kind, &corpus, |step| {
                    steps.push(step);
                    Ok(())
                })
                .unwrap();
            let (first, last) = (steps[0], steps[24]);
            let ignorance = (corpus.vocabulary().len() as f32).ln();
            assert!((first.training_loss - ignorance).abs() < 0.7, "{first:?}");
            assert!(last.training_loss < 0.6 * first.training_loss, "{last:?}");
            assert!(
                last.validation_loss.unwrap() < 0.6 * first.validation_loss.unwrap(),
                "{last:?}"
            );
            let measured: Vec<usize> = steps
                .iter()
                .filter(|step| step.validation_loss.is_some())
                .map(|step| step.number)
                .collect();
            assert_eq!(measured, [1, 10, 20, 25]);
        }
    }

    #[test]
    fn both_attentions_start_from_the_same_loss_and_the_same_gradients() {
        let (corpus, model) = tiny();
        let batch = corpus.validation_batch(4);
        let [flash, burn] = [AttentionKind::Flash, AttentionKind::Burn].map(|kind| {
            let loss = loss(&model, &batch, kind);
            let gradients = loss.backward();
            let embedding = model.tokens.weight.val().grad(&gradients).unwrap();
            let embedding: Vec<f32> = embedding.into_data().try_into_vec().unwrap();
            (loss.into_scalar::<f32>(), embedding)
        });
        approx::assert_abs_diff_eq!(flash.0, burn.0, epsilon = 1e-4);
        approx::assert_abs_diff_eq!(flash.1[..], burn.1[..], epsilon = 1e-5);
    }

    #[test]
    fn a_learning_rate_out_of_range_is_refused() {
        let (corpus, model) = tiny();
        let training = Training {
            learning_rate: 0.0,
            ..training()
        };
        let error = training
            .run(model, AttentionKind::Flash, &corpus, |_| Ok(()))
            .unwrap_err()
            .to_string();
        assert!(error.contains("learning rate"), "{error}");
    }
}
