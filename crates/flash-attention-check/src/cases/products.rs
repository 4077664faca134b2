//! The parts of the grid that are products: options, lengths, head dims, broadcasts, layouts.

use super::{Bias, Broadcast, Case, FULL, GradientLayout, Layout, Loss, Mask, PER_SCORE};
use flash_attention_spec::Wanted;

const LENGTHS: [usize; 9] = [1, 3, 31, 33, 63, 65, 127, 129, 203];

const HEAD_DIMS: [usize; 19] = [
    1, 3, 5, 8, 24, 32, 40, 59, 64, 72, 80, 96, 111, 120, 128, 160, 192, 224, 256,
];

const DROPPED: &str = "An option is dropped on one path, or in the forward or backward pass only.";
const TAIL: &str = "A length that no block or vector divides is cut off or read past its end.";
const CHANNEL: &str = "A channel past the last full vector or register block is lost.";
const BROADCAST: &str = "A broadcast dimension is stepped through, or its gradient is not summed.";
const STRIDED: &str = "A combination of strides and options is read as if it were packed.";

/// One option: its name and what it does to a case.
type Choice = (&'static str, fn(Case) -> Case);

const OPTIONS: [Choice; 10] = [
    ("scale", |case| case.scale(0.3)),
    ("softcap", |case| case.softcap(1.5)),
    ("causal", Case::causal),
    ("causal top-left", |case| case.causal().top_left()),
    ("window", |case| case.window(Some(9), Some(4))),
    ("mask", |case| case.mask(Mask::Random(FULL))),
    ("bias", |case| {
        case.bias(Bias::Uniform([true, false, false, false]))
    }),
    ("grouped heads", |case| Case {
        kv_heads: 1,
        ..case
    }),
    ("value_dim", |case| Case {
        value_dim: 5,
        ..case
    }),
    ("lse gradient", |case| case.loss(Loss::Both)),
];

/// Every option alone and every pair.
pub(super) fn options() -> Vec<Case> {
    let base = |name: String| Case::new(name, DROPPED, [1, 2, 2, 37, 41, 8, 8]);
    let mut cases = vec![base("option: none".into())];
    for (n, (first, with_first)) in OPTIONS.iter().enumerate() {
        cases.push(with_first(base(format!("option: {first}"))));
        for (second, with_second) in &OPTIONS[n + 1..] {
            let name = format!("options: {first} and {second}");
            cases.push(with_second(with_first(base(name))));
        }
    }
    cases
}

/// Every combination of the options that change generated code.
pub(super) fn all_options() -> Vec<Case> {
    let bands: [Choice; 6] = [
        ("all keys", |case| case),
        ("causal", Case::causal),
        ("causal top-left", |case| case.causal().top_left()),
        ("window", |case| case.window(Some(9), Some(4))),
        ("causal and window", |case| {
            case.causal().window(Some(9), None)
        }),
        ("window top-left", |case| {
            case.window(Some(9), Some(4)).top_left()
        }),
    ];
    let mut cases = Vec::new();
    for (band, with_band) in bands {
        for bits in 0..32_u8 {
            let has = |n: u8| bits & (1 << n) != 0;
            let mut name = format!("options: {band}");
            let shape = [1, 4, if has(4) { 2 } else { 4 }, 67, 73, 8, 8];
            let mut case = with_band(Case::new("", DROPPED, shape));
            let choices: [Choice; 4] = [OPTIONS[0], OPTIONS[1], OPTIONS[5], OPTIONS[6]];
            for (n, (option, with_option)) in (0..).zip(choices) {
                if has(n) {
                    case = with_option(case);
                    name.push_str(&format!(", {option}"));
                }
            }
            if has(4) {
                name.push_str(", grouped heads");
            }
            cases.push(Case {
                name: format!("{name} (product)"),
                ..case.loss(Loss::Both)
            });
        }
    }
    cases
}

fn length(seq_q: usize, seq_kv: usize, causal: bool) -> Case {
    let rule = if causal { ", causal" } else { "" };
    let name = format!("lengths {seq_q} x {seq_kv}{rule}");
    let case = Case::new(name, TAIL, [2, 2, 1, seq_q, seq_kv, 8, 8]);
    if causal { case.causal() } else { case }
}

/// Each length on both sides: with itself, with its successor, and causal with its predecessor.
pub(super) fn lengths() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, &seq) in LENGTHS.iter().enumerate() {
        let next = LENGTHS[(n + 1) % LENGTHS.len()];
        cases.push(length(seq, seq, true));
        cases.push(length(seq, next, false));
        if n + 1 < LENGTHS.len() {
            cases.push(length(next, seq, true));
        }
    }
    cases
}

