//! What is measured: the points of each grid, and how much arithmetic one is.

use burn_flash_attention::{Dtype, F32Precision, Options, Summation, Window};
use clap::ValueEnum;
use std::fmt;

/// Tokens of a batch on the `paper` grid.
const TOKENS: usize = 16_384;

/// Heads times `head_dim` on the `paper` grid.
const HIDDEN: usize = 2_048;

/// Longest sequence whose backward pass is on the `long` grid.
const LONGEST_BACKWARD: usize = 131_072;

/// Keys before its own that a query of [`Variant::Window`] sees.
const WINDOW: usize = 1_024;

/// The cap of [`Variant::Softcap`], that of Gemma 2's attention.
const SOFTCAP: f64 = 50.0;

/// A set of points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Grid {
    /// 16,384 tokens a batch, 2,048 hidden, as FlashAttention-2 and 3 are measured
    Paper,
    /// Batch 1, 8 heads, causal, short sequences: what a call costs the host
    Small,
    /// Batch 1, 16 heads, causal, 32k to 1M: what memory it takes
    Long,
    /// Every kind of visibility and score at 16k
    Masks,
}

/// What a call computes, and so what its time is the time of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pass {
    /// The output
    Forward,
    /// The gradients of query, key and value, from a kept forward pass
    Backward,
    /// Both, through autodiff, as host time a call
    Training,
}

/// Element type of every tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

/// Which keys a query sees, and what is done to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    Full,
    Causal,
    /// Causal, and no more than [`WINDOW`] keys back.
    Window,
    /// Causal, four query heads to a key head.
    Grouped,
    /// A bias `[1, 1, seq, seq]`, without its gradient.
    Bias,
    /// A mask `[1, 1, seq, seq]` that hides a third of the keys at random.
    Mask,
    /// Causal, soft cap 50.
    Softcap,
}

impl Variant {
    /// Every variant, in the order of the `masks` grid.
    pub const ALL: [Self; 7] = [
        Self::Full,
        Self::Causal,
        Self::Window,
        Self::Grouped,
        Self::Bias,
        Self::Mask,
        Self::Softcap,
    ];

    /// Whether later keys are hidden.
    pub fn causal(self) -> bool {
        match self {
            Self::Full | Self::Bias | Self::Mask => false,
            Self::Causal | Self::Window | Self::Grouped | Self::Softcap => true,
        }
    }
}

/// One problem and one pass over it.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub grid: Grid,
    pub variant: Variant,
    pub pass: Pass,
    pub dtype: Dtype,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Queries, and as many keys.
    pub seq: usize,
    /// Width of query, key and value.
    pub head_dim: usize,
    /// How the parts of gradients are added.
    pub summation: Summation,
    /// How products of `f32` operands are formed.
    pub f32_precision: F32Precision,
}

/// What is asked for instead of all of a grid.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Passes, instead of the grid's.
    pub passes: Vec<Pass>,
    /// Head dimensions, instead of the grid's.
    pub head_dims: Vec<usize>,
    /// Sequence lengths, instead of the grid's.
    pub seqs: Vec<usize>,
    /// Only variants that hide later keys, or only those that do not.
    pub causal: Option<bool>,
    /// How the parts of gradients are added.
    pub summation: Summation,
    /// How products of `f32` operands are formed.
    pub f32_precision: F32Precision,
}

impl Grid {
    /// The points of the grid, as far as they are chosen.
    pub fn points(self, choice: &Choice, dtype: Dtype) -> Vec<Point> {
        let passes = or_else(&choice.passes, self.passes());
        let head_dims = or_else(&choice.head_dims, self.head_dims());
        let seqs = or_else(&choice.seqs, self.seqs());
        let chosen = |variant: &Variant| choice.causal.is_none_or(|c| c == variant.causal());
        let mut points = Vec::new();
        for &pass in passes {
            for &head_dim in head_dims {
                for &variant in self.variants().iter().filter(|variant| chosen(variant)) {
                    let mut at_seq = |&seq: &usize| {
                        if self.has(pass, seq) {
                            points.push(Point {
                                summation: choice.summation,
                                f32_precision: choice.f32_precision,
                                ..self.point(variant, pass, dtype, seq, head_dim)
                            });
                        }
                    };
                    seqs.iter().for_each(&mut at_seq);
                }
            }
        }
        points
    }

