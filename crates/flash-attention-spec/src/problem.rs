//! A checked attention problem: the only place where shapes and options are validated.

use crate::error::{ProblemError, Reason};
use crate::operand::{Dtype, ElementType, Operand, Operands};
use crate::options::{F32Precision, Options, Summation, check_options};
use crate::visibility::Band;

/// Largest `head_dim` and `value_dim`.
pub const MAX_HEAD_DIM: usize = 256;
/// Longest sequence: positions and their offsets are counted in signed 32-bit integers.
pub const MAX_SEQUENCE: usize = 1 << 29;
/// Most elements of an operand or of the output, dimensions of 0 taken as 1: every product of their
/// dimensions, in elements or in bytes, then fits in a `usize`, whichever of them is 0.
pub const MAX_ELEMENTS: usize = {
    let addressable = isize::MAX as u64 / 8;
    (if addressable < 1 << 48 {
        addressable
    } else {
        1 << 48
    }) as usize
};

/// A request that passed every check, with its defaults filled in.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// Batch size; may be 0.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Query length; may be 0.
    pub seq_q: usize,
    /// Key and value length; may be 0.
    pub seq_kv: usize,
    /// Size of a query and key vector, 1 to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Size of a value and output vector, 1 to [`MAX_HEAD_DIM`].
    pub value_dim: usize,
    /// Element type of query, key, value, bias and output.
    pub dtype: Dtype,
    /// Factor on `q . k`.
    pub scale: f64,
    /// Soft cap, if any.
    pub softcap: Option<f64>,
    /// What `causal` and `window` leave visible.
    pub band: Band,
    /// Shape of the mask, each dimension 1 or full.
    pub mask: Option<[usize; 4]>,
    /// Shape of the bias, each dimension 1 or full.
    pub bias: Option<[usize; 4]>,
    /// How the parts of gradients are added.
    pub summation: Summation,
    /// How products of `f32` operands are formed; [`F32Precision::Full`] where `dtype` is not `f32`.
    pub f32_precision: F32Precision,
}

impl Problem {
    /// Checks a request.
    ///
    /// # Errors
    /// Every reason against it at once, in a [`ProblemError`].
    ///
    /// ```
    /// use flash_attention_spec::{Dtype, Operand, Operands, Options, Problem};
    ///
    /// let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
    /// let [query, key, value] = [[2, 8, 5, 64], [2, 4, 7, 64], [2, 4, 7, 32]].map(operand);
    /// let operands = Operands::new(query, key, value);
    /// let problem = Problem::new(&operands, &Options::default()).unwrap();
    /// assert_eq!(problem.output_shape(), [2, 8, 5, 32]);
    /// assert_eq!(problem.scale, 0.125);
    ///
    /// let wrong = Operands { value: operand([2, 3, 7, 32]), ..operands };
    /// let error = Problem::new(&wrong, &Options::default()).unwrap_err();
    /// assert_eq!(error.to_string(), "value has heads 3, expected 4 as in key");
    /// ```
    pub fn new(operands: &Operands, options: &Options) -> Result<Self, ProblemError> {
        let mut reasons = Vec::new();
        let query = four(&mut reasons, "query", &operands.query);
        let key = four(&mut reasons, "key", &operands.key);
        let value = four(&mut reasons, "value", &operands.value);
        let mask = operands
            .mask
            .as_ref()
            .map(|m| four(&mut reasons, "mask", m));
        let bias = operands
            .bias
            .as_ref()
            .map(|b| four(&mut reasons, "bias", b));
        let dtype = check_types(&mut reasons, operands);
        check_options(&mut reasons, options);
        // Sizes are only comparable once every operand has its four dimensions.
        let (Some(query), Some(key), Some(value)) = (query, key, value) else {
            return Err(ProblemError { reasons });
        };
        check_sizes(&mut reasons, query, key, value);
        check_products(
            &mut reasons,
            [
                ("query", Some(query)),
                ("key", Some(key)),
                ("value", Some(value)),
                ("output", Some([query[0], query[1], query[2], value[3]])),
                ("mask", mask.flatten()),
                ("bias", bias.flatten()),
            ],
        );
        let scores = [query[0], query[1], query[2], key[2]];
        let mask = mask.flatten();
        let bias = bias.flatten();
        for (operand, shape) in [("mask", mask), ("bias", bias)] {
            if let Some(given) = shape
                && !given
                    .iter()
                    .zip(scores)
                    .all(|(&n, full)| n == full || n == 1)
            {
                reasons.push(Reason::Broadcast {
                    operand,
                    given,
                    expected: scores,
                });
            }
        }
        match dtype {
            Some(dtype) if reasons.is_empty() => Ok(Self {
                batch: query[0],
                heads: query[1],
                kv_heads: key[1],
                seq_q: query[2],
                seq_kv: key[2],
                head_dim: query[3],
                value_dim: value[3],
                dtype,
                scale: options.scale.unwrap_or(1.0 / (query[3] as f64).sqrt()),
                softcap: options.softcap,
                band: Band::new(query[2], key[2], options),
                mask,
                bias,
                summation: options.summation,
                f32_precision: match dtype {
                    Dtype::F32 => options.f32_precision,
                    Dtype::F16 | Dtype::BF16 => F32Precision::Full,
                },
            }),
            _ => Err(ProblemError { reasons }),
        }
    }

