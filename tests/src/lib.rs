//! The device matrix: every test runs on every device that is compiled in and found.
//!
//! `FLASH_ATTENTION_DEVICES=vulkan,flex` restricts the run to the devices named, and no other driver
//! is loaded; one that is named and absent fails. `FLASH_ATTENTION_GRID=full` widens the grid to the
//! complete products, and `FLASH_ATTENTION_PART=2/8` runs the second of eight parts of it, for several
//! processes at once.
//!
//! ```sh
//! cargo test -p flash-attention-tests --no-default-features --features vulkan
//! ```

/// Runs the README's examples.
#[cfg(all(doctest, feature = "flex"))]
#[doc = include_str!("../../README.md")]
mod readme {}

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::{DeviceReport, device, devices};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::env;

/// The devices a run covers, in the order they were found or named.
///
/// # Panics
/// If none is there, or `FLASH_ATTENTION_DEVICES` names one that is absent.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let names: Vec<_> = flash_attention_tests::selected_devices()
///     .into_iter()
///     .map(|report| report.name)
///     .collect();
/// assert!(!names.is_empty());
/// # }
/// ```
pub fn selected_devices() -> Vec<DeviceReport> {
    let selected = match env::var("FLASH_ATTENTION_DEVICES") {
        Ok(names) => select(&names, device, || {
            devices().into_iter().map(|report| report.name).collect()
        }),
        Err(_) => Ok(devices()),
    };
    match selected {
        Ok(selected) if selected.is_empty() => panic!("no device was compiled in and found"),
        Ok(selected) => selected,
        Err(message) => panic!("{message}"),
    }
}

/// The devices that `names`, separated by commas, name; or which name is absent, and which devices
/// are there instead.
fn select<T>(
    names: &str,
    find: impl Fn(&str) -> Option<T>,
    there: impl FnOnce() -> Vec<String>,
) -> Result<Vec<T>, String> {
    let mut selected = Vec::new();
    for name in names.split(',').map(str::trim) {
        match find(name) {
            Some(device) => selected.push(device),
            None => {
                let there = there().join(", ");
                return Err(format!(
                    "FLASH_ATTENTION_DEVICES names {name:?}, found {there}"
                ));
            }
        }
    }
    Ok(selected)
}

/// Whether `FLASH_ATTENTION_GRID` asks for the complete products.
///
/// # Panics
/// If it holds anything but `full` or `small`.
pub fn full_grid() -> bool {
    match env::var("FLASH_ATTENTION_GRID").as_deref() {
        Ok("full") => true,
        Ok("small") | Err(_) => false,
        Ok(other) => panic!("FLASH_ATTENTION_GRID is {other:?}, expected full or small"),
    }
}

/// The part of the grid that `FLASH_ATTENTION_PART` asks for, as every `parts`-th of `cases`.
///
/// # Panics
/// If it is not `n/parts` with `1 <= n <= parts`.
pub fn selected_part<T>(cases: Vec<T>) -> Vec<T> {
    let Ok(part) = env::var("FLASH_ATTENTION_PART") else {
        return cases;
    };
    deal(cases, &part).unwrap_or_else(|message| panic!("{message}"))
}

/// Part `n` of `parts`, dealt round, so that costly neighbours go to different parts.
fn deal<T>(cases: Vec<T>, part: &str) -> Result<Vec<T>, String> {
    let numbers = part
        .split_once('/')
        .and_then(|(n, parts)| Some((n.parse::<usize>().ok()?, parts.parse::<usize>().ok()?)));
    match numbers {
        Some((n, parts)) if (1..=parts).contains(&n) => {
            Ok(cases.into_iter().skip(n - 1).step_by(parts).collect())
        }
        _ => Err(format!(
            "FLASH_ATTENTION_PART is {part:?}, expected n/parts with n from 1 to parts"
        )),
    }
}

/// An `f32` tensor of numbers between -1 and 1, the same for the same seed on every device.
pub fn uniform<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let mut rng = StdRng::seed_from_u64(seed);
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Relative Frobenius distance of `got` to `expected`; infinite where either holds NaN.
pub fn relative_error<const D: usize>(got: Tensor<D>, expected: Tensor<D>) -> f64 {
    assert_eq!(got.dims(), expected.dims());
    let (got, expected) = (got.into_data(), expected.into_data());
    let (mut error, mut size) = (0.0, 0.0);
    for (got, expected) in got.iter::<f64>().zip(expected.iter::<f64>()) {
        error += (got - expected).powi(2);
        size += expected.powi(2);
    }
    let relative = (error / size).sqrt();
    if relative.is_nan() {
        f64::INFINITY
    } else {
        relative
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a misspelt device that silently selects nothing.
    #[test]
    fn a_named_device_must_be_there() {
        let found = ["flex", "vulkan", "vulkan:1"];
        let select = |names| {
            let find = |name: &str| found.into_iter().find(|there| *there == name);
            select(names, find, || found.map(String::from).to_vec())
        };
        assert_eq!(select("vulkan, flex"), Ok(vec!["vulkan", "flex"]));
        assert_eq!(
            select("flex,cuda"),
            Err("FLASH_ATTENTION_DEVICES names \"cuda\", found flex, vulkan, vulkan:1".into())
        );
        assert!(select("").is_err());
    }

    /// Catches parts that leave a case out, and a part that does not exist.
    #[test]
    fn parts_cover_everything_once() {
        let mut dealt: Vec<u32> = (1..=3)
            .flat_map(|n| deal((0..10).collect(), &format!("{n}/3")).unwrap())
            .collect();
        assert_eq!(dealt.len(), 10);
        dealt.sort_unstable();
        assert_eq!(dealt, Vec::from_iter(0..10));
        for wrong in ["0/3", "4/3", "3", "a/b", ""] {
            let error = deal(vec![1], wrong).unwrap_err();
            assert!(error.contains("expected n/parts"), "{error}");
        }
    }
}
