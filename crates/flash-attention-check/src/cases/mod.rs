//! What a case is: shapes, options, operands, layout, gradients, and the fault it is there for.

mod grid;
mod products;

pub use grid::grid;

use flash_attention_spec::{
    Alignment, Dtype, F32Precision, Operand, Operands, Options, Problem, ProblemError, Summation,
    Wanted, Window,
};
use std::ops::Range;

/// The score dimensions `[batch, heads, seq_q, seq_kv]` a mask or bias is given with size 1 on.
pub type Broadcast = [bool; 4];

/// A mask or bias of full size.
pub const FULL: Broadcast = [false; 4];
/// One matrix of `[seq_q, seq_kv]` for every batch and head.
pub const PER_SCORE: Broadcast = [true, true, false, false];

/// How the mask of a case is drawn; true hides.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Mask {
    /// No mask.
    #[default]
    None,
    /// Each element hides with probability 1/3.
    Random(Broadcast),
    /// Hides every key from the given queries; shape `[1, 1, seq_q, 1]`.
    Rows(Range<usize>),
    /// Hides the given keys from every query; shape `[1, 1, 1, seq_kv]`.
    Keys(Range<usize>),
    /// Hides keys `j > i` from query `i`; shape `[1, 1, seq_q, seq_kv]`.
    Later,
}

/// How the bias of a case is drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Bias {
    /// No bias.
    #[default]
    None,
    /// Uniform, of mean 0 and variance 1.
    Uniform(Broadcast),
    /// `value` on the given queries and 0 on the others; shape `[1, 1, seq_q, 1]`.
    Rows(Range<usize>, f64),
    /// `value` on the given keys and uniform on the others; shape `[1, 1, 1, seq_kv]`.
    Keys(Range<usize>, f64),
    /// Uniform and of full size, NaN on the given keys.
    NanOnKeys(Range<usize>),
    /// `value` on one query and key and uniform on the others; shape `[1, 1, seq_q, seq_kv]`.
    Score([usize; 2], f64),
}

/// How query, key and value are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Draw {
    /// Uniform, of mean 0 and variance 1.
    #[default]
    Uniform,
    /// Whole numbers from -2 to 2 in query and key: scores that small sums hold exactly.
    WholeNumbers,
    /// Every element of query and key is this number.
    Equal(f64),
    /// The query is 0, so that all scores are, and every value is this number.
    FlatScores(f64),
    /// Every element of the query is this number; a key is that number or its negative.
    Signs(f64),
    /// As [`Draw::WholeNumbers`], and the first element of every query and key is this number: its
    /// square is in all scores, and small differences decide.
    Offset(f64),
}

/// A value written over some rows of both key and value.
#[derive(Clone, Debug, PartialEq)]
pub struct Poison {
    /// Positions of the rows.
    pub keys: Range<usize>,
    /// NaN or an infinity.
    pub with: f64,
}

/// What a [`QueryPoison`] is written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuerySide {
    /// Query, gradient of the output and gradient of `lse`.
    All,
    /// Query.
    Query,
    /// Gradient of the output.
    OutputGradient,
    /// Gradient of `lse`.
    LseGradient,
}

/// A value written over some rows that belong to queries.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryPoison {
    /// Positions of the rows.
    pub queries: Range<usize>,
    /// NaN or an infinity.
    pub with: f64,
    /// Whose rows.
    pub side: QuerySide,
}

/// How the operands lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Each operand row-major in its own buffer.
    #[default]
    Packed,
    /// Query, key and value as slices of one `[batch, seq, 3, heads, head_dim]` buffer.
    FusedQkv,
    /// Stored `[batch, seq, heads, dim]` with the middle axes swapped.
    SwappedAxes,
    /// Stored `[batch, heads, dim, seq]` with the last axes swapped: no axis of the rows is dense.
    Transposed,
    /// One key head expanded to all, mask and bias expanded to full size: strides of 0.
    Expanded,
    /// One batch of keys and values expanded to all: a stride of 0.
    SharedKeys,
    /// A view of longer buffers that hold NaN behind every sequence.
    LongerBuffer,
    /// A view of longer buffers that hold NaN before and behind every sequence.
    MiddleOfBuffer,
}

