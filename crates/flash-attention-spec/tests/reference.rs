//! The gradients of the reference against finite differences of its forward pass, for every
//! combination of options.

mod case;

use case::{Case, Sizes};
use flash_attention_spec::{Alignment, Options, Window};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Step of the differences.
const STEP: f64 = 1e-3;

/// Bound on `|difference - gradient|`.
///
/// The five-point difference is off by `STEP^4 / 30` times the fifth derivative of the loss, which
/// stays below a few hundred for inputs, scales and inverse caps of size 1: 1e-11. Rounding adds
/// `1.5 / STEP` times the error of the loss, a sum of some hundred terms of size 1 with 1e-16 each:
/// 1e-11 again.
const TOLERANCE: f64 = 1e-10;

/// Which options a case has; their values are drawn.
#[derive(Clone, Copy, Debug)]
struct Combination {
    causal: bool,
    alignment: Alignment,
    left: bool,
    right: bool,
    softcap: bool,
    mask: bool,
    bias: bool,
    lse_gradient: bool,
}

fn combinations() -> impl Iterator<Item = Combination> {
    (0..1 << 8).map(|bits: u32| {
        let bit = |n: u32| bits >> n & 1 == 1;
        Combination {
            causal: bit(0),
            alignment: if bit(1) {
                Alignment::TopLeft
            } else {
                Alignment::BottomRight
            },
            left: bit(2),
            right: bit(3),
            softcap: bit(4),
            mask: bit(5),
            bias: bit(6),
            lse_gradient: bit(7),
        }
    })
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let [batch, kv_heads, group] = [1..=2_usize, 1..=2, 1..=3];
    let [seq_q, seq_kv] = [0..=4_usize, 0..=5];
    let [head_dim, value_dim] = [1..=3_usize, 1..=3];
    (batch, kv_heads, group, seq_q, seq_kv, head_dim, value_dim).prop_map(
        |(batch, kv_heads, group, seq_q, seq_kv, head_dim, value_dim)| Sizes {
            batch,
            heads: kv_heads * group,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
        },
    )
}

fn options(with: Combination) -> impl Strategy<Value = Options> {
    let scale = prop::option::of(-1.0..1.0);
    (scale, 1.0..4.0, 0..4_usize, 0..4_usize).prop_map(move |(scale, softcap, left, right)| {
        Options {
            scale,
            softcap: with.softcap.then_some(softcap),
            causal: with.causal,
            alignment: with.alignment,
            window: Window {
                left: with.left.then_some(left),
                right: with.right.then_some(right),
            },
            ..Options::default()
        }
    })
}

/// A case with any subset of the dimensions of mask and bias broadcast.
fn case(with: Combination) -> impl Strategy<Value = Case> {
    let broadcast = any::<[bool; 4]>();
    (sizes(), options(with), broadcast, broadcast).prop_flat_map(
        move |(sizes, options, mask_ones, bias_ones)| {
            let full = [sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv];
            let shape = |ones: [bool; 4]| {
                std::array::from_fn::<_, 4, _>(|n| if ones[n] { 1 } else { full[n] })
            };
            let mask = with.mask.then(|| shape(mask_ones));
            let bias = with.bias.then(|| shape(bias_ones));
            let problem = sizes.problem(mask, bias, &options);
            let count = |shape: [usize; 4]| shape.iter().product::<usize>();
            let array = |n| prop::collection::vec(-1.0..1.0, n);
            let keys = sizes.batch * sizes.kv_heads * sizes.seq_kv;
            let queries = sizes.batch * sizes.heads * sizes.seq_q;
            let hides = prop::bool::weighted(0.3);
            // A bias of minus infinity takes a key out and must not disturb its neighbours.
            let shifts = prop_oneof![9 => -1.0..1.0, 1 => Just(f64::NEG_INFINITY)];
            (
                array(queries * sizes.head_dim),
                array(keys * sizes.head_dim),
                array(keys * sizes.value_dim),
                prop::collection::vec(hides, mask.map_or(0, count)),
                prop::collection::vec(shifts, bias.map_or(0, count)),
                array(queries * sizes.value_dim),
                array(queries),
            )
                .prop_map(
                    move |(query, key, value, mask, bias, output_gradient, lse_gradient)| Case {
                        problem,
                        query,
                        key,
                        value,
                        mask: with.mask.then_some(mask),
                        bias: with.bias.then_some(bias),
                        output_gradient,
                        lse_gradient: with.lse_gradient.then_some(lse_gradient),
                    },
                )
        },
    )
}

/// `sum(output * output_gradient) + sum(lse * lse_gradient)` over the rows that see something: the
/// others are constant.
fn loss(case: &Case) -> f64 {
    let result = case.forward();
    let dot = |a: &[f64], b: &[f64]| -> f64 {
        let pairs = a.iter().zip(b).filter(|(a, _)| **a != f64::NEG_INFINITY);
        pairs.map(|(a, b)| a * b).sum()
    };
    let of_lse = case.lse_gradient.as_ref();
    dot(&result.output, &case.output_gradient) + of_lse.map_or(0.0, |g| dot(&result.lse, g))
}

/// Compares `gradient` with differences of the loss in each element of the array `of` selects.
fn compare(
    case: &Case,
    name: &str,
    gradient: &[f64],
    of: impl Fn(&mut Case) -> &mut [f64],
) -> Result<(), TestCaseError> {
    let mut moved = case.clone();
    prop_assert_eq!(of(&mut moved).len(), gradient.len());
    for (n, gradient) in gradient.iter().enumerate() {
        let at = of(&mut moved)[n];
        let mut loss_at = |steps: f64| {
            of(&mut moved)[n] = at + steps * STEP;
            loss(&moved)
        };
        let near = loss_at(1.0) - loss_at(-1.0);
        let far = loss_at(2.0) - loss_at(-2.0);
        of(&mut moved)[n] = at;
        let difference = (8.0 * near - far) / (12.0 * STEP);
        prop_assert!(
            (difference - gradient).abs() <= TOLERANCE,
            "gradient of {name}[{n}] is {gradient:e}, by differences {difference:e}"
        );
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences_for_every_combination_of_options() {
    let config = Config {
        cases: 16,
        failure_persistence: None,
        ..Config::default()
    };
    for with in combinations() {
        let checked = TestRunner::new(config.clone()).run(&case(with), |case| {
            let gradients = case.backward();
            compare(&case, "query", &gradients.query, |c| &mut c.query)?;
            compare(&case, "key", &gradients.key, |c| &mut c.key)?;
            compare(&case, "value", &gradients.value, |c| &mut c.value)?;
            prop_assert_eq!(gradients.bias.is_some(), with.bias);
            if let Some(bias) = &gradients.bias {
                compare(&case, "bias", bias, |c| c.bias.as_mut().unwrap())?;
            }
            Ok(())
        });
        if let Err(error) = checked {
            panic!("{with:?}: {error}");
        }
    }
}
