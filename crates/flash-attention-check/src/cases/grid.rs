//! The grid: one function for each kind of fault that attention kernels have shipped with.

use super::products;
use super::{
    Bias, Broadcast, Case, Draw, FULL, GradientLayout, Layout, Loss, Mask, PER_SCORE, QuerySide,
    Wanted,
};
use flash_attention_spec::Dtype;

/// Every case. `full` adds the complete products of lengths, head dims, options, broadcasts and
/// layouts to the small grid, which touches every kind of fault at shapes a software GPU can run.
///
/// ```
/// let small = flash_attention_check::grid(false);
/// let full = flash_attention_check::grid(true);
/// assert!(small.len() < full.len());
/// assert!(small.iter().all(|case| full.iter().any(|other| other.name == case.name)));
/// ```
pub fn grid(full: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(alignment());
    cases.extend(rows_without_keys());
    cases.extend(large_bias());
    cases.extend(first_keys_hidden());
    cases.extend(poison());
    cases.extend(poisoned_queries());
    cases.extend(poisoned_bias());
    cases.extend(keys_without_rows());
    cases.extend(block_bounds());
    cases.extend(many_blocks());
    cases.extend(scales());
    cases.extend(wide_heads());
    cases.extend(unordered());
    cases.extend(tf32());
    cases.extend(keys_past_the_window());
    cases.extend(wide_and_long());
    cases.extend(windows());
    cases.extend(layouts());
    cases.extend(long_layouts());
    cases.extend(grouped_heads());
    cases.extend(gradient_subsets());
    cases.extend(number_range());
    cases.extend(empty());
    cases.extend(log_sum_exp());
    cases.extend(products::options());
    cases.extend(products::lengths());
    cases.extend(products::head_dims());
    cases.extend(products::broadcasts());
    if full {
        cases.extend(products::all_options());
        cases.extend(products::all_lengths());
        cases.extend(products::all_head_dims());
        cases.extend(products::all_broadcasts());
        cases.extend(products::all_layouts());
    }
    cases.into_iter().map(Case::with_enough_rows).collect()
}

fn alignment() -> Vec<Case> {
    let catches = "The causal diagonal sits on the wrong key when the lengths differ.";
    let wide = || Case::new("causal 2x5 bottom-right", catches, [1, 2, 2, 2, 5, 8, 8]).causal();
    let tall = || Case::new("causal 5x2 bottom-right", catches, [1, 2, 2, 5, 2, 8, 8]).causal();
    let named = |name: &str, case: Case| Case {
        name: name.into(),
        ..case
    };
    vec![
        wide(),
        named("causal 2x5 top-left", wide().top_left()),
        tall(),
        named("causal 5x2 top-left", tall().top_left()),
    ]
}

fn rows_without_keys() -> Vec<Case> {
    let catches = "A row that sees nothing divides 0 by 0, or leaks into the rows that see keys.";
    let case = |name: &str, seq_q, seq_kv| {
        let name = format!("nothing visible: {name}");
        Case::new(name, catches, [1, 2, 1, seq_q, seq_kv, 8, 8]).loss(Loss::Both)
    };
    let infinite = |keys| Bias::Keys(keys, f64::NEG_INFINITY);
    let window = (Some(1), Some(1));
    vec![
        case("causal", 5, 2).causal(),
        case("window", 9, 4).window(window.0, window.1).top_left(),
        case("mask", 6, 7).mask(Mask::Rows(1..4)),
        case("bias", 6, 7).bias(Bias::Rows(1..4, f64::NEG_INFINITY)),
        case("causal and mask", 6, 6)
            .causal()
            .mask(Mask::Keys(0..2)),
        case("causal and bias", 6, 6).causal().bias(infinite(0..2)),
        case("causal and window", 9, 4)
            .causal()
            .window(Some(2), None)
            .top_left(),
        case("window and mask", 9, 9)
            .window(window.0, window.1)
            .mask(Mask::Keys(3..8)),
        case("window and bias", 9, 9)
            .window(window.0, window.1)
            .bias(infinite(3..8)),
        case("mask and bias, every row", 3, 6)
            .mask(Mask::Keys(0..3))
            .bias(infinite(3..6)),
        case("mask, whole blocks of rows", 70, 70).mask(Mask::Rows(10..68)),
        case("soft cap and mask", 6, 7)
            .softcap(2.0)
            .mask(Mask::Rows(1..4)),
    ]
}

