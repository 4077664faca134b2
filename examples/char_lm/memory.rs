//! How much memory this process has used at most.

/// The peak resident memory of this process in bytes, where the system tells it.
///
/// On Linux it is the line `VmHWM` of `/proc/self/status`; elsewhere `None`. It counts host memory
/// only: what lies on a GPU is not in it.
pub fn peak_resident_bytes() -> Option<u64> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    peak_in_status(&status)
}

fn peak_in_status(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_peak_is_read_and_no_other() {
        let status = "VmPeak:\t  999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t  1 kB\n";
        assert_eq!(peak_in_status(status), Some(2048 * 1024));
        assert_eq!(peak_in_status("VmPeak:\t 1 kB\n"), None);
        assert_eq!(peak_in_status("VmHWM:\t many kB\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_memory_shows() {
        let touched = vec![1u8; 64 << 20];
        let peak = peak_resident_bytes().unwrap();
        assert!(peak >= touched.len() as u64, "{peak}");
        assert_eq!(
            touched.iter().map(|&byte| u64::from(byte)).sum::<u64>(),
            64 << 20
        );
    }
}
