//! From text to batches: the vocabulary, the two parts of the text, windows cut from them.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::Rng;

/// The distinct characters of a text; a token is the place of a character in it.
///
/// ```
/// use char_lm::text::Vocabulary;
///
/// let vocabulary = Vocabulary::of("abba");
/// assert_eq!(vocabulary.len(), 2);
/// assert_eq!(vocabulary.encode("bab"), Some(vec![1, 0, 1]));
/// assert_eq!(vocabulary.encode("c"), None);
/// assert_eq!(vocabulary.decode(&[1, 0]), "ba");
/// ```
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// Sorted, without repetition.
    characters: Vec<char>,
}

impl Vocabulary {
    /// The characters that occur in `text`.
    pub fn of(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        Self { characters }
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        self.characters.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.characters.is_empty()
    }

    /// The tokens of `text`, or `None` when a character is not in the vocabulary.
    pub fn encode(&self, text: &str) -> Option<Vec<i32>> {
        text.chars()
            .map(|character| {
                let place = self.characters.binary_search(&character).ok()?;
                i32::try_from(place).ok()
            })
            .collect()
    }

    /// The text that `tokens` stand for.
    ///
    /// # Panics
    /// When a token is not below [`len`](Self::len).
    pub fn decode(&self, tokens: &[i32]) -> String {
        tokens
            .iter()
            .map(|&token| self.characters[token as usize])
            .collect()
    }
}

/// The text is too short to cut one window from each of its two parts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the text has {given} characters; a context of {context} needs at least {needed}, \
     because the last tenth is kept for validation"
)]
pub struct TextTooShort {
    /// Characters in the text.
    pub given: usize,
    /// Characters the model sees at once.
    pub context: usize,
    /// Characters needed for that context.
    pub needed: usize,
}

/// A text as tokens: the first nine tenths to learn from, the last tenth to measure on.
#[derive(Clone, Debug)]
pub struct Corpus {
    vocabulary: Vocabulary,
    training: Vec<i32>,
    validation: Vec<i32>,
    context: usize,
}

impl Corpus {
    /// Splits `text` into its two parts, from which windows of `context` tokens will be cut.
    ///
    /// # Errors
    /// [`TextTooShort`] when the last tenth of the text does not hold `context + 1` characters.
    pub fn new(text: &str, context: usize) -> Result<Self, TextTooShort> {
        let vocabulary = Vocabulary::of(text);
        let tokens = vocabulary
            .encode(text)
            .expect("every character of the text is in its own vocabulary");
        let boundary = tokens.len() - tokens.len() / 10;
        if tokens.len() / 10 <= context {
            return Err(TextTooShort {
                given: tokens.len(),
                context,
                needed: 10 * (context + 1),
            });
        }
        let (training, validation) = tokens.split_at(boundary);
        Ok(Self {
            vocabulary,
            training: training.to_vec(),
            validation: validation.to_vec(),
            context,
        })
    }

    /// The characters of the whole text.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The part that is never learned from.
    pub fn validation(&self) -> &[i32] {
        &self.validation
    }

    /// `count` windows of the training part, each starting anywhere with equal chance.
    pub fn training_batch(&self, count: usize, random: &mut impl Rng) -> Batch {
        let last = self.training.len() - self.context - 1;
        let starts = (0..count).map(|_| random.random_range(0..=last));
        Batch::cut(&self.training, starts, self.context)
    }

    /// `count` windows spread evenly over the validation part: the same ones at every call, so that
    /// the losses of one run, and of two runs, compare.
    pub fn validation_batch(&self, count: usize) -> Batch {
        let last = self.validation.len() - self.context - 1;
        let starts = (0..count).map(|window| window * last / count.max(2).saturating_sub(1));
        Batch::cut(&self.validation, starts, self.context)
    }
}

/// Windows of a text, and for each of their tokens the token that follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    context: usize,
}

impl Batch {
    fn cut(tokens: &[i32], starts: impl Iterator<Item = usize>, context: usize) -> Self {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            inputs.extend_from_slice(&tokens[start..start + context]);
            targets.extend_from_slice(&tokens[start + 1..start + 1 + context]);
        }
        Self {
            inputs,
            targets,
            context,
        }
    }

    /// The tokens the model reads, `[batch, context]`.
    pub fn inputs(&self, device: &Device) -> Tensor<2, Int> {
        self.tensor(&self.inputs, device)
    }

    /// The tokens it should foretell, `[batch, context]`.
    pub fn targets(&self, device: &Device) -> Tensor<2, Int> {
        self.tensor(&self.targets, device)
    }

    fn tensor(&self, tokens: &[i32], device: &Device) -> Tensor<2, Int> {
        let shape = [tokens.len() / self.context, self.context];
        Tensor::from_data(TensorData::new(tokens.to_vec(), shape), device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::StdRng};

    /// Ten different characters over and over: the successor of each is known.
    fn digits() -> Corpus {
        Corpus::new(&"0123456789".repeat(40), 15).unwrap()
    }

    #[test]
    fn targets_are_the_inputs_one_character_later() {
        let corpus = digits();
        let mut random = StdRng::seed_from_u64(7);
        for batch in [
            corpus.training_batch(5, &mut random),
            corpus.validation_batch(5),
        ] {
            assert_eq!(batch.inputs.len(), 5 * 15);
            for (input, target) in batch.inputs.iter().zip(&batch.targets) {
                assert_eq!((input + 1) % 10, *target);
            }
        }
    }

    #[test]
    fn validation_windows_reach_both_ends() {
        let corpus = digits();
        let batch = corpus.validation_batch(3);
        assert_eq!(batch.inputs[..15], corpus.validation[..15]);
        let end = corpus.validation.len();
        assert_eq!(batch.targets[30..], corpus.validation[end - 15..]);
        assert_eq!(corpus.validation_batch(1).inputs, batch.inputs[..15]);
    }

    #[test]
    fn the_two_parts_make_up_the_text() {
        let corpus = digits();
        let whole = [corpus.training.clone(), corpus.validation.clone()].concat();
        assert_eq!(
            corpus.vocabulary.decode(&whole),
            "0123456789".repeat(40),
            "nothing may be lost or repeated at the boundary"
        );
    }

    #[test]
    fn a_text_shorter_than_needed_is_refused_and_one_as_long_is_not() {
        let error = Corpus::new(&"a".repeat(159), 15).unwrap_err();
        assert_eq!((error.given, error.needed), (159, 160));
        let corpus = Corpus::new(&"a".repeat(160), 15).unwrap();
        assert_eq!(corpus.validation_batch(2).inputs.len(), 30);
    }
}
