//! The bias gradient: one cube for each block of the bias, `dbias = dS` summed over the dimensions
//! the bias was broadcast on, one block of scores after the other.

use super::gradient::{
    BlockPosition, block_dots, rebuild_probabilities, score_gradients, share_scores, value_dots,
};
use super::stage::rows_of;
use super::sums::{SPAN, both_levels, fold, zero_totals};
use super::tile::{Config, Quad};
use crate::schedule::{Geometry, partly_visible};
use cubecl::prelude::*;

/// Shape of the bias.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BiasShape {
    pub batch: usize,
    pub heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
}

/// Which sequence dimensions the bias was broadcast on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BiasBroadcast {
    pub queries: bool,
    pub keys: bool,
}

/// Writes the gradient of the bias, packed, in the shape of the bias.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn bias_gradient_kernel<E: Float, M: Int, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: ComptimeOption<&Tensor<Vector<E, N>>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    bias_gradient: &mut [E],
    geometry: Geometry,
    shape: BiasShape,
    #[comptime] broadcast: BiasBroadcast,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let tile = comptime!(config.tile);
    let block_q = comptime!(tile.block_q());
    let block_kv = comptime!(tile.block_kv());
    let units = comptime!(tile.units() as usize);
    let query_blocks = (geometry.seq_q as usize).div_ceil(block_q);
    let key_blocks = (geometry.seq_kv as usize).div_ceil(block_kv);

    // The block of the bias, and the blocks of scores that it was added to.
    let rows = shape.seq_q.div_ceil(block_q);
    let columns = shape.seq_kv.div_ceil(block_kv);
    let column = CUBE_POS % columns;
    let row = CUBE_POS / columns % rows;
    let bias_head = CUBE_POS / (columns * rows) % shape.heads;
    let bias_batch = CUBE_POS / (columns * rows) / shape.heads;
    if bias_batch >= shape.batch {
        terminate!();
    }
    let mut end_batch = bias_batch + 1;
    if shape.batch == 1 {
        end_batch = geometry.batch;
    }
    let mut end_head = bias_head + 1;
    if shape.heads == 1 {
        end_head = geometry.heads;
    }
    let mut end_row = row + 1;
    if comptime!(broadcast.queries) {
        end_row = query_blocks;
    }
    let mut end_column = column + 1;
    if comptime!(broadcast.keys) {
        end_column = key_blocks;
    }

    let unit_x = UNIT_POS as usize % tile.units_x;
    let unit_y = UNIT_POS as usize / tile.units_x;
    let mut stage = Shared::<[Quad]>::new_slice(comptime!(tile.stage()));
    let mut shared = Shared::<[Quad]>::new_slice(comptime!(block_q * tile.score_pitch()));
    let mut dots = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut probabilities = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut gradients = Array::<Quad>::new(comptime!(tile.rows * tile.columns));
    let mut sums = zero_totals(true, comptime!(tile.rows * tile.columns));
    let mut totals = zero_totals(config.long, comptime!(tile.rows * tile.columns));
    let mut seen = 0usize;

    for batch in bias_batch..end_batch {
        for head in bias_head..end_head {
            let query_rows = rows_of(query, batch, head, geometry.seq_q);
            let key_rows = rows_of(key, batch, head / geometry.group, geometry.seq_kv);
            for query_block in row..end_row {
                for key_block in column..end_column {
                    let first_query = (query_block * block_q) as i32;
                    let first_kv = (key_block * block_kv) as i32;
                    if partly_visible(&geometry, first_query, first_kv, block_q, block_kv, false) {
                        let position = BlockPosition {
                            batch,
                            head,
                            first_query,
                            first_kv,
                            unit_x,
                            unit_y,
                        };
                        block_dots(
                            query,
                            query_rows,
                            key,
                            key_rows,
                            position,
                            &mut stage,
                            &mut dots,
                            config.head_dim,
                            config,
                        );
                        rebuild_probabilities::<E, M>(
                            &dots,
                            &mut probabilities,
                            row_statistics,
                            position,
                            &mask,
                            &bias,
                            &geometry,
                            config,
                        );
                        value_dots(
                            output_gradient,
                            key,
                            value,
                            position,
                            &mut stage,
                            &mut gradients,
                            &geometry,
                            config,
                        );
                        score_gradients(
                            &probabilities,
                            &mut gradients,
                            row_statistics,
                            position,
                            &geometry,
                            config,
                        );
                        #[unroll]
                        for n in 0..comptime!(tile.rows * tile.columns) {
                            sums[n] += gradients[n];
                        }
                        if comptime!(config.long) {
                            seen += 1;
                            if seen == SPAN {
                                seen = 0usize;
                                fold(
                                    &mut sums,
                                    &mut totals,
                                    1.0f32,
                                    0usize,
                                    comptime!(tile.rows * tile.columns),
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    // Sums over a broadcast sequence dimension stay inside the block: one unit for each result.
    let position = BlockPosition {
        batch: bias_batch,
        head: bias_head,
        first_query: (row * block_q) as i32,
        first_kv: (column * block_kv) as i32,
        unit_x,
        unit_y,
    };
    #[unroll]
    for n in 0..comptime!(tile.rows * tile.columns) {
        sums[n] = both_levels(&sums, &totals, n, config.long);
    }
    share_scores(&sums, &mut shared, position, config);
    sync_cube();
    let out_rows = comptime!(if broadcast.queries { 1 } else { block_q });
    let out_quads = comptime!(if broadcast.keys { 1 } else { tile.row_quads() });
    let per_row = comptime!(if broadcast.queries { block_q } else { 1 });
    let per_quad = comptime!(if broadcast.keys { tile.row_quads() } else { 1 });
    let base = (bias_batch * shape.heads + bias_head) * shape.seq_q;
    #[unroll]
    for n in 0..comptime!((out_rows * out_quads).div_ceil(units)) {
        let index = n * units + UNIT_POS as usize;
        if index < comptime!(out_rows * out_quads) {
            let out_row = index / out_quads;
            let out_quad = index % out_quads;
            let mut sum = Quad::new(0.0);
            for r in 0..per_row {
                for q in 0..per_quad {
                    sum += shared[(out_row + r) * comptime!(tile.score_pitch()) + out_quad + q];
                }
            }
            let i = row * block_q + out_row;
            if i < shape.seq_q {
                if comptime!(broadcast.keys) {
                    bias_gradient[base + i] = E::cast_from(
                        sum.extract(0usize)
                            + sum.extract(1usize)
                            + sum.extract(2usize)
                            + sum.extract(3usize),
                    );
                } else {
                    #[unroll]
                    for e in 0..4usize {
                        let j = column * block_kv + out_quad * 4 + e;
                        if j < shape.seq_kv {
                            bias_gradient[(base + i) * shape.seq_kv + j] =
                                E::cast_from(sum.extract(e));
                        }
                    }
                }
            }
        }
    }
}
