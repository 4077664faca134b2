//! Every reason a request can be refused for, from the input that it names.

use flash_attention_spec::{
    Dtype, ElementType, Operand, Operands, Options, Problem, ProblemError, Reason,
};
use flash_attention_spec::{MAX_ELEMENTS, MAX_HEAD_DIM, MAX_SEQUENCE};

const QUERY: [usize; 4] = [2, 4, 5, 8];
const KEY: [usize; 4] = [2, 2, 7, 8];
const VALUE: [usize; 4] = [2, 2, 7, 6];
const SCORES: [usize; 4] = [2, 4, 5, 7];

/// Puts a new shape or element type into one operand.
type Edit<T> = fn(&mut Operands, T);

fn float(shape: impl Into<Vec<usize>>) -> Operand {
    Operand::new(shape, Dtype::F32)
}

fn mask(shape: impl Into<Vec<usize>>) -> Option<Operand> {
    Some(Operand::new(shape, ElementType::Bool))
}

fn other(name: &str) -> ElementType {
    ElementType::Other(name.into())
}

fn operands() -> Operands {
    Operands {
        query: float(QUERY),
        key: float(KEY),
        value: float(VALUE),
        mask: None,
        bias: None,
    }
}

fn problem_after(edit: impl FnOnce(&mut Operands)) -> Result<Problem, ProblemError> {
    let mut operands = operands();
    edit(&mut operands);
    Problem::new(&operands, &Options::default())
}

/// The reasons against sound operands with one edit.
fn refused(edit: impl FnOnce(&mut Operands)) -> ProblemError {
    problem_after(edit).unwrap_err()
}

/// The only reason, with its text checked.
fn only(error: ProblemError, text: &str) -> Reason {
    assert_eq!(error.to_string(), text);
    let [reason] = error.reasons.try_into().unwrap();
    reason
}

#[test]
fn a_sound_request_keeps_its_sizes() {
    let problem = problem_after(|o| {
        o.mask = mask([2, 1, 5, 7]);
        o.bias = Some(float([1, 4, 1, 1]));
    })
    .unwrap();
    assert_eq!(problem.output_shape(), [2, 4, 5, 6]);
    assert_eq!(problem.lse_shape(), [2, 4, 5]);
    assert_eq!(problem.score_shape(), SCORES);
    assert_eq!(problem.scale, 1.0 / 8_f64.sqrt());
    assert_eq!((problem.softcap, problem.dtype), (None, Dtype::F32));
    assert_eq!(problem.mask, Some([2, 1, 5, 7]));
    assert_eq!(problem.bias, Some([1, 4, 1, 1]));
    assert_eq!([0, 1, 2, 3].map(|head| problem.kv_head(head)), [0, 0, 1, 1]);
}

#[test]
fn batch_and_lengths_may_be_zero() {
    for zero in [0, 2] {
        let shape = |mut shape: [usize; 4]| {
            shape[zero] = 0;
            float(shape)
        };
        let empty = problem_after(|o| {
            *o = Operands {
                query: shape(QUERY),
                key: shape(KEY),
                value: shape(VALUE),
                mask: None,
                bias: None,
            }
        });
        assert!(empty.is_ok(), "dimension {zero}");
    }
}

#[test]
fn every_operand_needs_four_dimensions() {
    let shape = || vec![2, 5, 8];
    let edits: [(&str, Edit<Vec<usize>>); 5] = [
        ("query", |o, shape| o.query = float(shape)),
        ("key", |o, shape| o.key = float(shape)),
        ("value", |o, shape| o.value = float(shape)),
        ("mask", |o, shape| o.mask = mask(shape)),
        ("bias", |o, shape| o.bias = Some(float(shape))),
    ];
    for (operand, edit) in edits {
        let text = format!("{operand} has shape [2, 5, 8] with 3 dimensions, expected 4");
        let given = shape();
        assert_eq!(
            only(refused(|o| edit(o, shape())), &text),
            Reason::Rank { operand, given }
        );
    }
    let text = "mask has shape [] with 0 dimensions, expected 4";
    only(refused(|o| o.mask = mask([])), text);
    let text = "bias has shape [1, 1, 1, 5, 7] with 5 dimensions, expected 4";
    only(refused(|o| o.bias = Some(float([1, 1, 1, 5, 7]))), text);
}

