//! What Hopper has and CubeCL has no name for, but for products ([`super::products`]): packed conversions,
//! shared memory by address, named barriers, registers handed from one warpgroup to others.

pub(crate) use crate::assembly::by_value;
pub(crate) use crate::unit::unit_again;
use cubecl::prelude::*;

/// `2^x`, to two units in the last place.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let x = by_value::<f32>(x);
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", x = in(_) x, y = out(_) y, options(pure, nomem));
    y
}

/// A product, rounded whatever becomes of it.
#[cube]
pub(crate) fn product(a: f32, b: f32) -> f32 {
    let a = by_value::<f32>(a);
    let b = by_value::<f32>(b);
    let y: f32;
    gpu_asm!("mul.rn.f32 {y}, {a}, {b};", a = in(_) a, b = in(_) b, y = out(_) y, options(pure, nomem));
    y
}

/// Two numbers rounded into the halves of a register.
#[cube]
pub(crate) fn pack(low: f32, high: f32, #[comptime] element: &'static str) -> u32 {
    let low = by_value::<f32>(low);
    let high = by_value::<f32>(high);
    let y: u32;
    gpu_asm!("cvt.rn.{element}x2.f32 {y}, {high}, {low};", low = in(_) low, high = in(_) high, y = out(_) y, options(pure, nomem));
    y
}

/// The number in one half of a register.
#[cube]
pub(crate) fn unpack(pair: u32, high: u32, #[comptime] element: &'static str) -> f32 {
    let half = by_value::<u32>(pair >> (high * 16));
    let y: f32;
    gpu_asm!("{{ .reg .b16 l, h; mov.b32 {{l, h}}, {half}; cvt.f32.{element} {y}, l; }}", half = in(_) half, y = out(_) y, options(pure, nomem));
    y
}

/// Where `p` lies in shared memory, in bytes.
#[cube]
pub(crate) fn shared_address<E: CubePrimitive>(p: *const E) -> u32 {
    let a: u32;
    gpu_asm!("{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {a}, t; }}", p = in(_) p, a = out(_) a, options(pure, nomem));
    a
}

/// Adds 1 to a counter in shared memory that returns to 0 after `last`; the value before.
///
/// Relaxed: what it counts are reads that have come back (a product that was waited for), so no fence
/// has to hold them.
#[cube]
pub(crate) fn count_up(address: u32, #[comptime] last: u32) -> u32 {
    let old: u32;
    gpu_asm!("atom.relaxed.cta.shared::cta.inc.u32 {old}, [{address}], {last};", address = in(_) address, old = out(_) old);
    old
}

/// Whether `x` is not 0 in any of a warpgroup's units, by named barrier `id`.
#[cube]
pub(crate) fn warpgroup_any(x: u32, #[comptime] id: u32) -> u32 {
    let x = by_value::<u32>(x);
    let y: u32;
    gpu_asm!(
        "{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; barrier.cta.red.or.pred.aligned q, {id}, 128, p; selp.u32 {y}, 1, 0, q; }}",
        x = in(_) x, y = out(_) y
    );
    y
}

/// `sum` plus 0 times the 16 bytes at an address: stays 0 as long as every number is finite.
#[cube]
pub(crate) fn watch_finite(address: u32, sum: u32, #[comptime] element: &'static str) -> u32 {
    let a = by_value::<u32>(address);
    let c = by_value::<u32>(sum);
    let y: u32;
    gpu_asm!(
        "{{ .reg .b32 x0, x1, x2, x3, z; mov.b32 z, 0; ld.shared.v4.b32 {{x0, x1, x2, x3}}, [{a}];",
        "fma.rn.{element}x2 x0, x0, z, {c}; fma.rn.{element}x2 x1, x1, z, x0;",
        "fma.rn.{element}x2 x2, x2, z, x1; fma.rn.{element}x2 {y}, x3, z, x2; }}",
        a = in(_) a, c = in(_) c, y = out(_) y
    );
    y
}

/// The register at an address of shared memory.
#[cube]
pub(crate) fn load_shared(address: u32) -> u32 {
    let a = by_value::<u32>(address);
    let y: u32;
    gpu_asm!("ld.shared.b32 {y}, [{a}];", a = in(_) a, y = out(_) y);
    y
}

/// The two registers at an address of shared memory, at a multiple of 8 bytes.
#[cube]
pub(crate) fn load_shared_wide(address: u32) -> u64 {
    let a = by_value::<u32>(address);
    let y: u64;
    gpu_asm!("ld.shared.b64 {y}, [{a}];", a = in(_) a, y = out(_) y);
    y
}

/// Writes two registers to an address of shared memory, at a multiple of 8 bytes.
#[cube]
pub(crate) fn store_shared_wide(address: u32, x: u64) {
    let a = by_value::<u32>(address);
    let x = by_value::<u64>(x);
    gpu_asm!("st.shared.b64 [{a}], {x};", a = in(_) a, x = in(_) x);
}

/// Writes a register to an address of shared memory.
#[cube]
pub(crate) fn store_shared(address: u32, x: u32) {
    let a = by_value::<u32>(address);
    let x = by_value::<u32>(x);
    gpu_asm!("st.shared.b32 [{a}], {x};", a = in(_) a, x = in(_) x);
}

/// Two neighbouring numbers in shared memory, at a multiple of 8 bytes.
#[cube]
pub(crate) fn load_shared_pair(address: u32) -> Vector<f32, Const<2>> {
    let a = by_value::<u32>(address);
    let y: Vector<f32, Const<2>>;
    gpu_asm!("/* {y} {a} */ ld.shared.v2.f32 {{%0, %1}}, [%2];", a = in(_) a, y = out(_) y);
    y
}

/// `1 / x` to one unit in the last place.
#[cube]
pub(crate) fn reciprocal(x: f32) -> f32 {
    let x = by_value::<f32>(x);
    let y: f32;
    gpu_asm!("rcp.approx.f32 {y}, {x};", x = in(_) x, y = out(_) y, options(pure, nomem));
    y
}

/// Minus infinity, where it is needed instead of in a register all along.
#[cube]
pub(crate) fn minus_infinity() -> f32 {
    let y: f32;
    gpu_asm!("mov.f32 {y}, 0fFF800000;", y = out(_) y, options(nomem));
    y
}

/// Leaves a warpgroup's units `count` registers.
#[cube]
pub(crate) fn give_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {count};");
}

/// Waits until a warpgroup's units can have `count` registers.
#[cube]
pub(crate) fn take_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {count};");
}

/// `x`, which a plane's units agree on, so that the assembler knows it too: where this comes from, it
/// keeps what follows in registers of the plane.
#[cube]
pub(crate) fn agreed(x: u32) -> u32 {
    let x = by_value::<u32>(x);
    let y: u32;
    gpu_asm!("redux.sync.max.u32 {y}, {x}, -1;", x = in(_) x, y = out(_) y);
    y
}

/// `x`, of which the compiler does not know that it has it already.
#[cube]
pub(crate) fn again(x: u32) -> u32 {
    let x = by_value::<u32>(x);
    let y: u32;
    gpu_asm!("mov.b32 {y}, {x};", x = in(_) x, y = out(_) y);
    y
}
