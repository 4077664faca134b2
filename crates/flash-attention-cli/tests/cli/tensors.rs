//! Safetensors files for tests.

use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A tensor as a file holds it.
#[derive(Clone)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Tensors of a file by name.
pub type File = BTreeMap<&'static str, Stored>;

/// Numbers rounded to a stored type; booleans and bytes are truncated.
pub fn stored(dtype: Dtype, shape: &[usize], values: impl IntoIterator<Item = f64>) -> Stored {
    let values = values.into_iter();
    let bytes: Vec<u8> = match dtype {
        Dtype::F64 => values.flat_map(f64::to_le_bytes).collect(),
        Dtype::F32 => values.flat_map(|x| (x as f32).to_le_bytes()).collect(),
        Dtype::F16 => values
            .flat_map(|x| f16::from_f64(x).to_le_bytes())
            .collect(),
        Dtype::BF16 => values
            .flat_map(|x| bf16::from_f64(x).to_le_bytes())
            .collect(),
        Dtype::U8 | Dtype::BOOL => values.map(|x| x as u8).collect(),
        other => panic!("no test stores {other}"),
    };
    Stored {
        dtype,
        shape: shape.to_vec(),
        bytes,
    }
}

/// Numbers between -1 and 1 that look like noise and differ between names.
pub fn noise(name: &str, length: usize) -> impl Iterator<Item = f64> {
    let start: u64 = name.bytes().fold(7, |at, byte| at * 31 + u64::from(byte));
    (0..length as u64).map(move |n| {
        let bits = (start + n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let bits = (bits ^ (bits >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (bits >> 11) as f64 / 2f64.powi(52) - 1.0
    })
}

/// Noise of a shape.
pub fn random(name: &str, dtype: Dtype, shape: &[usize]) -> Stored {
    stored(dtype, shape, noise(name, shape.iter().product()))
}

pub fn write(path: &Path, file: &File) {
    let views = file.iter().map(|(name, tensor)| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
        (*name, view.unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Every tensor of a file: type, shape and values.
pub fn read(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<f64>)> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(name, view)| {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F64 => chunks(data, f64::from_le_bytes),
                Dtype::F32 => chunks(data, |b| f32::from_le_bytes(b).into()),
                Dtype::F16 => chunks(data, |b| f16::from_le_bytes(b).into()),
                Dtype::BF16 => chunks(data, |b| bf16::from_le_bytes(b).into()),
                other => panic!("{name} is {other}"),
            };
            (name, (view.dtype(), view.shape().to_vec(), values))
        })
        .collect()
}

fn chunks<const N: usize>(data: &[u8], decode: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    data.as_chunks::<N>()
        .0
        .iter()
        .map(|&chunk| decode(chunk))
        .collect()
}
