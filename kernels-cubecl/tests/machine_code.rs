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
//! Of use while writing a kernel: `KERNELS` restricts to names with words that begin so,
//! `CAPABILITIES` (`80 90`) to compute capabilities, and `MACHINE_CODE` names a folder that keeps
//! source, PTX and machine code.

#[path = "machine_code/assembler.rs"]
mod assembler;
#[path = "machine_code/nvrtc.rs"]
mod nvrtc;

use assembler::Assembler;
use kernels_cubecl::machine_code::specimens;
use nvrtc::Nvrtc;
use std::env;
use std::path::PathBuf;

/// Ampere (data centre, consumer), Ada, Hopper.
const CAPABILITIES: [u32; 4] = [80, 86, 89, 90];

/// Catches kernels whose registers overflow, whose arrays left the registers, or whose warpgroup
/// products the assembler serialised.
#[test]
fn every_kernel_compiles_to_clean_machine_code() {
    let nvrtc = Nvrtc::open(&setting("NVRTC_LIBRARY"), &setting("CUDA_INCLUDE"));
    let keep = env::var_os("MACHINE_CODE").map(PathBuf::from);
    let folder = keep.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    std::fs::create_dir_all(&folder).expect("a folder for the output");
    let assembler = Assembler::new(setting("PTXAS"), env::var("NVDISASM").ok());
    let words = env::var("KERNELS").unwrap_or_default();
    let chosen = env::var("CAPABILITIES").unwrap_or_default();
    let capabilities: Vec<u32> = match chosen.is_empty() {
        true => CAPABILITIES.to_vec(),
        false => chosen
            .split_whitespace()
            .map(|n| n.parse().expect("a number"))
            .collect(),
    };

    let mut failures = Vec::new();
    let mut compiled = 0;
    println!(
        "{:<64} {:>4} {:>9} {:>7} {:>6} {:>6}",
        "kernel", "sm", "registers", "shared", "stack", "spills"
    );
    for specimen in specimens() {
        let named = |word: &str| specimen.name.split(' ').any(|part| part.starts_with(word));
        if !words.split_whitespace().all(named) {
            continue;
        }
        for &version in &capabilities {
            if version < specimen.since || (specimen.only && version != specimen.since) {
                continue;
            }
            compiled += 1;
            let name = &specimen.name;
            let stem = folder.join(format!("{}-sm{version}", name.replace(' ', "-")));
            let result = specimen.source(version).and_then(|source| {
                std::fs::write(stem.with_extension("cu"), &source.code)
                    .map_err(|e| e.to_string())?;
                let ptx = nvrtc.compile(&source.code, version)?;
                let code = assembler.assemble(&ptx, version, &stem)?;
                println!(
                    "{name:<64} {version:>4} {:>9} {:>7} {:>6} {:>6}{}",
                    code.registers,
                    source.shared_memory + code.static_shared,
                    code.stack,
                    code.spills,
                    code.products()
                );
                code.verdict(specimen.tolerated)
            });
            if let Err(reason) = result {
                failures.push(format!("{name}, sm_{version}: {reason}"));
            }
        }
    }
    assert!(compiled > 0, "no kernel's name holds all of {words:?}");
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: eval \"$(scripts/install-cuda-compilers.sh)\" sets it")
    })
}
