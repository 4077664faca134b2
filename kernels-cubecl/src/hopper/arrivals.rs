//! Barriers of shared memory by address, for planes that hand tiles to each other; and what lies
//! between tiles that units write and copies or products that read them.
//!
//! A barrier's phase ends with its last arrival. The phases of one that guards every second step, or
//! every step, are told apart by their parity: whoever is at most one phase ahead waits for the right
//! one.

use super::instructions::by_value;
use cubecl::prelude::*;

/// Makes the eight bytes at `address` a barrier whose phases end with `count` arrivals.
#[cube]
pub(crate) fn barrier_init(address: u32, #[comptime] count: u32) {
    let a = by_value::<u32>(address);
    gpu_asm!("mbarrier.init.shared::cta.b64 [{a}], {count};", a = in(_) a);
}

/// Arrives for a whole plane: whatever its lanes read and wrote before is done.
#[cube]
pub(crate) fn plane_arrive(address: u32, lane: u32) {
    sync_plane();
    if lane == 0 {
        barrier_arrive(address);
    }
}

/// Arrives.
#[cube]
pub(crate) fn barrier_arrive(address: u32) {
    let a = by_value::<u32>(address);
    gpu_asm!("mbarrier.arrive.release.cta.shared::cta.b64 _, [{a}];", a = in(_) a);
}

/// A plane's first lane arrives, for the plane's products are done and its reads are back. Without a
/// branch, so that the compiler sees the plane stay together.
#[cube]
pub(crate) fn done_with(address: u32) {
    let a = by_value::<u32>(address);
    let lane = by_value::<u32>(UNIT_POS % 32);
    gpu_asm!(
        "{{ .reg .pred first; setp.eq.u32 first, {lane}, 0;",
        "@first mbarrier.arrive.release.cta.shared::cta.b64 _, [{a}]; }}",
        a = in(_) a, lane = in(_) lane
    );
}

/// Waits until a phase of parity `parity` has ended.
#[cube]
pub(crate) fn barrier_wait(address: u32, parity: u32) {
    let a = by_value::<u32>(address);
    let p = by_value::<u32>(parity);
    gpu_asm!(
        "{{ .reg .pred done;",
        "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [{a}], {p};",
        "@!done bra AGAIN; }}",
        a = in(_) a, p = in(_) p
    );
}

/// What this unit wrote to shared memory is there for copies and products that are told of it later.
#[cube]
pub(crate) fn publish() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Waits for the units of a warpgroup, by a named barrier of its own.
#[cube]
pub(crate) fn warpgroup_sync(warpgroup: u32, #[comptime] warpgroups: u32) {
    #[unroll]
    for w in 0..warpgroups {
        if warpgroup == w {
            let id = comptime!(4 + w);
            gpu_asm!("barrier.cta.sync.aligned {id}, 128;");
        }
    }
}
