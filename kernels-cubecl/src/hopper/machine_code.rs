//! The Hopper kernels as the test `machine_code` reads them.

use super::blueprint::{ForwardBlueprint, plan_forward};
use super::forward::forward_kernel;
use super::gradient_blueprint::{Division, GradientBlueprint, plan_backward};
use super::one_pass::one_pass_kernel;
use super::query_gradient::query_gradient_kernel;
use super::query_sums::query_sums_kernel;
use super::statistics::statistics_kernel;
use super::wide_key_value_gradient::wide_key_value_gradient_kernel;
use crate::device::{Device, elem_type};
use crate::machine_code::{HEADS, HEADS_OF_EVERY_FORM, HEADS_WITH_OPTIONS, Options, Specimen};
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::{Dtype, Summation};

/// Heads that do not fill the last products, and heads with fewer or more features of the value.
const OTHERS: [[usize; 2]; 4] = [[40, 24], [64, 128], [192, 128], [136, 256]];

pub(crate) fn specimens(device: &Device) -> Vec<Specimen> {
    let mut all = Vec::new();
    let heads = HEADS.map(|dim| [dim, dim]);
    for dims in heads.into_iter().chain(OTHERS) {
        for &(options, dtype) in forms(dims) {
            let problem = options.problem(dims, dtype);
            if let Ok(blueprint) = plan_forward(&problem, device) {
                all.push(forward(blueprint, options, dtype));
                // Chosen by the keys that a query sees.
                if blueprint.warpgroups == 2 && options == Options::NONE {
                    let joined = !blueprint.joined;
                    all.push(forward(
                        ForwardBlueprint {
                            joined,
                            ..blueprint
                        },
                        options,
                        dtype,
                    ));
                }
            }
            if let Ok(blueprint) = plan_backward(&problem, device) {
                all.push(query_gradient(blueprint.query, options, dtype));
                let b = blueprint.key_value;
                if let Division::Gradients { .. } = b.division {
                    all.push(wide_key_value_gradient(b, options, dtype));
                } else {
                    let orders = [
                        Some(Summation::Reproducible),
                        Some(Summation::Unordered),
                        None,
                    ];
                    // One head stands for all where only the end of the kernel differs.
                    let every = dims[0] == HEADS_OF_EVERY_FORM && options == Options::NONE;
                    for order in &orders[..if every { 3 } else { 1 }] {
                        all.push(one_pass(b, options, dtype, *order));
                    }
                    all.push(query_sums(b, dtype));
                }
                all.push(statistics(b, dtype));
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
        (Options::BIAS, Dtype::BF16),
        (Options::MASK, Dtype::BF16),
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
        "hopper forward {dtype} d{}v{} {}x64x{}{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.block_kv,
        if b.joined { " joined" } else { "" },
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
            offline.index(),
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
fn one_pass(
    b: GradientBlueprint,
    options: Options,
    dtype: Dtype,
    summation: Option<Summation>,
) -> Specimen {
    let kernel = match summation {
        Some(Summation::Reproducible) => "one pass",
        Some(Summation::Unordered) => "one pass unordered",
        None => "one pass without query",
    };
    let name = gradient_name(kernel, &b, options, dtype);
    Specimen::new(name, move |offline| {
        Box::new(one_pass_kernel::OnePassKernel::new(
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
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            b.score_registers(),
            b.weight_registers(),
            b.sum_registers(),
            b,
            summation,
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

fn query_sums(b: GradientBlueprint, dtype: Dtype) -> Specimen {
    let name = format!("hopper query sums {dtype} d{} gradient", b.head_dim);
    Specimen::new(name, move |offline| {
        Box::new(query_sums_kernel::QuerySumsKernel::new(
            offline.settings(256, AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            4,
            b,
        ))
    })
}

#[allow(clippy::unit_arg)]
fn statistics(b: GradientBlueprint, dtype: Dtype) -> Specimen {
    let name = format!("hopper row statistics {dtype} v{} gradient", b.value_dim);
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
            offline.buffer(),
            offline.buffer(),
            offline.geometry(),
            offline.index(),
            8,
            4,
            b.value_dim,
            b.sum_width(),
            elem_type(dtype),
        ))
    })
}
