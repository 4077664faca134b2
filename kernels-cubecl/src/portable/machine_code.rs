//! The portable kernels as the test `machine_code` reads them.

use super::forward::forward_kernel;
use super::tile::{Config, Tile};
use crate::device::elem_type;
use crate::machine_code::Specimen;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::Dtype;

pub(crate) fn specimens() -> Vec<Specimen> {
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::BF16] {
        for options in [false, true] {
            let name = format!(
                "portable forward {dtype} d64{}",
                if options { " mask bias softcap" } else { "" }
            );
            let specimen = Specimen::new(name, 80, move |offline| {
                let config = Config {
                    tile: Tile::LARGE,
                    head_dim: 64,
                    value_dim: 64,
                    vectorized: true,
                    capped: options,
                    long: false,
                };
                Box::new(forward_kernel::ForwardKernel::new(
                    offline.settings(config.tile.units(), AddressType::U32),
                    offline.properties.clone(),
                    offline.target.clone(),
                    offline.tensor(),
                    offline.tensor(),
                    offline.tensor(),
                    offline.optional(options),
                    offline.optional(options),
                    offline.buffer(),
                    offline.buffer(),
                    offline.geometry(),
                    4,
                    config,
                    elem_type(dtype),
                    ElemType::UInt(UIntKind::U8),
                ))
            });
            // The assembler spills a few offsets for the sake of more cubes side by side.
            all.push(specimen.tolerating(192));
        }
    }
    all
}