    fn passes(self) -> &'static [Pass] {
        match self {
            Grid::Small => &[Pass::Training],
            Grid::Paper | Grid::Long | Grid::Masks => &[Pass::Forward, Pass::Backward],
        }
    }

    fn head_dims(self) -> &'static [usize] {
        match self {
            Grid::Paper => &[64, 128, 256],
            Grid::Small => &[64],
            Grid::Long | Grid::Masks => &[128],
        }
    }

    fn seqs(self) -> &'static [usize] {
        match self {
            Grid::Paper => &[512, 1_024, 2_048, 4_096, 8_192, 16_384],
            Grid::Small => &[64, 128, 256, 512, 1_024],
            Grid::Long => &[32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576],
            Grid::Masks => &[16_384],
        }
    }

    fn variants(self) -> &'static [Variant] {
        match self {
            Grid::Paper => &[Variant::Full, Variant::Causal],
            Grid::Small | Grid::Long => &[Variant::Causal],
            Grid::Masks => &Variant::ALL,
        }
    }

    fn has(self, pass: Pass, seq: usize) -> bool {
        self != Grid::Long || pass == Pass::Forward || seq <= LONGEST_BACKWARD
    }

    fn point(
        self,
        variant: Variant,
        pass: Pass,
        dtype: Dtype,
        seq: usize,
        head_dim: usize,
    ) -> Point {
        let (batch, heads) = match self {
            Grid::Paper => ((TOKENS / seq).max(1), (HIDDEN / head_dim).max(1)),
            Grid::Small => (1, 8),
            Grid::Long | Grid::Masks => (1, 16),
        };
        let kv_heads = match variant {
            Variant::Grouped => heads / 4,
            _ => heads,
        };
        Point {
            grid: self,
            variant,
            pass,
            dtype,
            batch,
            heads,
            kv_heads,
            seq,
            head_dim,
            summation: Summation::default(),
            f32_precision: F32Precision::default(),
        }
    }
}

fn or_else<'a, T>(chosen: &'a [T], all: &'a [T]) -> &'a [T] {
    if chosen.is_empty() { all } else { chosen }
}

impl Point {
    /// Shape of query, output and their gradients.
    pub fn query_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.head_dim]
    }

    /// Shape of key, value and their gradients.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq, self.head_dim]
    }

    /// Shape of mask or bias.
    pub fn table_shape(&self) -> [usize; 4] {
        [1, 1, self.seq, self.seq]
    }

    /// Options of the call, mask and bias apart.
    pub fn options(&self) -> Options {
        let window = self.variant == Variant::Window;
        Options {
            causal: self.variant.causal(),
            softcap: (self.variant == Variant::Softcap).then_some(SOFTCAP),
            window: Window {
                left: window.then_some(WINDOW),
                right: None,
            },
            summation: self.summation,
            f32_precision: self.f32_precision,
            ..Options::default()
        }
    }

    /// Bytes of query, key, value and, where the pass takes one, the output gradient.
    pub fn operand_bytes(&self) -> usize {
        let elements = |shape: [usize; 4]| shape.iter().product::<usize>();
        let queries = match self.pass {
            Pass::Backward => 2,
            Pass::Forward | Pass::Training => 1,
        };
        let count = queries * elements(self.query_shape()) + 2 * elements(self.key_shape());
        count * self.dtype.size()
    }

    /// Floating-point operations of the matrix products, a multiply-add being two, as papers count
    /// them (Dao, arXiv:2307.08691, section 4.1): `4 B H S^2 D` forward, half of it under a causal
    /// mask, and 2.5 times as many backward. Under a window the pairs it leaves are counted; keys
    /// that a mask hides count in full.
    pub fn operations(&self) -> f64 {
        let seq = self.seq as f64;
        let pairs = match self.variant {
            Variant::Window => (1..=self.seq).map(|n| n.min(WINDOW + 1) as f64).sum(),
            _ if self.variant.causal() => seq * seq / 2.0,
            _ => seq * seq,
        };
        let forward = 4.0 * (self.batch * self.heads * self.head_dim) as f64 * pairs;
        match self.pass {
            Pass::Forward => forward,
            Pass::Backward => 2.5 * forward,
            Pass::Training => 3.5 * forward,
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            variant,
            pass,
            dtype,
            seq,
            head_dim,
            ..
        } = self;
        write!(
            f,
            "{variant} {pass}, {dtype}, seq {seq}, head dim {head_dim}"
        )
    }
}

/// The name that clap takes, or would.
macro_rules! display {
    ($type:ident, $($variant:ident $name:literal),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $($type::$variant => $name),+ })
            }
        }
    };
}

display!(Grid, Paper "paper", Small "small", Long "long", Masks "masks");
display!(Pass, Forward "forward", Backward "backward", Training "training");
display!(Variant, Full "full", Causal "causal", Window "window", Grouped "grouped", Bias "bias",
    Mask "mask", Softcap "softcap");

