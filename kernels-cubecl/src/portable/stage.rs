//! Loads from global to shared memory, as `f32`, from any strides.

use super::tile::{Columns, Config, Quad, has_non_finite};
use cubecl::prelude::*;

/// Rows of one head of a `[batch, heads, rows, features]` operand.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rows {
    /// Offset of the head's first element.
    pub base: usize,
    /// Rows it has.
    pub count: i32,
}

/// The rows of `batch`, `head`.
#[cube]
pub(crate) fn rows_of<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    batch: usize,
    head: usize,
    count: i32,
) -> Rows {
    Rows {
        base: batch * x.stride(0) + head * x.stride(1),
        count,
    }
}

/// Features `4 quad .. 4 quad + 4` of a row; 0 past the last row and past the last feature, so
/// that memory outside the operand is never read.
#[cube]
pub(crate) fn load_quad<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    row: i32,
    quad: usize,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) -> Quad {
    let mut loaded = Quad::new(0.0);
    if row < rows.count && quad < comptime!(dim.div_ceil(4)) {
        let at = rows.base + row as usize * x.stride(2);
        if comptime!(config.vectorized) {
            loaded = Quad::cast_from(x[at / 4 + quad]);
        } else {
            let step = x.stride(3);
            #[unroll]
            for e in 0..4usize {
                let feature = quad * 4 + e;
                if feature < dim {
                    loaded.insert(e, f32::cast_from(x[at + feature * step].extract(0usize)));
                }
            }
        }
    }
    loaded
}

/// Stages features `first_quad ..` of `length` rows for a product over features.
///
/// With `interleave`, rows go to the slots that [`accumulate_dots`](super::tile::accumulate_dots)
/// reads keys from.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn stage_features<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    first_quad: usize,
    stage: &mut Shared<[Quad]>,
    #[comptime] slot: usize,
    #[comptime] length: usize,
    #[comptime] interleave: bool,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let total = comptime!(length * tile.depth);
    let units = comptime!(tile.units() as usize);
    for n in 0..comptime!(total.div_ceil(units)) {
        let index = n * units + UNIT_POS as usize;
        if comptime!(total % units == 0) || index < total {
            let row = index / tile.depth;
            let quad = index % tile.depth;
            let mut to = row;
            if comptime!(interleave) {
                let four = row / 4;
                to = ((four / tile.units_x) * 4 + row % 4) * tile.units_x + four % tile.units_x;
            }
            stage[slot + to * comptime!(tile.pitch()) + quad] = load_quad::<E, N>(
                x,
                rows,
                first_row + row as i32,
                first_quad + quad,
                dim,
                config,
            );
        }
    }
}

/// Stages `length` rows, the features of one pass, for a product over rows.
///
/// With `watch`, raises `flag` if a staged value is not finite.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn stage_columns<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    rows: Rows,
    first_row: i32,
    stage: &mut Shared<[Quad]>,
    flag: &mut Shared<[u32]>,
    watch: bool,
    #[comptime] length: usize,
    #[comptime] pass: usize,
    #[comptime] columns: Columns,
    #[comptime] dim: usize,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    let quads = comptime!(columns.width * tile.units_x);
    let total = comptime!(length * quads);
    let units = comptime!(tile.units() as usize);
    for n in 0..comptime!(total.div_ceil(units)) {
        let index = n * units + UNIT_POS as usize;
        if comptime!(total % units == 0) || index < total {
            let row = index / quads;
            let quad = comptime!(pass * quads) + index % quads;
            let loaded = load_quad::<E, N>(x, rows, first_row + row as i32, quad, dim, config);
            if watch && has_non_finite(loaded) {
                flag[0] = 1u32;
            }
            stage[index] = loaded;
        }
    }
}
