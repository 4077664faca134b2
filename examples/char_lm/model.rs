//! The transformer: pre-normalised blocks of causal self-attention and a two-layer perceptron.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    PositionalEncoding, PositionalEncodingConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_attention::{AttentionOptions, flash_attention};
use clap::ValueEnum;

/// Which code computes the attention. Both compute the same function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttentionKind {
    /// This library's: block by block, memory linear in the context.
    Flash,
    /// Burn's own.
    Burn,
}

impl AttentionKind {
    /// Causal attention of `query`, `key`, `value`, each `[batch, heads, context, head_dim]`.
    fn attend(self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        match self {
            Self::Flash => flash_attention(query, key, value, &AttentionOptions::new().causal()),
            Self::Burn => {
                let options = AttentionModuleOptions {
                    is_causal: true,
                    ..Default::default()
                };
                attention(query, key, value, None, None, options)
            }
        }
    }
}

/// The size of a [`CharTransformer`].
#[derive(Config, Debug)]
pub struct CharTransformerConfig {
    /// How many tokens there are.
    pub vocabulary: usize,
    /// The most tokens the model sees at once.
    pub context: usize,
    /// How many blocks follow one another.
    pub layers: usize,
    /// Attention heads of a block; divides `dim`.
    pub heads: usize,
    /// The width of the hidden state; even.
    pub dim: usize,
}

impl CharTransformerConfig {
    /// Why no model has these sizes, if none has.
    pub fn fault(&self) -> Option<String> {
        let (heads, dim) = (self.heads, self.dim);
        if !dim.is_multiple_of(2) {
            return Some(format!("dim is {dim}, expected an even number"));
        }
        let divides = heads > 0 && dim.is_multiple_of(heads);
        (!divides).then(|| format!("heads is {heads}, expected a divisor of dim, which is {dim}"))
    }

    /// A model with random parameters on `device`.
    ///
    /// # Panics
    /// When there is a [`fault`](Self::fault).
    pub fn init(&self, device: &Device) -> CharTransformer {
        assert_eq!(self.fault(), None);
        CharTransformer {
            // Smaller than the sinusoids, so that the first attention weights follow positions:
            // looking one character back is what the model must learn first.
            tokens: EmbeddingConfig::new(self.vocabulary, self.dim)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: 0.3,
                })
                .init(device),
            positions: PositionalEncodingConfig::new(self.dim)
                .with_max_sequence_size(self.context)
                .with_max_timescale(self.context.max(10_000))
                .init(device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: LayerNormConfig::new(self.dim).init(device),
            output: LinearConfig::new(self.dim, self.vocabulary).init(device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let dim = self.dim;
        Block {
            attention_norm: LayerNormConfig::new(dim).init(device),
            attention: SelfAttention {
                query_key_value: LinearConfig::new(dim, 3 * dim).init(device),
                output: LinearConfig::new(dim, dim).init(device),
                heads: self.heads,
            },
            perceptron_norm: LayerNormConfig::new(dim).init(device),
            expand: LinearConfig::new(dim, 4 * dim).init(device),
            contract: LinearConfig::new(4 * dim, dim).init(device),
        }
    }
}

/// A causal transformer over characters.
#[derive(Module, Debug)]
pub struct CharTransformer {
    pub(crate) tokens: Embedding,
    positions: PositionalEncoding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    output: Linear,
}

impl CharTransformer {
    /// The most tokens the model sees at once.
    pub fn context(&self) -> usize {
        self.positions.max_sequence_size
    }

    /// The device the parameters lie on.
    pub fn device(&self) -> Device {
        self.tokens.weight.device()
    }

