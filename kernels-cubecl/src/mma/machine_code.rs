//! The register-fragment kernels as the test `machine_code` reads them.

use super::blueprint::{Blocks, Config, all_blocks};
use super::forward::forward_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::query_gradient::query_gradient_kernel;
use crate::device::elem_type;
use crate::machine_code::{Offline, Specimen};
use cubecl::ir::{AddressType, ElemType, UIntKind};
use cubecl::prelude::CubeKernel;
use flash_attention_spec::Dtype;

pub(crate) fn specimens() -> Vec<Specimen> {
    let mut all = Vec::new();
    for (dtype, asynchronous) in [
        (Dtype::BF16, true),
        (Dtype::BF16, false),
        (Dtype::F32, true),
    ] {
        for dim in [64, 128, 256] {
            for (options, masked, more) in [
                ("", false, false),
                (" mask", true, false),
                (" mask bias softcap", true, true),
            ] {
                for kernel in ["forward", "query gradient", "key value gradient"] {
                    for blocks in all_blocks(kernel, dtype, dim, asynchronous).take(1) {
                        let config = Config {
                            capped: more,
                            biased: more,
                            ..config(blocks, dtype, dim, asynchronous)
                        };
                        let specimen = |sides: Option<Sides>, suffix: &str| {
                            let name = format!("{}{options}{suffix}", name(kernel, &config));
                            Specimen::new(name, 80, move |offline| match (kernel, sides) {
                                ("forward", _) => forward(offline, config, masked),
                                (_, Some(sides)) => key_value(offline, config, masked, sides),
                                _ => query(offline, config, masked),
                            })
                            .tolerating(TOLERATED)
                        };
                        if kernel != "key value gradient" {
                            all.push(specimen(None, ""));
                        } else if dim <= 128 {
                            all.push(specimen(Some(Sides::BOTH), ""));
                        } else {
                            all.push(specimen(Some(Sides::KEY), " key"));
                            all.push(specimen(Some(Sides::VALUE), " value"));
                        }
                    }
                }
            }
        }
    }
    all
}

/// The widest blocks keep a few words of local memory outside the products.
const TOLERATED: usize = 1024;

fn config(blocks: Blocks, dtype: Dtype, dim: usize, asynchronous: bool) -> Config {
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
        dtype,
    }
}

fn name(kernel: &str, config: &Config) -> String {
    let Blocks {
        warps,
        row_tiles,
        walked,
        stages,
        ..
    } = config.blocks;
    let copies = if config.asynchronous {
        "async"
    } else {
        "plain"
    };
    let dim = config.head_dim;
    let dtype = config.dtype;
    format!(
        "mma {dtype} {kernel} d{dim} {warps}x{row_tiles}x16 by {walked} stages {stages} {copies}"
    )
}

fn forward(offline: &mut Offline, config: Config, masked: bool) -> Box<dyn CubeKernel> {
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
        elem_type(config.dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}

fn query(offline: &mut Offline, config: Config, masked: bool) -> Box<dyn CubeKernel> {
    Box::new(query_gradient_kernel::QueryGradientKernel::new(
        offline.settings(config.blocks.units() as u32, AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(masked),
        offline.optional(config.biased),
        offline.tensor(),
        offline.buffer(),
        offline.buffer(),
        offline.geometry(),
        config.vector,
        config,
        elem_type(Dtype::BF16),
        elem_type(config.dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}

fn key_value(
    offline: &mut Offline,
    config: Config,
    masked: bool,
    sides: Sides,
) -> Box<dyn CubeKernel> {
    Box::new(key_value_gradient_kernel::KeyValueGradientKernel::new(
        offline.settings(config.blocks.units() as u32, AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(masked),
        offline.optional(config.biased),
        offline.tensor(),
        offline.buffer(),
        offline.buffer(),
        offline.buffer(),
        offline.geometry(),
        config.vector,
        sides,
        config,
        elem_type(Dtype::BF16),
        elem_type(config.dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}