/// What is called, and what the loss reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loss {
    /// `flash_attention_with_lse`; the loss reads the output, `lse` is only read back.
    #[default]
    Output,
    /// `flash_attention`.
    Plain,
    /// `flash_attention_with_lse`; the loss reads `lse` alone.
    Lse,
    /// `flash_attention_with_lse`; the loss reads both.
    Both,
}

/// Strides of the gradient that reaches the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientLayout {
    /// Row-major.
    #[default]
    Packed,
    /// Middle axes swapped.
    Swapped,
    /// That of `sum()`: 1 everywhere, each stride 0.
    Sum,
}

/// One problem with its operands and the fault it is there to catch.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Unique in the grid; the data is drawn from it.
    pub name: String,
    /// One sentence: the fault the case catches.
    pub catches: &'static str,
    /// Batch size.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Query length.
    pub seq_q: usize,
    /// Key and value length.
    pub seq_kv: usize,
    /// Size of a query and key vector.
    pub head_dim: usize,
    /// Size of a value vector.
    pub value_dim: usize,
    /// Scale, soft cap, causal, alignment and window.
    pub options: Options,
    /// The mask.
    pub mask: Mask,
    /// The bias.
    pub bias: Bias,
    /// Query, key and value.
    pub draw: Draw,
    /// NaN or infinities in key and value.
    pub poison: Option<Poison>,
    /// NaN or infinities in the query or in incoming gradients.
    pub query_poison: Option<QueryPoison>,
    /// How the operands lie in memory.
    pub layout: Layout,
    /// Which inputs require gradients.
    pub wanted: Wanted,
    /// What is called, and what the loss reads.
    pub loss: Loss,
    /// Strides of the gradient that reaches the output.
    pub gradient_layout: GradientLayout,
    /// Independent draws of the data that the case is judged over, together.
    pub draws: usize,
    /// Element types the case is defined for.
    pub dtypes: &'static [Dtype],
}

/// Rows of queries, and of keys, that a case of the grid has at least.
const ROWS: usize = 256;
/// Elements of a bias gradient that a case of the grid is judged over at least.
const BIAS_ELEMENTS: usize = 128;

impl Case {
    /// Plain attention on uniform, packed operands with every gradient wanted. `shape` is
    /// `(batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim)`.
    ///
    /// ```
    /// use flash_attention_check::Case;
    ///
    /// let case = Case::new("tail", "A tail that is not masked.", [1, 4, 2, 33, 65, 8, 8]).causal();
    /// assert_eq!(case.score_shape(), [1, 4, 33, 65]);
    /// assert!(case.options.causal);
    /// ```
    pub fn new(name: impl Into<String>, catches: &'static str, shape: [usize; 7]) -> Self {
        let [batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim] = shape;
        Self {
            name: name.into(),
            catches,
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
            options: Options::default(),
            mask: Mask::None,
            bias: Bias::None,
            draw: Draw::Uniform,
            poison: None,
            query_poison: None,
            layout: Layout::Packed,
            wanted: Wanted::ALL,
            loss: Loss::Output,
            gradient_layout: GradientLayout::Packed,
            draws: 1,
            dtypes: &Dtype::ALL,
        }
    }

    /// Causal, last query on the last key.
    pub fn causal(mut self) -> Self {
        self.options.causal = true;
        self
    }

    /// Moves the diagonal of `causal` and `window` to the first query and key.
    pub fn top_left(mut self) -> Self {
        self.options.alignment = Alignment::TopLeft;
        self
    }