fn large_bias() -> Vec<Case> {
    let catches = "A finite stand-in for minus infinity takes a large bias for a hidden key.";
    const WIDE_EXPONENT: &[Dtype] = &[Dtype::F32, Dtype::BF16];
    // Scores of whole quarters stay exact in f32 beside a bias of a million, so that the output
    // must not move at all.
    let case = |value: f64| {
        let name = format!("bias {value:e} on whole rows");
        Case::new(name, catches, [1, 2, 2, 5, 37, 16, 8])
            .draw(Draw::WholeNumbers)
            .bias(Bias::Rows(1..4, value))
            .loss(Loss::Both)
    };
    vec![
        case(-2e4),
        case(-6e4),
        case(-1e6).dtypes(WIDE_EXPONENT),
        case(half::bf16::MIN.to_f64()).dtypes(WIDE_EXPONENT),
        case(f64::from(f32::MIN)).dtypes(&[Dtype::F32]),
        case(6e4),
    ]
}

fn first_keys_hidden() -> Vec<Case> {
    let catches = "Leading key blocks without a visible key rescale by exp(-inf + inf).";
    let case = |name: &str| {
        let name = format!("first keys hidden: {name}");
        Case::new(name, catches, [1, 1, 1, 3, 200, 8, 8]).loss(Loss::Both)
    };
    vec![
        case("mask").mask(Mask::Keys(0..128)),
        case("bias").bias(Bias::Keys(0..128, f64::NEG_INFINITY)),
        case("last by mask").mask(Mask::Keys(72..200)),
        case("window").window(Some(40), Some(0)),
    ]
}

fn poison() -> Vec<Case> {
    let hidden = "A NaN or infinity in a hidden key or value is multiplied by 0 and spreads.";
    let partly = "A key block skips the select because some of its queries see the poisoned key.";
    let padding = "A tail reads past the end of a view into the NaN that lies behind it.";
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    let shape = [1, 2, 1, 9, 38, 8, 8];
    let square = [1, 2, 1, 70, 70, 8, 8];
    vec![
        Case::new("NaN hidden by mask", hidden, shape)
            .mask(Mask::Keys(3..5))
            .poison(3..5, nan),
        Case::new("infinity hidden by mask", hidden, shape)
            .mask(Mask::Keys(30..38))
            .poison(30..38, infinity)
            .softcap(3.0),
        Case::new("NaN in bias and keys hidden by mask", hidden, shape)
            .mask(Mask::Keys(3..5))
            .poison(3..5, nan)
            .bias(Bias::NanOnKeys(3..5)),
        Case::new("NaN outside of the window", hidden, [1, 2, 1, 5, 38, 8, 8])
            .window(Some(3), Some(3))
            .poison(0..30, nan),
        Case::new(
            "NaN past the causal diagonal",
            hidden,
            [1, 2, 1, 9, 38, 8, 8],
        )
        .causal()
        .top_left()
        .poison(9..38, nan),
        Case::new("NaN that causal shows to some queries", partly, square)
            .causal()
            .poison(40..42, nan),
        Case::new("infinity that causal shows to some queries", partly, square)
            .causal()
            .poison(40..41, infinity),
        Case::new("NaN that a window shows to some queries", partly, square)
            .causal()
            .window(Some(5), None)
            .poison(20..21, nan),
        Case::new("NaN that a mask shows to some queries", partly, square)
            .mask(Mask::Later)
            .window(Some(5), None)
            .poison(20..21, nan),
        Case::new("38 keys of 64, NaN behind", padding, shape).layout(Layout::LongerBuffer),
        Case::new("38 keys of 64, NaN behind, mask and bias", padding, shape)
            .layout(Layout::LongerBuffer)
            .mask(Mask::Random(FULL))
            .bias(Bias::Uniform(FULL))
            .causal(),
    ]
}

