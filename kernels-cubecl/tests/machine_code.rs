//! What the compiler makes of every kernel of the families `hopper` and `mma`, in each form that plans choose
//! on compute capabilities 8.0, 8.6, 8.9 and 9.0, on a machine without a GPU: no spills, no local memory, and
//! no warpgroup product that waits for the one before it.
//!
//! Needs NVIDIA's compilers; `eval "$(scripts/install-cuda-compilers.sh)"` installs them and sets
//!
//! | variable | |
//! |---|---|
//! | `NVRTC_LIBRARY` | NVRTC's shared library |
//! | `CUDA_INCLUDE` | folders of CUDA's headers, separated by `:` |
//! | `PTXAS` | the assembler |
//! | `NVDISASM` | the disassembler; without it, warpgroup products are judged by warnings alone |
//!
//! Compiles on as many threads as there are cores.
//!
//! Of use while writing a kernel: `KERNELS` restricts to names with words that begin so, of any family,
//! `CAPABILITIES` (`80 90`) to compute capabilities, and `MACHINE_CODE` names a folder that keeps
//! source, PTX and machine code.

#[path = "machine_code/assembler.rs"]
mod assembler;
#[path = "machine_code/nvrtc.rs"]
mod nvrtc;

use assembler::Assembler;
use kernels_cubecl::machine_code::{Specimen, specimens};
use nvrtc::Nvrtc;
use std::env;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Ampere (data centre, consumer), Ada, Hopper.
const CAPABILITIES: [u32; 4] = [80, 86, 89, 90];

/// The families that are compiled where `KERNELS` names nothing. Portable kernels, some of which spill, are
/// no part of the requirement.
const FAMILIES: [&str; 2] = ["hopper", "mma"];

/// Catches kernels whose registers overflow, whose arrays left the registers, or whose warpgroup
/// products the assembler serialised.
#[test]
fn every_kernel_compiles_to_clean_machine_code() {
    let compilers = Compilers::new();
    let work = work();
    assert!(!work.is_empty(), "no kernel's name holds all those words");
    println!(
        "{:<72} {:>4} {:>9} {:>7} {:>6} {:>6} {:>5}",
        "kernel", "sm", "registers", "shared", "stack", "spills", "s"
    );
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = job.run(&compilers);
                    failures.lock().expect("no panic").extend(found);
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic");
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// A kernel, and the compute capabilities on which a plan chooses it.
struct Job {
    specimen: Specimen,
    versions: Vec<u32>,
}

fn work() -> Vec<Job> {
    let words = env::var("KERNELS").unwrap_or_default();
    let chosen = env::var("CAPABILITIES").unwrap_or_default();
    let capabilities: Vec<u32> = match chosen.is_empty() {
        true => CAPABILITIES.to_vec(),
        false => chosen
            .split_whitespace()
            .map(|n| n.parse().expect("a number"))
            .collect(),
    };
    let mut work: Vec<Job> = Vec::new();
    for version in capabilities {
        for specimen in specimens(version) {
            let named = |word: &str| specimen.name.split(' ').any(|part| part.starts_with(word));
            let family = FAMILIES
                .iter()
                .any(|family| specimen.name.starts_with(family));
            if !words.split_whitespace().all(named) || words.is_empty() && !family {
                continue;
            }
            let same = |job: &&mut Job| job.specimen.name == specimen.name;
            match work.iter_mut().find(same) {
                Some(job) => job.versions.push(version),
                None => work.push(Job {
                    specimen,
                    versions: vec![version],
                }),
            }
        }
    }
    // Kernels without options first: they are of the most use.
    work.sort_by_key(|job| job.specimen.name.len());
    work
}

impl Job {
    /// What is wrong with the kernel's machine code.
    ///
    /// Kernels of the same name have the same source on every device, and PTX for 8.0 is what NVRTC
    /// makes for 8.6 and 8.9, too.
    fn run(&self, compilers: &Compilers) -> Vec<String> {
        let name = &self.specimen.name;
        let start = Instant::now();
        let source = match self.specimen.source(self.versions[0]) {
            Ok(source) => source,
            Err(reason) => return vec![format!("{name}: {reason}")],
        };
        let mut failures = Vec::new();
        let (older, newer): (Vec<u32>, Vec<u32>) = self.versions.iter().partition(|&&v| v < 90);
        for versions in [older, newer] {
            let Some(&oldest) = versions.first() else {
                continue;
            };
            let stem = compilers.stem(name, oldest);
            std::fs::write(stem.with_extension("cu"), &source.code).expect("a writable folder");
            let ptx = match compilers.nvrtc.compile(&source.code, oldest) {
                Ok(ptx) => ptx,
                Err(reason) => {
                    failures.push(format!("{name}, sm_{oldest}: {reason}"));
                    continue;
                }
            };
            for version in versions {
                let stem = compilers.stem(name, version);
                let verdict = match compilers.assembler.assemble(&ptx, version, &stem) {
                    Ok(code) => {
                        println!(
                            "{name:<72} {version:>4} {:>9} {:>7} {:>6} {:>6} {:>5.1}{}",
                            code.registers,
                            source.shared_memory + code.static_shared,
                            code.stack,
                            code.spills,
                            start.elapsed().as_secs_f32(),
                            code.products()
                        );
                        code.verdict()
                    }
                    Err(reason) => Err(reason),
                };
                failures.extend(verdict.err().map(|e| format!("{name}, sm_{version}: {e}")));
            }
        }
        failures
    }
}

struct Compilers {
    nvrtc: Nvrtc,
    assembler: Assembler,
    folder: PathBuf,
}

impl Compilers {
    fn new() -> Self {
        let keep = env::var_os("MACHINE_CODE").map(PathBuf::from);
        let assembler = Assembler {
            ptxas: setting("PTXAS"),
            nvdisasm: env::var("NVDISASM").ok(),
            keep: keep.is_some(),
        };
        let folder = keep.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
        std::fs::create_dir_all(&folder).expect("a folder for the output");
        Self {
            nvrtc: Nvrtc::open(&setting("NVRTC_LIBRARY"), &setting("CUDA_INCLUDE")),
            assembler,
            folder,
        }
    }

    /// Where a kernel's files lie, without their extensions.
    fn stem(&self, name: &str, version: u32) -> PathBuf {
        let name = name.replace(' ', "-");
        self.folder.join(format!("{name}-sm{version}"))
    }
}

fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: eval \"$(scripts/install-cuda-compilers.sh)\" sets it")
    })
}
