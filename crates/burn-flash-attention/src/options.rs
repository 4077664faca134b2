//! The options of a call, and their translation to a checked problem.

use crate::devices;
use crate::error::AttentionError;
use crate::ops::{MaybeBool, MaybeFloat};
use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{Bool, DType, Device, Tensor};
use flash_attention_spec::{
    Alignment, Dtype, ElementType, F32Precision, Operand, Operands, Options, Problem, Summation,
    Window,
};

/// Options of a call; the default is plain attention over all keys.
///
/// A score is formed in this order: `scale * (q . k)`, the soft cap, the bias; then keys that are
/// not visible leave the sum. `mask`, `causal` and `window` intersect.
///
/// ```
/// use burn_flash_attention::AttentionOptions;
///
/// let options = AttentionOptions::new().causal().window(Some(1024), None).softcap(50.0);
/// assert!(options.causal);
/// ```
///
/// Options will be added, so there is no literal of this type: every field has a method, and what is
/// only known at run time can be assigned.
///
/// ```
/// use burn_flash_attention::{Alignment, AttentionOptions};
///
/// let mut options = AttentionOptions::new().window(Some(4), Some(4)).alignment(Alignment::TopLeft);
/// options.scale = std::env::var("SCALE").ok().and_then(|scale| scale.parse().ok());
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Broadcasts to `[batch, heads, seq_q, seq_kv]`; **true hides**.
    pub mask: Option<Tensor<4, Bool>>,
    /// Added to the scores; broadcasts to `[batch, heads, seq_q, seq_kv]`, element type as query.
    pub bias: Option<Tensor<4>>,
    /// Factor on `q . k`; `1 / sqrt(head_dim)` where `None`.
    pub scale: Option<f64>,
    /// Caps scores softly: `c * tanh(score / c)`, before the bias.
    pub softcap: Option<f64>,
    /// Hides keys after the query's position.
    pub causal: bool,
    /// Where the diagonal of `causal` and `window` lies when lengths differ.
    pub alignment: Alignment,
    /// Sliding window around the query's position.
    pub window: Window,
    /// How the parts of gradients are added; reproducible by default.
    pub summation: Summation,
    /// How products of `f32` operands are formed; in full by default.
    pub f32_precision: F32Precision,
}

impl AttentionOptions {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// Hides keys where `mask` is true; each dimension is 1 or that of
    /// `[batch, heads, seq_q, seq_kv]`.
    pub fn mask(mut self, mask: Tensor<4, Bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds `bias` to the scores; each dimension is 1 or that of `[batch, heads, seq_q, seq_kv]`.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Replaces the default scale `1 / sqrt(head_dim)`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores softly at `softcap > 0`.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Hides later keys; unless [`alignment`](Self::alignment) asks otherwise, the last query lines
    /// up with the last key.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Hides later keys; the first query lines up with the first key.
    pub fn causal_top_left(self) -> Self {
        self.causal().alignment(Alignment::TopLeft)
    }

    /// Places the diagonal of `causal` and `window`, which lies elsewhere only where the lengths of
    /// query and key differ.
    pub fn alignment(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Keeps `left` keys before and `right` keys after each query's position; `None` is unbounded.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = Window { left, right };
        self
    }

    /// Lets the parts of a gradient be added in any order, where that is faster: its last bits may
    /// differ from run to run.
    pub fn unordered_gradients(mut self) -> Self {
        self.summation = Summation::Unordered;
        self
    }

    /// Lets operands of matrix products be rounded to TF32, 11 bits, where query, key and value are `f32`
    /// and that is faster: on NVIDIA devices of compute capability 8.0 and later, by CUDA's C++ generator, for
    /// sums of at most 65,536 terms. Everywhere else products stay in full, and `f16` and `bf16` are not touched; [`explain`] says what
    /// is done.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_attention::{AttentionOptions, F32Precision, flash_attention};
    ///
    /// let device = Device::flex();
    /// let [query, key, value] =
    ///     [(); 3].map(|()| Tensor::<4>::random([1, 2, 32, 16], Distribution::Default, &device));
    /// let options = AttentionOptions::new().f32_precision(F32Precision::Tf32);
    /// let output = flash_attention(query, key, value, &options);
    /// assert_eq!(output.dims(), [1, 2, 32, 16]);
    /// # }
    /// ```
    ///
    /// [`explain`]: crate::explain
    pub fn f32_precision(mut self, precision: F32Precision) -> Self {
        self.f32_precision = precision;
        self
    }

    /// The checked problem of a call with these options.
    pub(crate) fn problem(
        &self,
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
    ) -> Result<Problem, AttentionError> {
        let mask = self.mask.as_ref();
        let operands = Operands::new(operand(query), operand(key), operand(value))
            .mask(mask.map(|mask| Operand::new(mask.dims(), ElementType::Bool)))
            .bias(self.bias.as_ref().map(operand));
        let mut options = Options::new();
        options.scale = self.scale;
        options.softcap = self.softcap;
        options.causal = self.causal;
        options.alignment = self.alignment;
        options.window = self.window;
        options.summation = self.summation;
        options.f32_precision = self.f32_precision;
        let problem = Problem::new(&operands, &options)?;
        let device = query.device();
        let others = [
            ("key", Some(key.device())),
            ("value", Some(value.device())),
            ("mask", self.mask.as_ref().map(Tensor::device)),
            ("bias", self.bias.as_ref().map(Tensor::device)),
        ];
        let mut checkpointing = strategy(&device).map(|strategy| ("query", strategy));
        for (operand, other) in others {
            let Some(other) = other else { continue };
            if other != device {
                return Err(AttentionError::Device {
                    operand,
                    given: format!("{other:?}"),
                    expected: format!("{device:?}"),
                });
            }
            // Devices are equal whatever their strategies, and Burn panics where those differ.
            let Some(given) = strategy(&other) else {
                continue;
            };
            match &checkpointing {
                Some((other, expected)) if given != *expected => {
                    return Err(AttentionError::Checkpointing {
                        operand,
                        given: format!("{given:?}"),
                        expected: format!("{expected:?}"),
                        other,
                    });
                }
                Some(_) => {}
                None => checkpointing = Some((operand, given)),
            }
        }
        check_device(&problem, &device)?;
        Ok(problem)
    }

    /// Mask and bias as the extension op takes them.
    pub(crate) fn operands(&self) -> (MaybeBool<Dispatch>, MaybeFloat<Dispatch>) {
        let mask = self.mask.clone().map(Tensor::into_dispatch);
        let bias = self.bias.clone().map(Tensor::into_dispatch);
        (mask.into(), bias.into())
    }
}

/// Those of a checked problem, without mask and bias.
impl From<Options> for AttentionOptions {
    fn from(options: Options) -> Self {
        Self {
            mask: None,
            bias: None,
            scale: options.scale,
            softcap: options.softcap,
            causal: options.causal,
            alignment: options.alignment,
            window: options.window,
            summation: options.summation,
            f32_precision: options.f32_precision,
        }
    }
}

/// Whether the extension op is implemented for the device's backend: calling it elsewhere panics.
fn is_served(device: &DispatchDevice) -> bool {
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "autodiff")]
        DispatchDevice::Autodiff(device) => is_served(&device.clone().inner()),
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// A device's strategy of gradient checkpointing; none without autodiff.
#[cfg(feature = "autodiff")]
fn strategy(device: &Device) -> Option<impl PartialEq + std::fmt::Debug + use<>> {
    device.gradient_checkpointing_strategy()
}

