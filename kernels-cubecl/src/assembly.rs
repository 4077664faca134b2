//! What assembly text takes.

use cubecl::prelude::*;

/// The value of a variable: assembly text takes a mutable variable by its address.
#[cube]
pub(crate) fn by_value<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| x.read_value(scope).into())
}
