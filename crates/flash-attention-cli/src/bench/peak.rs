//! What a device could do at most, from its vendor's data sheet.

use burn_flash_attention::Dtype;

/// A device by a part of its name, and TFLOP/s without sparsity: f16 and bf16 by matrix units that
/// accumulate in f32, and f32 by the vector units, since products of f32 are not to lose bits.
struct Peak {
    name: &'static str,
    sixteen_bit: f64,
    f32: f64,
}

/// The first whose words stand in the device's name counts, so the longer names stand before the
/// shorter. Sources: NVIDIA's data sheets of each board (where they print figures with sparsity,
/// half of those), the Ada white paper for the GeForce board, AMD's data sheet of the MI300X.
const PEAKS: [Peak; 12] = [
    peak("H200 NVL", 835.5, 60.0),
    peak("H200", 989.5, 67.0),
    peak("H100 NVL", 835.5, 60.0),
    peak("H100 PCIe", 756.0, 51.0),
    peak("H100", 989.5, 67.0),
    peak("A100", 312.0, 19.5),
    peak("A40", 149.7, 37.4),
    peak("A30", 165.0, 10.3),
    peak("L40S", 362.05, 91.6),
    peak("L40", 181.05, 90.5),
    peak("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    peak("MI300X", 1307.4, 163.4),
];

const fn peak(name: &'static str, sixteen_bit: f64, f32: f64) -> Peak {
    Peak {
        name,
        sixteen_bit,
        f32,
    }
}

/// TFLOP/s of `hardware` in `dtype`, where it is known.
pub fn known(hardware: &str, dtype: Dtype) -> Option<f64> {
    let found = PEAKS.iter().find(|peak| is(hardware, peak.name))?;
    Some(match dtype {
        Dtype::F32 => found.f32,
        Dtype::F16 | Dtype::BF16 => found.sixteen_bit,
    })
}

/// Whether `name` stands in the device's name word by word. A GeForce's has to be all of it: what
/// follows there (Laptop, D, Ti) is another device.
fn is(hardware: &str, name: &str) -> bool {
    if name.contains("GeForce") {
        return hardware == name;
    }
    let (hardware, name) = (words(hardware), words(name));
    hardware.windows(name.len()).any(|part| part == name)
}

fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_own_name() {
        assert_eq!(known("NVIDIA H200", Dtype::BF16), Some(989.5));
        assert_eq!(known("NVIDIA H100 80GB HBM3", Dtype::F16), Some(989.5));
        assert_eq!(known("NVIDIA H100 PCIe", Dtype::BF16), Some(756.0));
        assert_eq!(known("NVIDIA L40S", Dtype::F32), Some(91.6));
        assert_eq!(known("NVIDIA A100-SXM4-80GB", Dtype::F32), Some(19.5));
        let geforce = "NVIDIA GeForce RTX 4090";
        assert_eq!(known(geforce, Dtype::BF16), Some(165.2));
        assert_eq!(known(&format!("{geforce} Laptop GPU"), Dtype::BF16), None);
        assert_eq!(known("NVIDIA RTX A4000", Dtype::F32), None);
        assert_eq!(known("host processor", Dtype::F32), None);
        assert_eq!(known("llvmpipe (LLVM 19.1.7, 256 bits)", Dtype::F32), None);
    }
}
