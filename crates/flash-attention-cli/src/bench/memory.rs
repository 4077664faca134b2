//! The most memory that a call takes, inputs included.

use burn::tensor::Device;
use std::fs;

/// Reads the memory of a device, or of this process where the device is the host's processor.
pub struct Gauge<'a> {
    device: &'a Device,
    /// Resident memory of this process at the start.
    start: Option<u64>,
}

impl<'a> Gauge<'a> {
    /// Starts before anything of a point is allocated.
    pub fn start(device: &'a Device) -> Self {
        device.memory_cleanup();
        Self {
            device,
            start: status("VmRSS:"),
        }
    }

    /// Forgets what drawing the inputs took for a while.
    pub fn forget(&self) {
        self.device.memory_cleanup();
        if cfg!(target_os = "linux") {
            // Sets the peak back to what is resident now; where that is refused, see `peak`.
            let _ = fs::write("/proc/self/clear_refs", "5");
        }
    }

    /// Bytes at the peak since `forget`: what the device's allocator has taken, which grows only
    /// until the next clean-up, or by how much this process has grown since the start. Where the
    /// host refuses to set its peak back, this is the largest so far.
    pub fn peak(&self) -> Option<u64> {
        match self.device.memory_pool_usage() {
            Some(usage) => Some(usage.bytes_reserved),
            None => Some(status("VmHWM:")?.saturating_sub(self.start?)),
        }
    }
}

/// A field of `/proc/self/status`, which gives sizes in KiB and calls them kB.
fn status(name: &str) -> Option<u64> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kibibytes * 1024)
}
