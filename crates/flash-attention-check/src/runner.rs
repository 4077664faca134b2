//! Runs a case on a device and judges every output.

use crate::acceptance::{Judged, OutputVerdict, Quantity, judge};
use crate::cases::{Case, Loss};
use crate::data::Data;
use crate::layout::{Operands, float_tensor, output_loss};
use crate::naive::naive;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::{
    AttentionError, AttentionOptions, burn_dtype, try_flash_attention, try_flash_attention_with_lse,
};
use flash_attention_spec::{Dtype, ProblemError, Wanted, reference};
use std::error::Error;
use std::fmt;

/// Why a case gave no report.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CaseError {
    /// The case itself is not a valid problem.
    Case(ProblemError),
    /// The op refused the call.
    Declined(AttentionError),
    /// The device failed while computing or reading back.
    Device(String),
    /// An input that was not to have a gradient has one.
    Unwanted(&'static str),
    /// An input that was to have a gradient has none.
    Missing(&'static str),
    /// An output has another shape or element type than the problem says.
    Shape {
        /// Name of the output.
        output: &'static str,
        /// Its shape and element type.
        given: String,
        /// What they should be.
        expected: String,
    },
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CaseError::Case(error) => error.fmt(f),
            CaseError::Declined(error) => write!(f, "declined: {error}"),
            CaseError::Device(error) => write!(f, "the device failed: {error}"),
            CaseError::Unwanted(output) => write!(f, "{output} is there, expected none"),
            CaseError::Missing(output) => write!(f, "{output} is missing"),
            CaseError::Shape {
                output,
                given,
                expected,
            } => write!(f, "{output} is {given}, expected {expected}"),
        }
    }
}

impl Error for CaseError {}

fn describe((shape, dtype): &(Vec<usize>, DType)) -> String {
    format!("{shape:?} in {dtype:?}")
}

/// How one case fared on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseReport {
    /// Name of the case.
    pub case: String,
    /// Each output that the case has.
    pub outputs: Vec<OutputVerdict>,
    /// Whether every output passed.
    pub passed: bool,
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.passed { "passed" } else { "FAILED" };
        write!(f, "{}: {mark}", self.case)?;
        self.outputs
            .iter()
            .try_for_each(|verdict| write!(f, "\n    {verdict}"))
    }
}

/// One output read back from a device.
#[derive(Clone, Debug)]
pub struct DeviceOutput {
    /// `o`, `lse`, `dq`, `dk`, `dv` or `dbias`.
    pub output: &'static str,
    /// The data of each draw as the device stored it, for comparisons bit by bit.
    pub data: Vec<TensorData>,
}

/// What an output is judged by.
#[derive(Clone, Debug)]
struct Expected {
    output: &'static str,
    quantity: Quantity,
    dtype: Dtype,
    /// Shape of one draw.
    shape: Vec<usize>,
    /// Of all draws, one after the other; likewise `naive`.
    exact: Vec<f64>,
    naive: Vec<f64>,
}

/// A case with its data, its reference and its unfused form, to be run on any number of devices.
#[derive(Clone, Debug)]
pub struct Prepared {
    case: Case,
    draws: Vec<Data>,
    expected: Vec<Expected>,
}

/// Runs `case` on `device` in `dtype`, on data drawn from `seed` and the case's name.
///
/// # Errors
/// [`CaseError`] if the case cannot be judged: the op declined it, the device failed, or gradients
/// are there that should not be or the reverse. A wrong result is a report, not an error.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use flash_attention_check::{Case, run_case};
/// use flash_attention_spec::Dtype;
///
/// let case = Case::new("small", "Anything.", [1, 2, 1, 3, 4, 8, 8]).causal();
/// let report = run_case(&case, &Device::flex(), Dtype::F32, 7).unwrap();
/// let names: Vec<_> = report.outputs.iter().map(|verdict| verdict.output).collect();
/// assert_eq!(names, ["o", "lse", "dq", "dk", "dv"]);
/// assert!(report.passed, "{report}");
/// # }
/// ```
pub fn run_case(
    case: &Case,
    device: &Device,
    dtype: Dtype,
    seed: u64,
) -> Result<CaseReport, CaseError> {
    Prepared::new(case, dtype, seed)?.run(device)
}

