//! What a record of figures must say about where they come from.

use burn_flash_attention::DeviceReport;
use serde::Serialize;
use std::fmt;
use std::process::Command;

/// The program, the source it was built from and the machine.
#[derive(Debug, Serialize)]
pub struct Setting {
    /// The command line.
    pub command: String,
    /// Short hash, with `-dirty` where files differ from it.
    pub commit: Option<String>,
    /// `release` or `dev`, then the features that change what is measured.
    pub build: String,
    /// Name of the device.
    pub device: String,
    /// The device's own name.
    pub hardware: String,
    /// What its kernels are compiled by.
    pub compiler: &'static str,
    /// Processor of the host, and how many threads it runs at once.
    pub host: String,
}

impl Setting {
    /// Of this run on a device.
    pub fn new(device: &DeviceReport) -> Self {
        Self {
            command: command(),
            commit: commit(),
            build: build(),
            device: device.name.clone(),
            hardware: device.hardware.clone(),
            compiler: device.compiler,
            host: host(),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# command: {}", self.command)?;
        let commit = self.commit.as_deref().unwrap_or("unknown");
        writeln!(f, "# commit: {commit}")?;
        writeln!(f, "# build: {}", self.build)?;
        let Self {
            device,
            hardware,
            compiler,
            ..
        } = self;
        writeln!(f, "# device: {device}, {hardware}, compiler {compiler}")?;
        writeln!(f, "# host: {}", self.host)
    }
}

/// The arguments as a shell takes them, after the program's name without its folder.
fn command() -> String {
    let quoted = std::env::args().skip(1).map(|argument| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:".contains(c);
        match !argument.is_empty() && argument.chars().all(plain) {
            true => argument,
            false => format!("'{}'", argument.replace('\'', r"'\''")),
        }
    });
    let mut words = vec![env!("CARGO_BIN_NAME").to_string()];
    words.extend(quoted);
    words.join(" ")
}

fn commit() -> Option<String> {
    let output = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR")])
        .args(["describe", "--always", "--dirty", "--exclude", "*"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}

fn build() -> String {
    let profile = if cfg!(debug_assertions) {
        "dev"
    } else {
        "release"
    };
    let features = [
        ("fusion", cfg!(feature = "fusion")),
        ("autotune", cfg!(feature = "autotune")),
    ];
    let state = features.map(|(name, on)| format!("{name} {}", if on { "on" } else { "off" }));
    format!("{profile}, {}", state.join(", "))
}

fn host() -> String {
    let system = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let processor = std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("model name"))?;
            Some(line.trim_start_matches([' ', '\t', ':']).to_string())
        });
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let processor = processor
        .map(|name| format!("{name}, "))
        .unwrap_or_default();
    format!("{processor}{threads} threads, {system}")
}
