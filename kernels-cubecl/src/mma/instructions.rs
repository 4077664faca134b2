//! Where the instructions of a kernel come from, and those that any of them takes.

use super::fragment::Pair;
use super::tf32::Ties;
pub(crate) use crate::assembly::by_value;
use cubecl::prelude::*;

/// Where the instructions come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Instructions {
    /// From the generator's own operations.
    Generated,
    /// From assembly text, for `f16`: constant offsets in the loads, no halves taken apart.
    AssemblyF16,
    /// From assembly text, for `bf16`.
    AssemblyBF16,
    /// From assembly text, for `f32`, in parts: see [`super::split`].
    SplitF32 {
        /// Right operands lie in shared memory in parts.
        apart: bool,
    },
    /// From assembly text, for `f32` rounded to TF32: see [`super::tf32`].
    Tf32 {
        /// How numbers are rounded.
        ties: Ties,
        /// Right operands lie in shared memory as they are, and are rounded in registers.
        columns: bool,
    },
}

impl Instructions {
    pub(crate) const fn assembly(self) -> bool {
        !matches!(self, Instructions::Generated)
    }

    /// Whether operands are split into parts.
    pub(crate) const fn splits(self) -> bool {
        matches!(self, Instructions::SplitF32 { .. })
    }

    /// Whether right operands lie in shared memory in parts: see [`super::apart`].
    pub(crate) const fn apart(self) -> bool {
        matches!(self, Instructions::SplitF32 { apart: true })
    }

    /// Whether operands are `f32` numbers, a word each.
    pub(crate) const fn numbers(self) -> bool {
        self.splits() || self.ties().is_some()
    }

    /// How numbers are rounded to TF32, if they are.
    pub(crate) const fn ties(self) -> Option<Ties> {
        match self {
            Instructions::Tf32 { ties, .. } => Some(ties),
            _ => None,
        }
    }

    /// The same, where right operands are not rounded to TF32 when they are loaded.
    pub(crate) const fn rounding_columns(self) -> Self {
        match self {
            Instructions::Tf32 { ties, .. } => Instructions::Tf32 {
                ties,
                columns: true,
            },
            other => other,
        }
    }

    /// Whether right operands are rounded to TF32 in registers.
    pub(crate) const fn rounds_columns(self) -> bool {
        matches!(self, Instructions::Tf32 { columns: true, .. })
    }

    /// Whether right operands lie in shared memory as whole numbers.
    pub(crate) const fn whole_columns(self) -> bool {
        self.numbers() && !self.apart()
    }

    /// Left fragments that 16 weights of each row make.
    pub(crate) const fn fragments(self) -> usize {
        if self.numbers() { 2 } else { 1 }
    }

    pub(crate) const fn element(self) -> &'static str {
        match self {
            Instructions::AssemblyF16 => "f16",
            _ => "bf16",
        }
    }
}

/// Rounds to the nearest pair of the input type, one register.
#[cube]
pub(crate) fn round_pair<E: Float>(x: Pair<f32>, #[comptime] instructions: Instructions) -> u32 {
    if comptime!(instructions.assembly()) {
        let element = comptime!(instructions.element());
        let low = by_value::<f32>(x.extract(0usize));
        let high = by_value::<f32>(x.extract(1usize));
        let packed: u32;
        gpu_asm!(
            "cvt.rn.{element}x2.f32 {packed}, {high}, {low};",
            low = in(_) low, high = in(_) high, packed = out(_) packed, options(pure, nomem)
        );
        by_value::<u32>(packed)
    } else {
        u32::reinterpret(Pair::<E>::cast_from(x))
    }
}

/// The address of a place in shared memory.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(pointer: *const T) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 wide; cvta.to.shared.u64 wide, {pointer}; cvt.u32.u64 {address}, wide; }}",
        pointer = in(_) pointer, address = out(_) address, options(pure, nomem)
    );
    by_value::<u32>(address)
}
