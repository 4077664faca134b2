//! Host memory of this process, as Linux accounts for it.

/// Resident memory now, in bytes.
pub fn resident_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// The most resident memory so far, in bytes. What lies on a GPU of its own is not in it.
pub fn peak_resident_bytes() -> Option<u64> {
    status("VmHWM:")
}

fn status(name: &str) -> Option<u64> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    field(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// A field of `/proc/self/status`, which gives sizes in KiB and calls them kB.
fn field(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_and_no_other() {
        let status = "VmPeak:\t  999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t  1 kB\n";
        assert_eq!(field(status, "VmHWM:"), Some(2048 * 1024));
        assert_eq!(field(status, "VmRSS:"), Some(1024));
        assert_eq!(field(status, "VmSwap:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_outlasts_the_memory_that_made_it() {
        let touched = vec![1u8; 256 << 20];
        assert!(resident_bytes().unwrap() >= touched.len() as u64);
        let size = std::hint::black_box(touched).len() as u64;
        assert!(peak_resident_bytes().unwrap() >= size);
    }
}
