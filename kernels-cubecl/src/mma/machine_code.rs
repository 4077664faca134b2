//! The register-fragment kernels as the test `machine_code` reads them.

use super::blueprint::{Blocks, Config, forward_blocks};
use super::forward::forward_kernel;
use crate::device::elem_type;
use crate::machine_code::Specimen;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::Dtype;

pub(crate) fn specimens() -> Vec<Specimen> {
    let mut all = Vec::new();
    for asynchronous in [true, false] {
        for dim in [64, 128, 256] {
            for (options, masked, biased, capped) in [
                ("", false, false, false),
                (" mask", true, false, false),
                (" mask bias softcap", true, true, true),
            ] {
                for blocks in forward_blocks(dim, asynchronous) {
                    let config = Config {
                        capped,
                        biased,
                        ..config(blocks, dim, asynchronous)
                    };
                    all.push(forward(config, options, masked));
                }
            }
        }
    }
    all
}

fn config(blocks: Blocks, dim: usize, asynchronous: bool) -> Config {
    Config {
        blocks,
        head_dim: dim,
        value_dim: dim,
        vector: 8,
        capped: false,
        biased: false,
        negative: false,
        assembly: asynchronous,
        asynchronous,
        bf16: true,
    }
}

fn name(kernel: &str, config: &Config, options: &str) -> String {
    let Blocks {
        warps,
        row_tiles,
        walked,
        ..
    } = config.blocks;
    let copies = if config.asynchronous {
        "async"
    } else {
        "plain"
    };
    let dim = config.head_dim;
    format!("mma {kernel} d{dim} {warps}x{row_tiles}x16 by {walked} {copies}{options}")
}

fn forward(config: Config, options: &str, masked: bool) -> Specimen {
    Specimen::new(name("forward", &config, options), 80, move |offline| {
        Box::new(forward_kernel::ForwardKernel::new(
            offline.settings(config.blocks.units() as u32, AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            offline.tensor(),
            offline.tensor(),
            offline.tensor(),
            offline.optional(masked),
            offline.optional(config.biased),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            config.vector,
            config,
            elem_type(Dtype::BF16),
            ElemType::UInt(UIntKind::U8),
        ))
    })
}