    /// Sliding window.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.options.window = Window { left, right };
        self
    }

    /// Scale in place of `1 / sqrt(head_dim)`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.options.scale = Some(scale);
        self
    }

    /// Soft cap.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.options.softcap = Some(softcap);
        self
    }

    /// Lets the parts of gradients be added in any order.
    pub fn unordered(mut self) -> Self {
        self.options.summation = Summation::Unordered;
        self
    }

    /// Lets operands of products in `f32` be rounded to TF32; the case is for that type alone.
    pub fn tf32(mut self) -> Self {
        self.options.f32_precision = F32Precision::Tf32;
        self.dtypes(&[Dtype::F32])
    }

    /// Sets the mask.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Sets the bias.
    pub fn bias(mut self, bias: Bias) -> Self {
        self.bias = bias;
        self
    }

    /// Sets how query, key and value are drawn.
    pub fn draw(mut self, draw: Draw) -> Self {
        self.draw = draw;
        self
    }

    /// Writes `with` over the given rows of key and value.
    pub fn poison(mut self, keys: Range<usize>, with: f64) -> Self {
        self.poison = Some(Poison { keys, with });
        self
    }

    /// Writes `with` over the given rows of one side or all.
    pub fn poison_queries(mut self, queries: Range<usize>, with: f64, side: QuerySide) -> Self {
        self.query_poison = Some(QueryPoison {
            queries,
            with,
            side,
        });
        self
    }

    /// Sets how the operands lie in memory.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets which inputs require gradients.
    pub fn wanted(mut self, wanted: Wanted) -> Self {
        self.wanted = wanted;
        self
    }

    /// Sets what is called and what the loss reads.
    pub fn loss(mut self, loss: Loss) -> Self {
        self.loss = loss;
        self
    }

    /// Sets the strides of the gradient that reaches the output.
    pub fn gradient_layout(mut self, layout: GradientLayout) -> Self {
        self.gradient_layout = layout;
        self
    }

    /// Restricts the case to some element types.
    pub fn dtypes(mut self, dtypes: &'static [Dtype]) -> Self {
        self.dtypes = dtypes;
        self
    }

    /// Repeats the case over the batch, and over draws where its bias is small.
    ///
    /// The acceptance rule sets one largest error against another. Over a handful of rows the
    /// unfused form can come out nearly exact by luck, and then nothing else would pass.
    fn with_enough_rows(mut self) -> Self {
        let rows = self.batch * (self.heads * self.seq_q).min(self.kv_heads * self.seq_kv);
        if rows > 0 {
            self.batch *= ROWS.div_ceil(rows);
        }
        let bias: Option<usize> = self.bias_shape().map(|shape| shape.iter().product());
        if let Some(elements @ 1..) = bias {
            self.draws = BIAS_ELEMENTS.div_ceil(elements);
        }
        self
    }

    /// `[batch, heads, seq_q, seq_kv]`.
    pub fn score_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_q, self.seq_kv]
    }

    /// Shape of the mask, if there is one.
    pub fn mask_shape(&self) -> Option<[usize; 4]> {
        let broadcast = match self.mask {
            Mask::None => return None,
            Mask::Random(broadcast) => broadcast,
            Mask::Rows(_) => [true, true, false, true],
            Mask::Keys(_) => [true, true, true, false],
            Mask::Later => PER_SCORE,
        };
        Some(self.broadcast_shape(broadcast))
    }

    /// Shape of the bias, if there is one.
    pub fn bias_shape(&self) -> Option<[usize; 4]> {
        let broadcast = match self.bias {
            Bias::None => return None,
            Bias::Uniform(broadcast) => broadcast,
            Bias::Rows(..) => [true, true, false, true],
            Bias::Keys(..) => [true, true, true, false],
            Bias::NanOnKeys(_) => FULL,
            Bias::Score(..) => PER_SCORE,
        };
        Some(self.broadcast_shape(broadcast))
    }

    fn broadcast_shape(&self, broadcast: Broadcast) -> [usize; 4] {
        let full = self.score_shape();
        std::array::from_fn(|n| if broadcast[n] { 1 } else { full[n] })
    }

    /// The checked problem in element type `dtype`.
    ///
    /// # Errors
    /// If the case is not a valid problem.
    pub fn problem(&self, dtype: Dtype) -> Result<Problem, ProblemError> {
        let key_shape = [self.batch, self.kv_heads, self.seq_kv, self.head_dim];
        let value_shape = [self.batch, self.kv_heads, self.seq_kv, self.value_dim];
        let query_shape = [self.batch, self.heads, self.seq_q, self.head_dim];
        let operands = Operands {
            query: Operand::new(query_shape, dtype),
            key: Operand::new(key_shape, dtype),
            value: Operand::new(value_shape, dtype),
            mask: self
                .mask_shape()
                .map(|shape| Operand::new(shape, flash_attention_spec::ElementType::Bool)),
            bias: self.bias_shape().map(|shape| Operand::new(shape, dtype)),
        };
        Problem::new(&operands, &self.options)
    }
}
