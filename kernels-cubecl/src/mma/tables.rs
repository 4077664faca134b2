//! Blocks in order of preference, for each kernel, type of numbers and set of options: what measurements and
//! the registers of compiled kernels left.

use super::blueprint::Blocks;
use crate::device::Device;
use flash_attention_spec::{Dtype, Problem};

/// Blocks in order of preference for heads up to a width, with asynchronous copies and without.
pub(super) type Table = [(usize, &'static [Blocks], &'static [Blocks])];

pub(super) const fn blocks(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        warps,
        row_tiles,
        walked,
        stages: 1,
        prefetch: true,
        apart: false,
    }
}

const fn taken_apart(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        apart: true,
        ..blocks(warps, row_tiles, walked)
    }
}

const fn staged_twice(warps: usize, row_tiles: usize, walked: usize) -> Blocks {
    Blocks {
        stages: 2,
        ..blocks(warps, row_tiles, walked)
    }
}

/// The last of each fits every device that has the instructions.
const FORWARD: [(usize, &[Blocks], &[Blocks]); 4] = [
    (
        64,
        &[staged_twice(4, 2, 64), blocks(4, 2, 64), blocks(4, 1, 32)],
        &[blocks(4, 2, 64), blocks(4, 1, 32)],
    ),
    (
        96,
        &[
            staged_twice(4, 2, 64),
            blocks(4, 2, 64),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[blocks(4, 2, 32), blocks(4, 1, 32)],
    ),
    // Scores of 64 keys beside outputs of 128 features leave too few registers.
    (
        128,
        &[
            staged_twice(4, 2, 48),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[blocks(4, 2, 32), blocks(4, 1, 32)],
    ),
    (
        256,
        &[blocks(4, 1, 64), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 32), blocks(4, 1, 16)],
    ),
];

const QUERY_GRADIENT: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 64), blocks(4, 1, 32)],
    ),
    (
        128,
        &[staged_twice(4, 2, 32), blocks(4, 1, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 48), blocks(4, 1, 32)],
    ),
    (
        256,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 16)],
    ),
];

const KEY_VALUE_GRADIENT: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 1, 32)],
        &[blocks(4, 1, 64), blocks(4, 1, 32)],
    ),
    (
        128,
        &[staged_twice(4, 1, 64), blocks(4, 1, 64), blocks(4, 1, 32)],
        &[blocks(4, 1, 16)],
    ),
    (
        256,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[blocks(4, 1, 16)],
    ),
];

/// Forward blocks where a mask is read alone, for all scores at once; with a bias they are read in turns.
const FORWARD_MASKED: [(usize, &[Blocks], &[Blocks]); 4] = [
    FORWARD[0],
    FORWARD[1],
    (
        128,
        &[staged_twice(4, 1, 64), blocks(4, 1, 64), blocks(4, 1, 32)],
        FORWARD[2].2,
    ),
    FORWARD[3],
];

/// Blocks of the gradients with options: the cap's derivative needs dot products beside probabilities and
/// their gradients, and masks and biases addresses.
const QUERY_GRADIENT_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 1, 32)],
        QUERY_GRADIENT[0].2,
    ),
    (
        128,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32)],
        QUERY_GRADIENT[1].2,
    ),
    QUERY_GRADIENT[2],
];

const KEY_VALUE_GRADIENT_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 1, 64), blocks(4, 1, 32)],
        KEY_VALUE_GRADIENT[0].2,
    ),
    (
        128,
        &[staged_twice(4, 1, 32), blocks(4, 1, 32)],
        KEY_VALUE_GRADIENT[1].2,
    ),
    KEY_VALUE_GRADIENT[2],
];

/// The same where a mask is read alone, on compute capability 9.0.
const KEY_VALUE_GRADIENT_MASKED: [(usize, &[Blocks], &[Blocks]); 3] = [
    KEY_VALUE_GRADIENT_OPTIONS[0],
    (
        128,
        &[staged_twice(4, 1, 16), blocks(4, 1, 16)],
        KEY_VALUE_GRADIENT_OPTIONS[1].2,
    ),
    KEY_VALUE_GRADIENT_OPTIONS[2],
];

/// Blocks for `f32`: rows take twice the shared memory, and a lane holds its operands in parts. A
/// warp takes its right operands apart by itself, so two row tiles halve that work too. The gradients,
/// which multiply by walked rows four times a block, or three, have them taken apart for all warps where
/// there is room for parts beside whole rows; eight warps, so that one cube has as many as two of four,
/// and 32 rows, for each warp takes its own rows apart again in each block.
const FORWARD_F32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[staged_twice(4, 2, 32), blocks(4, 2, 32), blocks(4, 1, 32)],
        &[],
    ),
    (
        128,
        &[blocks(4, 2, 16), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[],
    ),
    (
        256,
        &[blocks(4, 1, 32), blocks(4, 1, 16), blocks(2, 1, 16)],
        &[],
    ),
];