fn poisoned_queries() -> Vec<Case> {
    let padding =
        "A NaN or infinity in a query that sees nothing reaches what other queries add to.";
    let seen =
        "A NaN or infinity of one query is multiplied by the 0 of a key that it does not see.";
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    let case = |name: &str, catches, [seq_q, seq_kv]: [usize; 2]| {
        Case::new(name, catches, [1, 2, 1, seq_q, seq_kv, 64, 64]).loss(Loss::Both)
    };
    let banded = |name: &str| {
        case(name, seen, [150, 300])
            .causal()
            .window(Some(100), None)
    };
    vec![
        case(
            "NaN in queries that a mask shows nothing",
            padding,
            [150, 300],
        )
        .mask(Mask::Rows(60..140))
        .poison_queries(60..140, nan, QuerySide::All),
        case(
            "infinity in queries before the first key",
            padding,
            [300, 150],
        )
        .causal()
        .poison_queries(0..150, infinity, QuerySide::All),
        banded("NaN in a query that sees some keys").poison_queries(90..91, nan, QuerySide::Query),
        banded("NaN in the gradient of a row of the output").poison_queries(
            90..91,
            nan,
            QuerySide::OutputGradient,
        ),
        banded("infinity in the gradient of a row's lse").poison_queries(
            90..91,
            infinity,
            QuerySide::LseGradient,
        ),
    ]
}

fn poisoned_bias() -> Vec<Case> {
    let catches = "A visible NaN or infinity of the bias leaves its row, or is lost in it.";
    let case = |name: &str, value| {
        Case::new(name, catches, [1, 2, 1, 150, 300, 64, 64])
            .causal()
            .bias(Bias::Score([100, 200], value))
            .loss(Loss::Both)
    };
    vec![
        case("NaN in a visible bias, keys hidden beside it", f64::NAN),
        case(
            "infinity in a visible bias, keys hidden beside it",
            f64::INFINITY,
        ),
    ]
}

fn keys_without_rows() -> Vec<Case> {
    let catches = "Gradients of keys that no query sees keep what memory held before.";
    let case = |name: &str| {
        let name = format!("keys nobody sees: {name}");
        Case::new(name, catches, [1, 1, 1, 3, 8, 8, 8])
    };
    vec![
        case("mask").mask(Mask::Later),
        case("causal").causal().top_left(),
        case("window").window(Some(0), Some(1)).top_left(),
        case("bias")
            .mask(Mask::Later)
            .bias(Bias::Uniform(PER_SCORE)),
    ]
}

fn block_bounds() -> Vec<Case> {
    let catches = "A loop bound is wrong where a query block spans several key blocks.";
    let case = |name: &str| {
        let name = format!("192 positions: {name}");
        Case::new(name, catches, [1, 1, 1, 192, 192, 16, 16])
    };
    vec![
        case("all keys"),
        case("causal").causal(),
        case("window").window(Some(50), Some(20)),
    ]
}

fn many_blocks() -> Vec<Case> {
    let catches = "The larger blocks of longer sequences are wrong, at an edge or with an option.";
    let case = |name: &str, dims: [usize; 2]| {
        let name = format!("300 x 333 positions: {name}");
        Case::new(name, catches, [1, 2, 1, 300, 333, dims[0], dims[1]])
    };
    vec![
        case("all keys", [64, 64]),
        case("causal, odd dimensions, loss on both", [59, 21])
            .causal()
            .loss(Loss::Both),
        case("every option", [40, 72])
            .causal()
            .window(Some(200), None)
            .mask(Mask::Random(FULL))
            .bias(Bias::Uniform([true, false, false, false]))
            .softcap(1.5)
            .loss(Loss::Both),
        case("NaN that causal shows to some queries", [16, 16])
            .causal()
            .poison(250..252, f64::NAN),
        case("bias for each key", [128, 128]).bias(Bias::Uniform([true, true, true, false])),
        case("bias for each query", [64, 64])
            .bias(Bias::Uniform([true, false, false, true]))
            .loss(Loss::Both),
    ]
}

fn scales() -> Vec<Case> {
    let catches = "A scale that is negative, 0 or tiny turns maxima over, or is divided by.";
    let case = |scale: f64| {
        let name = format!("scale {scale:e} at 150 x 300 positions");
        Case::new(name, catches, [1, 2, 1, 150, 300, 64, 64])
            .scale(scale)
            .loss(Loss::Both)
    };
    vec![
        case(-0.7).causal().mask(Mask::Random(FULL)),
        case(0.0).causal(),
        case(1e-30).window(Some(200), Some(30)),
    ]
}

/// Blocks of keys that no query sees, and whose place is past the last block of queries.
fn keys_past_the_window() -> Vec<Case> {
    let catches =
        "A block of keys past the window waits for its turn at queries that are not there.";
    let case = |name: &str, dim: usize| {
        let name = format!("keys past the window: {name}");
        Case::new(name, catches, [1, 2, 1, 100, 400, dim, dim])
            .window(Some(9), Some(4))
            .top_left()
            .loss(Loss::Both)
    };
    vec![
        case("64 features", 64),
        case("64 features, unordered gradients", 64).unordered(),
        case("128 features", 128),
        case("256 features", 256),
    ]
}

