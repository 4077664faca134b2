//! PTX to machine code by `ptxas`, and what can be read from both.

use std::path::Path;
use std::process::Command;

pub struct Assembler {
    pub ptxas: String,
    pub nvdisasm: Option<String>,
    /// Whether the text of every kernel's machine code is wanted, and not only of those that have
    /// warpgroup products.
    pub keep: bool,
}

/// What was read from one kernel.
#[derive(Default)]
pub struct MachineCode {
    pub registers: usize,
    /// Shared memory declared in the kernel, in bytes; most is given at the launch instead.
    pub static_shared: usize,
    /// Local memory of a thread, in bytes.
    pub stack: usize,
    /// Bytes of spill stores and loads.
    pub spills: usize,
    warnings: Vec<String>,
    asked: Products,
    /// None where nothing was disassembled.
    got: Option<Products>,
}

/// Warpgroup products, and the fences that start a run of them.
#[derive(Default, Clone, Copy)]
struct Products {
    products: usize,
    fences: usize,
}

impl Assembler {
    /// Assembles `ptx`, which holds one kernel; leaves its files at `stem` with their extensions.
    pub fn assemble(&self, ptx: &str, version: u32, stem: &Path) -> Result<MachineCode, String> {
        let suffix = if version >= 90 { "a" } else { "" };
        let text = |path: &Path| path.display().to_string();
        let (input, output) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
        std::fs::write(&input, ptx).map_err(|error| error.to_string())?;
        let arch = format!("-arch=sm_{version}{suffix}");
        let log = run(
            &self.ptxas,
            &["-v", &arch, &text(&input), "-o", &text(&output)],
        )?
        .1;
        let mut code = MachineCode {
            registers: number_before(&log, "registers"),
            static_shared: number_before(&log, "bytes smem"),
            stack: number_before(&log, "bytes stack frame"),
            spills: number_before(&log, "bytes spill stores")
                + number_before(&log, "bytes spill loads"),
            warnings: log
                .lines()
                .filter(|line| line.contains("warning") || line.contains("wgmma"))
                .map(str::to_string)
                .collect(),
            asked: count(ptx, "wgmma.mma_async", "wgmma.fence"),
            got: None,
        };
        if let Some(nvdisasm) = &self.nvdisasm
            && (self.keep || code.asked.products > 0)
        {
            let sass = run(nvdisasm, &["-c", &text(&output)])?.0;
            std::fs::write(stem.with_extension("sass"), &sass)
                .map_err(|error| error.to_string())?;
            code.got = Some(count(&sass, "HGMMA", "WARPGROUP.ARRIVE"));
        }
        Ok(code)
    }
}

impl MachineCode {
    /// Products and fences in the machine code, where there are any.
    pub fn products(&self) -> String {
        match self.got {
            Some(got) if got.products > 0 => {
                format!("  {} HGMMA in {} runs", got.products, got.fences)
            }
            _ => String::new(),
        }
    }

    /// # Errors
    /// What is wrong with it.
    pub fn verdict(&self) -> Result<(), String> {
        let mut against = self.warnings.clone();
        if self.stack > 0 {
            against.push(format!(
                "{} bytes of local memory, expected none",
                self.stack
            ));
        }
        if self.spills > 0 {
            against.push(format!("{} bytes spilled, expected none", self.spills));
        }
        let limit = 255;
        if self.registers == 0 || self.registers > limit {
            against.push(format!(
                "{} registers, expected 1 to {limit}",
                self.registers
            ));
        }
        // The assembler may copy a run of products, never shorten one unless it serialises.
        if let Some(got) = self.got
            && got.fences * self.asked.products > got.products * self.asked.fences
        {
            against.push(format!(
                "serialised: {} products in {} runs, expected runs of {}",
                got.products,
                got.fences,
                self.asked.products / self.asked.fences.max(1)
            ));
        }
        if against.is_empty() {
            Ok(())
        } else {
            Err(against.join("; "))
        }
    }
}

/// Standard output and standard error of a program that must succeed.
fn run(program: &str, arguments: &[&str]) -> Result<(String, String), String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if output.status.success() {
        Ok((out, err))
    } else {
        Err(format!("{program}: {out}{err}"))
    }
}

/// The largest number that stands before `unit`.
fn number_before(log: &str, unit: &str) -> usize {
    log.match_indices(unit)
        .filter_map(|(at, _)| log[..at].split_whitespace().next_back()?.parse().ok())
        .max()
        .unwrap_or(0)
}

fn count(text: &str, product: &str, fence: &str) -> Products {
    Products {
        products: text.matches(product).count(),
        fences: text.matches(fence).count(),
    }
}
