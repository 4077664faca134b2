//! The Hopper kernels as the test `machine_code` reads them.

use super::blueprint::{ForwardBlueprint, variants};
use super::forward::forward_kernel;
use crate::device::elem_type;
use crate::machine_code::Specimen;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use flash_attention_spec::{Dtype, ElementType, Operand, Operands, Options, Problem};

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
        }
    }
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
        "hopper forward {dtype} d{}v{} {}x64x{}{}{}{}",
        b.head_dim,
        b.value_dim,
        b.warpgroups,
        b.block_kv,
        if b.turns { " turns" } else { "" },
        if b.polynomial > 0 { " polynomial" } else { "" },
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