#[test]
fn sizes_must_equal_those_of_the_other_operand() {
    let key = |shape: [usize; 4]| refused(|o| o.key = float(shape));
    let value = |shape: [usize; 4]| refused(|o| o.value = float(shape));
    let cases = [
        (key([3, 2, 7, 8]), "key", "batch", 3, 2, "query"),
        (value([1, 2, 7, 6]), "value", "batch", 1, 2, "query"),
        (value([2, 1, 7, 6]), "value", "heads", 1, 2, "key"),
        (value([2, 2, 6, 6]), "value", "seq_kv", 6, 7, "key"),
        (key([2, 2, 7, 9]), "key", "head_dim", 9, 8, "query"),
    ];
    for (error, operand, dimension, given, expected, other) in cases {
        let text = format!("{operand} has {dimension} {given}, expected {expected} as in {other}");
        let reason = Reason::Mismatch {
            operand,
            dimension,
            given,
            expected,
            other,
        };
        assert_eq!(only(error, &text), reason);
    }
}

#[test]
fn query_heads_must_be_a_multiple_of_key_heads() {
    for (heads, kv_heads) in [(4, 3), (2, 4), (0, 2), (4, 0), (0, 0)] {
        let error = refused(|o| {
            o.query = float([2, heads, 5, 8]);
            o.key = float([2, kv_heads, 7, 8]);
            o.value = float([2, kv_heads, 7, 6]);
        });
        assert_eq!(error.reasons, [Reason::Heads { heads, kv_heads }]);
        let text = error.to_string();
        assert!(text.contains(&format!("query has {heads} heads")), "{text}");
        assert!(
            text.contains(&format!("the {kv_heads} heads of key")),
            "{text}"
        );
    }
}

#[test]
fn dims_run_from_one_to_the_largest() {
    let with = |head_dim, value_dim| {
        problem_after(|o| {
            o.query = float([2, 4, 5, head_dim]);
            o.key = float([2, 2, 7, head_dim]);
            o.value = float([2, 2, 7, value_dim]);
        })
    };
    assert!(with(1, MAX_HEAD_DIM).is_ok());
    assert!(with(MAX_HEAD_DIM, 1).is_ok());
    for given in [0, MAX_HEAD_DIM + 1] {
        let cases = [
            (with(given, 6), "query", "head_dim"),
            (with(8, given), "value", "value_dim"),
        ];
        for (result, operand, dimension) in cases {
            let text = format!("{operand} has {dimension} {given}, expected 1 to 256");
            let reason = Reason::Dim {
                operand,
                dimension,
                given,
            };
            assert_eq!(only(result.unwrap_err(), &text), reason);
        }
    }
}

#[test]
fn sequences_end_where_positions_cannot_be_counted() {
    let with = |seq_q, seq_kv| {
        problem_after(|o| {
            o.query = float([2, 4, seq_q, 8]);
            o.key = float([2, 2, seq_kv, 8]);
            o.value = float([2, 2, seq_kv, 6]);
        })
    };
    assert!(with(MAX_SEQUENCE, MAX_SEQUENCE).is_ok());
    let given = MAX_SEQUENCE + 1;
    let cases = [
        (with(given, 7), "query", "seq_q"),
        (with(5, given), "key", "seq_kv"),
    ];
    for (result, operand, dimension) in cases {
        let text = format!("{operand} has {dimension} 536870913, expected at most 536870912");
        let reason = Reason::Sequence {
            operand,
            dimension,
            given,
        };
        assert_eq!(only(result.unwrap_err(), &text), reason);
    }
}

