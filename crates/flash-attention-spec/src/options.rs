//! What a call asks for, apart from its operands.

use crate::error::{ProblemError, Reason};

/// Which query lines up with which key where the two sequences differ in length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// The last query sits on the last key: `offset = seq_kv - seq_q`.
    #[default]
    BottomRight,
    /// The first query sits on the first key: `offset = 0`.
    TopLeft,
}

/// Sliding window: query `i` sees keys `i + offset - left ..= i + offset + right`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys visible before the query's own position; `None` is unbounded.
    pub left: Option<usize>,
    /// Keys visible after the query's own position; `None` is unbounded.
    pub right: Option<usize>,
}

/// How the parts of a gradient are added where several blocks contribute to one sum.
///
/// Sums of floating-point numbers depend on the order of their parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Summation {
    /// In an order that depends on the problem alone: the same operands on the same device give the same
    /// bits every time.
    #[default]
    Reproducible,
    /// In any order: gradients may differ in their last bits from run to run. Permits what may be
    /// faster, and demands nothing: kernels that have only a reproducible form serve it with that.
    Unordered,
}

/// How products of `f32` operands are formed, where query, key and value are `f32`.
///
/// Sums, softmax and results are `f32` either way. Of `f16` and `bf16` operands it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum F32Precision {
    /// With all 24 bits of every operand.
    #[default]
    Full,
    /// TF32: operands of matrix products may be rounded to the nearest number of 11 bits, probabilities and
    /// gradients of scores too. Permits what may be faster, and demands nothing: where there is no faster
    /// form, products are in full.
    Tf32,
}

/// Options of a call, apart from its operands. The default is plain attention.
///
/// Options will be added: make them by methods, or by a literal that ends in `..Options::default()`.
///
/// ```
/// use flash_attention_spec::{Alignment, Options, Window};
///
/// let options = Options::new().window(Some(4), None).alignment(Alignment::TopLeft);
/// let window = Window { left: Some(4), right: None };
/// assert_eq!(options, Options { window, alignment: Alignment::TopLeft, ..Options::default() });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// Factor on `q . k`; `1 / sqrt(head_dim)` where `None`.
    pub scale: Option<f64>,
    /// Scores become `c * tanh(score / c)` before the bias is added.
    pub softcap: Option<f64>,
    /// Hides keys after the query's position.
    pub causal: bool,
    /// Position of the diagonal for `causal` and `window`.
    pub alignment: Alignment,
    /// Sliding window.
    pub window: Window,
    /// How the parts of gradients are added.
    pub summation: Summation,
    /// How products of `f32` operands are formed.
    pub f32_precision: F32Precision,
}

impl Options {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the default scale `1 / sqrt(head_dim)`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores softly at `softcap > 0`.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Hides keys after the query's position.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Places the diagonal of `causal` and `window`.
    pub fn alignment(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Keeps `left` keys before and `right` keys after each query's position; `None` is unbounded.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = Window { left, right };
        self
    }

    /// Replaces the reproducible order in which the parts of gradients are added.
    pub fn summation(mut self, summation: Summation) -> Self {
        self.summation = summation;
        self
    }

    /// Replaces full products of `f32` operands; of other element types it changes nothing.
    pub fn f32_precision(mut self, precision: F32Precision) -> Self {
        self.f32_precision = precision;
        self
    }

    /// Checks what can be checked without operands; [`Problem::new`](crate::Problem::new) does so
    /// too.
    ///
    /// # Errors
    /// Every reason against them.
    pub fn check(&self) -> Result<(), ProblemError> {
        let mut reasons = Vec::new();
        check_options(&mut reasons, self);
        if reasons.is_empty() {
            return Ok(());
        }
        Err(ProblemError { reasons })
    }
}

/// Which gradients a backward pass computes.
///
/// ```
/// use flash_attention_spec::Wanted;
///
/// const WANTED: Wanted = Wanted::ALL.bias(false);
/// assert!(WANTED.query && !WANTED.bias);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Wanted {
    /// Gradient of the query.
    pub query: bool,
    /// Gradient of the key.
    pub key: bool,
    /// Gradient of the value.
    pub value: bool,
    /// Gradient of the bias.
    pub bias: bool,
}

impl Wanted {
    /// Every gradient.
    pub const ALL: Self = Self {
        query: true,
        key: true,
        value: true,
        bias: true,
    };
    /// No gradient.
    pub const NONE: Self = Self {
        query: false,
        key: false,
        value: false,
        bias: false,
    };

    /// With or without the gradient of the query.
    pub const fn query(mut self, wanted: bool) -> Self {
        self.query = wanted;
        self
    }

    /// With or without the gradient of the key.
    pub const fn key(mut self, wanted: bool) -> Self {
        self.key = wanted;
        self
    }

    /// With or without the gradient of the value.
    pub const fn value(mut self, wanted: bool) -> Self {
        self.value = wanted;
        self
    }

    /// With or without the gradient of the bias.
    pub const fn bias(mut self, wanted: bool) -> Self {
        self.bias = wanted;
        self
    }
}

/// Adds what is wrong with the options.
pub(crate) fn check_options(reasons: &mut Vec<Reason>, options: &Options) {
    if let Some(given) = options.scale
        && !(given.is_finite() && (given as f32).is_finite())
    {
        reasons.push(Reason::Scale { given });
    }
    // The cap is used, and divided by, in f32.
    if let Some(given) = options.softcap
        && !(given > 0.0 && (given as f32).is_normal())
    {
        reasons.push(Reason::Softcap { given });
    }
}
