//! A named array of floating-point numbers, between a safetensors file and the computation.

use crate::Outcome;
use burn_flash_attention::Dtype;
use half::{bf16, f16};
use safetensors::tensor::{Dtype as Stored, TensorView};

/// Numbers with the element type they have in a file. `f64` holds each of those types exactly.
pub struct Array {
    /// Name in the file.
    pub name: &'static str,
    /// Element type in the file.
    pub stored: Stored,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Row-major elements.
    pub values: Vec<f64>,
}

impl Array {
    /// Decodes a tensor of type f32, f16 or bf16.
    pub fn read(name: &'static str, view: &TensorView) -> Outcome<Self> {
        let bytes = view.data();
        let values = match float(view.dtype()) {
            Some(Dtype::F32) => elements(bytes, |b| f32::from_le_bytes(b).into()),
            Some(Dtype::F16) => elements(bytes, |b| f16::from_le_bytes(b).into()),
            Some(Dtype::BF16) => elements(bytes, |b| bf16::from_le_bytes(b).into()),
            None => {
                let given = type_name(view.dtype());
                return Err(format!(
                    "tensor {name} has element type {given}, expected f32, f16 or bf16"
                )
                .into());
            }
        };
        Ok(Self {
            name,
            stored: view.dtype(),
            shape: view.shape().to_vec(),
            values,
        })
    }

    /// The elements as a file holds them, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let values = self.values.iter();
        match float(self.stored) {
            Some(Dtype::F32) => values.flat_map(|&x| (x as f32).to_le_bytes()).collect(),
            Some(Dtype::F16) => values
                .flat_map(|&x| f16::from_f64(x).to_le_bytes())
                .collect(),
            Some(Dtype::BF16) => values
                .flat_map(|&x| bf16::from_f64(x).to_le_bytes())
                .collect(),
            None => values.flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// Position of element `at` along each dimension.
    pub fn index(&self, mut at: usize) -> Vec<usize> {
        let mut index: Vec<usize> = Vec::with_capacity(self.shape.len());
        for &size in self.shape.iter().rev() {
            index.push(at % size);
            at /= size;
        }
        index.reverse();
        index
    }

    /// Smallest and largest element, if there are any.
    pub fn range(&self) -> Option<(f64, f64)> {
        let mut values = self.values.iter().copied();
        let first = values.next()?;
        Some(values.fold((first, first), |(least, most), x| {
            (least.min(x), most.max(x))
        }))
    }
}

fn elements<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (elements, rest) = bytes.as_chunks::<N>();
    debug_assert!(
        rest.is_empty(),
        "the file's header was checked against its data"
    );
    elements.iter().map(|&element| decode(element)).collect()
}

/// The element type of attention that a stored type is, if it is one.
pub fn float(stored: Stored) -> Option<Dtype> {
    match stored {
        Stored::F32 => Some(Dtype::F32),
        Stored::F16 => Some(Dtype::F16),
        Stored::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}

/// The stored type of an element type.
pub fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::F32 => Stored::F32,
        Dtype::F16 => Stored::F16,
        Dtype::BF16 => Stored::BF16,
    }
}

/// Name of a stored type, spelled as in the rest of the program.
pub fn type_name(stored: Stored) -> String {
    stored.to_string().to_lowercase()
}
