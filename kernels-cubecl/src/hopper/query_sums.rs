//! The query gradient in rows, from the tiles that the pass over keys summed.

use super::gradient_blueprint::GradientBlueprint;
use super::instructions::pack;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Writes the gradient of the query, packed. A unit takes eight features of two rows, eight apart:
/// four neighbouring units' registers, in the order that they wrote them.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn query_sums_kernel<F: Size>(
    query_sums: &[Vector<f32, F>],
    query_gradient: &mut [Vector<u32, F>],
    geometry: Geometry,
    #[comptime] blueprint: GradientBlueprint,
) {
    let tiles = comptime!(blueprint.query_tiles());
    let panels = comptime!(blueprint.head_dim.div_ceil(64));
    let chunks = comptime!(blueprint.head_dim / 8);
    let element = comptime!(blueprint.element());
    let blocks = (geometry.seq_q as usize).div_ceil(comptime!(blueprint.walked));
    let chunk = ABSOLUTE_POS % 8;
    let pair = ABSOLUTE_POS / 8 % 32;
    let tile = ABSOLUTE_POS / 256 % tiles;
    let block = ABSOLUTE_POS / comptime!(256 * tiles);
    let batch_head = block / blocks;
    if batch_head < geometry.batch * geometry.heads {
        let column = tile % panels * 8 + chunk;
        let row = block % blocks * comptime!(blueprint.walked)
            + tile / panels * 64
            + pair / 8 * 16
            + pair % 8;
        if column < chunks {
            let first = (block * tiles + tile) * 1024 + chunk * 128 + pair * 4;
            let mut upper = Vector::<u32, F>::new(0u32);
            let mut lower = Vector::<u32, F>::new(0u32);
            #[unroll]
            for n in 0..4usize {
                let sums = query_sums[first + n];
                upper.insert(
                    n,
                    pack(
                        sums.extract(0usize) * geometry.scale,
                        sums.extract(1usize) * geometry.scale,
                        element,
                    ),
                );
                lower.insert(
                    n,
                    pack(
                        sums.extract(2usize) * geometry.scale,
                        sums.extract(3usize) * geometry.scale,
                        element,
                    ),
                );
            }
            let at = (batch_head * geometry.seq_q as usize + row) * chunks + column;
            if row < geometry.seq_q as usize {
                query_gradient[at] = upper;
            }
            if row + 8 < geometry.seq_q as usize {
                query_gradient[at + 8 * chunks] = lower;
            }
        }
    }
}
