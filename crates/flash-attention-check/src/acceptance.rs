//! The acceptance rule: how far an output may lie from the exact one.
//!
//! ```text
//! max|got - exact| <= f * max|naive - exact| + floor      f = 2 for o and lse, 3 for gradients
//! ```
//!
//! `exact` is the `f64` reference on the operands as stored, `naive` the unfused form in the
//! element type under test (see [`crate::naive`]), and `floor` two roundings of the output's type
//! at the size of its largest exact value. NaN or infinity where the exact value is finite always
//! fails; where `lse` is exactly minus infinity it has to be that. In `f32` the relative Frobenius
//! error must also stay under 5e-6 for o and under 2e-5 for gradients, unless the problem permits TF32:
//! there the unfused form rounds the operands of its products to that.
//!
//! Where the exact value is NaN or infinite, because a visible operand was, a finite one fails.
//!
//! An output that is 0 in exact arithmetic, such as the gradient of a query that sees one key, holds
//! in the reference what `f64` leaves of terms that cancel. A relative error would divide by that
//! rounding, so the absolute bound alone decides there (see [`vanishes`]).

use flash_attention_spec::{Dtype, F32Precision};
use half::{bf16, f16};
use std::fmt;

/// Largest relative Frobenius error of an output in `f32`.
pub(crate) const F32_OUTPUT: f64 = 5e-6;

/// Largest relative Frobenius error of a gradient in `f32`.
pub(crate) const F32_GRADIENT: f64 = 2e-5;

/// Which of the rule's figures apply to an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// o.
    Output,
    /// lse.
    LogSumExp,
    /// dq, dk, dv, dbias.
    Gradient,
}

/// One output of one run, beside what it is judged by.
#[derive(Clone, Copy, Debug)]
pub struct Judged<'a> {
    /// Name of the output.
    pub output: &'static str,
    /// Which figures apply.
    pub quantity: Quantity,
    /// Element type of the output.
    pub dtype: Dtype,
    /// How products of `f32` operands may be formed.
    pub f32_precision: F32Precision,
    /// Its shape, for the position of the worst element.
    pub shape: &'a [usize],
    /// What the device returned.
    pub got: &'a [f64],
    /// The `f64` reference.
    pub exact: &'a [f64],
    /// The unfused form.
    pub naive: &'a [f64],
}

/// How one output fared.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputVerdict {
    /// `o`, `lse`, `dq`, `dk`, `dv` or `dbias`.
    pub output: &'static str,
    /// Largest absolute error; infinite where a finite value was missed altogether.
    pub worst: f64,
    /// What the rule allows for it.
    pub bound: f64,
    /// Relative Frobenius error.
    pub frobenius: f64,
    /// Row-major index of the worst element.
    pub index: usize,
    /// The device's value there; NaN where the output is empty.
    pub got: f64,
    /// The exact value there; NaN where the output is empty.
    pub exact: f64,
    /// Whether the rule holds.
    pub passed: bool,
    /// One line that says all of this.
    pub message: String,
}

impl fmt::Display for OutputVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The size of two roundings of `dtype` at a value of size `size`.
///
/// One rounding is at most `size` times half the machine epsilon, and at most half the smallest
/// subnormal number near 0 (Higham, "Accuracy and Stability of Numerical Algorithms", 2.1).
pub fn floor(size: f64, dtype: Dtype) -> f64 {
    if size == 0.0 {
        return 0.0;
    }
    let (epsilon, smallest) = match dtype {
        Dtype::F32 => (f64::from(f32::EPSILON), f64::from(f32::from_bits(1))),
        Dtype::F16 => (f16::EPSILON.to_f64(), f16::from_bits(1).to_f64()),
        Dtype::BF16 => (bf16::EPSILON.to_f64(), bf16::from_bits(1).to_f64()),
    };
    (size * epsilon).max(smallest)
}

