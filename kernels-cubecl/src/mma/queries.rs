//! Blocks of queries, and of their output gradients, on their way to shared memory together: what cubes that
//! own keys walk.

use super::config::Config;
use super::fragment::Chunk;
use super::gradient::{load_statistics, store_statistics};
use super::one_pass_tiles::Tiles;
use super::stage::{Staging, issue, land, rows_of, stage_first};
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// How both are staged, and the chunks from one stage of each to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueryStaging {
    pub query: Staging,
    pub gradient: Staging,
    pub query_slot: usize,
    pub gradient_slot: usize,
}

/// Rows of both that wait in registers, where copies are not asynchronous.
#[derive(CubeType)]
pub(crate) struct Pending<E: Float> {
    pub query: Array<Chunk<E>>,
    pub gradient: Array<Chunk<E>>,
}

/// Room for them.
#[cube]
pub(crate) fn pending<E: Float>(#[comptime] staging: QueryStaging) -> Pending<E> {
    Pending::<E> {
        query: Array::new(comptime!(staging.query.pending())),
        gradient: Array::new(comptime!(staging.gradient.pending())),
    }
}

/// Stages block `block` of the first head that reads `kv_head`, with its statistics, in places that are free.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn stage_first_queries<E: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    row_statistics: &[f32],
    batch: usize,
    kv_head: usize,
    block: usize,
    tiles: &mut Tiles<E>,
    pending: &mut Pending<E>,
    geometry: &Geometry,
    #[comptime] staging: QueryStaging,
    #[comptime] config: Config,
) {
    let block_q = comptime!(staging.query.rows);
    let own = UNIT_POS as usize;
    let mut pending_statistics = Array::<f32>::new(3usize);
    let head = kv_head * geometry.group;
    let first_query = (block * block_q) as i32;
    stage_first(
        query,
        rows_of(query, batch, head, geometry.seq_q),
        first_query,
        &mut tiles.queries,
        &mut pending.query,
        staging.query,
    );
    stage_first(
        output_gradient,
        rows_of(output_gradient, batch, head, geometry.seq_q),
        first_query,
        &mut tiles.gradients,
        &mut pending.gradient,
        staging.gradient,
    );
    load_statistics(
        row_statistics,
        &mut pending_statistics,
        batch,
        head,
        first_query + own as i32,
        geometry,
        config,
    );
    if own < block_q {
        store_statistics(
            &pending_statistics,
            &mut tiles.statistics,
            0usize,
            own,
            block_q,
        );
    }
}

/// [`issue`]s the rows from `first_query` on of a head, to `stage`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn issue_queries<E: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    batch: usize,
    head: usize,
    first_query: i32,
    queries: &mut Shared<[Chunk<E>]>,
    gradients: &mut Shared<[Chunk<E>]>,
    stage: usize,
    pending: &mut Pending<E>,
    geometry: &Geometry,
    #[comptime] staging: QueryStaging,
) {
    issue(
        query,
        rows_of(query, batch, head, geometry.seq_q),
        first_query,
        queries,
        stage * staging.query_slot,
        &mut pending.query,
        staging.query,
    );
    issue(
        output_gradient,
        rows_of(output_gradient, batch, head, geometry.seq_q),
        first_query,
        gradients,
        stage * staging.gradient_slot,
        &mut pending.gradient,
        staging.gradient,
    );
}

/// [`land`]s what [`issue_queries`] started.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn land_queries<E: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    batch: usize,
    head: usize,
    first_query: i32,
    queries: &mut Shared<[Chunk<E>]>,
    gradients: &mut Shared<[Chunk<E>]>,
    stage: usize,
    pending: &Pending<E>,
    geometry: &Geometry,
    #[comptime] staging: QueryStaging,
) {
    land(
        query,
        rows_of(query, batch, head, geometry.seq_q),
        first_query,
        queries,
        stage * staging.query_slot,
        &pending.query,
        staging.query,
    );
    land(
        output_gradient,
        rows_of(output_gradient, batch, head, geometry.seq_q),
        first_query,
        gradients,
        stage * staging.gradient_slot,
        &pending.gradient,
        staging.gradient,
    );
}
