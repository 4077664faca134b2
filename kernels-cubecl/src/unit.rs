//! A unit's number, kept or read again.

use cubecl::prelude::*;

/// `UNIT_POS`, read again instead of kept in a register. By assembly text.
#[cube]
pub(crate) fn unit_again() -> u32 {
    let y: u32;
    gpu_asm!("mov.u32 {y}, %tid.x;", y = out(_) y, options(nomem));
    y
}

/// `UNIT_POS`; read `again` where registers are scarce, for what follows from it would be kept, too.
#[cube]
pub(crate) fn unit(#[comptime] again: bool) -> u32 {
    if again { unit_again() } else { UNIT_POS }
}

/// `UNIT_POS_PLANE` of planes of 32 units, as [`unit`].
#[cube]
pub(crate) fn lane(#[comptime] again: bool) -> u32 {
    if again {
        unit_again() % 32
    } else {
        UNIT_POS_PLANE
    }
}