/// Wide heads with more keys than their kernels take one block at a time.
fn wide_and_long() -> Vec<Case> {
    let catches = "Two blocks in flight take each other's values, or the end of one tile the start of the next.";
    let nan = f64::NAN;
    let case = |name: &str, [seq_q, seq_kv, head_dim, value_dim]: [usize; 4]| {
        let name = format!("wide and long: {name}");
        Case::new(name, catches, [1, 2, 1, seq_q, seq_kv, head_dim, value_dim])
            .wanted(Wanted::NONE)
            .loss(Loss::Output)
    };
    vec![
        case("causal, NaN that some queries see", [150, 1900, 256, 256])
            .causal()
            .poison(1850..1852, nan),
        case("all keys, NaN behind them", [70, 1700, 64, 192]).layout(Layout::LongerBuffer),
        case("window, NaN before it", [150, 1900, 136, 256])
            .window(Some(1600), Some(3))
            .poison(0..149, nan),
        Case::new(
            "wide and long: queries that see nothing",
            catches,
            [1, 1, 1, 3500, 3300, 136, 136],
        )
        .wanted(Wanted::NONE)
        .loss(Loss::Output)
        .causal()
        .poison(3299..3300, nan),
        case(
            "negative scale, queries of many tiles",
            [500, 1601, 256, 200],
        )
        .scale(-0.1),
    ]
}

fn unordered() -> Vec<Case> {
    let catches = "Parts of a gradient that are added in any order are lost, or added twice.";
    let case = |name: &str, dim: usize| {
        let name = format!("unordered gradients: {name}");
        let sizes = [1, 4, 2, 230, 301, dim, dim];
        Case::new(name, catches, sizes).unordered().loss(Loss::Both)
    };
    vec![
        case("all keys, 64 features", 64),
        case("causal, 128 features", 128).causal(),
        case("window and mask, 40 features", 40)
            .window(Some(90), Some(20))
            .mask(Mask::Random(FULL)),
    ]
}

fn tf32() -> Vec<Case> {
    let catches = "Products of numbers rounded to TF32 mix up elements, or round more than that.";
    let hidden = "A hidden number that TF32 rounds to infinity is multiplied by 0 and spreads.";
    let sized = |name: &str, catches, [seq_q, seq_kv]: [usize; 2], dims: [usize; 2]| {
        let sizes = [1, 4, 2, seq_q, seq_kv, dims[0], dims[1]];
        Case::new(format!("tf32: {name}"), catches, sizes)
            .tf32()
            .loss(Loss::Both)
    };
    let case = |name, dims| sized(name, catches, [300, 333], dims);
    vec![
        case("all keys, 64 features", [64, 64]),
        case("causal, 64 features", [64, 64]).causal(),
        case("causal, 128 features", [128, 128]).causal(),
        case("80 features", [80, 80]),
        case("odd dimensions", [59, 21]),
        case("256 features", [256, 256]).causal(),
        case("bias and soft cap", [64, 64])
            .bias(Bias::Uniform([true, false, false, false]))
            .softcap(1.5),
        case("window and mask, 128 features", [128, 128])
            .window(Some(90), Some(20))
            .mask(Mask::Random(FULL)),
        case("no axis dense", [64, 64]).layout(Layout::Transposed),
        sized(
            "NaN that causal shows to some queries",
            catches,
            [150, 300],
            [64, 64],
        )
        .causal()
        .poison(200..202, f64::NAN),
        sized("largest numbers hidden", hidden, [150, 300], [64, 64])
            .mask(Mask::Keys(30..38))
            .poison(30..38, f64::from(f32::MAX)),
    ]
}

fn wide_heads() -> Vec<Case> {
    let catches =
        "Heads too wide for a kernel's registers meet blocks or options it shares out wrongly.";
    let case = |name: &str, dims: [usize; 2]| {
        let name = format!("wide heads, 230 x 201 positions: {name}");
        Case::new(name, catches, [1, 4, 2, 230, 201, dims[0], dims[1]]).loss(Loss::Both)
    };
    vec![
        case("all keys", [256, 256]),
        case("causal and window", [192, 128])
            .causal()
            .window(Some(90), None),
        case("soft cap, causal", [256, 64]).softcap(1.5).causal(),
        case("every option", [136, 256])
            .causal()
            .window(Some(150), None)
            .mask(Mask::Random(FULL))
            .bias(Bias::Uniform([true, false, false, false]))
            .softcap(1.5),
        case("NaN that causal shows to some queries", [256, 192])
            .causal()
            .poison(130..132, f64::NAN),
    ]
}

