//! Where the tiles of the wide key and value gradients lie in shared memory, and who fills them.
//!
//! Queries, with the row statistics, and output gradients have two stages each, of their own barriers:
//! one warpgroup starts with queries, the other with output gradients.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::load_shared;
use super::pipeline::{Walked, load_rows, load_stage, retire};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Places in a cube's three slices: one register tells where each begins.
///
/// Elements: keys, values, two stages of queries, two of output gradients. Numbers: two stages of
/// statistics, two blocks of weights. Words: the constants below.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub value: usize,
    pub query: usize,
    pub query_stage: usize,
    pub gradient: usize,
    pub gradient_stage: usize,
    pub elements: usize,
    pub weights: usize,
    pub numbers: usize,
}

impl Layout {
    pub(crate) const fn new(blueprint: &GradientBlueprint) -> Self {
        let key_panels = blueprint.head_dim.div_ceil(64);
        let value_panels = blueprint.value_dim.div_ceil(64);
        let owned_panel = blueprint.owned() * 64;
        let panel = blueprint.walked * 64;
        let (query_stage, gradient_stage) = (key_panels * panel, value_panels * panel);
        let value = key_panels * owned_panel;
        let query = value + value_panels * owned_panel;
        let gradient = query + 2 * query_stage;
        let weights = 2 * blueprint.statistics();
        Self {
            value,
            query,
            query_stage,
            gradient,
            gradient_stage,
            elements: gradient + 2 * gradient_stage,
            weights,
            numbers: weights + 2 * blueprint.handed_over() / 4,
        }
    }
}

/// A cube's shared memory: the three slices, and barriers that tell when tiles are there.
#[derive(CubeType)]
pub(crate) struct Memory<E: Float> {
    pub tiles: Shared<[E]>,
    pub numbers: Shared<[f32]>,
    pub words: Shared<[u32]>,
    pub key_full: Shared<Barrier>,
    pub value_full: Shared<Barrier>,
    pub query_full_0: Shared<Barrier>,
    pub query_full_1: Shared<Barrier>,
    pub gradient_full_0: Shared<Barrier>,
    pub gradient_full_1: Shared<Barrier>,
}

/// The memory, not filled yet.
#[cube]
pub(crate) fn memory<E: Float>(#[comptime] blueprint: GradientBlueprint) -> Memory<E> {
    let layout = comptime!(Layout::new(&blueprint));
    Memory::<E> {
        tiles: Shared::new_aligned_slice(comptime!(layout.elements), 1024usize),
        numbers: Shared::new_aligned_slice(comptime!(layout.numbers), 128usize),
        words: Shared::new_slice(comptime!(WORDS)),
        key_full: Barrier::shared_uninit(),
        value_full: Barrier::shared_uninit(),
        query_full_0: Barrier::shared_uninit(),
        query_full_1: Barrier::shared_uninit(),
        gradient_full_0: Barrier::shared_uninit(),
        gradient_full_1: Barrier::shared_uninit(),
    }
}

/// Words that count how many planes are done with a stage: of queries (0, 1), of output gradients.
pub(crate) const GRADIENTS_DONE: usize = 2;
/// Words that wait for whoever asks, so that no register holds them all along.
pub(crate) const BATCH_HEAD: usize = 4;
pub(crate) const FIRST_BLOCK: usize = 5;
pub(crate) const PER_HEAD: usize = 6;
/// How many there are.
pub(crate) const WORDS: usize = 7;

/// The word `n` of those at `words`.
#[cube]
pub(crate) fn word(words: u32, #[comptime] n: usize) -> u32 {
    load_shared(words + comptime!((n * 4) as u32))
}

/// What the cube walks two blocks later.
#[cube]
fn after_next(walked: Walked, words: u32) -> Walked {
    let first_block = word(words, FIRST_BLOCK);
    let per_head = word(words, PER_HEAD);
    let ahead = walked.block - first_block + 2;
    Walked {
        batch: walked.batch,
        head: walked.head + ahead / per_head,
        block: first_block + ahead % per_head,
    }
}

