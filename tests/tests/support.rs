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
    family: &'static str,
    /// f32, f16, bf16.
    dtypes: [Has; 3],
}

const fn backend(
    feature: &'static str,
    compiler: &'static str,
    family: &'static str,
    dtypes: [Has; 3],
) -> Backend {
    Backend {
        feature,
        compiler,
        family,
        dtypes,
    }
}

use Has::{Maybe, No, Yes};

const BACKENDS: [Backend; 9] = [
    backend("flex", "rust", "composed", [Yes, Yes, Yes]),
    backend("cuda", "llvm", "portable", [Yes, Yes, Maybe]),
    backend("cuda-nvrtc", "cuda c++", "portable", [Yes, Yes, Maybe]),
    backend("rocm", "llvm", "portable", [Yes, Yes, Maybe]),
    backend("metal", "msl", "portable", [Yes, Yes, Maybe]),
    backend("vulkan", "spirv", "portable", [Yes, Maybe, Maybe]),
    backend("webgpu", "wgsl", "portable", [Yes, Maybe, No]),
    backend("wgpu", "wgsl", "portable", [Yes, Maybe, No]),
    backend("cpu", "llvm", "portable", [Yes, Maybe, Maybe]),
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
            backend.family,
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
        assert_eq!(report.forward_family, row.family, "{}", report.name);
        assert_eq!(report.backward_family, row.family, "{}", report.name);
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
