//! How many times the loops of a kernel go round in one unit: at least as many as are counted by a
//! driver that stops a kernel after so many.
//!
//! Mirrors the loops that the kernels do not unroll; a loop counts once more than it goes round.

use super::tile::{Columns, Tile};
use flash_attention_spec::Problem;

/// Of the kernel that goes round most: the whole walk of the unit that sees most.
pub(crate) fn most_iterations(problem: &Problem, tile: Tile, key_value_together: bool) -> u128 {
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let query_blocks = problem.seq_q.div_ceil(tile.block_q()) as u128;
    let key_blocks = problem.seq_kv.div_ceil(tile.block_kv()) as u128;
    let scores = tile.dots(head_dim);
    let both = scores + tile.dots(value_dim);
    let reduction = (tile.rows * (tile.units_x + 1)) as u128;

    let forward = key_blocks * (1 + scores + reduction + tile.rows_product(value_dim)) + reduction;
    let query = key_blocks * (1 + both + tile.rows_product(head_dim));
    let value_part = tile.columns_product(value_dim);
    let key_part = tile.dots(value_dim) + tile.columns_product(head_dim);
    let parts = match key_value_together {
        true => value_part + key_part,
        false => value_part.max(key_part),
    };
    let key_value = problem.group() as u128 * (1 + query_blocks * (1 + scores + parts));
    let bias = problem.bias.map_or(0, |shape| {
        let summed = tile.summed_blocks(problem, shape);
        let [batches, heads, rows, columns] = summed.map(|n| n as u128);
        let last = tile.block_q() * (tile.row_quads() + 1);
        batches * heads * (2 + rows * (1 + columns * (1 + both))) + last as u128
    });
    forward.max(query).max(key_value).max(bias)
}

impl Tile {
    /// Batches, heads, query blocks and key blocks whose scores a block of a bias of that `shape` is
    /// added to.
    pub(crate) fn summed_blocks(&self, problem: &Problem, shape: [usize; 4]) -> [usize; 4] {
        let query_blocks = problem.seq_q.div_ceil(self.block_q());
        let key_blocks = problem.seq_kv.div_ceil(self.block_kv());
        let all = [problem.batch, problem.heads, query_blocks, key_blocks];
        std::array::from_fn(|n| if shape[n] == 1 { all[n] } else { 1 })
    }

    /// Loads of a unit that shares `quads` with the others of its cube.
    fn loads(&self, quads: usize) -> u128 {
        1 + quads.div_ceil(self.units() as usize) as u128
    }

    /// A block of dot products over `dim` features.
    fn dots(&self, dim: usize) -> u128 {
        let chunks = dim.div_ceil(4).div_ceil(self.depth) as u128;
        let loads =
            self.loads(self.block_q() * self.depth) + self.loads(self.block_kv() * self.depth);
        1 + chunks * (2 + loads + self.depth as u128)
    }

    /// A block of scores times rows of `dim` features, `step` rows each time round.
    fn product(&self, dim: usize, block: usize, step: usize) -> u128 {
        let columns = Columns::of(*self, dim);
        let staged = columns.staged.min(block);
        let parts = (block / staged) as u128;
        let loads = self.loads(staged * columns.width * self.units_x);
        columns.passes as u128 * (1 + parts * (2 + loads + (staged / step) as u128))
    }

    fn rows_product(&self, dim: usize) -> u128 {
        self.product(dim, self.block_kv(), 4)
    }

    fn columns_product(&self, dim: usize) -> u128 {
        self.product(dim, self.block_q(), 1)
    }
}
