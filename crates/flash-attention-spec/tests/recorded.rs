//! The reference against values recorded in f64 by another framework through automatic
//! differentiation; `scripts/record_reference.py` writes the file.

mod case;

use case::{Case, Sizes};
use flash_attention_spec::{Alignment, Options, Window};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

const RECORDED: &[u8] = include_bytes!("data/recorded.safetensors");

/// Bound on the difference of two elements, relative to the largest of their array: both sides are
/// f64, sum at most a few dozen terms, and in the case of large scores lose a factor of some 100
/// in the exponential: below 1e-13 in all.
const TOLERANCE: f64 = 1e-12;

/// The tensors of one recorded case.
struct Recorded<'a> {
    file: &'a SafeTensors<'a>,
    name: &'a str,
}

impl Recorded<'_> {
    fn array(&self, operand: &str) -> Option<([usize; 4], Vec<f64>)> {
        let tensor = self.file.tensor(&format!("{}/{operand}", self.name)).ok()?;
        assert_eq!(tensor.dtype(), Dtype::F64, "{operand}");
        let (numbers, rest) = tensor.data().as_chunks();
        assert!(rest.is_empty());
        let numbers = numbers.iter().map(|n| f64::from_le_bytes(*n)).collect();
        Some((four(tensor.shape()), numbers))
    }

    fn mask(&self) -> Option<([usize; 4], Vec<bool>)> {
        let tensor = self.file.tensor(&format!("{}/mask", self.name)).ok()?;
        assert_eq!(tensor.dtype(), Dtype::BOOL);
        let hides = tensor.data().iter().map(|byte| *byte != 0).collect();
        Some((four(tensor.shape()), hides))
    }

    fn case(&self, options: &Options) -> Case {
        let (query_shape, query) = self.array("query").unwrap();
        let (key_shape, key) = self.array("key").unwrap();
        let (value_shape, value) = self.array("value").unwrap();
        let (mask_shape, mask) = self.mask().unzip();
        let (bias_shape, bias) = self.array("bias").unzip();
        let [batch, heads, seq_q, head_dim] = query_shape;
        let [_, kv_heads, seq_kv, value_dim] = value_shape;
        assert_eq!(key_shape, [batch, kv_heads, seq_kv, head_dim]);
        let sizes = Sizes {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
        };
        Case {
            problem: sizes.problem(mask_shape, bias_shape, options),
            query,
            key,
            value,
            mask,
            bias,
            output_gradient: self.array("output_gradient").unwrap().1,
            lse_gradient: self.array("lse_gradient").map(|(_, numbers)| numbers),
        }
    }

    fn compare(&self, operand: &str, got: &[f64]) {
        let (_, expected) = self.array(operand).unwrap();
        assert_eq!(got.len(), expected.len(), "{}/{operand}", self.name);
        let finite = expected.iter().filter(|x| x.is_finite());
        let largest = finite.fold(0.0_f64, |largest, x| largest.max(x.abs()));
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!(
                got == expected || (got - expected).abs() <= TOLERANCE * largest,
                "{}/{operand}[{n}] is {got:e}, recorded {expected:e}",
                self.name
            );
        }
    }
}

/// Shape of an array with up to four dimensions; those it lacks are 1, at the end.
fn four(shape: &[usize]) -> [usize; 4] {
    std::array::from_fn(|n| shape.get(n).copied().unwrap_or(1))
}

fn options(case: &Value) -> Options {
    let number = |name: &str| match &case[name] {
        Value::Null => None,
        number => Some(number.as_f64().unwrap()),
    };
    let side = |n: usize| match &case["window"][n] {
        Value::Null => None,
        keys => Some(keys.as_u64().unwrap() as usize),
    };
    Options {
        scale: number("scale"),
        softcap: number("softcap"),
        causal: case["causal"].as_bool().unwrap(),
        alignment: match case["alignment"].as_str().unwrap() {
            "bottom-right" => Alignment::BottomRight,
            "top-left" => Alignment::TopLeft,
            other => panic!("alignment {other}"),
        },
        window: Window {
            left: side(0),
            right: side(1),
        },
        ..Options::default()
    }
}

#[test]
fn agrees_with_every_recorded_case() {
    let file = SafeTensors::deserialize(RECORDED).unwrap();
    let (_, header) = SafeTensors::read_metadata(RECORDED).unwrap();
    let recorded = &header.metadata().as_ref().unwrap()["recorded"];
    let recorded: Value = serde_json::from_str(recorded).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for described in cases {
        let recorded = Recorded {
            file: &file,
            name: described["name"].as_str().unwrap(),
        };
        let case = recorded.case(&options(described));
        let result = case.forward();
        recorded.compare("output", &result.output);
        recorded.compare("lse", &result.lse);
        let gradients = case.backward();
        recorded.compare("query_gradient", &gradients.query);
        recorded.compare("key_gradient", &gradients.key);
        recorded.compare("value_gradient", &gradients.value);
        if let Some(bias) = &gradients.bias {
            recorded.compare("bias_gradient", bias);
        }
    }
}
