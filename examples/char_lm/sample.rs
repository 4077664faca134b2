//! Text drawn from a trained model, one character after another.

use burn::tensor::{Int, Tensor, TensorData};
use rand::Rng;
use rand::distr::{Distribution, weighted::WeightedIndex};

use crate::model::{AttentionKind, CharTransformer};

/// Continues `prompt` by `length` tokens and returns those tokens.
///
/// Each token is drawn from `softmax(scores / temperature)`: below 1 the likely ones become
/// likelier, above 1 all become more alike. The model sees the last
/// [`context`](CharTransformer::context) tokens.
///
/// # Panics
/// When `prompt` is empty or `temperature` is not over 0.
pub fn generate(
    model: &CharTransformer,
    kind: AttentionKind,
    prompt: &[i32],
    length: usize,
    temperature: f64,
    random: &mut impl Rng,
) -> Vec<i32> {
    assert!(!prompt.is_empty(), "the prompt needs at least one token");
    assert!(temperature > 0.0, "temperature {temperature} is not over 0");
    let device = model.device();
    let mut tokens = prompt.to_vec();
    for _ in 0..length {
        let seen = &tokens[tokens.len().saturating_sub(model.context())..];
        let input = TensorData::new(seen.to_vec(), [1, seen.len()]);
        let scores = model.forward(Tensor::<2, Int>::from_data(input, &device), kind);
        let last = scores.slice([0..1, seen.len() - 1..seen.len()]);
        let scores: Vec<f32> = last
            .into_data()
            .convert::<f32>()
            .try_into_vec()
            .expect("the scores were converted to f32");
        tokens.push(draw(&scores, temperature, random));
    }
    tokens.split_off(prompt.len())
}

/// A token by the chances `softmax(scores / temperature)`.
fn draw(scores: &[f32], temperature: f64, random: &mut impl Rng) -> i32 {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = scores
        .iter()
        .map(|score| (f64::from(score - largest) / temperature).exp());
    let token = WeightedIndex::new(weights)
        .expect("finite scores give weights of which the largest is 1")
        .sample(random);
    i32::try_from(token).expect("tokens are i32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::CharTransformerConfig;
    use burn::tensor::Device;
    use rand::{SeedableRng, rngs::StdRng};

    /// Two scores ln 3 apart are drawn three to one at temperature 1, nine to one at one half.
    #[test]
    fn tokens_are_drawn_by_their_chances() {
        let scores = [0.0, 3f32.ln()];
        for (temperature, expected) in [(1.0, 0.75), (0.5, 0.9)] {
            let mut random = StdRng::seed_from_u64(1);
            let draws = 20_000;
            let ones: i32 = (0..draws)
                .map(|_| draw(&scores, temperature, &mut random))
                .sum();
            let share = f64::from(ones) / f64::from(draws);
            // Four standard deviations of the share are below 0.0125.
            assert!(
                (share - expected).abs() < 0.0125,
                "{share} at {temperature}"
            );
        }
    }

    #[test]
    fn very_different_scores_stay_finite() {
        let mut random = StdRng::seed_from_u64(1);
        assert_eq!(draw(&[-3e38, 3e38, 0.0], 0.1, &mut random), 1);
    }

    /// The prompt is longer than the context, and the result grows past it too.
    #[test]
    fn as_many_tokens_as_asked_whatever_the_context() {
        let device = Device::default();
        let model = CharTransformerConfig::new(5, 4, 1, 1, 8).init(&device);
        let mut random = StdRng::seed_from_u64(2);
        let tokens = generate(
            &model,
            AttentionKind::Flash,
            &[0, 1, 2, 3, 4, 0],
            7,
            1.0,
            &mut random,
        );
        assert_eq!(tokens.len(), 7);
        assert!(tokens.iter().all(|token| (0..5).contains(token)));
    }
}