#[test]
fn mask_and_bias_broadcast_in_any_dimension_and_to_no_other_size() {
    for ones in 0..16_u32 {
        let shape: [usize; 4] =
            std::array::from_fn(|n| if ones >> n & 1 == 1 { 1 } else { SCORES[n] });
        let problem = problem_after(|o| {
            o.mask = mask(shape);
            o.bias = Some(float(shape));
        });
        assert!(problem.is_ok(), "{shape:?}");
    }
    for dimension in 0..4 {
        for size in [0, 3, SCORES[dimension] + 1] {
            let mut given = SCORES;
            given[dimension] = size;
            let cases = [
                (refused(|o| o.mask = mask(given)), "mask"),
                (refused(|o| o.bias = Some(float(given))), "bias"),
            ];
            for (error, operand) in cases {
                let text = format!(
                    "{operand} has shape {given:?}, expected [2, 4, 5, 7] with any dimension 1"
                );
                let reason = Reason::Broadcast {
                    operand,
                    given,
                    expected: SCORES,
                };
                assert_eq!(only(error, &text), reason);
            }
        }
    }
}

#[test]
fn element_types_attention_is_not_defined_on_are_named() {
    let edits: [(&str, Edit<ElementType>); 4] = [
        ("query", |o, element| o.query.element = element),
        ("key", |o, element| o.key.element = element),
        ("value", |o, element| o.value.element = element),
        ("bias", |o, element| {
            o.bias = Some(Operand::new(SCORES, element))
        }),
    ];
    for (operand, edit) in edits {
        for given in [other("f64"), other("i32"), ElementType::Bool] {
            let error = refused(|o| edit(o, given.clone()));
            let expected = "f32, f16 or bf16";
            let text = format!("{operand} has element type {given}, expected {expected}");
            let reason = Reason::ElementType {
                operand,
                given,
                expected,
            };
            assert_eq!(only(error, &text), reason);
        }
    }
    for given in [other("u8"), Dtype::F32.into()] {
        let error = refused(|o| o.mask = Some(Operand::new(SCORES, given.clone())));
        let text = format!("mask has element type {given}, expected bool");
        let reason = Reason::ElementType {
            operand: "mask",
            given,
            expected: "bool",
        };
        assert_eq!(only(error, &text), reason);
    }
}

#[test]
fn key_value_and_bias_have_the_type_of_the_query() {
    let bias = Some(Operand::new(SCORES, Dtype::F16));
    let cases = [
        ("key", refused(|o| o.key.element = Dtype::F16.into())),
        ("value", refused(|o| o.value.element = Dtype::F16.into())),
        ("bias", refused(|o| o.bias = bias)),
    ];
    for (operand, error) in cases {
        let text = format!("{operand} has element type f16, expected f32 as in query");
        let reason = Reason::UnequalTypes {
            operand,
            given: Dtype::F16.into(),
            expected: Dtype::F32.into(),
        };
        assert_eq!(only(error, &text), reason);
    }
    let bf16 = |shape: [usize; 4]| Operand::new(shape, Dtype::BF16);
    let problem = problem_after(|o| {
        (o.query, o.key, o.value) = (bf16(QUERY), bf16(KEY), bf16(VALUE));
    });
    assert_eq!(problem.unwrap().dtype, Dtype::BF16);
}

/// Sound operands under the given scale and soft cap.
fn problem_with(scale: Option<f64>, softcap: Option<f64>) -> Result<Problem, ProblemError> {
    let options = Options {
        scale,
        softcap,
        ..Options::default()
    };
    Problem::new(&operands(), &options)
}

#[test]
fn scale_is_any_number_that_single_precision_holds() {
    for scale in [0.0, -2.5, 1e-60, f64::from(f32::MAX)] {
        assert_eq!(problem_with(Some(scale), None).unwrap().scale, scale);
    }
    for given in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e39] {
        let error = problem_with(Some(given), None).unwrap_err();
        let reason = only(
            error,
            &format!("scale is {given:?}, expected a finite number of at most 3.40e38 in size"),
        );
        let bits = given.to_bits();
        assert!(matches!(reason, Reason::Scale { given } if given.to_bits() == bits));
    }
}

#[test]
fn softcap_is_a_positive_number_that_single_precision_can_divide_by() {
    for softcap in [50.0, f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)] {
        let problem = problem_with(None, Some(softcap)).unwrap();
        assert_eq!(problem.softcap, Some(softcap));
    }
    for given in [0.0, -0.0, -1.0, 1e-60, 1e39, f64::NAN, f64::INFINITY] {
        let error = problem_with(None, Some(given)).unwrap_err();
        let text =
            format!("softcap is {given:?}, expected a positive number from 1.18e-38 to 3.40e38");
        let reason = only(error, &text);
        let bits = given.to_bits();
        assert!(matches!(reason, Reason::Softcap { given } if given.to_bits() == bits));
    }
}

