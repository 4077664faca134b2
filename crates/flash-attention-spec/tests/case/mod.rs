//! A problem with its operands and incoming gradients, as the tests of the reference build them.

use flash_attention_spec::reference::{Forward, Gradients, Inputs, backward, forward};
use flash_attention_spec::{Dtype, ElementType, Operand, Operands, Options, Problem};

/// The sizes that fix the shapes of query, key, value and the incoming gradients.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub value_dim: usize,
}

impl Sizes {
    pub fn problem(
        &self,
        mask: Option<[usize; 4]>,
        bias: Option<[usize; 4]>,
        options: &Options,
    ) -> Problem {
        let float = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
        let operands = Operands {
            query: float([self.batch, self.heads, self.seq_q, self.head_dim]),
            key: float([self.batch, self.kv_heads, self.seq_kv, self.head_dim]),
            value: float([self.batch, self.kv_heads, self.seq_kv, self.value_dim]),
            mask: mask.map(|shape| Operand::new(shape, ElementType::Bool)),
            bias: bias.map(float),
        };
        Problem::new(&operands, options).unwrap()
    }
}

/// A problem and every array that goes into it.
#[derive(Clone, Debug)]
pub struct Case {
    pub problem: Problem,
    pub query: Vec<f64>,
    pub key: Vec<f64>,
    pub value: Vec<f64>,
    pub mask: Option<Vec<bool>>,
    pub bias: Option<Vec<f64>>,
    pub output_gradient: Vec<f64>,
    pub lse_gradient: Option<Vec<f64>>,
}

impl Case {
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.query, &self.key, &self.value)
            .mask(self.mask.as_deref())
            .bias(self.bias.as_deref())
    }

    pub fn forward(&self) -> Forward {
        forward(&self.problem, &self.inputs())
    }

    pub fn backward(&self) -> Gradients {
        let lse_gradient = self.lse_gradient.as_deref();
        backward(
            &self.problem,
            &self.inputs(),
            &self.output_gradient,
            lse_gradient,
        )
    }
}
