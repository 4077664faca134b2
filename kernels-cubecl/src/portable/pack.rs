//! Key and value side by side in one buffer, for devices that bind too few.

use super::tile::Config;
use crate::schedule::Geometry;
use cubecl::prelude::*;

/// Writes `[batch, kv_heads, seq_kv, head_dim + value_dim]`, packed, one unit for each element.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pack_kernel<E: Float>(
    key: &Tensor<E>,
    value: &Tensor<E>,
    packed: &mut [E],
    geometry: Geometry,
    #[comptime] config: Config,
    #[define(E)] _element: ElemType,
) {
    let length = comptime!(config.head_dim + config.value_dim);
    let kv_heads = geometry.heads / geometry.group;
    let at = ABSOLUTE_POS;
    let row = at / length;
    let batch_head = row / geometry.seq_kv as usize;
    if batch_head >= geometry.batch * kv_heads {
        terminate!();
    }
    let (batch, head) = (batch_head / kv_heads, batch_head % kv_heads);
    let j = row % geometry.seq_kv as usize;
    let feature = at % length;
    if feature < config.head_dim {
        packed[at] = key[batch * key.stride(0)
            + head * key.stride(1)
            + j * key.stride(2)
            + feature * key.stride(3)];
    } else {
        packed[at] = value[batch * value.stride(0)
            + head * value.stride(1)
            + j * value.stride(2)
            + (feature - config.head_dim) * value.stride(3)];
    }
}
