//! The row statistics of the backward pass: `D = rowsum(dO o) - dlse` beside the saved two.

use super::stage::{load_quad, rows_of};
use super::tile::{Config, Quad};
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Writes `[3, batch, heads, seq_q]`: the two saved statistics and `D`, one unit for each row.
///
/// One buffer holds all three, so that the gradient kernels stay within the bindings of WebGPU.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn delta_kernel<E: Float, N: Size>(
    output: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    statistics: &[f32],
    lse_gradient: ComptimeOption<&Tensor<f32>>,
    row_statistics: &mut [f32],
    geometry: Geometry,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
) {
    let rows = geometry.batch * geometry.heads * geometry.seq_q as usize;
    let at = ABSOLUTE_POS;
    if at >= rows {
        terminate!();
    }
    let batch_head = at / geometry.seq_q as usize;
    let i = at % geometry.seq_q as usize;
    let (batch, head) = (batch_head / geometry.heads, batch_head % geometry.heads);
    let output_rows = rows_of(output, batch, head, geometry.seq_q);
    let gradient_rows = rows_of(output_gradient, batch, head, geometry.seq_q);

    let mut sum = Quad::new(0.0);
    for quad in 0..comptime!(config.value_dim.div_ceil(4)) {
        let o = load_quad(
            output,
            output_rows,
            i as i32,
            quad,
            config.value_dim,
            config,
        );
        let g = load_quad(
            output_gradient,
            gradient_rows,
            i as i32,
            quad,
            config.value_dim,
            config,
        );
        sum = fma(o, g, sum);
    }
    let mut delta =
        sum.extract(0usize) + sum.extract(1usize) + sum.extract(2usize) + sum.extract(3usize);
    #[comptime]
    match &lse_gradient {
        ComptimeOption::Some(lse_gradient) => {
            delta -= lse_gradient[batch * lse_gradient.stride(0)
                + head * lse_gradient.stride(1)
                + i * lse_gradient.stride(2)];
        }
        ComptimeOption::None => {}
    }
    row_statistics[at] = statistics[at];
    row_statistics[rows + at] = statistics[rows + at];
    row_statistics[2 * rows + at] = delta;
}
