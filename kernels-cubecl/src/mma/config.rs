//! What a kernel is compiled for.

use super::apart::in_parts;
use super::blueprint::{Blocks, Blueprint};
use super::fragment::{CHUNK, chunks, pitch};
use super::instructions::Instructions;
use super::memory::{staged, walked_tile};
use super::stage::Staging;
use super::tf32::Ties;
use flash_attention_spec::{Dtype, Problem};

/// Comptime choices of a kernel: one compiled kernel for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    pub blocks: Blocks,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Elements of a load: 8, 4 or 2, or 1 for rows of any stride. Halves of `f32` come two at least, and
    /// two are for rows of any stride.
    pub vector: usize,
    pub masked: bool,
    pub capped: bool,
    pub biased: bool,
    /// The scale is negative: the largest score belongs to the smallest dot product.
    pub negative: bool,
    pub assembly: bool,
    pub dtype: Dtype,
    /// Rounding of operands to TF32.
    pub tf32: Option<Ties>,
}

impl Config {
    /// The kernel of `problem` with blocks of `blueprint`, whose operands are read in vectors.
    pub(crate) fn of(
        problem: &Problem,
        blueprint: &Blueprint,
        blocks: Blocks,
        vector: usize,
    ) -> Self {
        Self {
            blocks,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            vector,
            masked: problem.mask.is_some(),
            capped: problem.softcap.is_some(),
            biased: problem.bias.is_some(),
            negative: problem.scale < 0.0,
            assembly: blueprint.assembly,
            dtype: problem.dtype,
            tf32: blueprint.tf32,
        }
    }

    /// Whether the score of a visible key is its dot product times the scale.
    pub(crate) const fn plain(&self) -> bool {
        !self.capped && !self.biased
    }

    /// Whether registers are scarce, and what follows from a unit's number is found out again where it is
    /// needed: all but plain kernels of 16-bit numbers, or of TF32 and narrow heads, unless warps own two row tiles and the rows of a
    /// copy are no power of two of chunks.
    pub(crate) const fn crowded(&self) -> bool {
        let even =
            chunks(self.head_dim).is_power_of_two() && chunks(self.value_dim).is_power_of_two();
        let wide = self.blocks.row_tiles > 1 && !even;
        let options = self.masked || self.capped || self.biased;
        let narrow = self.head_dim <= 64 && self.value_dim <= 64;
        let parts = self.halved() && (self.tf32.is_none() || !narrow);
        self.assembly && (parts || options || self.vector < CHUNK || wide)
    }

    /// Whether the largest score belongs to the smallest value that the softmax compares.
    pub(crate) const fn descending(&self) -> bool {
        self.plain() && self.negative
    }

    /// The bits of infinity for the elements in a word of a walked tile, or of numbers that may be rounded
    /// to it: rows that hold one are not multiplied by weights of 0.
    pub(crate) const fn exponent(&self) -> u32 {
        match self.dtype {
            Dtype::F32 if self.blocks.apart => 0x7F80_7F80,
            Dtype::F32 if self.tf32.is_some() => 0x7F7F_0000,
            Dtype::F32 => 0x7F80_0000,
            Dtype::F16 => 0x7C00_7C00,
            Dtype::BF16 => 0x7F80_7F80,
        }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        match (self.dtype, self.tf32) {
            (Dtype::F32, Some(ties)) => Instructions::Tf32 {
                ties,
                columns: false,
            },
            (Dtype::F32, None) => Instructions::SplitF32 {
                apart: self.blocks.apart,
            },
            _ if !self.assembly => Instructions::Generated,
            (Dtype::F16, _) => Instructions::AssemblyF16,
            (Dtype::BF16, _) => Instructions::AssemblyBF16,
        }
    }

    /// Whether tiles are staged as the halves of `f32` numbers.
    pub(crate) const fn halved(&self) -> bool {
        matches!(self.dtype, Dtype::F32)
    }

    /// Staged elements of a row of `dim` features.
    pub(crate) const fn staged(&self, dim: usize) -> usize {
        staged(self.dtype, dim)
    }

    /// Distance of two rows of a shared tile, in chunks.
    pub(crate) const fn pitch(&self, dim: usize) -> usize {
        pitch(self.staged(dim))
    }

    /// Distance of two walked rows that products read, in chunks.
    pub(crate) const fn walked_pitch(&self, dim: usize) -> usize {
        if self.blocks.apart {
            pitch(in_parts(dim))
        } else {
            self.pitch(dim)
        }
    }

    /// Chunks of a walked operand's tile.
    pub(crate) const fn walked_tile(&self, dim: usize) -> usize {
        walked_tile(self.dtype, dim, &self.blocks)
    }

    /// Where walked rows land, in chunks from the place that products read.
    pub(crate) const fn landing(&self, dim: usize) -> usize {
        if self.blocks.apart {
            self.blocks.walked * self.walked_pitch(dim)
        } else {
            0
        }
    }

    /// Staging of walked rows as products read them: what hidden ones are looked for in.
    pub(crate) const fn walked_staging(&self, dim: usize) -> Staging {
        let mut staging = self.staging(self.blocks.walked, dim);
        if self.blocks.apart {
            staging.dim = in_parts(dim);
        }
        staging
    }

    /// Tiles of eight columns that the sums for `dim` features have.
    pub(crate) const fn tiles(&self, dim: usize) -> usize {
        if self.halved() {
            dim.div_ceil(8)
        } else {
            chunks(dim)
        }
    }

    /// Staging of `rows` rows of `dim` features.
    pub(crate) const fn staging(&self, rows: usize, dim: usize) -> Staging {
        Staging {
            rows,
            dim: self.staged(dim),
            units: self.blocks.units(),
            vector: self.vector,
            halved: self.halved(),
            crowded: self.crowded(),
            tf32: self.tf32,
            asynchronous: self.assembly && self.vector == 8,
            prefetch: self.blocks.prefetch && self.vector == 8,
        }
    }
}
