//! The register-fragment kernels as the test `machine_code` reads them.

use super::blueprint::{Blocks, Blueprint, plan};
use super::config::Config;
use super::forward::forward_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::memory::staged_as;
use super::one_pass::one_pass_kernel;
use super::one_pass_blueprint::OnePass;
use super::query_gradient::query_gradient_kernel;
use crate::device::{Device, elem_type};
use crate::machine_code::{
    HEADS, HEADS_OF_EVERY_FORM, HEADS_WITH_OPTIONS, Offline, Options, Specimen,
};
use cubecl::ir::{AddressType, ElemType, UIntKind};
use cubecl::prelude::CubeKernel;
use flash_attention_spec::{Dtype, F32Precision, Summation};

/// The kernels of the family, and what chooses between their forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Forward,
    QueryGradient,
    KeyValueGradient(Sides),
}

const KERNELS: [Kernel; 5] = [
    Kernel::Forward,
    Kernel::QueryGradient,
    Kernel::KeyValueGradient(Sides::BOTH),
    Kernel::KeyValueGradient(Sides::KEY),
    Kernel::KeyValueGradient(Sides::VALUE),
];

pub(crate) fn specimens(device: &Device) -> Vec<Specimen> {
    let mut all = of_device(device);
    // What CubeCL's other generator gets, compiled by this one: the blocks and loops are the same, on
    // every device.
    if device.cuda_capability == Some(OLDEST) {
        let other = Device {
            copy_async: false,
            ..device.clone()
        };
        all.extend(of_device(&other));
    }
    all
}

const OLDEST: u32 = 80;

fn of_device(device: &Device) -> Vec<Specimen> {
    let mut all = Vec::new();
    for (kernel, dim) in KERNELS.into_iter().flat_map(|k| HEADS.map(|dim| (k, dim))) {
        let mut add_rounded = |options: Options, dtype: Dtype, vector: usize, precision| {
            let mut problem = options.problem([dim, dim], dtype);
            problem.f32_precision = precision;
            let blueprint = plan(&problem, device).expect("served");
            if let Some(blocks) = kernel.blocks(&blueprint) {
                let config = Config::of(&problem, &blueprint, blocks.read_in(vector), vector);
                all.push(kernel.specimen(config, options, dtype));
            }
            let one_pass = blueprint
                .one_pass
                .filter(|_| kernel == KERNELS[0] && vector == 8);
            if let Some(one_pass) = one_pass {
                let config = Config::of(&problem, &blueprint, one_pass.blocks(), vector);
                all.push(one_pass_specimen(one_pass, config, options, dtype));
                let unordered = OnePass {
                    summation: Summation::Unordered,
                    ..one_pass
                };
                if options == Options::NONE {
                    all.push(one_pass_specimen(unordered, config, options, dtype));
                }
            }
        };
        if device.copy_async {
            let tf32 = F32Precision::Tf32;
            add_rounded(Options::NONE, Dtype::F32, 8, tf32);
            if dim == HEADS_OF_EVERY_FORM {
                add_rounded(Options::ALL, Dtype::F32, 8, tf32);
                add_rounded(Options::NONE, Dtype::F32, 2, tf32);
            }
        }
        let mut add = |options, dtype, vector| {
            add_rounded(options, dtype, vector, F32Precision::Full);
        };
        add(Options::NONE, Dtype::BF16, 8);
        if device.copy_async {
            add(Options::NONE, Dtype::F32, 8);
        }
        if device.copy_async && HEADS_WITH_OPTIONS.contains(&dim) {
            add(Options::ALL, Dtype::BF16, 8);
        }
        if device.copy_async && dim == HEADS_OF_EVERY_FORM {
            add(Options::NONE, Dtype::F16, 8);
            add(Options::NONE, Dtype::BF16, 1);
            add(Options::MASK, Dtype::BF16, 8);
            add(Options::ALL, Dtype::F32, 8);
            add(Options::NONE, Dtype::F32, 2);
        }
    }
    all
}

