//! What the compiler makes of every kernel, on a machine without a GPU: no spills, no local memory,
//! and no warpgroup product that waits for the one before it.
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
//! Of use while writing a kernel: `KERNELS` restricts to names with words that begin so,
//! `CAPABILITIES` (`80 90`) to compute capabilities, and `MACHINE_CODE` names a folder that keeps
//! source, PTX and machine code.

#[path = "machine_code/assembler.rs"]
mod assembler;
#[path = "machine_code/nvrtc.rs"]
mod nvrtc;

use assembler::{Assembler, MachineCode};
use kernels_cubecl::machine_code::{Specimen, specimens};
use nvrtc::Nvrtc;
use std::env;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Ampere (data centre, consumer), Ada, Hopper.
const CAPABILITIES: [u32; 4] = [80, 86, 89, 90];

/// Spills that are let pass: how a kernel's name begins, the compute capability, and the bytes measured.
const KNOWN: [(&str, u32, usize); 20] = [
    // The rows of a copy are no power of two of chunks, and its addresses take more than one register.
    ("mma forward bf16 d96v96 4x2x16 by 64 stages 2", 80, 100),
    // Parts of f32 operands come in fours next to each other, with few registers between. What is kept
    // back is read once a block.
    ("mma forward f32 d96v96 4x2x16", 80, 48),
    ("mma forward f32 d96v96 4x2x16", 90, 372),
    ("mma forward f32 d128v128 4x2x16", 90, 248),
    ("mma forward f32 d192v192 4x1x16", 90, 24),
    ("mma query gradient f32 d192v192 2x1x16", 90, 8),
    ("mma query gradient f32 d256v256 2x1x16", 80, 224),
    ("mma key value gradient f32 d64v64 4x2x16", 86, 128),
    ("mma key value gradient f32 d64v64 4x2x16", 89, 128),
    // Sums and gradients of scores fill the registers; what stays the same is read once a block.
    ("mma key value gradient f32 d128v128 4x1x16", 80, 152),
    ("mma key value gradient f32 d128v128 8x1x16", 90, 320),
    ("mma key value gradient f32 d64v64 4x2x16", 90, 176),
    ("mma key value gradient f32 d96v96 4x1x16", 86, 92),
    ("mma key value gradient f32 d96v96 4x1x16", 89, 92),
    ("mma key value gradient f32 d96v96 8x1x16", 80, 168),
    ("mma key value gradient f32 d96v96 8x1x16", 90, 144),
    ("mma query gradient f32 d128v128 4x1x16", 80, 32),
    ("mma query gradient f32 d64v64 4x2x16", 90, 52),
    // A mask alone is read for every score, and its addresses are live across the products.
    ("hopper forward bf16 d128v128 3x64x80 mask", 90, 20),
    ("hopper query gradient bf16 d128v128 3x64x64 mask", 90, 80),
];

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
            if !words.split_whitespace().all(named) {
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
                        verdict(&code, name, version)
                    }
                    Err(reason) => Err(reason),
                };
                failures.extend(verdict.err().map(|e| format!("{name}, sm_{version}: {e}")));
            }
        }
        failures
    }
}

fn verdict(code: &MachineCode, name: &str, version: u32) -> Result<(), String> {
    let known = KNOWN
        .iter()
        .find(|(start, capability, _)| name.starts_with(start) && version == *capability);
    code.verdict(known.map_or(0, |(.., bytes)| *bytes))
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
