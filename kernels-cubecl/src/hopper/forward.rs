//! The forward kernel: a cube walks tiles of queries, one warpgroup 64 queries of each.

use super::blueprint::ForwardBlueprint;
use super::careful::{add_careful, any_in_warpgroup, non_finite};
use super::instructions::*;
use super::pipeline::{load_stage, row_of};
use super::softmax::{RowPair, masked_scores, probabilities, rounded};
use super::tiles::{place_of, tile_of, tiles_of_cube};
use crate::schedule::{Geometry, keys_of_block, wholly_visible};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Writes the output `[batch, heads, seq_q, value_dim]`, in pairs, and the statistics
/// `[2, batch, heads, seq_q]`: row maximum, and logarithm of the sum of `exp(score - maximum)`.
///
/// `S`, `P` and `O` are the registers of a unit for scores, probabilities and output. `fold` blocks of
/// queries are a cube's unit of work.
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
    output: &mut [u32],
    statistics: &mut [f32],
    geometry: Geometry,
    fold: u32,
    #[comptime] blueprint: ForwardBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let block_q = comptime!(blueprint.block_q());
    let block_kv = comptime!(blueprint.block_kv);
    let stages = comptime!(blueprint.stages);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let query_panel = comptime!(block_q * 64);
    let panel = comptime!(block_kv * 64);
    let key_stage = comptime!(key_panels * panel);
    let value_stage = comptime!(value_panels * panel);
    let element = comptime!(blueprint.element());
    let last_warpgroup = comptime!(blueprint.warpgroups - 1);

    let mut query_tile =
        Shared::<[E]>::new_aligned_slice(comptime!(key_panels * query_panel), 1024usize);
    let mut key_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * key_stage), 1024usize);
    let mut value_tiles =
        Shared::<[E]>::new_aligned_slice(comptime!(stages as usize * value_stage), 1024usize);
    // Filled: the query, stages of keys, stages of values.
    let full = Shared::<[Barrier]>::new_slice(comptime!(1 + 2 * stages as usize));
    // How many warpgroups are done with a stage of keys, of values.
    let mut done = Shared::<[u32]>::new_slice(comptime!(2 * stages as usize));
    // What a plane knows of its tile and rarely needs: no register holds it all along.
    let mut kept = Shared::<[u32]>::new_slice(comptime!(12 * blueprint.warpgroups as usize));

    let query_full = shared_address::<Barrier>(full.as_ptr());
    let key_full = query_full + 8;
    let value_full = query_full + comptime!(8 + 8 * stages);
    let key_done = shared_address::<u32>(done.as_ptr());
    let value_done = key_done + comptime!(4 * stages);
    let kept_address = shared_address::<u32>(kept.as_ptr());
    let elected = UNIT_POS == 0;
    if elected {
        #[unroll]
        for i in 0..comptime!(1 + 2 * stages) {
            init_barrier(query_full + comptime!(8 * i), 1u32);
        }
        #[unroll]
        for i in 0..comptime!(2 * stages as usize) {
            done[i] = 0u32;
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let tiles = tiles_of_cube(&geometry, fold, blueprint);
    if elected {
        for ahead in 0..stages {
            let place = place_of(&geometry, 0u32, ahead, tiles, fold, blueprint);
            if place.present {
                if ahead == 0 {
                    load_stage(
                        &full[0],
                        query,
                        &mut query_tile,
                        0usize,
                        place.batch,
                        place.head,
                        place.first_query,
                        key_panels,
                        query_panel,
                    );
                }
                load_stage(
                    &full[(1 + ahead) as usize],
                    key,
                    &mut key_tiles,
                    ahead as usize * key_stage,
                    place.batch,
                    place.kv_head,
                    place.first_kv,
                    key_panels,
                    panel,
                );
                load_stage(
                    &full[(1 + stages + ahead) as usize],
                    value,
                    &mut value_tiles,
                    ahead as usize * value_stage,
                    place.batch,
                    place.kv_head,
                    place.first_kv,
                    value_panels,
                    panel,
                );
            }
        }
    }

    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let query_address = shared_address::<E>(query_tile.as_ptr()) + warpgroup * 8192;
    let key_address = shared_address::<E>(key_tiles.as_ptr());
    let value_address = shared_address::<E>(value_tiles.as_ptr());
    let score_registers = comptime!(blueprint.score_registers());
    let output_registers = comptime!(blueprint.output_registers());
    let score_body = comptime!(blueprint.products().started_scores(score_registers));
    let value_body = comptime!(
        blueprint
            .products()
            .started_values(output_registers, blueprint.probability_registers())
    );
    let scores_done = comptime!(finish(block_kv / 2, score_registers, 1));
    let values_done = comptime!(finish(blueprint.value_dim / 2, output_registers, 0));
    if comptime!(blueprint.turns) {
        if warpgroup == last_warpgroup {
            give_turn(1u32);
        }
    }

    // Key blocks so far, of all tiles: they come and go in stages.
    let mut filled = 0u32;
    let mut query_phase = 0u32;
    for t in 0..tiles {
        let tile = tile_of(&geometry, t, fold, blueprint);
        let batch = tile.batch_head / geometry.heads;
        let head = tile.batch_head % geometry.heads;
        let plane = (UNIT_POS / 32) as usize;
        kept[plane * 3] = tile.batch_head as u32;
        kept[plane * 3 + 1] = batch as u32;
        kept[plane * 3 + 2] = (head / geometry.group) as u32;

        // The blocks that this warpgroup's own queries see. The others it passes by.
        let own_query = tile.first_query + (warpgroup * 64) as i32;
        let own_keys = keys_of_block(&geometry, own_query, 64usize);
        let own_first = own_keys.first as u32 / comptime!(block_kv as u32);
        let mut own_end = (own_keys.end as u32).div_ceil(comptime!(block_kv as u32));
        if own_query >= geometry.seq_q {
            own_end = own_first;
        }

        let mut rows = RowPair::new(&geometry, blueprint);
        let mut acc = Vector::<f32, O>::new(0.0f32);
        let mut p = Vector::<u32, P>::new(0u32);
        // Whether the block before waits for its values, and whether those want a look first.
        let mut pending = false;
        let mut suspect = false;
        let mut begun = false;
        // Blocks that still have to be multiplied with the query; then the last one's values.
        let mut todo = tile.end_block - tile.first_block;
        let mut going = todo > 0;
        if going {
            wait_barrier(query_full, query_phase);
            query_phase = 1 - query_phase;
        }
        while going {
            let more = todo > 0;
            let block = tile.first_block + todo - 1;
            let first_kv = (block * comptime!(block_kv as u32)) as i32;
            let mine = more && block >= own_first && block < own_end;
            let stage = filled % stages;
            let phase = filled / stages % 2;
            let stage_before = (filled + comptime!(stages - 1)) % stages;
            let phase_before = (filled + comptime!(2 * stages - 1)) / stages % 2;
            let value_before = value_address + stage_before * comptime!((value_stage * 2) as u32);

            if pending && suspect {
                wait_barrier(value_full + stage_before * 8, phase_before);
                let found = non_finite(
                    value_before,
                    block_kv,
                    blueprint.value_dim,
                    blueprint.warpgroups,
                    element,
                );
                if found != 0 {
                    // Nothing runs, but the assembler asks for a wait before others add to the output.
                    finish_all();
                    acc = add_careful::<P, O>(
                        acc,
                        p,
                        value_before,
                        UNIT_POS % 32,
                        block_kv,
                        blueprint.value_dim,
                        element,
                    );
                    // All of the warpgroup's reads are back before one of its units says so.
                    any_in_warpgroup(0u32, blueprint.warpgroups);
                    pending = false;
                }
            }

            if more {
                wait_barrier(key_full + stage * 8, phase);
            }
            if begun {
                wait_barrier(value_full + stage_before * 8, phase_before);
            }
            if comptime!(blueprint.turns) {
                #[unroll]
                for w in 0..blueprint.warpgroups {
                    if warpgroup == w {
                        take_turn(comptime!(1 + w));
                    }
                }
            }
            let values = column_descriptor(value_before, comptime!(panel * 2));
            if mine {
                let dots = dot_product::<S>(
                    row_descriptor(query_address),
                    row_descriptor(key_address + stage * comptime!((key_stage * 2) as u32)),
                    comptime!(score_body.clone()),
                );
                if pending {
                    acc = value_product::<P, O>(acc, p, values, comptime!(value_body.clone()));
                } else {
                    finish_all();
                }
                if comptime!(blueprint.turns) {
                    pass_turn(warpgroup, blueprint.warpgroups);
                }
                let mut scores = finished::<S>(dots, comptime!(scores_done.clone()));
                let edge = comptime!(mask.is_some() || bias.is_some() || blueprint.capped)
                    || !wholly_visible(&geometry, own_query, first_kv, 64usize, block_kv);
                if edge {
                    let unit = unit_again();
                    scores = masked_scores::<E, M, S>(
                        scores,
                        own_query + row_of(unit),
                        first_kv + ((unit % 4) * 2) as i32,
                        batch,
                        head,
                        &mask,
                        &bias,
                        &geometry,
                        blueprint,
                    );
                }
                suspect = edge;
                let growth = plane_any(rows.grow::<S>(scores, blueprint));
                let mut a0 = 1.0f32;
                let mut a1 = 1.0f32;
                if growth {
                    let (b0, b1) = rows.rescale();
                    a0 = b0;
                    a1 = b1;
                }
                let exact = probabilities::<S>(scores, &mut rows, blueprint);
                // The waits for the output stand behind a branch on the sums, which are never negative:
                // else the assembler would have exponents and sums wait, too.
                if plane_any(growth || rows.negative()) {
                    acc = finished::<O>(acc, comptime!(values_done.clone()));
                    #[unroll]
                    for j in 0..comptime!(blueprint.value_dim / 8) {
                        acc.insert(4 * j, acc.extract(4 * j) * a0);
                        acc.insert(4 * j + 1, acc.extract(4 * j + 1) * a0);
                        acc.insert(4 * j + 2, acc.extract(4 * j + 2) * a1);
                        acc.insert(4 * j + 3, acc.extract(4 * j + 3) * a1);
                    }
                } else {
                    acc = finished::<O>(acc, comptime!(values_done.clone()));
                }
                p = rounded::<S, P>(exact, blueprint);
            } else {
                if pending {
                    acc = value_product::<P, O>(acc, p, values, comptime!(value_body.clone()));
                }
                if comptime!(blueprint.turns) {
                    pass_turn(warpgroup, blueprint.warpgroups);
                }
                acc = finished::<O>(acc, comptime!(values_done.clone()));
            }
            pending = mine;

            // Done with the keys of this block and the values of the one before: the last warpgroup
            // asks for those that follow.
            if UNIT_POS % 128 == 0 {
                let mut last_of_keys = false;
                if more {
                    last_of_keys = count_up(key_done + stage * 4, last_warpgroup) == last_warpgroup;
                }
                let mut last_of_values = false;
                if begun {
                    last_of_values =
                        count_up(value_done + stage_before * 4, last_warpgroup) == last_warpgroup;
                }
                if last_of_keys {
                    let mut present = true;
                    let mut batch = load_shared(kept_address + unit_again() / 32 * 12 + 4) as i32;
                    let mut kv_head = load_shared(kept_address + unit_again() / 32 * 12 + 8) as i32;
                    let mut row = first_kv - comptime!((stages as usize * block_kv) as i32);
                    if todo <= stages {
                        let ahead = stages - todo;
                        let place = place_of(&geometry, t + 1, ahead, tiles, fold, blueprint);
                        present = place.present;
                        batch = place.batch;
                        kv_head = place.kv_head;
                        row = place.first_kv;
                    }
                    if present {
                        load_stage(
                            &full[(1 + stage) as usize],
                            key,
                            &mut key_tiles,
                            stage as usize * key_stage,
                            batch,
                            kv_head,
                            row,
                            key_panels,
                            panel,
                        );
                    }
                    if todo == 1 {
                        let place = place_of(&geometry, t + 1, 0u32, tiles, fold, blueprint);
                        if place.present {
                            load_stage(
                                &full[0],
                                query,
                                &mut query_tile,
                                0usize,
                                place.batch,
                                place.head,
                                place.first_query,
                                key_panels,
                                query_panel,
                            );
                        }
                    }
                }
                if last_of_values {
                    let mut present = true;
                    let mut batch = load_shared(kept_address + unit_again() / 32 * 12 + 4) as i32;
                    let mut kv_head = load_shared(kept_address + unit_again() / 32 * 12 + 8) as i32;
                    let mut row = first_kv - comptime!(((stages as usize - 1) * block_kv) as i32);
                    if todo < stages {
                        let ahead = comptime!(stages - 1) - todo;
                        let place = place_of(&geometry, t + 1, ahead, tiles, fold, blueprint);
                        present = place.present;
                        batch = place.batch;
                        kv_head = place.kv_head;
                        row = place.first_kv;
                    }
                    if present {
                        load_stage(
                            &full[(1 + stages + stage_before) as usize],
                            value,
                            &mut value_tiles,
                            stage_before as usize * value_stage,
                            batch,
                            kv_head,
                            row,
                            value_panels,
                            panel,
                        );
                    }
                }
            }
            sync_plane();
            begun = true;
            going = more;
            if more {
                filled += 1;
                todo -= 1;
            }
        }

        let unit = unit_again();
        let batch_head = load_shared(kept_address + unit / 32 * 12) as usize;
        let lane = unit % 32;
        let row = own_query + row_of(unit);
        let half = geometry.batch * geometry.heads * geometry.seq_q as usize;
        let pitch = comptime!(blueprint.value_dim / 2);
        #[unroll]
        for r in 0..2usize {
            let i = row + comptime!(r as i32 * 8);
            let end = rows.finish(&geometry, comptime!(r == 1), blueprint);
            if i < geometry.seq_q {
                let at = batch_head * geometry.seq_q as usize + i as usize;
                if lane % 4 == 0 {
                    statistics[at] = end.maximum;
                    statistics[half + at] = end.log_sum;
                }
                #[unroll]
                for j in 0..comptime!(blueprint.value_dim / 8) {
                    output[at * pitch + (comptime!(j * 4) + (lane % 4) as usize)] = pack(
                        acc.extract(comptime!(4 * j + 2 * r)) * end.inverse,
                        acc.extract(comptime!(4 * j + 2 * r + 1)) * end.inverse,
                        element,
                    );
                }
            }
        }
    }
}

/// Lets the next warpgroup start its products.
#[cube]
fn pass_turn(warpgroup: u32, #[comptime] warpgroups: u32) {
    #[unroll]
    for w in 0..warpgroups {
        if warpgroup == w {
            give_turn(comptime!(1 + (w + 1) % warpgroups));
        }
    }
}