    /// The scores of every next token.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, length]`, `length` at most [`context`](Self::context)
    /// - result: `[batch, length, vocabulary]`, before the softmax
    pub fn forward(&self, tokens: Tensor<2, Int>, kind: AttentionKind) -> Tensor<3> {
        let hidden = self.positions.forward(self.tokens.forward(tokens));
        let hidden = self
            .blocks
            .iter()
            .fold(hidden, |hidden, block| block.forward(hidden, kind));
        self.output.forward(self.norm.forward(hidden))
    }
}

/// One layer: attention, then a perceptron at each position, both added to what came in.
#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: SelfAttention,
    perceptron_norm: LayerNorm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn forward(&self, hidden: Tensor<3>, kind: AttentionKind) -> Tensor<3> {
        let normed = self.attention_norm.forward(hidden.clone());
        let hidden = hidden + self.attention.forward(normed, kind);
        let normed = self.perceptron_norm.forward(hidden.clone());
        hidden + self.contract.forward(gelu(self.expand.forward(normed)))
    }
}

/// Multi-head causal self-attention with its projections.
#[derive(Module, Debug)]
struct SelfAttention {
    query_key_value: Linear,
    output: Linear,
    heads: usize,
}

impl SelfAttention {
    fn forward(&self, hidden: Tensor<3>, kind: AttentionKind) -> Tensor<3> {
        let [batch, length, dim] = hidden.dims();
        let heads = |part: Tensor<3>| {
            part.reshape([batch, length, self.heads, dim / self.heads])
                .swap_dims(1, 2)
        };
        let parts: [Tensor<3>; 3] = self
            .query_key_value
            .forward(hidden)
            .chunk(3, 2)
            .try_into()
            .expect("3 dim columns are three times dim");
        let [query, key, value] = parts.map(heads);
        let attended = kind.attend(query, key, value);
        self.output
            .forward(attended.swap_dims(1, 2).reshape([batch, length, dim]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    fn model(layers: usize) -> CharTransformer {
        CharTransformerConfig::new(7, 12, layers, 2, 16).init(&Device::default())
    }

    fn scores(model: &CharTransformer, tokens: [i32; 5], kind: AttentionKind) -> Vec<f32> {
        let tokens = Tensor::from_data(TensorData::from([tokens]), &Device::default());
        let scores = model.forward(tokens, kind);
        assert_eq!(scores.dims(), [1, 5, 7]);
        scores.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn the_size_that_is_wrong_is_named() {
        let fault = |heads, dim| CharTransformerConfig::new(7, 12, 1, heads, dim).fault();
        assert_eq!(fault(4, 128), None);
        let heads = "heads is 3, expected a divisor of dim, which is 128";
        assert_eq!(fault(3, 128).unwrap(), heads);
        assert!(fault(0, 128).unwrap().starts_with("heads is 0"));
        assert_eq!(fault(7, 7).unwrap(), "dim is 7, expected an even number");
    }

    /// Catches help that is written for rustdoc.
    #[test]
    fn help_has_no_links() {
        for kind in AttentionKind::value_variants() {
            let value = kind.to_possible_value().unwrap();
            let help = value.get_help().unwrap().to_string();
            assert!(!help.contains(['[', '`']), "{help}");
        }
    }

    /// What follows a position must not reach it: with either attention.
    #[test]
    fn later_tokens_do_not_change_earlier_scores() {
        let model = model(2);
        for kind in [AttentionKind::Flash, AttentionKind::Burn] {
            let one = scores(&model, [1, 2, 3, 4, 5], kind);
            let other = scores(&model, [1, 2, 3, 6, 0], kind);
            assert_eq!(one[..3 * 7], other[..3 * 7], "{kind:?}");
            assert_ne!(one[3 * 7..], other[3 * 7..], "{kind:?}");
        }
    }

    /// One layer without positions could not tell two orders of a prefix apart, beyond rounding.
    #[test]
    fn the_order_of_earlier_tokens_matters() {
        let model = model(1);
        let one = scores(&model, [1, 2, 3, 4, 5], AttentionKind::Flash);
        let other = scores(&model, [3, 2, 1, 4, 5], AttentionKind::Flash);
        let difference = one[4 * 7..]
            .iter()
            .zip(&other[4 * 7..])
            .map(|(one, other)| (one - other).abs())
            .fold(0.0, f32::max);
        assert!(difference > 1e-4, "{difference}");
    }
}