fn windows() -> Vec<Case> {
    let catches = "A window is one key too wide or too narrow.";
    let case = |left: Option<usize>, right: Option<usize>| {
        let name = format!("window {left:?} {right:?} at 70 positions");
        Case::new(name, catches, [1, 2, 1, 70, 70, 8, 8]).window(left, right)
    };
    vec![
        // One key a row: dq and dk are 0 unless the loss reads lse.
        case(Some(0), Some(0)),
        Case {
            name: "window 0 0 at 70 positions, loss on both".into(),
            ..case(Some(0), Some(0)).loss(Loss::Both)
        },
        case(Some(3), Some(0)),
        case(Some(0), Some(3)),
        case(Some(64), Some(64)),
        case(Some(usize::MAX), Some(1000)),
        case(None, Some(3)),
        case(Some(3), None),
    ]
}

fn layouts() -> Vec<Case> {
    let catches = "An operand is read as if it were packed.";
    let incoming = "The incoming gradient is read as if it were packed.";
    let case = |name: &str, layout| {
        let name = format!("layout: {name}");
        let shape = [2, 2, 2, 19, 19, 8, 8];
        Case::new(name, catches, shape).layout(layout)
    };
    let gradient = |name: &str, layout| {
        let name = format!("incoming gradient: {name}");
        let shape = [2, 3, 1, 19, 21, 8, 5];
        Case::new(name, incoming, shape)
            .loss(Loss::Plain)
            .gradient_layout(layout)
    };
    let no_bias = Wanted::ALL.bias(false);
    let masked = |case: Case| {
        case.mask(Mask::Random([true, true, false, false]))
            .bias(Bias::Uniform([true, false, false, false]))
    };
    vec![
        case("fused qkv", Layout::FusedQkv),
        masked(case("swapped axes", Layout::SwappedAxes)),
        masked(case("transposed", Layout::Transposed)),
        masked(case("expanded", Layout::Expanded)).wanted(no_bias),
        masked(case("longer buffer", Layout::LongerBuffer)),
        gradient("swapped axes", GradientLayout::Swapped),
        gradient("sum", GradientLayout::Sum),
        gradient("sum, causal with lse", GradientLayout::Sum)
            .causal()
            .loss(Loss::Both),
    ]
}

fn long_layouts() -> Vec<Case> {
    let catches = "An operand is read as if it were packed from its second block on.";
    let case = |name: &str, layout| {
        let name = format!("layout of 200 positions: {name}");
        Case::new(name, catches, [2, 2, 2, 200, 200, 64, 64])
            .layout(layout)
            .causal()
    };
    vec![
        case("fused qkv", Layout::FusedQkv),
        case("swapped axes, gradient too", Layout::SwappedAxes)
            .gradient_layout(GradientLayout::Swapped),
        case("transposed", Layout::Transposed),
        case("middle of a buffer", Layout::MiddleOfBuffer),
        case("keys shared by the batch", Layout::SharedKeys).gradient_layout(GradientLayout::Sum),
    ]
}

fn grouped_heads() -> Vec<Case> {
    let catches = "A query head reads the wrong key head, or dk and dv miss part of their group.";
    let small = [1, 2, 3, 6].map(|kv_heads| {
        let name = format!("6 heads on {kv_heads} key heads");
        let shape = [2, 6, kv_heads, 7, 11, 8, 8];
        Case::new(name, catches, shape)
            .causal()
            .bias(Bias::Uniform([false, false, true, false]))
    });
    let name = "7 heads on 1 key head, 150 x 201 positions";
    let large = Case::new(name, catches, [1, 7, 1, 150, 201, 64, 64]).causal();
    small.into_iter().chain([large]).collect()
}

fn gradient_subsets() -> Vec<Case> {
    let catches = "A gradient that is not wanted is computed, or one that is wanted is lost.";
    (0..16_u8)
        .map(|bits| {
            let wants = |n: u8| bits & (1 << n) != 0;
            let wanted = Wanted::NONE
                .query(wants(0))
                .key(wants(1))
                .value(wants(2))
                .bias(wants(3));
            let name = format!(
                "gradients wanted: q {} k {} v {} bias {}",
                wanted.query, wanted.key, wanted.value, wanted.bias
            );
            Case::new(name, catches, [1, 2, 1, 7, 9, 8, 8])
                .bias(Bias::Uniform([true, false, false, false]))
                .wanted(wanted)
        })
        .collect()
}

