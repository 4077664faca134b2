//! Row statistics of the backward pass as its kernels take them.

use crate::schedule::Geometry;
use cubecl::prelude::*;

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Features of a load.
const CHUNK: usize = 8;

/// What is known of a row: probabilities are `2^((score - maximum) log2(e) - log_sum)`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowStatistics {
    pub maximum: f32,
    /// In exponents of two; infinity for a row that sees nothing.
    pub log_sum: f32,
    /// `D = rowsum(dO o) - dlse`.
    pub delta: f32,
}

/// Statistics of a row that sees nothing.
#[cube]
pub(crate) fn nothing(geometry: &Geometry) -> RowStatistics {
    RowStatistics {
        maximum: 0.0f32,
        log_sum: -geometry.negative_infinity,
        delta: 0.0f32,
    }
}

/// Units that share a row of `dim` features.
pub(crate) const fn units_of_row(dim: usize) -> usize {
    dim.div_ceil(CHUNK).next_power_of_two()
}

/// Writes `[batch * heads, 3, padded]`; probabilities of rows past the last are exactly 0. Where the
/// query's gradient is summed in global memory, also the zeros that its sums, of `width` features, and
/// `turns` start from.
///
/// `saved` is `[2, batch, heads, seq_q]`. Strides of output and gradient are multiples of 8.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn statistics_kernel<E: Float, N: Size, Q: Size>(
    output: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    saved: &[f32],
    lse_gradient: ComptimeOption<&Tensor<f32>>,
    statistics: &mut [f32],
    query_sums: &mut [Vector<f32, Q>],
    turns: &mut [u32],
    geometry: Geometry,
    padded: usize,
    #[comptime] dim: usize,
    #[comptime] width: usize,
    #[define(E)] _element: ElemType,
) {
    let units = comptime!(units_of_row(dim));
    let heads = geometry.batch * geometry.heads;
    let seq_q = geometry.seq_q as usize;
    // Units past the last row take part in the shuffles.
    let place = ABSOLUTE_POS / units;
    let chunk = ABSOLUTE_POS % units;
    let batch_head = place / padded;
    let i = place % padded;
    let batch = batch_head / geometry.heads;
    let head = batch_head % geometry.heads;
    let present = batch_head < heads && i < seq_q;
    let mut sum = 0.0f32;
    if present && chunk < comptime!(dim / CHUNK) {
        let o = output[row_start(output, batch, head, i) + chunk];
        let g = output_gradient[row_start(output_gradient, batch, head, i) + chunk];
        #[unroll]
        for n in 0..CHUNK {
            sum = fma(
                f32::cast_from(o.extract(n)),
                f32::cast_from(g.extract(n)),
                sum,
            );
        }
    }
    #[unroll]
    for n in 0..comptime!(units.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << n));
    }
    if batch_head < heads {
        #[unroll]
        for n in 0..comptime!(width / 4 / units) {
            query_sums[place * comptime!(width / 4) + comptime!(n * units) + chunk] =
                Vector::new(0.0f32);
        }
    }
    if comptime!(width > 0) {
        // A counter for each tile of 64 by 64; the last counts the cubes.
        let tiles = comptime!(width / 64);
        if chunk == 0 && place.is_multiple_of(64) && place < heads * padded {
            #[unroll]
            for n in 0..tiles {
                turns[place / 64 * tiles + n] = 0u32;
            }
        }
        if chunk == 0 && place == heads * padded {
            turns[place / 64 * tiles] = 0u32;
        }
    }
    if chunk == 0 && batch_head < heads {
        let mut row = nothing(&geometry);
        if present {
            let at = batch_head * seq_q + i;
            let log_sum = saved[heads * seq_q + at];
            row.maximum = saved[at];
            if log_sum != geometry.negative_infinity {
                row.log_sum = log_sum * LOG2_E;
            }
            row.delta = sum;
            #[comptime]
            match &lse_gradient {
                ComptimeOption::Some(lse_gradient) => {
                    row.delta -= lse_gradient[batch * lse_gradient.stride(0)
                        + head * lse_gradient.stride(1)
                        + i * lse_gradient.stride(2)];
                }
                ComptimeOption::None => {}
            }
        }
        let at = batch_head * 3 * padded + i;
        statistics[at] = row.maximum;
        statistics[at + padded] = row.log_sum;
        statistics[at + 2 * padded] = row.delta;
    }
}

/// The first chunk of a row.
#[cube]
fn row_start<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    batch: usize,
    head: usize,
    i: usize,
) -> usize {
    (batch * x.stride(0) + head * x.stride(1) + i * x.stride(2)) / CHUNK
}

/// What [`statistics_kernel`] wrote of a row, where `present`.
#[cube]
pub(crate) fn load_statistics(
    statistics: &[f32],
    batch_head: usize,
    i: i32,
    padded: usize,
    geometry: &Geometry,
) -> RowStatistics {
    let mut row = nothing(geometry);
    if i < geometry.seq_q {
        let at = batch_head * 3 * padded + i as usize;
        row.maximum = statistics[at];
        row.log_sum = statistics[at + padded];
        row.delta = statistics[at + 2 * padded];
    }
    row
}
