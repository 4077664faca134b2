//! Row statistics as the copy engine takes them to the key and value gradients.

use super::gradient::row_statistics;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Writes `[batch * heads, 3, padded]` from `[3, batch, heads, seq_q]`, one unit for each row.
/// Probabilities of rows past the last are exactly 0.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pad_statistics_kernel(
    statistics: &[f32],
    output: &mut [f32],
    geometry: Geometry,
    padded: usize,
) {
    let heads = geometry.batch * geometry.heads;
    if ABSOLUTE_POS >= heads * padded {
        terminate!();
    }
    let batch_head = ABSOLUTE_POS / padded;
    let i = ABSOLUTE_POS % padded;
    let seq_q = geometry.seq_q as usize;
    let row = row_statistics(
        statistics,
        heads * seq_q,
        batch_head * seq_q + i,
        i < seq_q,
        &geometry,
    );
    let at = batch_head * 3 * padded + i;
    output[at] = row.maximum;
    output[at + padded] = row.log_sum;
    output[at + 2 * padded] = row.delta;
}
