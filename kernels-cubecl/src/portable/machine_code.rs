//! The portable kernels as the test `machine_code` reads them.

use super::bias_gradient::{BiasBroadcast, bias_gradient_kernel};
use super::blueprint::{Blueprint, plan};
use super::delta::delta_kernel;
use super::forward::forward_kernel;
use super::key_value_gradient::{Sides, key_value_gradient_kernel};
use super::query_gradient::query_gradient_kernel;
use super::tile::Config;
use crate::device::{Device, elem_type};
use crate::machine_code::{Offline, Options, Specimen};
use cubecl::ir::{AddressType, ElemType, UIntKind};
use cubecl::prelude::CubeKernel;
use flash_attention_spec::{Dtype, Problem};

/// The kernels of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Forward,
    QueryGradient,
    KeyValueGradient(Sides),
    BiasGradient,
    Delta,
}

pub(crate) fn specimens(device: &Device) -> Vec<Specimen> {
    let mut all = Vec::new();
    for dim in [64, 256] {
        for (options, dtype) in [(Options::NONE, Dtype::F32), (Options::ALL, Dtype::BF16)] {
            let problem = options.problem([dim, dim], dtype);
            let blueprint = plan(&problem, device).expect("served");
            for kernel in kernels(&blueprint, options) {
                all.push(kernel.specimen(&problem, &blueprint, options));
            }
        }
    }
    all
}

fn kernels(blueprint: &Blueprint, options: Options) -> Vec<Kernel> {
    let side = |key, value| Kernel::KeyValueGradient(Sides { key, value });
    let mut kernels = vec![Kernel::Forward, Kernel::QueryGradient];
    if blueprint.key_value_together {
        kernels.push(side(true, true));
    } else {
        kernels.extend([side(true, false), side(false, true)]);
    }
    if options.bias {
        kernels.extend([Kernel::BiasGradient, Kernel::Delta]);
    }
    kernels
}

impl Kernel {
    fn specimen(self, problem: &Problem, blueprint: &Blueprint, options: Options) -> Specimen {
        let (kernel, tile) = match self {
            Kernel::Forward => ("forward", blueprint.forward),
            Kernel::QueryGradient => ("query gradient", blueprint.backward),
            Kernel::KeyValueGradient(sides) => (
                match (sides.key, sides.value) {
                    (true, true) => "key value gradient",
                    (true, _) => "key gradient",
                    _ => "value gradient",
                },
                blueprint.backward,
            ),
            Kernel::BiasGradient => ("bias gradient", blueprint.backward),
            Kernel::Delta => ("delta", blueprint.backward),
        };
        let config = Config {
            tile,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            vectorized: true,
            capped: options.softcap,
            long: false,
        };
        let dtype = problem.dtype;
        let name = format!(
            "portable {kernel} {dtype} d{}v{} {}x{}{}",
            config.head_dim,
            config.value_dim,
            tile.block_q(),
            tile.block_kv(),
            options.suffix(),
        );
        Specimen::new(name, move |offline| match self {
            Kernel::Forward => forward(offline, config, options, dtype),
            Kernel::QueryGradient => query(offline, config, options, dtype),
            Kernel::KeyValueGradient(sides) => key_value(offline, config, options, sides, dtype),
            Kernel::BiasGradient => bias(offline, config, options, dtype),
            Kernel::Delta => delta(offline, config, dtype),
        })
    }
}

const MASK_ELEMENT: ElemType = ElemType::UInt(UIntKind::U8);

fn forward(
    offline: &mut Offline,
    config: Config,
    options: Options,
    dtype: Dtype,
) -> Box<dyn CubeKernel> {
    Box::new(forward_kernel::ForwardKernel::new(
        offline.settings(config.tile.units(), AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(options.mask),
        offline.optional(options.bias),
        offline.buffer(),
        offline.buffer(),
        offline.geometry(),
        4,
        config,
        elem_type(dtype),
        MASK_ELEMENT,
    ))
}

fn query(
    offline: &mut Offline,
    config: Config,
    options: Options,
    dtype: Dtype,
) -> Box<dyn CubeKernel> {
    Box::new(query_gradient_kernel::QueryGradientKernel::new(
        offline.settings(config.tile.units(), AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(true),
        offline.optional(options.mask),
        offline.optional(options.bias),
        offline.tensor(),
        offline.buffer(),
        offline.buffer(),
        offline.geometry(),
        4,
        config,
        elem_type(dtype),
        MASK_ELEMENT,
    ))
}

// Arguments that leave no trace in a kernel's code are units.
#[allow(clippy::unit_arg)]
fn key_value(
    offline: &mut Offline,
    config: Config,
    options: Options,
    sides: Sides,
    dtype: Dtype,
) -> Box<dyn CubeKernel> {
    Box::new(key_value_gradient_kernel::KeyValueGradientKernel::new(
        offline.settings(config.tile.units(), AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(true),
        offline.optional(options.mask),
        offline.optional(options.bias),
        offline.tensor(),
        offline.buffer(),
        offline.buffer(),
        offline.index(),
        offline.geometry(),
        4,
        sides,
        config,
        elem_type(dtype),
        MASK_ELEMENT,
    ))
}

fn bias(
    offline: &mut Offline,
    config: Config,
    options: Options,
    dtype: Dtype,
) -> Box<dyn CubeKernel> {
    let broadcast = BiasBroadcast {
        queries: true,
        keys: true,
    };
    Box::new(bias_gradient_kernel::BiasGradientKernel::new(
        offline.settings(config.tile.units(), AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.optional(true),
        offline.optional(options.mask),
        offline.optional(options.bias),
        offline.tensor(),
        offline.buffer(),
        offline.buffer(),
        offline.geometry(),
        offline.bias_shape(),
        4,
        broadcast,
        config,
        elem_type(dtype),
        MASK_ELEMENT,
    ))
}

fn delta(offline: &mut Offline, config: Config, dtype: Dtype) -> Box<dyn CubeKernel> {
    Box::new(delta_kernel::DeltaKernel::new(
        offline.settings(64, AddressType::U32),
        offline.properties.clone(),
        offline.target.clone(),
        offline.tensor(),
        offline.tensor(),
        offline.buffer(),
        offline.optional(true),
        offline.buffer(),
        offline.geometry(),
        4,
        config,
        elem_type(dtype),
    ))
}