/// Applies the rule.
///
/// ```
/// use flash_attention_check::acceptance::{Judged, Quantity, judge};
/// use flash_attention_spec::{Dtype, F32Precision};
///
/// let judged = Judged {
///     output: "o",
///     quantity: Quantity::Output,
///     dtype: Dtype::F32,
///     f32_precision: F32Precision::Full,
///     shape: &[1, 1, 1, 2],
///     got: &[1.0, 2.0],
///     exact: &[1.0, 2.0],
///     naive: &[1.0, 2.0],
/// };
/// assert!(judge(&judged).passed);
/// let verdict = judge(&Judged { got: &[1.0, 2.1], ..judged });
/// assert!(!verdict.passed);
/// assert!(verdict.message.starts_with("o: worst error 1.000e-1 over the bound 2.384e-7 at [0, 0, 0, 1]"));
/// ```
pub fn judge(judged: &Judged) -> OutputVerdict {
    let (got, exact) = (judged.got, judged.exact);
    if got.len() != exact.len() {
        let (given, expected) = (got.len(), exact.len());
        let output = judged.output;
        return OutputVerdict {
            output,
            worst: f64::INFINITY,
            bound: 0.0,
            frobenius: f64::INFINITY,
            index: 0,
            got: f64::NAN,
            exact: f64::NAN,
            passed: false,
            message: format!("{output}: has {given} elements, expected {expected}"),
        };
    }
    let bound = bound(judged);
    let (mut worst, mut index) = (0.0, 0);
    for (n, (got, exact)) in got.iter().zip(exact).enumerate() {
        let error = error(*got, *exact, judged.quantity);
        if error > worst {
            (worst, index) = (error, n);
        }
    }
    let frobenius = frobenius(got, exact);
    let limit = frobenius_limit(judged);
    let passed = worst <= bound && limit.is_none_or(|limit| frobenius < limit);
    let at = |values: &[f64]| values.get(index).copied().unwrap_or(f64::NAN);
    let mut verdict = OutputVerdict {
        output: judged.output,
        worst,
        bound,
        frobenius,
        index,
        got: at(got),
        exact: at(exact),
        passed,
        message: String::new(),
    };
    verdict.message = message(judged, &verdict, limit);
    verdict
}

fn message(judged: &Judged, verdict: &OutputVerdict, limit: Option<f64>) -> String {
    let OutputVerdict {
        output,
        worst,
        bound,
        frobenius,
        got,
        exact,
        ..
    } = verdict;
    let relation = if worst <= bound { "within" } else { "over" };
    let position = position(verdict.index, judged.shape);
    let relative = match limit {
        Some(limit) if *frobenius < limit => format!("under {limit:e}"),
        Some(limit) => format!("not under {limit:e}"),
        None => "not bounded".into(),
    };
    format!(
        "{output}: worst error {worst:.3e} {relation} the bound {bound:.3e} at {position:?}: \
         got {got:e}, exact {exact:e}; relative error {frobenius:.3e}, {relative}"
    )
}

fn bound(judged: &Judged) -> f64 {
    let factor = match judged.quantity {
        Quantity::Output | Quantity::LogSumExp => 2.0,
        Quantity::Gradient => 3.0,
    };
    let (size, unfused) = sizes(judged.exact, judged.naive);
    factor * unfused + floor(size, judged.dtype)
}

/// The largest finite exact value, and the largest error of the unfused form.
fn sizes(exact: &[f64], naive: &[f64]) -> (f64, f64) {
    let (mut size, mut unfused) = (0.0_f64, 0.0_f64);
    for (exact, naive) in exact.iter().zip(naive) {
        if exact.is_finite() {
            size = size.max(exact.abs());
            // Where the unfused form overflows it is no yardstick.
            if naive.is_finite() {
                unfused = unfused.max((naive - exact).abs());
            }
        }
    }
    (size, unfused)
}

/// Whether an output is 0 in exact arithmetic: all of it lies under a millionth of what rounding
/// alone left in the unfused form. `f64` leaves some 1e-9 of what `f32` does; an output that is
/// small but not 0 would have to be lost in `f32` altogether to come so low.
pub fn vanishes(exact: &[f64], naive: &[f64]) -> bool {
    let (size, unfused) = sizes(exact, naive);
    size < 1e-6 * unfused
}

fn frobenius_limit(judged: &Judged) -> Option<f64> {
    match (judged.dtype, judged.quantity) {
        _ if judged.f32_precision == F32Precision::Tf32 => None,
        _ if vanishes(judged.exact, judged.naive) => None,
        (Dtype::F32, Quantity::Output) => Some(F32_OUTPUT),
        (Dtype::F32, Quantity::Gradient) => Some(F32_GRADIENT),
        _ => None,
    }
}