/// The plane is done with `walked`'s queries and statistics, in `stage`; the last of the cube's planes
/// refills it, if there are `more`. Nobody waits.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn release_queries<E: Float>(
    memory: &mut Memory<E>,
    words: u32,
    more: bool,
    stage: u32,
    walked: Walked,
    query: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    heads: usize,
    #[comptime] blueprint: GradientBlueprint,
) {
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    if retire(words + stage * 4, UNIT_POS % 32, more, last_plane) {
        let next = after_next(walked, words);
        if stage == 0 {
            load_queries(memory, 0usize, next, query, statistics, heads, blueprint);
        } else {
            load_queries(memory, 1usize, next, query, statistics, heads, blueprint);
        }
    }
    sync_plane();
}

/// The same for output gradients.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn release_gradients<E: Float>(
    memory: &mut Memory<E>,
    words: u32,
    more: bool,
    stage: u32,
    walked: Walked,
    output_gradient: &TensorMap<E, Tiled>,
    #[comptime] blueprint: GradientBlueprint,
) {
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    let counter = words + comptime!((GRADIENTS_DONE * 4) as u32) + stage * 4;
    if retire(counter, UNIT_POS % 32, more, last_plane) {
        let next = after_next(walked, words);
        if stage == 0 {
            load_gradients(memory, 0usize, next, output_gradient, blueprint);
        } else {
            load_gradients(memory, 1usize, next, output_gradient, blueprint);
        }
    }
    sync_plane();
}

/// Asks for a block of queries, with their statistics, to `stage`; there are `heads` in a batch.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_queries<E: Float>(
    memory: &mut Memory<E>,
    #[comptime] stage: usize,
    walked: Walked,
    query: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    heads: usize,
    #[comptime] blueprint: GradientBlueprint,
) {
    let full = if comptime!(stage == 0) {
        &memory.query_full_0
    } else {
        &memory.query_full_1
    };
    let layout = comptime!(Layout::new(&blueprint));
    let row = (walked.block * comptime!(blueprint.walked as u32)) as i32;
    let statistic_stage = comptime!(blueprint.statistics());
    full.arrive_and_expect_tx(
        1,
        comptime!((layout.query_stage * 2 + 3 * blueprint.walked * 4) as u32),
    );
    full.tma_load_3d(
        statistics,
        &mut memory.numbers
            [comptime!(stage * statistic_stage)..comptime!((stage + 1) * statistic_stage)],
        (walked.batch * heads) as i32 + walked.head as i32,
        0i32,
        row,
    );
    load_rows(
        full,
        query,
        &mut memory.tiles,
        comptime!(layout.query + stage * layout.query_stage).runtime(),
        walked.batch as i32,
        walked.head as i32,
        row,
        comptime!(blueprint.head_dim.div_ceil(64)),
        comptime!(blueprint.walked * 64),
    );
}

/// Asks for a block of output gradients to `stage`.
#[cube]
pub(crate) fn load_gradients<E: Float>(
    memory: &mut Memory<E>,
    #[comptime] stage: usize,
    walked: Walked,
    output_gradient: &TensorMap<E, Tiled>,
    #[comptime] blueprint: GradientBlueprint,
) {
    let full = if comptime!(stage == 0) {
        &memory.gradient_full_0
    } else {
        &memory.gradient_full_1
    };
    let layout = comptime!(Layout::new(&blueprint));
    load_stage(
        full,
        output_gradient,
        &mut memory.tiles,
        comptime!(layout.gradient + stage * layout.gradient_stage).runtime(),
        walked.batch as i32,
        walked.head as i32,
        (walked.block * comptime!(blueprint.walked as u32)) as i32,
        comptime!(blueprint.value_dim.div_ceil(64)),
        comptime!(blueprint.walked * 64),
    );
}
