//! What is measured: a shape, an element type and a pass, and how much arithmetic that is.

use burn::tensor::DType;
use burn_flash_attention::Dtype;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One self-attention problem: as many keys as queries, values as wide as keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq: usize,
    pub head_dim: usize,
    pub dtype: Element,
    pub causal: bool,
    pub pass: Pass,
}

/// How far a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// The output, without autodiff.
    Forward,
    /// The output and the gradients of query, key and value, under autodiff.
    Training,
    /// A training step of a whole transformer layer, under autodiff.
    Layer,
}

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Implementation {
    /// burn-flash-attention
    Flash,
    /// Burn's own attention
    Burn,
}

/// Element type of every tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    F32,
    F16,
    Bf16,
}

impl From<Element> for Dtype {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => Dtype::F32,
            Element::F16 => Dtype::F16,
            Element::Bf16 => Dtype::BF16,
        }
    }
}

impl From<Element> for DType {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => DType::F32,
            Element::F16 => DType::F16,
            Element::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Dtype::from(*self).fmt(f)
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pass::Forward => "forward",
            Pass::Training => "training",
            Pass::Layer => "layer",
        })
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Implementation::Flash => "flash",
            Implementation::Burn => "burn",
        })
    }
}

impl Workload {
    /// Shape of the query, the output and the gradients of both.
    pub fn query_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.head_dim]
    }

    /// Shape of key, value and their gradients.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq, self.head_dim]
    }

    /// Width of a layer's hidden state.
    pub fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of a layer's query, key and value together.
    pub fn projected(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Shape of a layer's input, its output and the gradients of both.
    pub fn layer_shape(&self) -> [usize; 4] {
        [self.batch, 1, self.seq, self.hidden()]
    }

    /// What a call computes, in this order: the output, then the gradients of a training pass; of a
    /// layer, its output, the gradient of its input and the weights after the step.
    pub fn outputs(&self) -> Vec<(&'static str, [usize; 4])> {
        if self.pass == Pass::Layer {
            let hidden = self.hidden();
            return vec![
                ("y", self.layer_shape()),
                ("dx", self.layer_shape()),
                ("w_qkv", [1, 1, hidden, self.projected()]),
                ("w_o", [1, 1, hidden, hidden]),
                ("w_expand", [1, 1, hidden, 4 * hidden]),
                ("w_contract", [1, 1, 4 * hidden, hidden]),
            ];
        }
        let mut outputs = vec![("o", self.query_shape())];
        if self.pass == Pass::Training {
            outputs.push(("dq", self.query_shape()));
            outputs.push(("dk", self.key_shape()));
            outputs.push(("dv", self.key_shape()));
        }
        outputs
    }

    /// Floating-point operations of the matrix products of a call, a multiply-add being two.
    ///
    /// Counted as papers do (Dao, arXiv:2307.08691, section 4.1): two products over the visible
    /// pairs forward and five backward, of which one rebuilds the scores. Both implementations are
    /// given the same count, so their rates compare as their times do. A layer adds those of its
    /// weights.
    pub fn operations(&self) -> f64 {
        let seq = self.seq as f64;
        let pairs = match self.causal {
            true => seq * (seq + 1.0) / 2.0,
            false => seq * seq,
        };
        let products = match self.pass {
            Pass::Forward => 2.0,
            Pass::Training | Pass::Layer => 7.0,
        };
        let attention = 2.0 * products * (self.batch * self.heads * self.head_dim) as f64 * pairs;
        if self.pass != Pass::Layer {
            return attention;
        }
        // Each weight is multiplied once forward and twice backward.
        let hidden = self.hidden() as f64;
        let weights = hidden * self.projected() as f64 + 9.0 * hidden * hidden;
        attention + 6.0 * weights * (self.batch * self.seq) as f64
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn workload(pass: Pass, dtype: Element) -> Workload {
        Workload {
            batch: 1,
            heads: 2,
            kv_heads: 1,
            seq: 3,
            head_dim: 4,
            dtype,
            causal: true,
            pass,
        }
    }

    #[test]
    fn operations_are_counted_over_visible_pairs() {
        // 6 visible pairs in each of 2 heads, 4 multiply-adds a pair and product, 2 products.
        let forward = workload(Pass::Forward, Element::F32);
        assert_eq!(forward.operations(), (6 * 2 * 4 * 2 * 2) as f64);
        let training = workload(Pass::Training, Element::F32);
        assert_eq!(training.operations(), 3.5 * forward.operations());
        // 8 hidden; 8 x (8 + 2 x 4) weights for query, key and value, 8 x 8 and 8 x 32 twice.
        let layer = workload(Pass::Layer, Element::F32);
        assert_eq!(
            layer.operations() - training.operations(),
            (6 * 704 * 3) as f64
        );
        let full = Workload {
            causal: false,
            ..forward
        };
        assert_eq!(full.operations(), (9 * 2 * 4 * 2 * 2) as f64);
    }
}
