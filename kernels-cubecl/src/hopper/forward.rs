//! The forward kernel: a cube walks tiles of queries, one warpgroup 64 queries of each.

use super::arrivals::{barrier_init, barrier_wait};
use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, non_finite};
use super::instructions::*;
use super::output::{Chunk, store_rows};
use super::pipeline::{load_stage, row_of};
use super::softmax::{RowPair, masked_scores, probabilities};
use super::tiles::*;
use crate::schedule::{Geometry, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]`, in chunks of eight features, and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
///
/// `S`, `P` and `O` are the registers of a unit for scores, probabilities and output. `section` heads
/// at a time have their tiles side by side, so that the cache keeps their keys and values.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn forward_kernel<E: Float, M: Int, S: Size, P: Size, O: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    output: &mut [Chunk],
    statistics: &mut [f32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: ForwardBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let warpgroups = comptime!(blueprint.warpgroups);
    let stages = comptime!(blueprint.stages);
    let block_kv = comptime!(blueprint.block_kv);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let own_queries = comptime!(key_panels * QUERY_PANEL);
    let panel = comptime!(block_kv * 64);
    let key_stage = comptime!(key_panels * panel);
    let value_stage = comptime!(value_panels * panel);
    let element = comptime!(blueprint.element());

    let mut query_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(warpgroups as usize * own_queries), 1024usize);
    let mut key_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * key_stage), 1024usize);
    let mut value_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * value_stage), 1024usize);
    // Of every warpgroup's queries, then of stages of keys, then of stages of values: the barrier that
    // tells that they are there, and how many planes are done with them.
    let full = Shared::<[Barrier]>::new_slice(comptime!(blueprint.guarded() as usize));
    let mut done = Shared::<[u32]>::new_slice(comptime!(blueprint.guarded() as usize));
    let kept = Shared::<[u32]>::new_aligned_slice(comptime!(blueprint.kept_words()), 16usize);
    let first_key = comptime!(warpgroups);
    let first_value = comptime!(warpgroups + stages);
    let full_address = shared_address::<Barrier>(full.as_ptr());
    let kept_address = shared_address::<u32>(kept.as_ptr());
    let section = section as u32;

    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..comptime!(blueprint.guarded()) {
            barrier_init(full_address + comptime!(8 * i), 1u32);
            done[i as usize] = 0u32;
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    if UNIT_POS == 0 {
        look_ahead(
            &geometry,
            kept_address,
            0u32,
            section,
            0u32,
            true,
            blueprint,
        );
        #[unroll]
        for w in 0..warpgroups {
            load_stage(
                &full[w as usize],
                query,
                &mut query_tile,
                comptime!(w as usize * own_queries).runtime(),
                word(kept_address, NEXT, 0u32) as i32,
                word(kept_address, NEXT, 1u32) as i32,
                word(kept_address, NEXT, 2u32) as i32 + comptime!(w as i32 * 64),
                key_panels,
                QUERY_PANEL,
            );
        }
        #[unroll]
        for s in 0..stages {
            let row = word(kept_address, comptime!(KEYS + 1 + s), 2u32);
            if row != NOTHING {
                let batch = word(kept_address, comptime!(KEYS + 1 + s), 0u32) as i32;
                let kv_head = word(kept_address, comptime!(KEYS + 1 + s), 1u32) as i32;
                load_stage(
                    &full[comptime!((first_key + s) as usize)],
                    key,
                    &mut key_tiles,
                    comptime!(s as usize * key_stage).runtime(),
                    batch,
                    kv_head,
                    row as i32,
                    key_panels,
                    panel,
                );
                load_stage(
                    &full[comptime!((first_value + s) as usize)],
                    value,
                    &mut value_tiles,
                    comptime!(s as usize * value_stage).runtime(),
                    batch,
                    kv_head,
                    row as i32,
                    value_panels,
                    panel,
                );
            }
        }
    }

    let plane = plane_broadcast(UNIT_POS / 32, 0u32);
    let words = kept_address + plane * comptime!(entries(stages) * ENTRY);
    let warpgroup = plane / 4;
    let query_address =
        shared_address::<E>(query_tile.as_ptr()) + warpgroup * comptime!((own_queries * 2) as u32);
    let key_address = shared_address::<E>(key_tiles.as_ptr());
    let value_address = shared_address::<E>(value_tiles.as_ptr());
    let done_address = shared_address::<u32>(done.as_ptr());
    let score_body = comptime!(blueprint.products().scores(blueprint.score_registers()));
    let value_body = comptime!(blueprint.products().values(
        blueprint.output_registers(),
        blueprint.probability_registers()
    ));

    // Blocks of keys so far: they come and go in stages, across tiles.
    let mut filled = 0u32;
    let mut t = 0u32;
    let mut going = true;
    while going {
        sync_plane();
        // From a broadcast the compiler knows that a plane's units agree.
        let count = look_ahead(&geometry, words, t, section, warpgroup, false, blueprint);
        sync_plane();
        let mut left = plane_broadcast(count, 0u32);
        let mut rows = RowPair::new(&geometry, blueprint);
        let mut acc = Vector::<f32, O>::new(0.0f32);
        barrier_wait(full_address + warpgroup * 8, t % 2);

        while left > 0 {
            let block = word(words, OWN, 3u32) + left - 1;
            let stage = filled % stages;
            let phase = filled / stages % 2;
            // A warpgroup passes by what its own queries do not see.
            let mine = block >= word(words, OWN, 1u32) && block < word(words, OWN, 2u32);
            let mut p = Vector::<u32, P>::new(0u32);

            barrier_wait(full_address + (first_key + stage) * 8, phase);
            // How to multiply: not at all (2), careful of what is not finite (1), or as it is (0).
            let mut way = 2u32;
            if mine {
                let mut scores = dot_product::<S>(
                    row_descriptor(query_address),
                    row_descriptor(key_address + stage * comptime!((key_stage * 2) as u32)),
                    comptime!(score_body.clone()),
                );
                release_stage(
                    done_address,
                    words,
                    first_key,
                    stage,
                    left,
                    &full,
                    key,
                    &mut key_tiles,
                    key_panels,
                    blueprint,
                );
                release_queries(
                    done_address,
                    words,
                    left,
                    &full,
                    query,
                    &mut query_tile,
                    blueprint,
                );
                let own_query = plane_broadcast(word(words, OWN, 0u32), 0u32) as i32;
                let first_kv = plane_broadcast(first_key_of(words, left, block_kv), 0u32);
                let edge = comptime!(mask.is_some() || bias.is_some() || blueprint.capped)
                    || !wholly_visible(&geometry, own_query, first_kv, 64usize, block_kv);
                if edge {
                    let unit = unit_again();
                    scores = masked_scores::<E, M, S>(
                        scores,
                        own_query + row_of(unit),
                        first_kv + ((unit % 4) * 2) as i32,
                        plane_broadcast(word(words, KEYS, 0u32), 0u32) as usize,
                        plane_broadcast(word(words, KEYS, 3u32), 0u32) as usize,
                        &mask,
                        &bias,
                        &geometry,
                        blueprint,
                    );
                }
                let growth = rows.grow::<S>(scores, blueprint);
                if plane_any(growth) {
                    let (a0, a1) = rows.rescale();
                    #[unroll]
                    for j in 0..comptime!(blueprint.value_dim / 8) {
                        acc.insert(4 * j, acc.extract(4 * j) * a0);
                        acc.insert(4 * j + 1, acc.extract(4 * j + 1) * a0);
                        acc.insert(4 * j + 2, acc.extract(4 * j + 2) * a1);
                        acc.insert(4 * j + 3, acc.extract(4 * j + 3) * a1);
                    }
                }
                p = probabilities::<S, P>(scores, &mut rows, blueprint);
                barrier_wait(full_address + (first_value + stage) * 8, phase);
                way = 0u32;
                if edge {
                    way = non_finite(
                        value_address + stage * comptime!((value_stage * 2) as u32),
                        block_kv,
                        blueprint.value_dim,
                        blueprint.warpgroups,
                        element,
                    );
                }
            } else {
                release_stage(
                    done_address,
                    words,
                    first_key,
                    stage,
                    left,
                    &full,
                    key,
                    &mut key_tiles,
                    key_panels,
                    blueprint,
                );
                release_queries(
                    done_address,
                    words,
                    left,
                    &full,
                    query,
                    &mut query_tile,
                    blueprint,
                );
                barrier_wait(full_address + (first_value + stage) * 8, phase);
            }
            if way < 2 {
                if way == 0 {
                    acc = value_product::<P, O>(
                        acc,
                        p,
                        column_descriptor(
                            value_address + stage * comptime!((value_stage * 2) as u32),
                            comptime!(panel * 2),
                        ),
                        comptime!(value_body.clone()),
                    );
                } else {
                    acc = add_careful::<P, O>(
                        acc,
                        p,
                        value_address + stage * comptime!((value_stage * 2) as u32),
                        unit_again() % 32,
                        0usize,
                        block_kv,
                        blueprint.value_dim,
                        element,
                    );
                }
            }
            release_stage(
                done_address,
                words,
                first_value,
                stage,
                left,
                &full,
                value,
                &mut value_tiles,
                value_panels,
                blueprint,
            );
            left -= 1;
            filled += 1;
        }

        let batch = word(words, KEYS, 0u32) as usize;
        store_rows::<O>(
            acc,
            &rows,
            batch * geometry.heads + word(words, KEYS, 3u32) as usize,
            word(words, OWN, 0u32) as i32,
            output,
            statistics,
            &geometry,
            blueprint,
        );
        t = plane_broadcast(word(words, NEXT, 3u32), 0u32);
        going = t != 0;
    }
}

/// The plane is done with a stage of keys or values, whose barriers begin at `first`; the last of the
/// cube's planes refills it, across tiles. Nobody waits.
///
/// Kernels evaluate both sides of `&&`: the count stands in an `if` of its own.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn release_stage<E: Float>(
    done: u32,
    words: u32,
    #[comptime] first: u32,
    stage: u32,
    left: u32,
    full: &Shared<[Barrier]>,
    operand: &TensorMap<E, Tiled>,
    tiles: &mut Shared<[E]>,
    #[comptime] panels: usize,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let stages = comptime!(blueprint.stages);
    let last_plane = comptime!(blueprint.warpgroups * 4 - 1);
    let panel = comptime!(blueprint.block_kv * 64);
    // Every lane's reads are back.
    sync_plane();
    if unit_again() % 32 == 0 {
        if count_up(done + (first + stage) * 4, last_plane) == last_plane {
            let after = select(left > stages, 0u32, stages + 1 - left);
            let entry = words + after * ENTRY;
            let mut row = word(entry, KEYS, 2u32);
            if left > stages {
                row = first_key_of(words, left - stages, blueprint.block_kv) as u32;
            }
            if row != NOTHING {
                load_stage(
                    &full[(first + stage) as usize],
                    operand,
                    tiles,
                    stage as usize * comptime!(panels * panel),
                    word(entry, KEYS, 0u32) as i32,
                    word(entry, KEYS, 1u32) as i32,
                    row as i32,
                    panels,
                    panel,
                );
            }
        }
    }
    sync_plane();
}

/// At the tile's last block the plane is done with its queries, too; the last of the warpgroup's planes
/// asks for those of the next tile.
#[cube]
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
fn release_queries<E: Float>(
    done: u32,
    words: u32,
    left: u32,
    full: &Shared<[Barrier]>,
    query: &TensorMap<E, Tiled>,
    tiles: &mut Shared<[E]>,
    #[comptime] blueprint: ForwardBlueprint,
) {
    let panels = comptime!(blueprint.head_dim.div_ceil(64));
    let unit = unit_again();
    let warpgroup = unit / 128;
    if unit % 32 == 0 && left == 1 {
        if count_up(done + warpgroup * 4, 3u32) == 3 {
            if word(words, NEXT, 3u32) != 0 {
                load_stage(
                    &full[warpgroup as usize],
                    query,
                    tiles,
                    warpgroup as usize * comptime!(panels * QUERY_PANEL),
                    word(words, NEXT, 0u32) as i32,
                    word(words, NEXT, 1u32) as i32,
                    word(words, NEXT, 2u32) as i32,
                    panels,
                    QUERY_PANEL,
                );
            }
        }
    }
}