impl Kernel {
    /// Its blocks, where the blueprint has the kernel for both gradients or one for each: where it has
    /// the first, the others are parts of it.
    fn blocks(self, blueprint: &Blueprint) -> Option<Blocks> {
        match self {
            Kernel::Forward => Some(blueprint.forward),
            Kernel::QueryGradient => Some(blueprint.query_gradient),
            Kernel::KeyValueGradient(sides) => (blueprint.joint_key_value
                == (sides == Sides::BOTH))
                .then_some(blueprint.key_value_gradient),
        }
    }

    fn specimen(self, config: Config, options: Options, dtype: Dtype) -> Specimen {
        let Blocks {
            warps,
            row_tiles,
            walked,
            stages,
            apart,
            ..
        } = config.blocks;
        let kernel = match self {
            Kernel::Forward => "forward",
            Kernel::QueryGradient => "query gradient",
            Kernel::KeyValueGradient(Sides::KEY) => "key gradient",
            Kernel::KeyValueGradient(Sides::VALUE) => "value gradient",
            Kernel::KeyValueGradient(_) => "key value gradient",
        };
        let copies = match (config.assembly, config.vector) {
            (false, _) => " plain",
            (true, 8) => "",
            (true, _) => " strided",
        };
        let name = format!(
            "mma {kernel} {dtype} d{}v{} {warps}x{row_tiles}x16 by {walked} stages {stages}{}{copies}{}",
            config.head_dim,
            config.value_dim,
            match (apart, config.tf32) {
                (true, _) => " apart",
                (_, Some(_)) => " rounded",
                (_, None) => "",
            },
            options.suffix(),
        );
        Specimen::new(name, move |offline| match self {
            Kernel::Forward => forward(offline, config, options.mask, dtype),
            Kernel::QueryGradient => query(offline, config, options.mask, dtype),
            Kernel::KeyValueGradient(sides) => {
                key_value(offline, config, options.mask, sides, dtype)
            }
        })
    }
}

// Arguments that leave no trace in a kernel's code are units.
#[allow(clippy::unit_arg)]
fn one_pass_specimen(
    one_pass: OnePass,
    config: Config,
    options: Options,
    dtype: Dtype,
) -> Specimen {
    let name = format!(
        "mma one pass{} {dtype} d{}v{} {} keys of {} warps by {} stages {}{}{}{}",
        if one_pass.ordered() { "" } else { " unordered" },
        config.head_dim,
        config.value_dim,
        one_pass.owned(),
        one_pass.warps,
        one_pass.walked,
        one_pass.stages,
        if one_pass.wide { " wide" } else { "" },
        if config.assembly { "" } else { " plain" },
        options.suffix(),
    );
    Specimen::new(name, move |offline| {
        Box::new(one_pass_kernel::OnePassKernel::new(
            offline.settings(one_pass.units() as u32, AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            offline.tensor(),
            offline.tensor(),
            offline.tensor(),
            offline.optional(options.mask),
            offline.optional(config.biased),
            offline.tensor(),
            offline.buffer(),
            offline.buffer(),
            offline.buffer(),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            config.vector,
            one_pass,
            config,
            elem_type(dtype),
            elem_type(dtype),
            ElemType::UInt(UIntKind::U8),
        ))
    })
}

fn forward(
    offline: &mut Offline,
    config: Config,
    masked: bool,
    dtype: Dtype,
) -> Box<dyn CubeKernel> {
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
        elem_type(staged_as(dtype)),
        elem_type(dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}

fn query(offline: &mut Offline, config: Config, masked: bool, dtype: Dtype) -> Box<dyn CubeKernel> {
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
        elem_type(staged_as(dtype)),
        elem_type(dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}

fn key_value(
    offline: &mut Offline,
    config: Config,
    masked: bool,
    sides: Sides,
    dtype: Dtype,
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
        elem_type(staged_as(dtype)),
        elem_type(dtype),
        ElemType::UInt(UIntKind::U8),
    ))
}