impl Prepared {
    /// Draws the data of `case` and computes what it is judged by, once for all devices.
    ///
    /// # Errors
    /// If the case is not a valid problem.
    pub fn new(case: &Case, dtype: Dtype, seed: u64) -> Result<Self, CaseError> {
        let draws: Vec<Data> = (0..case.draws as u64)
            .map(|draw| Data::draw(case, dtype, seed.wrapping_add(draw << 32)))
            .collect::<Result<_, _>>()
            .map_err(CaseError::Case)?;
        let mut expected: Vec<Expected> = Vec::new();
        for data in &draws {
            let next = self::expected(case, data);
            if expected.is_empty() {
                expected = next;
                continue;
            }
            for (all, next) in expected.iter_mut().zip(next) {
                all.exact.extend(next.exact);
                all.naive.extend(next.naive);
            }
        }
        Ok(Self {
            case: case.clone(),
            draws,
            expected,
        })
    }

    /// Runs the case on `device` and judges it.
    ///
    /// # Errors
    /// As [`run_case`].
    pub fn run(&self, device: &Device) -> Result<CaseReport, CaseError> {
        let outputs = self.outputs(device)?;
        self.judge(&outputs)
    }

    /// Runs the case on `device` and returns what the device stored.
    ///
    /// # Errors
    /// As [`run_case`].
    pub fn outputs(&self, device: &Device) -> Result<Vec<DeviceOutput>, CaseError> {
        let mut outputs: Vec<DeviceOutput> = Vec::new();
        for draw in &self.draws {
            for (output, data) in self.outputs_of(draw, device)? {
                match outputs.iter_mut().find(|other| other.output == output) {
                    Some(output) => output.data.push(data),
                    None => outputs.push(DeviceOutput {
                        output,
                        data: vec![data],
                    }),
                }
            }
        }
        Ok(outputs)
    }

    fn outputs_of(
        &self,
        data: &Data,
        device: &Device,
    ) -> Result<Vec<(&'static str, TensorData)>, CaseError> {
        let case = &self.case;
        let operands = Operands::new(case, data, device);
        if case.wanted == Wanted::NONE {
            let (output, lse) = self.call(&operands)?;
            return read_back(output, lse, []);
        }
        let operands = operands.require_grad(case);
        let (output, lse) = self.call(&operands)?;
        let loss = self.loss(data, &output, lse.as_ref());
        let gradients = loss.backward();
        let inputs = [
            ("dq", Some(&operands.query), case.wanted.query),
            ("dk", Some(&operands.key), case.wanted.key),
            ("dv", Some(&operands.value), case.wanted.value),
            ("dbias", operands.bias.as_ref(), case.wanted.bias),
        ];
        let mut read = Vec::new();
        for (name, input, wanted) in inputs {
            let Some(input) = input else { continue };
            match (input.grad(&gradients), wanted) {
                (Some(gradient), true) => read.push((name, gradient)),
                (None, false) => {}
                (Some(_), false) => return Err(CaseError::Unwanted(name)),
                (None, true) => return Err(CaseError::Missing(name)),
            }
        }
        read_back(output, lse, read)
    }

    fn call(&self, operands: &Operands) -> Result<(Tensor<4>, Option<Tensor<3>>), CaseError> {
        let options = self.options(operands);
        let (query, key, value) = (
            operands.query.clone(),
            operands.key.clone(),
            operands.value.clone(),
        );
        if self.case.loss == Loss::Plain {
            let output = try_flash_attention(query, key, value, &options);
            output.map(|output| (output, None))
        } else {
            let outputs = try_flash_attention_with_lse(query, key, value, &options);
            outputs.map(|(output, lse)| (output, Some(lse)))
        }
        .map_err(CaseError::Declined)
    }

    fn options(&self, operands: &Operands) -> AttentionOptions {
        let mut options = AttentionOptions::from(self.case.options);
        options.mask = operands.mask.clone();
        options.bias = operands.bias.clone();
        options
    }

    fn loss(&self, data: &Data, output: &Tensor<4>, lse: Option<&Tensor<3>>) -> Tensor<1> {
        let (reads_output, reads_lse) = loss_reads(&self.case);
        let of_output = reads_output.then(|| {
            let dtype = data.problem.dtype;
            output_loss(&self.case, output.clone(), &data.output_gradient, dtype)
        });
        let of_lse = lse.filter(|_| reads_lse).map(|lse| {
            let device = lse.device().without_autodiff();
            let gradient = float_tensor(&data.lse_gradient, lse.dims(), Dtype::F32, &device);
            (lse.clone() * gradient.autodiff()).sum()
        });
        match (of_output, of_lse) {
            (Some(output), Some(lse)) => output.cast(DType::F32) + lse,
            (Some(loss), None) | (None, Some(loss)) => loss,
            (None, None) => unreachable!("a loss reads the output or lse"),
        }
    }