const QUERY_GRADIENT_F32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            taken_apart(4, 2, 32),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[
            taken_apart(8, 1, 32),
            taken_apart(4, 1, 16),
            staged_twice(4, 1, 16),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// Blocks for `f32` with options.
const FORWARD_F32_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    FORWARD_F32[0],
    (128, &[blocks(4, 1, 32), blocks(4, 1, 16)], &[]),
    FORWARD_F32[FORWARD_F32.len() - 1],
];

const QUERY_GRADIENT_F32_OPTIONS: [(usize, &[Blocks], &[Blocks]); 3] = [
    QUERY_GRADIENT_F32[0],
    (
        128,
        &[
            taken_apart(8, 1, 16),
            taken_apart(4, 1, 16),
            staged_twice(4, 1, 16),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    QUERY_GRADIENT_F32[2],
];

/// Both sums beside probabilities and their gradients leave few registers.
const KEY_VALUE_GRADIENT_F32: [(usize, &[Blocks], &[Blocks]); 4] = [
    (
        64,
        &[
            taken_apart(8, 1, 32),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (96, &[taken_apart(8, 1, 16), taken_apart(4, 1, 16)], &[]),
    (128, &[taken_apart(8, 1, 16), blocks(4, 1, 16)], &[]),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// Blocks for `f32` rounded to TF32: shared memory as above, registers as 16-bit numbers but for right
/// operands, which take twice as many.
const FORWARD_TF32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            staged_twice(4, 2, 64),
            staged_twice(4, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[
            staged_twice(8, 2, 32),
            blocks(4, 2, 32),
            blocks(4, 1, 32),
            blocks(4, 1, 16),
        ],
        &[],
    ),
    (
        256,
        &[blocks(4, 1, 32), blocks(4, 1, 16), blocks(2, 1, 16)],
        &[],
    ),
];

/// Of either gradient kernel.
const GRADIENT_TF32: [(usize, &[Blocks], &[Blocks]); 3] = [
    (
        64,
        &[
            staged_twice(4, 2, 32),
            staged_twice(4, 1, 32),
            blocks(4, 1, 32),
        ],
        &[],
    ),
    (
        128,
        &[staged_twice(8, 1, 32), blocks(4, 1, 32), blocks(4, 1, 16)],
        &[],
    ),
    (256, &[blocks(4, 1, 16), blocks(2, 1, 16)], &[]),
];

/// The tables of a problem on a device: forward, query gradient, key and value gradients.
pub(super) fn tables(problem: &Problem, device: &Device, tf32: bool) -> [&'static Table; 3] {
    if problem.dtype == Dtype::F32 && tf32 {
        return [&FORWARD_TF32, &GRADIENT_TF32, &GRADIENT_TF32];
    }
    let (masked, biased) = (problem.mask.is_some(), problem.bias.is_some());
    let options = masked || biased || problem.softcap.is_some();
    if problem.dtype == Dtype::F32 {
        return if options {
            [
                &FORWARD_F32_OPTIONS,
                &QUERY_GRADIENT_F32_OPTIONS,
                &KEY_VALUE_GRADIENT_F32,
            ]
        } else {
            [&FORWARD_F32, &QUERY_GRADIENT_F32, &KEY_VALUE_GRADIENT_F32]
        };
    }
    let alone = masked && !biased;
    let forward: &Table = if alone { &FORWARD_MASKED } else { &FORWARD };
    if alone && device.cuda_capability >= Some(90) {
        [forward, &QUERY_GRADIENT_OPTIONS, &KEY_VALUE_GRADIENT_MASKED]
    } else if options {
        [
            forward,
            &QUERY_GRADIENT_OPTIONS,
            &KEY_VALUE_GRADIENT_OPTIONS,
        ]
    } else {
        [forward, &QUERY_GRADIENT, &KEY_VALUE_GRADIENT]
    }
}

pub(super) fn candidates(
    widest: usize,
    asynchronous: bool,
    table: &'static Table,
) -> impl Iterator<Item = Blocks> {
    let row = table.iter().find(|(width, _, _)| widest <= *width);
    let (_, with, without) = row.expect("the last row serves the widest head");
    let order = if asynchronous { *with } else { *without };
    order.iter().copied()
}
