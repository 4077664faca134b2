//! The operands of the pass over keys in shared memory, and who fills it: a cube's keys and values, and two
//! stages of queries with their output gradients and statistics.

use super::gradient_blueprint::GradientBlueprint;
use super::pipeline::{Walked, load_owned, load_rows};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// The tiles, and the barriers that tell when they are there.
#[derive(CubeType)]
pub(crate) struct Memory<E: Float> {
    pub keys: Shared<[E]>,
    pub values: Shared<[E]>,
    pub queries: Shared<[E]>,
    pub gradients: Shared<[E]>,
    pub statistics: Shared<[f32]>,
    pub owned_full: Shared<Barrier>,
    pub full_0: Shared<Barrier>,
    pub full_1: Shared<Barrier>,
}

/// Asks for the rows that the cube owns, of head `kv_head`, and for the first two blocks that it walks, from
/// before `end` on backwards; there are `count` of them, `per_head` of each head.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_first<E: Float>(
    memory: &mut Memory<E>,
    kv_head: usize,
    first_kv: i32,
    end: Walked,
    per_head: u32,
    count: u32,
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    heads: usize,
    #[comptime] blueprint: GradientBlueprint,
) {
    if count > 0 {
        load_owned(
            &memory.owned_full,
            key,
            value,
            &mut memory.keys,
            &mut memory.values,
            end.batch,
            kv_head,
            first_kv,
            blueprint,
        );
        load_queries(
            memory,
            0usize,
            Walked {
                batch: end.batch,
                head: end.head,
                block: end.block - 1,
            },
            query,
            output_gradient,
            statistics,
            heads,
            blueprint,
        );
    }
    if count > 1 {
        load_queries(
            memory,
            1usize,
            Walked {
                batch: end.batch,
                head: end.head + 1 / per_head,
                block: end.block - 1 - 1 % per_head,
            },
            query,
            output_gradient,
            statistics,
            heads,
            blueprint,
        );
    }
}

/// Asks for a block of queries, with output gradients and statistics, to `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_stage<E: Float>(
    memory: &mut Memory<E>,
    stage: u32,
    walked: Walked,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    heads: usize,
    #[comptime] blueprint: GradientBlueprint,
) {
    if stage == 0 {
        load_queries(
            memory,
            0usize,
            walked,
            query,
            output_gradient,
            statistics,
            heads,
            blueprint,
        );
    } else {
        load_queries(
            memory,
            1usize,
            walked,
            query,
            output_gradient,
            statistics,
            heads,
            blueprint,
        );
    }
}

/// The same for a stage that is known; there are `heads` in a batch.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_queries<E: Float>(
    memory: &mut Memory<E>,
    #[comptime] stage: usize,
    walked: Walked,
    query: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    heads: usize,
    #[comptime] blueprint: GradientBlueprint,
) {
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let panel = comptime!(block_q * 64);
    let statistic_stage = comptime!(blueprint.statistics());
    let row = (walked.block * comptime!(block_q as u32)) as i32;
    let full = if comptime!(stage == 0) {
        &memory.full_0
    } else {
        &memory.full_1
    };
    full.arrive_and_expect_tx(
        1,
        comptime!(((key_panels + value_panels) * panel * 2 + 3 * block_q * 4) as u32),
    );
    load_rows(
        full,
        query,
        &mut memory.queries,
        comptime!(stage * key_panels * panel).runtime(),
        walked.batch as i32,
        walked.head as i32,
        row,
        key_panels,
        panel,
    );
    full.tma_load_3d(
        statistics,
        &mut memory.statistics
            [comptime!(stage * statistic_stage)..comptime!((stage + 1) * statistic_stage)],
        (walked.batch * heads) as i32 + walked.head as i32,
        0i32,
        row,
    );
    load_rows(
        full,
        output_gradient,
        &mut memory.gradients,
        comptime!(stage * value_panels * panel).runtime(),
        walked.batch as i32,
        walked.head as i32,
        row,
        value_panels,
        panel,
    );
}