#[cfg(not(feature = "autodiff"))]
fn strategy(_: &Device) -> Option<std::convert::Infallible> {
    None
}

fn check_device(problem: &Problem, device: &Device) -> Result<(), AttentionError> {
    if !is_served(device.as_dispatch()) {
        return Err(AttentionError::Backend {
            given: format!("{device:?}"),
            expected: match (cfg!(feature = "cube"), cfg!(feature = "flex")) {
                (true, true) => "Cube, Flex",
                (true, false) => "Cube",
                (false, true) => "Flex",
                (false, false) => "none is compiled in",
            },
        });
    }
    if !device.supports_dtype(devices::burn_dtype(problem.dtype)) {
        let has: Vec<String> = devices::dtypes_of(device)
            .iter()
            .map(Dtype::to_string)
            .collect();
        return Err(AttentionError::Dtype {
            given: problem.dtype,
            device: format!("{device:?}"),
            expected: has.join(", "),
        });
    }
    #[cfg(feature = "cube")]
    if let Some(limits) = crate::cube::limits(device) {
        kernels_cubecl::plan::plan(problem, &limits)?;
    }
    Ok(())
}

fn operand(tensor: &Tensor<4>) -> Operand {
    let element = match tensor.dtype() {
        DType::F32 => Dtype::F32.into(),
        DType::F16 => Dtype::F16.into(),
        DType::BF16 => Dtype::BF16.into(),
        other => ElementType::Other(format!("{other:?}").to_lowercase()),
    };
    Operand::new(tensor.dims(), element)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Catches an option that no method reaches, and one method that undoes another.
    #[test]
    fn every_option_has_a_method_and_methods_come_in_any_order() {
        let device = Device::flex();
        let [query, key] = [3, 7].map(|seq| Tensor::<4>::ones([1, 1, seq, 4], &device));
        let mask = Tensor::<4, Bool>::full([1, 1, 1, 7], false, &device);
        let all = [
            AttentionOptions::new()
                .alignment(Alignment::TopLeft)
                .causal()
                .window(Some(1), None)
                .scale(0.5)
                .softcap(2.0)
                .mask(mask.clone())
                .bias(Tensor::ones([1, 1, 3, 7], &device)),
            AttentionOptions::new()
                .bias(Tensor::ones([1, 1, 3, 7], &device))
                .mask(mask)
                .softcap(2.0)
                .scale(0.5)
                .window(Some(1), None)
                .causal_top_left(),
        ];
        let [one, other] = all.map(|options| options.problem(&query, &key, &key).unwrap());
        assert_eq!(one, other);
        assert_eq!((one.scale, one.softcap), (0.5, Some(2.0)));
        assert_eq!(
            (one.mask, one.bias),
            (Some([1, 1, 1, 7]), Some([1, 1, 3, 7]))
        );
        assert_eq!(one.band.keys(2, 7), 1..3);

        let window = AttentionOptions::new().window(Some(1), Some(1));
        let window = window.alignment(Alignment::TopLeft);
        let problem = window.problem(&query, &key, &key).unwrap();
        assert_eq!(problem.band.keys(2, 7), 1..4);
    }
}