fn error(got: f64, exact: f64, quantity: Quantity) -> f64 {
    let error = if exact.is_finite() {
        (got - exact).abs()
    } else if quantity == Quantity::LogSumExp && exact == f64::NEG_INFINITY && got != exact
        || got.is_finite()
    {
        f64::INFINITY
    } else {
        0.0
    };
    if error.is_nan() { f64::INFINITY } else { error }
}

/// `|got - exact| / |exact|` over the elements whose exact value is finite; 0 where both are 0.
fn frobenius(got: &[f64], exact: &[f64]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (got, exact) in got.iter().zip(exact) {
        if exact.is_finite() {
            error += (got - exact).powi(2);
            size += exact.powi(2);
        }
    }
    if error == 0.0 {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        (error / size).sqrt()
    }
}

fn position(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut position: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let size = size.max(1);
            let at = index % size;
            index /= size;
            at
        })
        .collect();
    position.reverse();
    position
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXACT: [f64; 6] = [0.5, -1.5, 0.25, 2.0, 1.0, -0.125];

    fn judged(got: &[f64]) -> Judged<'_> {
        Judged {
            output: "o",
            quantity: Quantity::Output,
            dtype: Dtype::F32,
            f32_precision: F32Precision::Full,
            shape: &[1, 1, 3, 2],
            got,
            exact: &EXACT,
            naive: &EXACT,
        }
    }

    fn with(index: usize, value: f64) -> [f64; 6] {
        let mut got = EXACT;
        got[index] = value;
        got
    }

    /// Catches a rule that lets a wrong value through.
    #[test]
    fn a_wrong_value_is_rejected_and_named() {
        assert!(judge(&judged(&EXACT)).passed);
        let verdict = judge(&judged(&with(3, 2.01)));
        assert!(!verdict.passed);
        assert_eq!((verdict.index, verdict.got, verdict.exact), (3, 2.01, 2.0));
        assert!(
            verdict
                .message
                .contains("at [0, 0, 1, 1]: got 2.01e0, exact 2e0")
        );
    }

    /// Catches a comparison that a NaN slips through, and an infinity.
    #[test]
    fn nan_and_infinity_are_rejected() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                let got = with(1, value);
                let verdict = judge(&Judged {
                    dtype,
                    // However bad the unfused form is.
                    naive: &[1e30; 6],
                    ..judged(&got)
                });
                assert!(!verdict.passed, "{verdict}");
                assert_eq!(verdict.index, 1);
            }
        }
    }

    /// Catches an unfused form that overflowed and so allows everything.
    #[test]
    fn an_overflow_of_the_naive_form_allows_nothing() {
        for overflow in [f64::NAN, f64::INFINITY] {
            let got = with(0, 0.6);
            let naive = with(0, overflow);
            let verdict = judge(&Judged {
                naive: &naive,
                ..judged(&got)
            });
            assert!(!verdict.passed, "{verdict}");
        }
    }

    /// Catches a row that sees nothing reported as a large negative number, or as NaN.
    #[test]
    fn a_missing_minus_infinity_is_rejected() {
        let exact = with(2, f64::NEG_INFINITY);
        let passes = |got: &[f64]| {
            let lse = Judged {
                output: "lse",
                quantity: Quantity::LogSumExp,
                exact: &exact,
                naive: &exact,
                ..judged(got)
            };
            judge(&lse).passed
        };
        assert!(passes(&exact));
        for value in [-1e30, f64::NAN, f64::INFINITY, 0.0] {
            assert!(!passes(&with(2, value)), "{value}");
        }
        // And one that should not be there.
        let mut got = exact;
        got[4] = f64::NEG_INFINITY;
        assert!(!passes(&got));
    }

    /// Catches rows written one place too far, though every value is one of the right ones.
    #[test]
    fn rows_off_by_one_are_rejected() {
        let mut got = EXACT;
        got.rotate_left(2);
        assert!(!judge(&judged(&got)).passed);
    }

    /// Catches outputs that are cut short or too long.
    #[test]
    fn a_wrong_length_is_rejected() {
        let verdict = judge(&judged(&EXACT[..4]));
        assert!(!verdict.passed);
        assert_eq!(verdict.message, "o: has 4 elements, expected 6");
    }

    /// Catches a bound that is not twice (thrice) the unfused error plus two roundings.
    #[test]
    fn the_bound_is_as_stated() {
        let naive = with(0, 0.5 + 1e-3);
        let allowed = 2e-3 + 2.0 * f64::from(f32::EPSILON);
        for (quantity, extra) in [(Quantity::Output, 0.0), (Quantity::Gradient, 1e-3)] {
            let bound = judge(&Judged {
                quantity,
                naive: &naive,
                ..judged(&EXACT)
            })
            .bound;
            assert!((bound - allowed - extra).abs() < 1e-12, "{bound}");
        }
        assert_eq!(floor(1.0, Dtype::F16), 2.0_f64.powi(-10));
        assert_eq!(floor(1.0, Dtype::BF16), 2.0_f64.powi(-7));
        assert_eq!(floor(1e-9, Dtype::F16), 2.0_f64.powi(-24));
        assert_eq!(floor(0.0, Dtype::F16), 0.0);
    }

    /// Catches an error of every element that stays under the largest one allowed.
    #[test]
    fn relative_errors_bind_in_f32_alone() {
        let got = EXACT.map(|x| x * (1.0 + 1e-5));
        let naive = EXACT.map(|x| x + 1e-3);
        let loose = Judged {
            naive: &naive,
            ..judged(&got)
        };
        assert!(!judge(&loose).passed);
        let rounded = Judged {
            f32_precision: F32Precision::Tf32,
            ..loose
        };
        assert!(judge(&rounded).passed);
        let sixteen_bit = Judged {
            dtype: Dtype::BF16,
            ..loose
        };
        assert!(judge(&sixteen_bit).passed);
        let gradient = Judged {
            quantity: Quantity::Gradient,
            ..loose
        };
        assert!(judge(&gradient).passed);
        let got = EXACT.map(|x| x * (1.0 + 3e-5));
        let gradient = Judged {
            got: &got,
            ..gradient
        };
        assert!(!judge(&gradient).passed);
    }

    /// Catches a relative error asked of an output that is 0 but for the reference's own rounding,
    /// and one that is waived for an output that is only small.
    #[test]
    fn what_vanishes_has_no_relative_error() {
        let small = EXACT.map(|x| 1e-12 * x);
        let (noise, naive) = (EXACT.map(|x| 1e-16 * x), EXACT.map(|x| 1e-7 * x));
        assert!(vanishes(&noise, &naive));
        let wrong = EXACT.map(|x| 4e-7 * x);
        let gradient = |exact, naive, got: &[f64]| {
            judge(&Judged {
                quantity: Quantity::Gradient,
                exact,
                naive,
                ..judged(got)
            })
        };
        assert!(gradient(&noise, &naive, &naive).passed);
        assert!(!gradient(&noise, &naive, &wrong).passed);
        assert!(!vanishes(&small, &naive));
        assert!(!gradient(&small, &naive, &naive).passed);
        assert!(!vanishes(&EXACT, &EXACT));
    }

    /// Catches a gradient that must vanish and holds left-over memory.
    #[test]
    fn an_exact_zero_must_be_met() {
        let zero = [0.0; 6];
        let mut got = zero;
        let verdict = |got: &[f64]| {
            judge(&Judged {
                quantity: Quantity::Gradient,
                dtype: Dtype::F16,
                exact: &zero,
                naive: &zero,
                ..judged(got)
            })
        };
        assert!(verdict(&got).passed);
        got[5] = 1e-12;
        assert!(!verdict(&got).passed);
    }

    /// Catches a visible NaN that was lost on the way.
    #[test]
    fn a_finite_value_in_place_of_nan_is_rejected() {
        let exact = with(2, f64::NAN);
        let verdict = |got: &[f64]| {
            judge(&Judged {
                exact: &exact,
                naive: &exact,
                ..judged(got)
            })
        };
        assert!(verdict(&exact).passed);
        assert!(verdict(&with(2, f64::INFINITY)).passed);
        let lost = verdict(&with(2, 7.0));
        assert!(!lost.passed && lost.index == 2, "{lost}");
    }
}