    /// `[batch, heads, seq_q, value_dim]`.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_q, self.value_dim]
    }

    /// `[batch, heads, seq_q]`, of `lse` and of each row statistic.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.seq_q]
    }

    /// `[batch, heads, seq_q, seq_kv]`: what mask and bias broadcast to. Never stored.
    pub fn score_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_q, self.seq_kv]
    }

    /// Query heads that read one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// The key head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / self.group()
    }
}

fn four(reasons: &mut Vec<Reason>, operand: &'static str, given: &Operand) -> Option<[usize; 4]> {
    let shape = <[usize; 4]>::try_from(given.shape.as_slice()).ok();
    if shape.is_none() {
        reasons.push(Reason::Rank {
            operand,
            given: given.shape.clone(),
        });
    }
    shape
}

fn check_types(reasons: &mut Vec<Reason>, operands: &Operands) -> Option<Dtype> {
    const FLOAT: &str = "f32, f16 or bf16";
    let mut dtype = None;
    let floats = [
        ("query", Some(&operands.query)),
        ("key", Some(&operands.key)),
        ("value", Some(&operands.value)),
        ("bias", operands.bias.as_ref()),
    ];
    for (operand, given) in floats {
        let Some(given) = given else { continue };
        match (&given.element, operand) {
            (ElementType::Float(d), "query") => dtype = Some(*d),
            (ElementType::Float(d), _) => {
                if let Some(expected) = dtype.filter(|e| e != d) {
                    reasons.push(Reason::UnequalTypes {
                        operand,
                        given: given.element.clone(),
                        expected: expected.into(),
                    });
                }
            }
            _ => reasons.push(Reason::ElementType {
                operand,
                given: given.element.clone(),
                expected: FLOAT,
            }),
        }
    }
    if let Some(mask) = &operands.mask
        && mask.element != ElementType::Bool
    {
        reasons.push(Reason::ElementType {
            operand: "mask",
            given: mask.element.clone(),
            expected: "bool",
        });
    }
    dtype
}

fn check_sizes(reasons: &mut Vec<Reason>, query: [usize; 4], key: [usize; 4], value: [usize; 4]) {
    let equal = [
        ("key", "batch", key[0], query[0], "query"),
        ("value", "batch", value[0], query[0], "query"),
        ("value", "heads", value[1], key[1], "key"),
        ("value", "seq_kv", value[2], key[2], "key"),
        ("key", "head_dim", key[3], query[3], "query"),
    ];
    for (operand, dimension, given, expected, other) in equal {
        if given != expected {
            reasons.push(Reason::Mismatch {
                operand,
                dimension,
                given,
                expected,
                other,
            });
        }
    }
    let (heads, kv_heads) = (query[1], key[1]);
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        reasons.push(Reason::Heads { heads, kv_heads });
    }
    let dims = [
        ("query", "head_dim", query[3]),
        ("value", "value_dim", value[3]),
    ];
    for (operand, dimension, given) in dims {
        if !(1..=MAX_HEAD_DIM).contains(&given) {
            reasons.push(Reason::Dim {
                operand,
                dimension,
                given,
            });
        }
    }
    for (operand, dimension, given) in [("query", "seq_q", query[2]), ("key", "seq_kv", key[2])] {
        if given > MAX_SEQUENCE {
            reasons.push(Reason::Sequence {
                operand,
                dimension,
                given,
            });
        }
    }
}

/// Whatever is computed from the shapes later is a product of some of the dimensions of one operand,
/// or of the output; a 0 among them must not hide that the others overflow.
fn check_products(reasons: &mut Vec<Reason>, operands: [(&'static str, Option<[usize; 4]>); 6]) {
    for (operand, shape) in operands {
        let Some(given) = shape else { continue };
        let product = given
            .iter()
            .try_fold(1, |product: usize, &n| product.checked_mul(n.max(1)));
        if product.is_none_or(|product| product > MAX_ELEMENTS) {
            reasons.push(Reason::Elements { operand, given });
        }
    }
}
