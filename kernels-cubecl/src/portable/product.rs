//! Products of a block of scores in shared memory with rows of an operand: `P X`, `P^T X`.

use super::stage::{Rows, stage_columns};
use super::tile::{Columns, Config, Quad, Tile};
use cubecl::prelude::*;

/// `out += P X` for a block of scores and the rows `first_row ..` of `x`, which are staged part by
/// part. `watch` where some key of the block is hidden from some query.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn multiply_rows<E: Float, N: Size>(
    scores: &Shared<[Quad]>,
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    stage: &mut Shared<[Quad]>,
    non_finite: &mut Shared<[u32]>,
    watch: bool,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let columns = comptime!(Columns::of(tile, dim));
    let staged = comptime!(columns.staged.min(tile.block_kv()));
    #[unroll]
    for pass in 0..columns.passes {
        for part in 0..comptime!(tile.block_kv() / staged) {
            let first = part * staged;
            sync_cube();
            stage_columns(
                x,
                rows,
                first_row + first as i32,
                stage,
                non_finite,
                watch,
                staged,
                pass,
                columns,
                dim,
                config,
            );
            sync_cube();
            if watch && non_finite[0] != 0 {
                accumulate_rows(
                    scores, &*stage, out, unit_x, unit_y, first, staged, pass, columns, true, tile,
                );
            } else {
                accumulate_rows(
                    scores, &*stage, out, unit_x, unit_y, first, staged, pass, columns, false, tile,
                );
            }
        }
    }
}

/// `out += P^T X` for a block of scores and the rows `first_row ..` of `x`, which are staged part by
/// part. `watch` where some key of the block is hidden from some query.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn multiply_columns<E: Float, N: Size>(
    scores: &Shared<[Quad]>,
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    stage: &mut Shared<[Quad]>,
    non_finite: &mut Shared<[u32]>,
    watch: bool,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let columns = comptime!(Columns::of(tile, dim));
    let staged = comptime!(columns.staged.min(tile.block_q()));
    #[unroll]
    for pass in 0..columns.passes {
        for part in 0..comptime!(tile.block_q() / staged) {
            let first = part * staged;
            sync_cube();
            stage_columns(
                x,
                rows,
                first_row + first as i32,
                stage,
                non_finite,
                watch,
                staged,
                pass,
                columns,
                dim,
                config,
            );
            sync_cube();
            if watch && non_finite[0] != 0 {
                accumulate_columns(
                    scores, &*stage, out, unit_x, unit_y, first, staged, pass, columns, true, tile,
                );
            } else {
                accumulate_columns(
                    scores, &*stage, out, unit_x, unit_y, first, staged, pass, columns, false, tile,
                );
            }
        }
    }
}

/// `out[r][n] += sum_j P[row r][j] X[j][column]` over the staged rows of `X`.
///
/// With `guard`, a probability of exactly 0 skips its row of `X`, so that a hidden row's NaN or
/// infinity does not become NaN.
#[cube]
// `guard` decides at compile time whether there is an inner test at all.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn accumulate_rows(
    scores: &Shared<[Quad]>,
    stage: &Shared<[Quad]>,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    first: usize,
    #[comptime] staged: usize,
    #[comptime] pass: usize,
    #[comptime] columns: Columns,
    #[comptime] guard: bool,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.score_pitch());
    let width = comptime!(columns.width);
    let length = comptime!(tile.units_x * columns.width);
    for group in 0..comptime!(staged / 4) {
        let mut x = Array::<Quad>::new(comptime!(4 * width));
        #[unroll]
        for e in 0..4usize {
            #[unroll]
            for w in 0..width {
                x[comptime!(e * width + w)] =
                    stage[(group * 4 + e) * length + comptime!(w * tile.units_x) + unit_x];
            }
        }
        #[unroll]
        for r in 0..tile.rows {
            let p = scores[(unit_y + r * tile.units_y) * pitch + first / 4 + group];
            #[unroll]
            for e in 0..4usize {
                let weight = p.extract(e);
                #[unroll]
                for w in 0..width {
                    let mut row = x[comptime!(e * width + w)];
                    if comptime!(guard) {
                        if weight == 0.0 {
                            row = Quad::new(0.0);
                        }
                    }
                    let index = comptime!(r * columns.quads() + pass * width + w);
                    out[index] = fma(Quad::new(weight), row, out[index]);
                }
            }
        }
    }
}

/// `out[g, e][n] += sum_i P[i][key 4 (y + g units_y) + e] X[i][column]`: the transposed product.
#[cube]
// `guard` decides at compile time whether there is an inner test at all.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn accumulate_columns(
    scores: &Shared<[Quad]>,
    stage: &Shared<[Quad]>,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    first: usize,
    #[comptime] staged: usize,
    #[comptime] pass: usize,
    #[comptime] columns: Columns,
    #[comptime] guard: bool,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.score_pitch());
    let width = comptime!(columns.width);
    let length = comptime!(tile.units_x * columns.width);
    for i in 0..staged {
        let mut x = Array::<Quad>::new(width);
        #[unroll]
        for w in 0..width {
            x[w] = stage[i * length + comptime!(w * tile.units_x) + unit_x];
        }
        #[unroll]
        for g in 0..comptime!(tile.key_groups()) {
            let p = scores[(first + i) * pitch + unit_y + g * tile.units_y];
            #[unroll]
            for e in 0..4usize {
                let weight = p.extract(e);
                #[unroll]
                for w in 0..width {
                    let mut row = x[w];
                    if comptime!(guard) {
                        if weight == 0.0 {
                            row = Quad::new(0.0);
                        }
                    }
                    let index = comptime!((g * 4 + e) * columns.quads() + pass * width + w);
                    out[index] = fma(Quad::new(weight), row, out[index]);
                }
            }
        }
    }
}