#[cfg(test)]
pub mod tests {
    use super::*;

    fn all(grid: Grid) -> Vec<Point> {
        grid.points(&Choice::default(), Dtype::BF16)
    }

    /// One small point.
    pub fn point(variant: Variant, pass: Pass) -> Point {
        let choice = Choice {
            passes: vec![pass],
            head_dims: vec![16],
            seqs: vec![64],
            causal: Some(variant.causal()),
            ..Choice::default()
        };
        let points = Grid::Masks.points(&choice, Dtype::F32);
        let mut found = points.into_iter().filter(|point| point.variant == variant);
        found.next().expect("every variant is on the grid")
    }

    #[test]
    fn the_paper_grid_keeps_tokens_and_width() {
        let points = all(Grid::Paper);
        assert_eq!(points.len(), 2 * 3 * 2 * 6);
        for point in &points {
            assert_eq!(point.batch * point.seq, 16_384);
            assert_eq!(point.heads * point.head_dim, 2_048);
            assert_eq!(point.kv_heads, point.heads);
        }
        let last = points.last().unwrap();
        assert_eq!(
            (last.seq, last.head_dim, last.pass),
            (16_384, 256, Pass::Backward)
        );
        assert!(last.variant.causal());
    }

    #[test]
    fn the_other_grids_are_as_described() {
        let small = all(Grid::Small);
        let shape = |point: &Point| (point.batch, point.heads, point.head_dim, point.pass);
        assert!(small.iter().all(|p| shape(p) == (1, 8, 64, Pass::Training)));
        let seqs: Vec<usize> = small.iter().map(|point| point.seq).collect();
        assert_eq!(seqs, [64, 128, 256, 512, 1_024]);

        let long = all(Grid::Long);
        let longest = |pass| {
            let of_pass = long.iter().filter(move |point| point.pass == pass);
            of_pass.map(|point| point.seq).max()
        };
        assert_eq!(longest(Pass::Forward), Some(1 << 20));
        assert_eq!(longest(Pass::Backward), Some(1 << 17));
        assert!(
            long.iter()
                .all(|p| (p.batch, p.heads, p.head_dim) == (1, 16, 128))
        );

        let masks = all(Grid::Masks);
        assert_eq!(masks.len(), 2 * Variant::ALL.len());
        let grouped = masks.iter().find(|point| point.variant == Variant::Grouped);
        assert_eq!(grouped.unwrap().kv_heads, 4);
    }

    #[test]
    fn a_choice_replaces_what_the_grid_has() {
        let choice = Choice {
            passes: vec![Pass::Forward],
            head_dims: vec![128],
            seqs: vec![64, 1_024],
            causal: Some(true),
            ..Choice::default()
        };
        let points = Grid::Paper.points(&choice, Dtype::F16);
        let chosen: Vec<_> = points.iter().map(|p| (p.batch, p.seq, p.heads)).collect();
        assert_eq!(chosen, [(256, 64, 16), (16, 1_024, 16)]);
        assert!(points.iter().all(|p| p.variant == Variant::Causal));
    }

    #[test]
    fn operations_are_those_of_the_formula() {
        // 4 * batch 1 * heads 16 * 64 * 64 * head_dim 16.
        let full = point(Variant::Full, Pass::Forward);
        assert_eq!(full.operations(), 4_194_304.0);
        let times = |variant, pass| point(variant, pass).operations() / full.operations();
        assert_eq!(times(Variant::Causal, Pass::Forward), 0.5);
        assert_eq!(times(Variant::Grouped, Pass::Forward), 0.5);
        assert_eq!(times(Variant::Full, Pass::Backward), 2.5);
        assert_eq!(times(Variant::Causal, Pass::Training), 1.75);
        assert_eq!(times(Variant::Mask, Pass::Forward), 1.0);
        // A window wider than the sequence hides nothing: 64 * 65 / 2 pairs.
        assert_eq!(times(Variant::Window, Pass::Forward), 2_080.0 / 4_096.0);
        let choice = Choice {
            seqs: vec![2_000],
            causal: Some(true),
            ..Choice::default()
        };
        let points = Grid::Masks.points(&choice, Dtype::BF16);
        let window = points
            .iter()
            .find(|point| point.variant == Variant::Window)
            .unwrap();
        let pairs = (1_025 * 1_026 / 2 + 975 * 1_025) as f64;
        assert_eq!(window.operations(), 4.0 * 16.0 * 128.0 * pairs);
    }
}
