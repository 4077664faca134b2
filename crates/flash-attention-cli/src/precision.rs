//! `--f32-precision`, of the commands that compute.

use burn_flash_attention::F32Precision;
use clap::ValueEnum;

/// How products of f32 operands are formed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// With all bits
    #[default]
    Full,
    /// Rounded to TF32 where the device has kernels for that
    Tf32,
}

impl From<Precision> for F32Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Full => F32Precision::Full,
            Precision::Tf32 => F32Precision::Tf32,
        }
    }
}
