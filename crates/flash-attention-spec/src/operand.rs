//! What a call is given: shapes and element types, before they are checked.

use std::fmt;

/// Element type of query, key, value, bias and output. Accumulation is `f32` for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    BF16,
}

impl Dtype {
    /// Every element type attention is defined on.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Size of an element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
        })
    }
}

/// The element type an operand arrived with, before it is known to be usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// A type attention is defined on.
    Float(Dtype),
    /// Booleans, for masks.
    Bool,
    /// Any other type, by its name.
    Other(String),
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementType::Float(dtype) => dtype.fmt(f),
            ElementType::Bool => f.write_str("bool"),
            ElementType::Other(name) => f.write_str(name),
        }
    }
}

impl From<Dtype> for ElementType {
    fn from(dtype: Dtype) -> Self {
        ElementType::Float(dtype)
    }
}

/// Shape and element type of one operand as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its element type.
    pub element: ElementType,
}

impl Operand {
    /// An operand of the given shape and element type.
    pub fn new(shape: impl Into<Vec<usize>>, element: impl Into<ElementType>) -> Self {
        Self {
            shape: shape.into(),
            element: element.into(),
        }
    }
}

/// All operands of one call.
///
/// ```
/// use flash_attention_spec::{Dtype, ElementType, Operand, Operands};
///
/// let operand = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
/// let (query, key) = (operand([1, 8, 5, 64]), operand([1, 8, 7, 64]));
/// let operands = Operands::new(query, key.clone(), key)
///     .mask(Operand::new([1, 1, 5, 7], ElementType::Bool))
///     .bias(operand([1, 8, 5, 7]));
/// assert_eq!(operands.bias.unwrap().shape, [1, 8, 5, 7]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operands {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: Operand,
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: Operand,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: Operand,
    /// Broadcasts to `[batch, heads, seq_q, seq_kv]`; true hides.
    pub mask: Option<Operand>,
    /// Broadcasts to `[batch, heads, seq_q, seq_kv]`; added to the scores.
    pub bias: Option<Operand>,
}

impl Operands {
    /// Query, key and value alone.
    pub fn new(query: Operand, key: Operand, value: Operand) -> Self {
        Self {
            query,
            key,
            value,
            mask: None,
            bias: None,
        }
    }

    /// With this mask, or with none.
    pub fn mask(mut self, mask: impl Into<Option<Operand>>) -> Self {
        self.mask = mask.into();
        self
    }

    /// With this bias, or with none.
    pub fn bias(mut self, bias: impl Into<Option<Operand>>) -> Self {
        self.bias = bias.into();
        self
    }
}
