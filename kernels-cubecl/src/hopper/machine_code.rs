//! The Hopper kernels as the test `machine_code` reads them.

use super::blueprint::{ForwardBlueprint, plan_forward};
use super::forward::forward_kernel;
use super::gradient_blueprint::{Division, GradientBlueprint, plan_backward};
use super::key_value_gradient::key_value_gradient_kernel;
use super::query_gradient::query_gradient_kernel;
use super::statistics::statistics_kernel;
use super::wide_key_value_gradient::wide_key_value_gradient_kernel;
use crate::device::{Device, elem_type};
use crate::machine_code::{HEADS, HEADS_OF_EVERY_FORM, HEADS_WITH_OPTIONS, Options, Specimen};
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::Dtype;

/// Heads that do not fill the last products, and heads with fewer or more features of the value.
const OTHERS: [[usize; 2]; 3] = [[40, 24], [192, 128], [136, 256]];

pub(crate) fn specimens(device: &Device) -> Vec<Specimen> {
    let mut all = Vec::new();
    let heads = HEADS.map(|dim| [dim, dim]);
    for dims in heads.into_iter().chain(OTHERS) {
        for &(options, dtype) in forms(dims) {
            let problem = options.problem(dims, dtype);
            if let Ok(blueprint) = plan_forward(&problem, device) {
                all.push(forward(blueprint, options, dtype));
            }
            if let Ok(blueprint) = plan_backward(&problem, device) {
                all.push(query_gradient(blueprint.query, options, dtype));
                all.push(key_value_gradient(blueprint.key_value, options, dtype));
                all.push(statistics(dims[1], dtype));
            }
        }
    }
    all
}

/// Options and element types that heads are tried with.
fn forms(dims: [usize; 2]) -> &'static [(Options, Dtype)] {
    let all = &[
        (Options::NONE, Dtype::BF16),
        (Options::ALL, Dtype::BF16),
        (Options::NONE, Dtype::F16),
        (Options::SOFTCAP, Dtype::BF16),
    ];
    if dims[0] == HEADS_OF_EVERY_FORM {
        all
    } else if HEADS_WITH_OPTIONS.contains(&dims[0]) {
        &all[..2]
    } else {
        &all[..1]
    }
}

// Arguments that leave no trace in a kernel's code are units.
#[allow(clippy::unit_arg)]
fn forward(blueprint: ForwardBlueprint, options: Options, dtype: Dtype) -> Specimen {
    let b = blueprint;
    let name = format!(
        "hopper forward {dtype} d{}v{} {}x64x{} {}stages{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.block_kv,
        b.stages,
        if b.turns { " turns" } else { "" },
        options.suffix(),
    );
    Specimen::new(name, move |offline| {
        Box::new(forward_kernel::ForwardKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            offline.optional(options.mask),
            offline.optional(b.biased),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.number(),
            b.score_registers(),
            b.probability_registers(),
            b.output_registers(),
            b,
            elem_type(dtype),
            ElemType::UInt(UIntKind::U8),
        ))
    })
}

fn gradient_name(kernel: &str, b: &GradientBlueprint, options: Options, dtype: Dtype) -> String {
    format!(
        "hopper {kernel} {dtype} d{}v{} {}x{}x{}{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.owned() / b.warpgroups as usize,
        b.walked,
        match b.held() {
            0 => String::new(),
            held => format!(" held {held}"),
        },
        options.suffix(),
    )
}

#[allow(clippy::unit_arg)]
fn query_gradient(b: GradientBlueprint, options: Options, dtype: Dtype) -> Specimen {
    let name = gradient_name("query gradient", &b, options, dtype);
    Specimen::new(name, move |offline| {
        Box::new(query_gradient_kernel::QueryGradientKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            (),
            offline.optional(options.mask),
            offline.optional(b.biased),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            offline.index(),
            b.score_registers(),
            b.weight_registers(),
            b.key_registers(),
            b,
            elem_type(dtype),
            ElemType::UInt(UIntKind::U8),
        ))
    })
}

#[allow(clippy::unit_arg)]
fn key_value_gradient(b: GradientBlueprint, options: Options, dtype: Dtype) -> Specimen {
    if let Division::Gradients { .. } = b.division {
        return wide_key_value_gradient(b, options, dtype);
    }
    let name = gradient_name("key value gradient", &b, options, dtype);
    Specimen::new(name, move |offline| {
        Box::new(key_value_gradient_kernel::KeyValueGradientKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            (),
            (),
            offline.optional(options.mask),
            offline.optional(b.biased),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            b.score_registers(),
            b.weight_registers(),
            b.key_registers(),
            b.value_registers(),
            b,
            elem_type(dtype),
            ElemType::UInt(UIntKind::U8),
        ))
    })
}

#[allow(clippy::unit_arg)]
fn wide_key_value_gradient(b: GradientBlueprint, options: Options, dtype: Dtype) -> Specimen {
    let name = gradient_name("wide key value gradient", &b, options, dtype);
    Specimen::new(name, move |offline| {
        Box::new(
            wide_key_value_gradient_kernel::WideKeyValueGradientKernel::new(
                offline.settings(b.units(), AddressType::U32),
                offline.properties.clone(),
                offline.target.clone(),
                (),
                (),
                (),
                (),
                (),
                offline.optional(options.mask),
                offline.optional(b.biased),
                offline.buffer(),
                offline.buffer(),
                offline.geometry(),
                offline.index(),
                b.score_registers(),
                b.weight_registers(),
                b.key_registers(),
                b.value_registers(),
                b.held_registers(),
                b,
                elem_type(dtype),
                ElemType::UInt(UIntKind::U8),
            ),
        )
    })
}

#[allow(clippy::unit_arg)]
fn statistics(dim: usize, dtype: Dtype) -> Specimen {
    let name = format!("hopper row statistics {dtype} v{dim} gradient");
    Specimen::new(name, move |offline| {
        Box::new(statistics_kernel::StatisticsKernel::new(
            offline.settings(256, AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            offline.tensor(),
            offline.tensor(),
            offline.buffer(),
            offline.optional(true),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            8,
            dim,
            elem_type(dtype),
        ))
    })
}