    /// Judges outputs that [`Prepared::outputs`] returned.
    ///
    /// # Errors
    /// If one has another shape or element type than the problem says.
    pub fn judge(&self, outputs: &[DeviceOutput]) -> Result<CaseReport, CaseError> {
        let mut verdicts = Vec::new();
        for expected in &self.expected {
            let Some(got) = outputs.iter().find(|got| got.output == expected.output) else {
                continue;
            };
            let wanted = (expected.shape.clone(), burn_dtype(expected.dtype));
            let given = |data: &TensorData| (data.shape().to_vec(), data.dtype());
            if let Some(wrong) = got.data.iter().find(|data| given(data) != wanted) {
                return Err(CaseError::Shape {
                    output: expected.output,
                    given: describe(&given(wrong)),
                    expected: describe(&wanted),
                });
            }
            let got: Vec<f64> = got.data.iter().flat_map(TensorData::iter::<f64>).collect();
            let mut shape = expected.shape.clone();
            if self.draws.len() > 1 {
                shape.insert(0, self.draws.len());
            }
            verdicts.push(judge(&Judged {
                output: expected.output,
                quantity: expected.quantity,
                dtype: expected.dtype,
                f32_precision: self.case.options.f32_precision,
                shape: &shape,
                got: &got,
                exact: &expected.exact,
                naive: &expected.naive,
            }));
        }
        Ok(CaseReport {
            case: self.case.name.clone(),
            passed: verdicts.iter().all(|verdict| verdict.passed),
            outputs: verdicts,
        })
    }
}

/// Whether the loss of a case reads the output, and `lse`.
fn loss_reads(case: &Case) -> (bool, bool) {
    match case.loss {
        Loss::Output | Loss::Plain => (true, false),
        Loss::Lse => (false, true),
        Loss::Both => (true, true),
    }
}

fn expected(case: &Case, data: &Data) -> Vec<Expected> {
    let problem = &data.problem;
    let inputs = data.inputs();
    let (reads_output, reads_lse) = loss_reads(case);
    let forward = reference::forward(problem, &inputs);
    let output_gradient: Vec<f64> = data
        .output_gradient
        .iter()
        .map(|g| if reads_output { *g } else { 0.0 })
        .collect();
    let lse_gradient = reads_lse.then_some(data.lse_gradient.as_slice());
    let backward = reference::backward(problem, &inputs, &output_gradient, lse_gradient);
    let naive = naive(data, (reads_output, reads_lse));

    let key_shape = [problem.batch, problem.kv_heads, problem.seq_kv];
    let row = |shape: [usize; 3], dim| shape.into_iter().chain([dim]).collect();
    let output = |output, quantity, dtype, shape, exact, naive| Expected {
        output,
        quantity,
        dtype,
        shape,
        exact,
        naive,
    };
    let gradient = |name, shape, exact, naive| {
        output(name, Quantity::Gradient, problem.dtype, shape, exact, naive)
    };
    let mut expected = vec![
        output(
            "o",
            Quantity::Output,
            problem.dtype,
            problem.output_shape().to_vec(),
            forward.output,
            naive.output,
        ),
        output(
            "lse",
            Quantity::LogSumExp,
            Dtype::F32,
            problem.lse_shape().to_vec(),
            forward.lse,
            naive.lse,
        ),
        gradient(
            "dq",
            row(problem.lse_shape(), problem.head_dim),
            backward.query,
            naive.query,
        ),
        gradient(
            "dk",
            row(key_shape, problem.head_dim),
            backward.key,
            naive.key,
        ),
        gradient(
            "dv",
            row(key_shape, problem.value_dim),
            backward.value,
            naive.value,
        ),
    ];
    if let (Some(shape), Some(exact), Some(naive)) = (problem.bias, backward.bias, naive.bias) {
        expected.push(gradient("dbias", shape.to_vec(), exact, naive));
    }
    expected
}

