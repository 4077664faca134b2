//! A problem as kernels see it, and which blocks of the other side a block of queries or keys walks:
//! those wholly hidden are skipped, and those wholly visible need no test of each score.

use cubecl::prelude::*;
use flash_attention_spec::visibility::{end_key, end_query, first_key, first_query};

/// Run-time numbers of a problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Geometry {
    pub batch: usize,
    pub heads: usize,
    /// Query heads that read one key head.
    pub group: usize,
    pub seq_q: i32,
    pub seq_kv: i32,
    /// The band of `causal` and `window`.
    pub offset: i32,
    pub left: i32,
    pub right: i32,
    pub scale: f32,
    /// 1 where there is no cap.
    pub softcap: f32,
    /// Some shading languages have no literal for it.
    pub negative_infinity: f32,
}

/// Rows of the other side that a block can see.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BlockRange {
    pub first: i32,
    pub end: i32,
}

/// The keys that some query of `first_query .. first_query + block_q` sees through the band. None are an
/// empty range: at 0 if they have to be `placed`, else where they would be.
#[cube]
pub(crate) fn keys_of_block(
    geometry: &Geometry,
    first_query: i32,
    #[comptime] block_q: usize,
    #[comptime] placed: bool,
) -> BlockRange {
    let mut last_query = first_query + comptime!(block_q as i32) - 1;
    if last_query >= geometry.seq_q {
        last_query = geometry.seq_q - 1;
    }
    let mut first = first_key(first_query, geometry.offset, geometry.left);
    first = select(first < 0, 0i32, first);
    let mut end = end_key(last_query, geometry.offset, geometry.right);
    if end > geometry.seq_kv {
        end = geometry.seq_kv;
    }
    if comptime!(placed) {
        if end <= first {
            first = 0i32;
            end = 0i32;
        }
    } else if end < first {
        end = first;
    }
    BlockRange { first, end }
}

/// The keys that every query of `first_query .. first_query + block_q` sees through the band; none where
/// some are past the last query.
#[cube]
pub(crate) fn keys_of_all(
    geometry: &Geometry,
    first_query: i32,
    #[comptime] block_q: usize,
) -> BlockRange {
    let last_query = first_query + comptime!(block_q as i32) - 1;
    let mut first = first_key(last_query, geometry.offset, geometry.left);
    first = select(first < 0, 0i32, first);
    let mut end = end_key(first_query, geometry.offset, geometry.right);
    if end > geometry.seq_kv {
        end = geometry.seq_kv;
    }
    if end < first || last_query >= geometry.seq_q {
        end = 0i32;
    }
    BlockRange { first, end }
}

/// The queries that see some key of `first_kv .. first_kv + block_kv` through the band. None are an empty
/// range: at 0 if they have to be `placed`, for a block of them past the last one has no place among the
/// sums that blocks are added to; else where they would be.
#[cube]
pub(crate) fn queries_of_block(
    geometry: &Geometry,
    first_kv: i32,
    #[comptime] block_kv: usize,
    #[comptime] placed: bool,
) -> BlockRange {
    let mut last_kv = first_kv + comptime!(block_kv as i32) - 1;
    if last_kv >= geometry.seq_kv {
        last_kv = geometry.seq_kv - 1;
    }
    let mut first = first_query(first_kv, geometry.offset, geometry.right);
    first = select(first < 0, 0i32, first);
    let mut end = end_query(last_kv, geometry.offset, geometry.left);
    if end > geometry.seq_q {
        end = geometry.seq_q;
    }
    if comptime!(placed) {
        if end <= first {
            first = 0i32;
            end = 0i32;
        }
    } else if end < first {
        end = first;
    }
    BlockRange { first, end }
}

/// Where a cube is at work.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Seat {
    /// The head, counted through the batch.
    pub batch_head: usize,
    place: usize,
    width: usize,
}

#[cube]
impl Seat {
    /// That of cube `number`, where heads with `blocks` blocks each come in sections of `section`, whose cubes
    /// run side by side: within one, a block of every head before the next.
    pub fn of(number: usize, blocks: usize, heads: usize, section: usize) -> Seat {
        let first_head = number / (blocks * section) * section;
        let width = select(heads - first_head < section, heads - first_head, section);
        let place = number - first_head * blocks;
        Seat {
            batch_head: first_head + place % width,
            place,
            width,
        }
    }

    /// The block of the head.
    pub fn block(&self) -> usize {
        self.place / self.width
    }
}

/// Whether every query of the block sees every key of the block, mask aside.
#[cube]
pub(crate) fn wholly_visible(
    geometry: &Geometry,
    first_query: i32,
    first_kv: i32,
    #[comptime] block_q: usize,
    #[comptime] block_kv: usize,
) -> bool {
    let last_query = first_query + comptime!(block_q as i32) - 1;
    let end_kv = first_kv + comptime!(block_kv as i32);
    last_query < geometry.seq_q
        && end_kv <= geometry.seq_kv
        && first_key(last_query, geometry.offset, geometry.left) <= first_kv
        && end_key(first_query, geometry.offset, geometry.right) >= end_kv
}

/// Whether some query of the block sees some key of the block, mask aside. An empty range that is not
/// `placed` (see [`keys_of_block`]) may pass for one that has keys.
#[cube]
pub(crate) fn partly_visible(
    geometry: &Geometry,
    first_query: i32,
    first_kv: i32,
    #[comptime] block_q: usize,
    #[comptime] block_kv: usize,
    #[comptime] placed: bool,
) -> bool {
    let keys = keys_of_block(geometry, first_query, block_q, placed);
    keys.first < first_kv + comptime!(block_kv as i32) && keys.end > first_kv
}