/// Catches a 0 that hides from a product that the other dimensions overflow.
#[test]
fn shapes_that_cannot_be_addressed_are_refused_though_they_hold_nothing() {
    let heads = 1 << 62;
    let no_batch = |o: &mut Operands| {
        o.query = float([0, heads, 5, 8]);
        o.key = float([0, heads, 7, 8]);
        o.value = float([0, heads, 7, 6]);
        (o.mask, o.bias) = (None, None);
    };
    let error = problem_after(no_batch).unwrap_err();
    let given = [0, heads, 5, 8];
    let operand = "query";
    assert_eq!(error.reasons[0], Reason::Elements { operand, given });
    assert_eq!(
        error.reasons[0].to_string(),
        format!(
            "query has shape {given:?}, expected a product of at most {MAX_ELEMENTS} over the \
             dimensions that are not 0"
        )
    );
    let named: Vec<_> = error
        .reasons
        .iter()
        .map(|reason| match reason {
            Reason::Elements { operand, .. } => *operand,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(named, ["query", "key", "value", "output"]);

    // Bytes are addressed, not elements alone, and the limit itself is allowed.
    let batches = |batch: usize| {
        problem_after(|o| {
            o.query = float([batch, 1, 1, 1]);
            o.key = float([batch, 1, 0, 1]);
            o.value = float([batch, 1, 0, 1]);
            (o.mask, o.bias) = (None, None);
        })
    };
    assert!(batches(MAX_ELEMENTS).is_ok());
    assert!(batches(MAX_ELEMENTS + 1).is_err());
}

#[test]
fn all_reasons_come_at_once() {
    let wrong = Operands {
        query: Operand::new([2, 3, 5, 300], Dtype::F32),
        key: Operand::new([1, 2, 7, 300], Dtype::F16),
        value: Operand::new([2, 2, 6, 6], other("i64")),
        mask: Some(Operand::new([2, 3, 5, 8], other("u8"))),
        bias: Some(Operand::new([2, 3, 4, 7], Dtype::F32)),
    };
    let options = Options {
        scale: Some(f64::INFINITY),
        softcap: Some(0.0),
        ..Options::default()
    };
    let error = Problem::new(&wrong, &options).unwrap_err();
    let text = [
        "key has element type f16, expected f32 as in query",
        "value has element type i64, expected f32, f16 or bf16",
        "mask has element type u8, expected bool",
        "scale is inf, expected a finite number of at most 3.40e38 in size",
        "softcap is 0.0, expected a positive number from 1.18e-38 to 3.40e38",
        "key has batch 1, expected 2 as in query",
        "value has seq_kv 6, expected 7 as in key",
        "query has 3 heads, expected a positive multiple of the 2 heads of key and value",
        "query has head_dim 300, expected 1 to 256",
        "mask has shape [2, 3, 5, 8], expected [2, 3, 5, 7] with any dimension 1",
        "bias has shape [2, 3, 4, 7], expected [2, 3, 5, 7] with any dimension 1",
    ];
    assert_eq!(error.to_string(), text.join("; "));
    assert_eq!(error.reasons.len(), text.len());
}

#[test]
fn a_missing_dimension_does_not_hide_types_options_and_other_ranks() {
    let wrong = Operands {
        query: float([5, 8]),
        mask: mask([7]),
        key: Operand::new(KEY, other("f64")),
        ..operands()
    };
    let options = Options {
        softcap: Some(-1.0),
        ..Options::default()
    };
    let error = Problem::new(&wrong, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "query has shape [5, 8] with 2 dimensions, expected 4; \
         mask has shape [7] with 1 dimensions, expected 4; \
         key has element type f64, expected f32, f16 or bf16; \
         softcap is -1.0, expected a positive number from 1.18e-38 to 3.40e38"
    );
}