fn number_range() -> Vec<Case> {
    let overflow = "A 16-bit sum overflows although its result is in range.";
    let saturated = "tanh of a large score is computed as a quotient of infinities.";
    let large = "One f32 log-sum-exp is too coarse to rebuild probabilities of large scores.";
    const F32: &[Dtype] = &[Dtype::F32];
    const SIXTEEN_BIT: &[Dtype] = &[Dtype::F16, Dtype::BF16];
    let equal = |value: f64| {
        let name = format!("50 equal keys of {value}");
        // All probabilities are 1/50.
        Case::new(name, large, [1, 1, 1, 5, 50, 16, 16])
            .draw(Draw::Equal(value))
            .dtypes(F32)
            .loss(Loss::Both)
    };
    vec![
        Case::new(
            "16-bit scores of 10,000 by a scale of no power of two",
            large,
            [1, 2, 1, 5, 50, 40, 16],
        )
        .draw(Draw::Equal(40.0))
        .dtypes(SIXTEEN_BIT)
        .loss(Loss::Both),
        Case::new(
            "scores of 113,000, wide heads",
            large,
            [1, 2, 1, 70, 70, 128, 64],
        )
        .draw(Draw::Equal(100.0))
        .causal()
        .dtypes(&[Dtype::BF16])
        .loss(Loss::Both),
        // The gradient of each probability is g . v = 60,000, the same for every key.
        Case::new("values of 30000", overflow, [1, 1, 1, 8, 64, 8, 2])
            .draw(Draw::FlatScores(30000.0))
            .dtypes(SIXTEEN_BIT)
            .gradient_layout(GradientLayout::Sum),
        Case::new(
            "scores of 10000 under a cap of 50",
            saturated,
            [1, 2, 1, 8, 37, 16, 8],
        )
        .draw(Draw::Signs(25.0))
        .scale(1.0)
        .softcap(50.0),
        Case::new(
            "scores around a cap of 1",
            saturated,
            [1, 2, 1, 8, 37, 16, 8],
        )
        .softcap(1.0)
        .scale(4.0),
        equal(1000.0),
        equal(10000.0),
        Case::new(
            "unequal scores around 10000",
            large,
            [1, 2, 1, 150, 300, 16, 16],
        )
        .draw(Draw::Offset(100.0))
        .scale(1.0)
        .loss(Loss::Both),
    ]
}

fn empty() -> Vec<Case> {
    let catches = "A launch without work fails, or leaves outputs unwritten.";
    let case = |name: &str, shape| Case::new(format!("empty: {name}"), catches, shape);
    vec![
        case("batch 0", [0, 2, 1, 3, 4, 8, 8]),
        case("no queries", [1, 2, 1, 0, 4, 8, 8]),
        case("no keys", [1, 2, 1, 3, 0, 8, 8]).loss(Loss::Both),
        case("no keys, causal", [2, 2, 2, 3, 0, 8, 5]).causal(),
        case("nothing at all", [0, 1, 1, 0, 0, 8, 8]),
        case("no keys, bias", [1, 2, 1, 3, 0, 8, 8])
            .bias(Bias::Uniform([true, true, false, false])),
        case("no keys, mask", [1, 2, 1, 3, 0, 8, 8]).mask(Mask::Random(FULL)),
        case("no queries, mask", [1, 2, 1, 0, 4, 8, 8]).mask(Mask::Random(FULL)),
        case("no queries, bias", [1, 2, 1, 0, 4, 8, 8])
            .bias(Bias::Uniform([true, true, true, false])),
    ]
}

fn log_sum_exp() -> Vec<Case> {
    let catches = "The gradient of lse is lost, or reaches values.";
    let case = |name: &str, loss| {
        let broadcast: Broadcast = [true, false, true, false];
        let shape = [1, 4, 2, 35, 37, 8, 8];
        Case::new(format!("loss: {name}"), catches, shape)
            .loss(loss)
            .bias(Bias::Uniform(broadcast))
    };
    vec![
        case("output by the plain call", Loss::Plain),
        case("output, lse unused", Loss::Output),
        case("lse alone", Loss::Lse),
        case("lse alone, soft cap", Loss::Lse).softcap(2.0),
        case("output and lse, causal", Loss::Both).causal(),
    ]
}