/// Every pair of lengths, with all keys visible and causal, that [`lengths`] leaves out.
pub(super) fn all_lengths() -> Vec<Case> {
    let small = lengths();
    let mut cases = Vec::new();
    for seq_q in LENGTHS {
        for seq_kv in LENGTHS {
            for causal in [false, true] {
                let case = length(seq_q, seq_kv, causal);
                if !small.contains(&case) {
                    cases.push(case);
                }
            }
        }
    }
    cases
}

fn head_dim(head_dim: usize, value_dim: usize) -> Case {
    let name = format!("head_dim {head_dim}, value_dim {value_dim}");
    Case::new(name, CHANNEL, [1, 2, 1, 5, 35, head_dim, value_dim]).loss(Loss::Both)
}

/// Every head dim, and pairs of unequal ones.
pub(super) fn head_dims() -> Vec<Case> {
    let unequal = [(8, 1), (1, 8), (64, 40), (40, 64), (192, 128), (3, 256)];
    let equal = HEAD_DIMS.into_iter().map(|dim| (dim, dim));
    let pairs = equal.chain(unequal);
    pairs.map(|(d, v)| head_dim(d, v).causal()).collect()
}

/// Head dim and value dim apart over the whole list, with several query blocks.
pub(super) fn all_head_dims() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, d) in HEAD_DIMS.into_iter().enumerate() {
        for offset in [0, 1, 7, 12] {
            let value_dim = HEAD_DIMS[(n + offset) % HEAD_DIMS.len()];
            let case = head_dim(d, value_dim);
            cases.push(Case {
                name: format!("{}, 67 x 75", case.name),
                seq_q: 67,
                seq_kv: 75,
                ..case
            });
        }
    }
    cases
}

fn subset(bits: u8) -> Broadcast {
    std::array::from_fn(|n| bits & (1 << n) != 0)
}

fn broadcast(mask: u8, bias: u8) -> Case {
    let name = format!("broadcast: mask {mask:04b}, bias {bias:04b}");
    // With lse in the loss the sum of a row's dS, which is the gradient of a bias of one key, is
    // that of lse and not 0.
    Case::new(name, BROADCAST, [2, 4, 2, 7, 9, 8, 8])
        .mask(Mask::Random(subset(mask)))
        .bias(Bias::Uniform(subset(bias)))
        .loss(Loss::Both)
}

/// Every subset of dimensions of size 1, the bias on the complement of the mask's.
pub(super) fn broadcasts() -> Vec<Case> {
    (0..16).map(|mask| broadcast(mask, 15 - mask)).collect()
}

/// Every pair of subsets that [`broadcasts`] leaves out.
pub(super) fn all_broadcasts() -> Vec<Case> {
    (0..16)
        .flat_map(|mask| (0..16).map(move |bias| (mask, bias)))
        .filter(|(mask, bias)| mask + bias != 15)
        .map(|(mask, bias)| broadcast(mask, bias))
        .collect()
}

/// Every layout with every layout of the incoming gradient, causal, masked and biased, and a grid
/// of blocks past the 65,535 that one launch dimension holds on most devices.
pub(super) fn all_layouts() -> Vec<Case> {
    let layouts = [
        Layout::Packed,
        Layout::FusedQkv,
        Layout::SwappedAxes,
        Layout::Transposed,
        Layout::Expanded,
        Layout::SharedKeys,
        Layout::LongerBuffer,
        Layout::MiddleOfBuffer,
    ];
    let gradients = [
        GradientLayout::Packed,
        GradientLayout::Swapped,
        GradientLayout::Sum,
    ];
    let mut cases = Vec::new();
    for layout in layouts {
        for gradient in gradients {
            let name = format!("layouts: {layout:?}, gradient {gradient:?}");
            let case = Case::new(name, STRIDED, [2, 2, 2, 35, 35, 12, 12])
                .layout(layout)
                .gradient_layout(gradient)
                .causal()
                .mask(Mask::Random(PER_SCORE))
                .bias(Bias::Uniform([false, true, false, false]))
                .wanted(Wanted::ALL.bias(layout != Layout::Expanded));
            cases.push(case);
        }
    }
    cases.push(
        Case::new(
            "66000 batches",
            "A grid dimension passes 65,535.",
            [66000, 1, 1, 2, 3, 4, 4],
        )
        .loss(Loss::Both),
    );
    cases
}
