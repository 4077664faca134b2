//! Whether two implementations computed the same, without which their times say nothing.

use crate::Outcome;
use crate::workload::{Element, Workload};
use serde::Serialize;
use std::path::Path;

/// By how much the outputs differ.
#[derive(Debug, Serialize)]
pub struct Agreement {
    /// For each output `|a - b| / |b|`, with the root of the sum of squares over all elements.
    pub differences: Vec<(&'static str, f64)>,
    /// The largest difference that is accepted.
    pub bound: f64,
}

impl Agreement {
    /// Compares two files that hold the outputs of `workload`.
    ///
    /// An output over the bound, or one that is not finite, is an error.
    pub fn of(workload: &Workload, ours: &Path, theirs: &Path) -> Outcome<Self> {
        let (ours, theirs) = (std::fs::read(ours)?, std::fs::read(theirs)?);
        let bound = bound(workload.dtype);
        let mut differences = Vec::new();
        let mut start = 0;
        for (name, shape) in workload.outputs() {
            let end = start + shape.iter().product::<usize>() * size_of::<f32>();
            let missing = || format!("{name} has too few elements");
            let ours = ours.get(start..end).ok_or_else(missing)?;
            let theirs = theirs.get(start..end).ok_or_else(missing)?;
            start = end;
            let difference = relative_difference(numbers(ours), numbers(theirs));
            if difference.is_nan() || difference > bound {
                return Err(format!(
                    "flash and burn disagree: {name} differs by {difference:.1e}, at most {bound:.0e} is accepted"
                )
                .into());
            }
            differences.push((name, difference));
        }
        Ok(Self { differences, bound })
    }
}

/// Twice what one implementation may be off by: f32 leaves room for matrix units that multiply f32
/// with fewer bits, f16 and bf16 for one that keeps its table of probabilities in them.
fn bound(dtype: Element) -> f64 {
    match dtype {
        Element::F32 => 1e-3,
        Element::F16 => 1e-2,
        Element::Bf16 => 5e-2,
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f64> {
    let words = bytes.as_chunks().0.iter();
    words.map(|&word| f64::from(f32::from_le_bytes(word)))
}

fn relative_difference(ours: impl Iterator<Item = f64>, theirs: impl Iterator<Item = f64>) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (a, b) in ours.zip(theirs) {
        difference += (a - b).powi(2);
        size += b.powi(2);
    }
    (difference / size).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Pass;
    use crate::workload::tests::workload;

    /// The outcome for outputs of ones, of which ours have `changed` at one place of the last.
    fn outcome(dtype: Element, changed: f32) -> Outcome<Agreement> {
        let workload = workload(Pass::Training, dtype);
        let folder = tempfile::tempdir()?;
        let shapes = workload.outputs().into_iter().map(|(_, shape)| shape);
        let count = shapes.map(|shape| shape.iter().product::<usize>());
        let mut values = vec![1f32; count.sum()];
        let write = |name: &str, values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).map(|()| path)
        };
        let theirs = write("theirs", &values)?;
        *values.last_mut().ok_or("empty")? = changed;
        Agreement::of(&workload, &write("ours", &values)?, &theirs)
    }

    #[test]
    fn the_difference_is_relative_and_by_output() {
        let found = outcome(Element::F32, 1.0 + 2f32.powi(-12)).unwrap();
        let names: Vec<&str> = found.differences.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["o", "dq", "dk", "dv"]);
        // dv has 12 elements, all 1.
        let expected = 2f64.powi(-12) / 12f64.sqrt();
        assert!((found.differences[3].1 - expected).abs() < 1e-12);
        assert_eq!(found.differences[0].1, 0.0);
    }

    #[test]
    fn what_differs_is_refused() {
        let error = outcome(Element::F32, 1.01).unwrap_err().to_string();
        assert!(error.contains("dv differs by 2.9e-3"), "{error}");
        assert!(outcome(Element::F16, 1.01).is_ok());
        assert!(outcome(Element::Bf16, 1.5).is_err());
        assert!(outcome(Element::Bf16, f32::NAN).is_err());
        assert!(outcome(Element::Bf16, f32::INFINITY).is_err());
    }

    #[test]
    fn a_short_file_is_refused() {
        let workload = workload(Pass::Forward, Element::F32);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("empty");
        std::fs::write(&path, []).unwrap();
        let error = Agreement::of(&workload, &path, &path).unwrap_err();
        assert_eq!(error.to_string(), "o has too few elements");
    }
}