fn read_back(
    output: Tensor<4>,
    lse: Option<Tensor<3>>,
    gradients: impl IntoIterator<Item = (&'static str, Tensor<4>)>,
) -> Result<Vec<(&'static str, TensorData)>, CaseError> {
    let device = |error| CaseError::Device(format!("{error:?}"));
    let mut read = vec![("o", output.try_into_data().map_err(device)?)];
    if let Some(lse) = lse {
        read.push(("lse", lse.try_into_data().map_err(device)?));
    }
    for (name, gradient) in gradients {
        read.push((name, gradient.try_into_data().map_err(device)?));
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::grid;

    /// `values` in `parts` equal parts.
    fn split(values: &[f64], parts: usize) -> impl Iterator<Item = &[f64]> {
        let len = values.len() / parts;
        (0..parts).map(move |n| &values[n * len..(n + 1) * len])
    }

    fn naive_outputs(prepared: &Prepared) -> Vec<DeviceOutput> {
        let expected = prepared.expected.iter();
        expected
            .map(|expected| DeviceOutput {
                output: expected.output,
                data: split(&expected.naive, prepared.draws.len())
                    .map(|naive| {
                        TensorData::new(naive.to_vec(), expected.shape.clone())
                            .convert_dtype(burn_dtype(expected.dtype))
                    })
                    .collect(),
            })
            .collect()
    }

    /// Catches a case that asks for more than its element type can give: the unfused form itself
    /// must pass every case in every type.
    #[test]
    fn the_unfused_form_passes_the_grid() {
        let mut failed = Vec::new();
        for case in grid(false) {
            for &dtype in case.dtypes {
                let prepared = Prepared::new(&case, dtype, 1).unwrap();
                let report = prepared.judge(&naive_outputs(&prepared)).unwrap();
                if !report.passed {
                    failed.push(format!("{dtype} {report}"));
                }
            }
        }
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    /// Catches two cases of one name, which would share their data and hide each other in reports.
    #[test]
    fn names_are_unique_and_every_case_is_a_problem() {
        let mut names = std::collections::HashSet::new();
        for case in grid(true) {
            assert!(names.insert(case.name.clone()), "{}", case.name);
            assert!(case.catches.ends_with('.'), "{}", case.name);
            for &dtype in case.dtypes {
                assert_eq!(case.problem(dtype).err(), None, "{}", case.name);
            }
        }
    }

    /// Catches a runner that does not look at an output: each output of each kind of case, changed
    /// in its last element, must be rejected.
    #[test]
    fn a_changed_output_fails_its_case() {
        for case in grid(false).iter().step_by(17) {
            let prepared = Prepared::new(case, Dtype::F32, 1).unwrap();
            for changed in 0..prepared.expected.len() {
                let mut prepared = prepared.clone();
                let finite = prepared.expected[changed].exact.iter();
                let Some(last) = finite.clone().rposition(|x| x.is_finite()) else {
                    continue;
                };
                let size = finite.fold(1.0_f64, |max, x| max.max(x.abs()));
                let outputs = naive_outputs(&prepared);
                prepared.expected[changed].exact[last] += 0.1 * size;
                prepared.expected[changed].naive[last] += 0.1 * size;
                let report = prepared.judge(&outputs).unwrap();
                assert!(!report.outputs[changed].passed, "{report}");
                assert!(!report.passed);
            }
        }
    }

    /// Catches a grid that is blind: a device that gets one thing wrong everywhere must fail at
    /// least one case, whichever thing it is.
    #[cfg(feature = "flex")]
    #[test]
    fn every_fault_fails_some_case() {
        use flash_attention_spec::Alignment;

        type Fault = (&'static str, fn(&mut Prepared));
        let faults: [Fault; 11] = [
            ("window one key wider to the left", |prepared| {
                let left = &mut prepared.case.options.window.left;
                *left = left.map(|left| left + 1);
            }),
            ("window one key wider to the right", |prepared| {
                let right = &mut prepared.case.options.window.right;
                *right = right.map(|right| right + 1);
            }),
            ("top-left alignment throughout", |prepared| {
                prepared.case.options.alignment = Alignment::TopLeft;
            }),
            ("bottom-right alignment throughout", |prepared| {
                prepared.case.options.alignment = Alignment::BottomRight;
            }),
            ("no causal", |prepared| prepared.case.options.causal = false),
            ("no soft cap", |prepared| {
                prepared.case.options.softcap = None
            }),
            ("no scale", |prepared| prepared.case.options.scale = None),
            ("no mask", |prepared| {
                prepared.draws.iter_mut().for_each(|data| data.mask = None);
            }),
            ("mask of the wrong polarity", |prepared| {
                let masks = prepared.draws.iter_mut().flat_map(|data| &mut data.mask);
                masks.flatten().for_each(|hidden| *hidden = !*hidden);
            }),
            ("incoming gradient of 1 throughout", |prepared| {
                prepared.case.gradient_layout = crate::cases::GradientLayout::Sum;
            }),
            ("no gradient of lse", |prepared| {
                let draws = prepared.draws.iter_mut();
                draws.for_each(|data| data.lse_gradient.fill(0.0));
            }),
        ];
        let device = Device::flex();
        let cases: Vec<_> = grid(false)
            .into_iter()
            .map(|case| Prepared::new(&case, Dtype::F32, 1).unwrap())
            .collect();
        for (name, fault) in faults {
            let fails = |prepared: &Prepared| {
                let mut faulty = prepared.clone();
                fault(&mut faulty);
                faulty.run(&device).is_ok_and(|report| !report.passed)
            };
            assert!(cases.iter().any(fails), "{name} passes every case");
        }
    }
}
