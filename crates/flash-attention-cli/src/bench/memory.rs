//! The most memory that a call takes, inputs included.

use burn::tensor::Device;
use std::fs;

/// Reads the memory of a device, or of this process where the device is the host's processor.
pub struct Gauge<'a> {
    device: &'a Device,
}

impl<'a> Gauge<'a> {
    /// Starts before anything of a point is allocated.
    pub fn start(device: &'a Device) -> Self {
        device.memory_cleanup();
        Self { device }
    }

    /// Forgets what drawing the inputs took for a while.
    pub fn forget(&self) {
        self.device.memory_cleanup();
        if cfg!(target_os = "linux") {
            // Sets the peak back to what is resident now. Where that is refused the peak is that of
            // the points so far.
            let _ = fs::write("/proc/self/clear_refs", "5");
        }
    }

    /// Bytes at the peak since `forget`: what the device's allocator has taken, which only grows
    /// until the next clean-up, or what this process had resident, all of it.
    pub fn peak(&self) -> Option<u64> {
        match self.device.memory_pool_usage() {
            Some(usage) => Some(usage.bytes_reserved),
            None => peak_resident(),
        }
    }
}

/// The most resident memory since the peak was set back, in bytes.
fn peak_resident() -> Option<u64> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    // Sizes are given in KiB and called kB.
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kibibytes * 1024)
}
