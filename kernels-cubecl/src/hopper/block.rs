//! A block of keys as a warpgroup of the forward pass meets it, one tile's keys after another
//! (`walk.rs`) or with the products of two blocks joined (`joined.rs`): where it lies, how much of it the
//! warpgroup's queries see, and values that are not finite.

use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, non_finite};
use super::instructions::unit_again;
use crate::schedule::{Geometry, keys_of_all, keys_of_block};
use cubecl::prelude::*;

/// Where a cube's tiles and barriers lie in shared memory. Barriers are those of every warpgroup's queries,
/// then of stages of keys, then of stages of values: that they are there (`full`), and that every plane
/// which reads them is done with them (`free`).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Places {
    pub full: u32,
    pub free: u32,
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
}

#[cube]
impl Places {
    /// A warpgroup's queries, which are number `own` of what copies fill.
    pub fn queries_at(&self, own: u32, #[comptime] blueprint: ForwardBlueprint) -> u32 {
        self.queries + own * comptime!(blueprint.own_queries())
    }

    /// A stage of keys.
    pub fn keys_at(&self, stage: u32, #[comptime] blueprint: ForwardBlueprint) -> u32 {
        self.keys + stage * comptime!(blueprint.key_stage())
    }

    /// A stage of values.
    pub fn values_at(&self, stage: u32, #[comptime] blueprint: ForwardBlueprint) -> u32 {
        self.values + stage * comptime!(blueprint.value_stage())
    }
}

/// The blocks of keys that some of a warpgroup's queries see, and those that all do.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sight {
    some_first: u32,
    pub some_end: u32,
    all_first: u32,
    all_end: u32,
}

#[cube]
impl Sight {
    pub fn new(
        geometry: &Geometry,
        first_query: i32,
        #[comptime] blueprint: ForwardBlueprint,
    ) -> Sight {
        let block_kv = comptime!(blueprint.block_kv as u32);
        let some = keys_of_block(geometry, first_query, 64usize, true);
        let mut some_end = (some.end as u32).div_ceil(block_kv);
        if first_query >= geometry.seq_q {
            some_end = 0u32;
        }
        let all = keys_of_all(geometry, first_query, 64usize);
        Sight {
            some_first: some.first as u32 / block_kv,
            some_end,
            all_first: (all.first as u32).div_ceil(block_kv),
            all_end: all.end as u32 / block_kv,
        }
    }

    /// Whether some query sees some key of the block.
    pub fn reaches(&self, block: u32) -> bool {
        block >= self.some_first && block < self.some_end
    }

    /// Whether some of the queries do not see a key of the block because it lies before those that they
    /// see, or because it lies behind.
    pub fn edges(&self, block: u32) -> (bool, bool) {
        (block < self.all_first, block >= self.all_end)
    }
}

/// The first key of a block of which `unit` has the scores.
#[cube]
pub(crate) fn column_of(unit: u32, block: u32, #[comptime] blueprint: ForwardBlueprint) -> i32 {
    (block * comptime!(blueprint.block_kv as u32) + (unit % 4) * 2) as i32
}

/// Whether a block of values holds a number that is not finite; the same for a warpgroup's units.
#[cube]
pub(crate) fn non_finite_values(values: u32, #[comptime] blueprint: ForwardBlueprint) -> u32 {
    non_finite(
        values,
        blueprint.block_kv,
        blueprint.value_dim,
        blueprint.warpgroups,
        comptime!(blueprint.element()),
    )
}

/// The output with a block of values added, but for those of probability 0, whatever they hold.
#[cube]
pub(crate) fn add_careful_values<P: Size, O: Size>(
    output: Vector<f32, O>,
    probabilities: Vector<u32, P>,
    values: u32,
    #[comptime] blueprint: ForwardBlueprint,
) -> Vector<f32, O> {
    add_careful::<P, O>(
        output,
        probabilities,
        values,
        unit_again() % 32,
        0usize,
        blueprint.block_kv,
        blueprint.value_dim,
        comptime!(blueprint.element()),
    )
}
