//! The support table of the README: rendered from what the tests expect, so that it cannot drift.

use burn_flash_attention::{Dtype, devices};

#[derive(Clone, Copy, PartialEq)]
enum Has {
    Yes,
    /// Depends on the hardware or its driver.
    Maybe,
    No,
}

struct Backend {
    feature: &'static str,
    compiler: &'static str,
    /// Kernel families of f32, and of f16 and bf16, of which the hardware decides.
    families: [&'static [&'static str]; 2],
    /// f32, f16, bf16.
    dtypes: [Has; 3],
}

const fn backend(
    feature: &'static str,
    compiler: &'static str,
    families: [&'static [&'static str]; 2],
    dtypes: [Has; 3],
) -> Backend {
    Backend {
        feature,
        compiler,
        families,
        dtypes,
    }
}

use Has::{Maybe, No, Yes};

const BACKENDS: [Backend; 9] = [
    backend("flex", "rust", [&["composed"]; 2], [Yes, Yes, Yes]),
    backend(
        "cuda",
        "llvm",
        [&["portable"], &["mma", "portable"]],
        [Yes, Yes, Maybe],
    ),
    backend(
        "cuda-nvrtc",
        "cuda c++",
        [&["mma", "portable"], &["hopper", "mma", "portable"]],
        [Yes, Yes, Maybe],
    ),
    backend("rocm", "llvm", [&["portable"]; 2], [Yes, Yes, Maybe]),
    backend("metal", "msl", [&["portable"]; 2], [Yes, Yes, Maybe]),
    backend("vulkan", "spirv", [&["portable"]; 2], [Yes, Maybe, No]),
    backend("webgpu", "wgsl", [&["portable"]; 2], [Yes, Maybe, No]),
    backend("wgpu", "wgsl", [&["portable"]; 2], [Yes, Maybe, No]),
    backend("cpu", "llvm", [&["portable"]; 2], [Yes, Maybe, Maybe]),
];

fn rendered() -> String {
    let mut table = String::from(
        "| feature | compiled by | kernels | f32 | f16 | bf16 | every option, forward and backward |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for backend in &BACKENDS {
        let cells = backend.dtypes.map(|has| match has {
            Yes => "yes",
            Maybe => "where the device has it",
            No => "no",
        });
        table += &format!(
            "| `{}` | {} | {} | {} | yes |\n",
            backend.feature,
            backend.compiler,
            match backend.families {
                [f32, half] if f32 == half => f32.join(" or "),
                [f32, half] => format!(
                    "{} (f16, bf16), {} (f32)",
                    half.join(" or "),
                    f32.join(" or ")
                ),
            },
            cells.join(" | ")
        );
    }
    table
}

/// Catches a README that promises something else than what is tested.
#[test]
fn the_readme_shows_the_table() {
    let readme = include_str!("../../README.md");
    let table = rendered();
    assert!(
        readme.contains(&table),
        "README.md has no support table like this:\n{table}"
    );
}

/// Catches a device that has more or fewer element types, or other kernels, than the table says.
#[test]
fn devices_are_what_the_table_says() {
    for report in devices() {
        let feature = report.name.split(':').next().unwrap_or_default();
        let row = BACKENDS
            .iter()
            .find(|row| {
                row.compiler == report.compiler
                    && (row.feature == feature || row.feature == "cuda-nvrtc")
            })
            // A device without what its own compiler needs is served through WGSL.
            .or_else(|| BACKENDS.iter().find(|row| row.compiler == report.compiler))
            .unwrap_or_else(|| panic!("no row for {feature} by {}", report.compiler));
        for (dtype, family) in report.forward.iter().chain(&report.backward) {
            let expected = row.families[usize::from(*dtype != Dtype::F32)];
            assert!(
                expected.contains(family),
                "{} {dtype}: {family}",
                report.name
            );
        }
        for (dtype, has) in [Dtype::F32, Dtype::F16, Dtype::BF16]
            .into_iter()
            .zip(row.dtypes)
        {
            let found = report.dtypes.contains(&dtype);
            assert!(
                has == Maybe || found == (has == Yes),
                "{} {dtype}: found {found}",
                report.name
            );
        }
    }
}
