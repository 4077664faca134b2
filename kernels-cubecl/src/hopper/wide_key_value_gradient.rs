//! The key and value gradients of wide heads: one cube for 64 keys of a key head, whose gradients are
//! more than the registers of one warpgroup. Two warpgroups share the work without repeating any.
//!
//! ```text
//! warpgroup 0                               warpgroup 1
//!     S^T = K Q^T                               dP^T = V dO^T
//!     P^T = 2^(S^T - m - ln l)  -- weights -->  dS^T = P^T (dP^T - D)
//!     dV += P^T dO                              dK += dS^T Q
//! ```
//!
//! Both hold scores in the same layout, so that each unit hands its weights to one other unit, through
//! one of two buffers in shared memory. While one warpgroup takes exponents the other multiplies.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::shared_address;
use super::pipeline::{Walked, load_stage};
use super::wide_pipeline::*;
use super::wide_sums::{Addresses, Walk, sum_keys, sum_values};
use crate::schedule::{Geometry, Seat, queries_of_block};
use cubecl::prelude::*;

/// Writes the gradients of key and value, packed, in pairs.
///
/// `statistics` is what `statistics_kernel` wrote. `S`, `P`, `K`, `V` and `H` are the registers of a
/// unit for scores, rounded weights, the two gradients and the owned operand's part that stays in
/// registers. `section` heads at a time have their cubes run side by side, so that the cache keeps
/// their queries and output gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    clippy::collapsible_if,
    clippy::manual_is_multiple_of
)]
pub(crate) fn wide_key_value_gradient_kernel<
    E: Float,
    M: Int,
    S: Size,
    P: Size,
    K: Size,
    V: Size,
    H: Size,
>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    output_gradient: &TensorMap<E, Tiled>,
    statistics: &TensorMap<f32, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    key_gradient: &mut [u32],
    value_gradient: &mut [u32],
    geometry: Geometry,
    section: usize,
    #[comptime] blueprint: GradientBlueprint,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
) {
    let block_kv = comptime!(blueprint.owned());
    let block_q = comptime!(blueprint.walked);
    let key_panels = comptime!(blueprint.head_dim.div_ceil(64));
    let value_panels = comptime!(blueprint.value_dim.div_ceil(64));
    let owned_panel = comptime!(block_kv * 64);
    let layout = comptime!(Layout::new(&blueprint));

    // Which keys: heads in sections, the first block of keys first, for the most queries see it.
    let kv_heads = geometry.heads / geometry.group;
    let blocks = (geometry.seq_kv as usize).div_ceil(block_kv);
    let heads = geometry.batch * kv_heads;
    if CUBE_POS >= blocks * heads {
        terminate!();
    }
    let seat = Seat::of(CUBE_POS, blocks, heads, section);
    let batch_head = seat.batch_head;
    let first_kv = (seat.block() * block_kv) as i32;
    let batch = batch_head / kv_heads;
    let kv_head = batch_head % kv_heads;

    // The blocks of queries that the cube walks, once for each head of the group.
    let queries = queries_of_block(&geometry, first_kv, block_kv, true);
    let first_block = queries.first as u32 / comptime!(block_q as u32);
    let end_block = (queries.end as u32).div_ceil(comptime!(block_q as u32));
    let per_head = select(end_block > first_block, end_block - first_block, 0u32);
    let count = per_head * geometry.group as u32;
    let group_head = (kv_head * geometry.group) as u32;

    let mut memory = memory::<E>(blueprint);
    let elected = UNIT_POS == 0;
    if UNIT_POS < 4 {
        memory.words[UNIT_POS as usize] = 0u32;
    }
    if elected {
        memory.words[comptime!(BATCH_HEAD)] = batch_head as u32;
        memory.words[comptime!(FIRST_BLOCK)] = first_block;
        memory.words[comptime!(PER_HEAD)] = per_head;
        memory.key_full.init_manual(1u32);
        memory.value_full.init_manual(1u32);
        memory.query_full_0.init_manual(1u32);
        memory.query_full_1.init_manual(1u32);
        memory.gradient_full_0.init_manual(1u32);
        memory.gradient_full_1.init_manual(1u32);
    }
    sync_async_proxy_shared();
    sync_cube();

    if elected {
        if count > 0 {
            let walked = Walked {
                batch,
                head: group_head,
                block: first_block,
            };
            load_stage(
                &memory.key_full,
                key,
                &mut memory.tiles,
                0usize,
                batch as i32,
                kv_head as i32,
                first_kv,
                key_panels,
                owned_panel,
            );
            load_queries(
                &mut memory,
                0usize,
                walked,
                query,
                statistics,
                geometry.heads,
                blueprint,
            );
            load_stage(
                &memory.value_full,
                value,
                &mut memory.tiles,
                comptime!(layout.value),
                batch as i32,
                kv_head as i32,
                first_kv,
                value_panels,
                owned_panel,
            );
            load_gradients(&mut memory, 0usize, walked, output_gradient, blueprint);
        }
        if count > 1 {
            let walked = Walked {
                batch,
                head: group_head + 1 / per_head,
                block: first_block + 1 % per_head,
            };
            load_queries(
                &mut memory,
                1usize,
                walked,
                query,
                statistics,
                geometry.heads,
                blueprint,
            );
            load_gradients(&mut memory, 1usize, walked, output_gradient, blueprint);
        }
    }

    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let addresses = Addresses {
        tiles: shared_address::<E>(memory.tiles.as_ptr()),
        numbers: shared_address::<f32>(memory.numbers.as_ptr()),
        words: shared_address::<u32>(memory.words.as_ptr()),
    };
    let walk = Walk {
        batch,
        first_kv,
        head: group_head,
        first_block,
        end_block,
        count,
    };
    if warpgroup == 0 {
        sum_values::<E, M, S, P, V, H>(
            &mut memory,
            addresses,
            walk,
            query,
            output_gradient,
            statistics,
            &mask,
            &bias,
            value_gradient,
            &geometry,
            blueprint,
        );
    } else {
        sum_keys::<E, S, P, K, H>(
            &mut memory,
            addresses,
            walk,
            query,
            output_gradient,
            statistics,
            key_gradient,
            &geometry,
            comptime!(mask.is_some() || bias.is_some()),
            blueprint,
        );
    }
}
