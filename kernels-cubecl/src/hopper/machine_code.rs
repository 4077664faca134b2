//! The Hopper kernels as the test `machine_code` reads them.

use super::blueprint::{ForwardBlueprint, variants};
use super::forward::forward_kernel;
use super::gradient_blueprint::{GradientBlueprint, gradient_variants};
use super::one_pass::one_pass_kernel;
use super::query_gradient::query_gradient_kernel;
use super::query_sums::query_sums_kernel;
use super::statistics::statistics_kernel;
use crate::device::elem_type;
use crate::machine_code::Specimen;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::{Dtype, ElementType, Operand, Operands, Options, Problem, Summation};

const ORDERED: Option<Summation> = Some(Summation::Reproducible);

pub(crate) fn specimens() -> Vec<Specimen> {
    let mut all = Vec::new();
    for dims in [
        [64, 64],
        [128, 128],
        [256, 256],
        [96, 96],
        [192, 128],
        [40, 24],
    ] {
        for dtype in [Dtype::BF16, Dtype::F16] {
            let plain = problem(dims, dtype, false, Options::default());
            // Every variant of one element type, the first of the other.
            let count = if dtype == Dtype::BF16 { usize::MAX } else { 1 };
            for blueprint in variants(&plain).into_iter().take(count) {
                all.push(forward(blueprint, false, dtype));
            }
            let options = Options {
                softcap: Some(20.0),
                ..Options::default()
            };
            let full = problem(dims, dtype, true, options);
            all.push(forward(variants(&full)[0], true, dtype));
            if dims[0].max(dims[1]) > 128 {
                continue;
            }
            for (problem, masked, count) in [(&plain, false, count), (&full, true, 1)] {
                let (query, passes) = gradient_variants(problem);
                for blueprint in query.into_iter().take(count) {
                    all.push(query_gradient(blueprint, masked, dtype));
                }
                for blueprint in passes.into_iter().take(count) {
                    all.push(one_pass(blueprint, masked, dtype, ORDERED));
                }
            }
            let (_, passes) = gradient_variants(&plain);
            all.push(one_pass(
                passes[0],
                false,
                dtype,
                Some(Summation::Unordered),
            ));
            all.push(one_pass(passes[0], false, dtype, None));
            all.push(query_sums(passes[0], dtype));
            all.push(statistics(passes[0], dtype));
            // Capped scores alone have a form for blocks that are wholly visible, too.
            let (query, passes) = gradient_variants(&problem(dims, dtype, false, options));
            all.push(query_gradient(query[0], false, dtype));
            all.push(one_pass(passes[0], false, dtype, ORDERED));
        }
    }
    // Fewer tiles of the query gradient than warpgroups.
    let narrow = problem([64, 128], Dtype::BF16, false, Options::default());
    all.push(one_pass(
        gradient_variants(&narrow).1[0],
        false,
        Dtype::BF16,
        ORDERED,
    ));
    all
}

fn problem(
    [head_dim, value_dim]: [usize; 2],
    dtype: Dtype,
    biased: bool,
    options: Options,
) -> Problem {
    let operands = Operands {
        query: Operand::new([1, 2, 256, head_dim], dtype),
        key: Operand::new([1, 2, 256, head_dim], dtype),
        value: Operand::new([1, 2, 256, value_dim], dtype),
        mask: biased.then(|| Operand::new([1, 1, 256, 256], ElementType::Bool)),
        bias: biased.then(|| Operand::new([1, 1, 256, 256], dtype)),
    };
    Problem::new(&operands, &options).expect("a valid problem")
}

// Arguments that leave no trace in a kernel's code are units.
#[allow(clippy::unit_arg)]
fn forward(blueprint: ForwardBlueprint, masked: bool, dtype: Dtype) -> Specimen {
    let b = blueprint;
    let name = format!(
        "hopper forward {dtype} d{}v{} {}x64x{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.block_kv,
        if masked { " mask bias softcap" } else { "" },
    );
    Specimen::new(name, 90, move |offline| {
        Box::new(forward_kernel::ForwardKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            offline.optional(masked),
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
    .only()
}

fn gradient_name(kernel: &str, b: &GradientBlueprint, masked: bool, dtype: Dtype) -> String {
    format!(
        "hopper {kernel} {dtype} d{}v{} {}x64x{}{}{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.walked,
        if masked { " mask" } else { "" },
        if b.biased { " bias" } else { "" },
        if b.capped { " softcap" } else { "" },
    )
}

#[allow(clippy::unit_arg)]
fn query_gradient(b: GradientBlueprint, masked: bool, dtype: Dtype) -> Specimen {
    let name = gradient_name("query gradient", &b, masked, dtype);
    Specimen::new(name, 90, move |offline| {
        Box::new(query_gradient_kernel::QueryGradientKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            (),
            offline.optional(masked),
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
    .only()
}

#[allow(clippy::unit_arg)]
fn one_pass(
    b: GradientBlueprint,
    masked: bool,
    dtype: Dtype,
    summation: Option<Summation>,
) -> Specimen {
    let kernel = match summation {
        Some(Summation::Reproducible) => "one pass",
        Some(Summation::Unordered) => "one pass unordered",
        None => "one pass without query",
    };
    let name = gradient_name(kernel, &b, masked, dtype);
    Specimen::new(name, 90, move |offline| {
        Box::new(one_pass_kernel::OnePassKernel::new(
            offline.settings(b.units(), AddressType::U32),
            offline.properties.clone(),
            offline.target.clone(),
            (),
            (),
            (),
            (),
            (),
            offline.optional(masked),
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
    .only()
}

fn query_sums(b: GradientBlueprint, dtype: Dtype) -> Specimen {
    let name = format!("hopper query sums {dtype} d{} gradient", b.head_dim);
    Specimen::new(name, 90, move |offline| {
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
    .only()
}

#[allow(clippy::unit_arg)]
fn statistics(b: GradientBlueprint, dtype: Dtype) -> Specimen {
    let name = format!("hopper row statistics {dtype} v{} gradient", b.value_dim);
    Specimen::new(name, 90, move |offline| {
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
    .only()
}
