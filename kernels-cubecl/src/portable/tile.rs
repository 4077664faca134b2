//! The block sizes of a cube, and the register-tile products every kernel is built from.

use cubecl::prelude::*;

/// Four `f32`, the unit of every staged load.
pub(crate) type Quad = Vector<f32, Const<4>>;

/// How the units of a cube share a block of scores: unit `(y, x)` holds the rows `y + r * units_y`
/// and the columns `4 x .. 4 x + 4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Units along the queries.
    pub units_y: usize,
    /// Units along the keys.
    pub units_x: usize,
    /// Query rows of a unit.
    pub rows: usize,
    /// Features staged at a time for a product over features, in fours.
    pub depth: usize,
}

impl Tile {
    /// 32 x 32 scores, 64 units.
    pub const SMALLEST: Self = Self {
        units_y: 8,
        units_x: 8,
        rows: 4,
        depth: 8,
    };
    /// 32 x 64 scores, 128 units: more units a row, for wide heads within 16 KiB.
    pub const MEDIUM: Self = Self {
        units_y: 8,
        units_x: 16,
        rows: 4,
        depth: 2,
    };
    /// 64 x 64 scores, 256 units.
    pub const LARGE: Self = Self {
        units_y: 16,
        units_x: 16,
        rows: 4,
        depth: 8,
    };

    /// Units of a cube.
    pub const fn units(&self) -> u32 {
        (self.units_x * self.units_y) as u32
    }

    /// Queries of a block.
    pub const fn block_q(&self) -> usize {
        self.units_y * self.rows
    }

    /// Keys of a block.
    pub const fn block_kv(&self) -> usize {
        self.units_x * 4
    }

    /// Groups of four keys that a unit owns in the key and value gradients.
    pub(crate) const fn key_groups(&self) -> usize {
        self.units_x / self.units_y
    }

    /// Length of a staged row, in fours. One more than its content: an odd stride keeps the rows
    /// that neighbouring units read in different banks.
    pub(crate) const fn pitch(&self) -> usize {
        self.depth + 1
    }

    /// Length of a row of the score tile, in fours.
    pub(crate) const fn score_pitch(&self) -> usize {
        self.units_x + 1
    }

    /// Staging area, in fours: query and key rows side by side, or value rows.
    pub(crate) const fn stage(&self) -> usize {
        (self.block_q() + self.block_kv()) * self.pitch()
    }

    /// Rows of the other operand that fit the staging area, one quad for each x unit.
    pub(crate) const fn staged_rows(&self) -> usize {
        let fit = self.stage() / self.units_x;
        let longest = if self.block_kv() > self.block_q() {
            self.block_kv()
        } else {
            self.block_q()
        };
        let mut rows = longest;
        while rows > fit {
            rows /= 2;
        }
        rows
    }

    /// Shared memory of a cube, in bytes: the staging area, the score tile, a number for each row
    /// and x unit, a flag.
    pub const fn shared_memory(&self) -> usize {
        let tile = self.block_q() * self.score_pitch();
        (self.stage() + tile) * 16 + self.block_q() * self.units_x * 4 + 16
    }
}

/// Comptime choices: one compiled kernel for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    pub tile: Tile,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Rows are read in fours; else by their stride, one element at a time.
    pub vectorized: bool,
    pub capped: bool,
}

/// Columns of `dim` features that an x unit accumulates, in fours.
pub(crate) fn column_passes(tile: Tile, dim: usize) -> usize {
    dim.div_ceil(4).div_ceil(tile.units_x)
}

/// Whether a lane is an infinity or not a number. Tests the exponent bits, which no
/// floating-point rewriting by a driver can fold away.
#[cube]
pub(crate) fn has_non_finite(x: Quad) -> bool {
    let mut found = false;
    #[unroll]
    for e in 0..4usize {
        let bits = u32::reinterpret(x.extract(e));
        found = found || (bits & 0x7F80_0000u32) == 0x7F80_0000u32;
    }
    found
}

/// `scores[r][c] += a[row r] . b[column c]` over the staged features.
///
/// `a` holds query rows, `b` key rows behind them, key `4 x + c` at slot `c * units_x + x` so that
/// neighbouring units read neighbouring rows.
#[cube]
pub(crate) fn accumulate_dots(
    stage: &Shared<[Quad]>,
    scores: &mut Array<f32>,
    unit_x: usize,
    unit_y: usize,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.pitch());
    let keys = comptime!(tile.block_q() * tile.pitch());
    for d in 0..tile.depth {
        let mut b = Array::<f32>::new(16usize);
        #[unroll]
        for c in 0..4usize {
            let quad = stage[keys + (c * tile.units_x + unit_x) * pitch + d];
            #[unroll]
            for e in 0..4usize {
                b[comptime!(c * 4 + e)] = quad.extract(e);
            }
        }
        #[unroll]
        for r in 0..tile.rows {
            let quad = stage[(unit_y + r * tile.units_y) * pitch + d];
            let mut sums = Array::<f32>::new(4usize);
            #[unroll]
            for c in 0..4usize {
                sums[c] = scores[comptime!(r * 4 + c)];
            }
            #[unroll]
            for e in 0..4usize {
                let a = quad.extract(e);
                #[unroll]
                for c in 0..4usize {
                    sums[c] = fma(a, b[comptime!(c * 4 + e)], sums[c]);
                }
            }
            #[unroll]
            for c in 0..4usize {
                scores[comptime!(r * 4 + c)] = sums[c];
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
pub(crate) fn accumulate_rows(
    scores: &Shared<[Quad]>,
    stage: &Shared<[Quad]>,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    first: usize,
    #[comptime] staged: usize,
    #[comptime] pass: usize,
    #[comptime] passes: usize,
    #[comptime] guard: bool,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.score_pitch());
    for group in 0..comptime!(staged / 4) {
        let mut x = Array::<Quad>::new(4usize);
        #[unroll]
        for e in 0..4usize {
            x[e] = stage[(group * 4 + e) * tile.units_x + unit_x];
        }
        #[unroll]
        for r in 0..tile.rows {
            let p = scores[(unit_y + r * tile.units_y) * pitch + first / 4 + group];
            #[unroll]
            for e in 0..4usize {
                let weight = p.extract(e);
                let mut row = x[e];
                if comptime!(guard) {
                    if weight == 0.0 {
                        row = Quad::new(0.0);
                    }
                }
                let index = comptime!(r * passes + pass);
                out[index] = fma(Quad::new(weight), row, out[index]);
            }
        }
    }
}

/// `out[g, e][n] += sum_i P[i][key 4 (y + g units_y) + e] X[i][column]`: the transposed product.
#[cube]
// `guard` decides at compile time whether there is an inner test at all.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn accumulate_columns(
    scores: &Shared<[Quad]>,
    stage: &Shared<[Quad]>,
    out: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    first: usize,
    #[comptime] staged: usize,
    #[comptime] pass: usize,
    #[comptime] passes: usize,
    #[comptime] guard: bool,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.score_pitch());
    for i in 0..staged {
        let x = stage[i * tile.units_x + unit_x];
        #[unroll]
        for g in 0..comptime!(tile.key_groups()) {
            let p = scores[(first + i) * pitch + unit_y + g * tile.units_y];
            #[unroll]
            for e in 0..4usize {
                let weight = p.extract(e);
                let mut row = x;
                if comptime!(guard) {
                    if weight == 0.0 {
                        row = Quad::new(0.0);
                    }
                }
                let index = comptime!((g * 4 + e) * passes + pass);
                out[index] = fma(Quad::new(weight), row, out[index]);
            }
        }
    }
}
