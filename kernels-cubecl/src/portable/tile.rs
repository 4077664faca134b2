//! The block sizes of a cube, and the register-tile products every kernel is built from.

use cubecl::prelude::*;

/// Four `f32`, the unit of every staged load.
pub(crate) type Quad = Vector<f32, Const<4>>;

/// How the units of a cube share a block of scores: unit `(y, x)` holds the rows `y + r * units_y`
/// and, four keys at a time, the quads `x + c * units_x` of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Units along the queries.
    pub units_y: usize,
    /// Units along the keys.
    pub units_x: usize,
    /// Query rows of a unit.
    pub rows: usize,
    /// Keys of a unit, in fours.
    pub columns: usize,
    /// Features staged at a time for a product over features, in fours.
    pub depth: usize,
    /// Features of a unit in one pass of a product over rows, in fours, where the head has as many.
    /// Wider passes are fewer, and meet at fewer barriers.
    pub width: usize,
}

impl Tile {
    /// 32 x 32 scores, 64 units.
    pub const SMALLEST: Self = Self {
        units_y: 8,
        units_x: 8,
        rows: 4,
        columns: 1,
        depth: 8,
        width: 2,
    };
    /// 32 x 64 scores, 128 units: more units a row, for wide heads within 16 KiB.
    pub const MEDIUM: Self = Self {
        units_y: 8,
        units_x: 16,
        rows: 4,
        columns: 1,
        depth: 2,
        width: 1,
    };
    /// 64 x 64 scores, 256 units.
    pub const LARGE: Self = Self {
        units_y: 16,
        units_x: 16,
        rows: 4,
        columns: 1,
        depth: 8,
        width: 1,
    };
    /// 64 x 64 scores, 64 units, each with 8 x 8 of them: for devices without a fixed number of
    /// registers, where loads from shared memory cost far more than arithmetic.
    pub const SOFTWARE: Self = Self {
        units_y: 8,
        units_x: 8,
        rows: 8,
        columns: 2,
        depth: 4,
        width: 2,
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
        self.row_quads() * 4
    }

    /// Keys of a block, in fours.
    pub(crate) const fn row_quads(&self) -> usize {
        self.units_x * self.columns
    }

    /// Groups of four keys that a unit owns in the key and value gradients.
    pub(crate) const fn key_groups(&self) -> usize {
        self.row_quads() / self.units_y
    }

    /// Length of a staged row, in fours. One more than its content: an odd stride keeps the rows
    /// that neighbouring units read in different banks.
    pub(crate) const fn pitch(&self) -> usize {
        self.depth + 1
    }

    /// Length of a row of the score tile, in fours.
    pub(crate) const fn score_pitch(&self) -> usize {
        self.row_quads() + 1
    }

    /// Staging area, in fours: query and key rows side by side, or rows of the other operand.
    pub(crate) const fn stage(&self) -> usize {
        (self.block_q() + self.block_kv()) * self.pitch()
    }

    /// Shared memory of a cube, in bytes: the staging area, the score tile, a number for each row
    /// and x unit, a flag.
    pub const fn shared_memory(&self) -> usize {
        let tile = self.block_q() * self.score_pitch();
        (self.stage() + tile) * 16 + self.block_q() * self.units_x * 4 + 16
    }

    /// `f32` accumulators of a unit for `dim` features of each of its keys.
    pub(crate) fn key_accumulators(&self, dim: usize) -> usize {
        self.key_groups() * 4 * Columns::of(*self, dim).quads() * 4
    }
}

/// How the columns of a product over rows are dealt to the x units: unit `x` accumulates, four
/// features at a time, the quads `x + n * units_x`, `width` of them for each pass over the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// Quads of a unit in one pass.
    pub width: usize,
    /// Passes over the rows.
    pub passes: usize,
    /// Rows that fit the staging area at a time.
    pub staged: usize,
}

impl Columns {
    /// Those of `dim` features.
    pub(crate) fn of(tile: Tile, dim: usize) -> Self {
        let quads = dim.div_ceil(4).div_ceil(tile.units_x);
        let width = quads.min(tile.width);
        let fit = tile.stage() / (tile.units_x * width);
        let mut staged = tile.block_q().max(tile.block_kv());
        while staged > fit {
            staged /= 2;
        }
        Self {
            width,
            passes: quads.div_ceil(width),
            staged,
        }
    }

    /// Quads of a unit.
    pub(crate) fn quads(&self) -> usize {
        self.width * self.passes
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
    /// Sums run over so many terms that they are taken in two levels.
    pub long: bool,
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

/// The key, within a block, that element `e` of quad `c` of a unit's row of scores belongs to.
#[cube]
pub(crate) fn key_of(
    unit_x: usize,
    #[comptime] c: usize,
    #[comptime] e: usize,
    #[comptime] tile: Tile,
) -> i32 {
    ((unit_x + comptime!(c * tile.units_x)) * 4 + e) as i32
}

/// `scores[r, c] += a[row r] . b[keys of quad c]` over the staged features.
///
/// `a` holds query rows, `b` key rows behind them, key `e` of quad `x + c * units_x` at slot
/// `(4 c + e) * units_x + x` so that neighbouring units read neighbouring rows.
#[cube]
pub(crate) fn accumulate_dots(
    stage: &Shared<[Quad]>,
    scores: &mut Array<Quad>,
    unit_x: usize,
    unit_y: usize,
    #[comptime] tile: Tile,
) {
    let pitch = comptime!(tile.pitch());
    let columns = comptime!(tile.columns);
    let keys = comptime!(tile.block_q() * tile.pitch());
    for d in 0..tile.depth {
        // Transposed: one quad holds a feature of four keys.
        let mut b = Array::<Quad>::new(comptime!(columns * 4));
        #[unroll]
        for c in 0..columns {
            let mut key_quads = Array::<Quad>::new(4usize);
            #[unroll]
            for key in 0..4usize {
                let slot = comptime!((c * 4 + key) * tile.units_x) + unit_x;
                key_quads[key] = stage[keys + slot * pitch + d];
            }
            #[unroll]
            for e in 0..4usize {
                let mut feature = Quad::new(0.0);
                #[unroll]
                for key in 0..4usize {
                    feature.insert(key, key_quads[key].extract(e));
                }
                b[comptime!(c * 4 + e)] = feature;
            }
        }
        #[unroll]
        for r in 0..tile.rows {
            let quad = stage[(unit_y + r * tile.units_y) * pitch + d];
            #[unroll]
            for e in 0..4usize {
                let a = Quad::new(quad.extract(e));
                #[unroll]
                for c in 0..columns {
                    let index = comptime!(r * columns + c);
                    scores[index] = fma(a, b[comptime!(c * 4 + e)], scores[index]);
                }
            }
        }
    }
}
