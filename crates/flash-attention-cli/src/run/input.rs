//! Reads and checks the tensors of a run, before anything is computed.

use super::array::{Array, float, type_name};
use super::seen::{Hidden, Seen};
use crate::Outcome;
use burn_flash_attention::{ElementType, Operand, Operands, Options, Problem, Reason};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Stored, TensorInfo, TensorView};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Names a run cannot do without.
const REQUIRED: [&str; 3] = ["q", "k", "v"];

/// Names a run reads where they are there; every other tensor of the file is reported as ignored.
const OPTIONAL: [&str; 4] = ["mask", "bias", "do", "dlse"];

/// Names of a file that an error lists at most.
const LISTED: usize = 12;

/// Checked tensors of a run.
pub struct Inputs {
    /// What they ask for.
    pub problem: Problem,
    /// `q`.
    pub query: Array,
    /// `k`.
    pub key: Array,
    /// `v`.
    pub value: Array,
    /// `mask`; true hides.
    pub mask: Option<Vec<bool>>,
    /// `bias`.
    pub bias: Option<Array>,
    /// `do`, the gradient of the loss with respect to the output.
    pub output_gradient: Option<Array>,
    /// `dlse`, the gradient of the loss with respect to lse.
    pub lse_gradient: Option<Array>,
    /// Tensors of the file that play no part.
    pub ignored: Vec<String>,
}

impl Inputs {
    /// Reads the tensors of a safetensors file.
    pub fn read(bytes: &[u8], options: &Options) -> Outcome<Self> {
        if let Some(name) = repeated_tensor(bytes) {
            return Err(format!("tensor {name} is in the header twice").into());
        }
        let file = match SafeTensors::deserialize(bytes) {
            Ok(file) => file,
            Err(error) => {
                let fault = broken_tensor(bytes);
                return Err(fault
                    .unwrap_or_else(|| format!("no safetensors file: {error}"))
                    .into());
            }
        };
        let optional = |name: &str| file.tensor(name).ok();
        let required = |name| optional(name).ok_or_else(|| missing(&file));
        let (query, key, value) = (required("q")?, required("k")?, required("v")?);
        let (mask, bias) = (optional("mask"), optional("bias"));
        let (output_gradient, lse_gradient) = (optional("do"), optional("dlse"));

        let operands = Operands::new(operand(&query), operand(&key), operand(&value))
            .mask(mask.as_ref().map(operand))
            .bias(bias.as_ref().map(operand));
        let problem = Problem::new(&operands, options).map_err(|mut error| {
            error.reasons.iter_mut().for_each(expect_bytes_too);
            let name = culprit(&error.reasons[0]);
            format!("{name}: {error}")
        })?;
        if let Some(view) = &output_gradient {
            expect("do", view, &problem.output_shape(), query.dtype())?;
        }
        if let Some(view) = &lse_gradient {
            expect("dlse", view, &problem.lse_shape(), Stored::F32)?;
        }

        let array =
            |name, view: Option<TensorView>| view.map(|view| Array::read(name, &view)).transpose();
        let mut ignored: Vec<String> = file.names().into_iter().map(String::from).collect();
        ignored.retain(|name| {
            let name = name.as_str();
            !REQUIRED.contains(&name) && !OPTIONAL.contains(&name)
        });
        ignored.sort();
        let inputs = Self {
            problem,
            query: Array::read("q", &query)?,
            key: Array::read("k", &key)?,
            value: Array::read("v", &value)?,
            mask: mask.map(|view| read_mask(&view)).transpose()?,
            bias: array("bias", bias)?,
            output_gradient: array("do", output_gradient)?,
            lse_gradient: array("dlse", lse_gradient)?,
            ignored,
        };
        inputs.check_numbers()?;
        Ok(inputs)
    }

    /// Whether the file asks for gradients.
    pub fn wants_gradients(&self) -> bool {
        self.output_gradient.is_some() || self.lse_gradient.is_some()
    }

    /// Refuses a NaN or an infinity that would reach a result. In a key, a value or a bias that no
    /// query sees it is legal padding, as it is in a query that sees nothing, and in its gradients.
    fn check_numbers(&self) -> Outcome<()> {
        let optional = [&self.bias, &self.output_gradient, &self.lse_gradient];
        let required = [&self.query, &self.key, &self.value];
        for array in required.into_iter().chain(optional.into_iter().flatten()) {
            let hides = |x: f64| array.name == "bias" && x == f64::NEG_INFINITY;
            let elements = array.values.iter().enumerate();
            let mut lost = elements
                .filter(|&(_, &x)| !x.is_finite() && !hides(x))
                .peekable();
            if lost.peek().is_none() {
                continue;
            }
            let seen = self.seen(array.name);
            for (at, x) in lost {
                let index = array.index(at);
                if seen.at(scores_of(array.name, &index)) {
                    let name = array.name;
                    return Err(format!(
                        "tensor {name} is {x} at {index:?}, expected a finite number"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    /// Which elements of the named tensor have to do with a visible score.
    fn seen(&self, name: &str) -> Seen {
        let problem = &self.problem;
        let [batch, heads, seq_q, seq_kv] = problem.score_shape();
        let shape = match name {
            "k" | "v" => [batch, problem.kv_heads, 1, seq_kv],
            "bias" => problem.bias.unwrap_or_default(),
            _ => [batch, heads, seq_q, 1],
        };
        Seen::new(problem, self.hidden(name), shape)
    }

    /// What hides the named tensor: the mask, and the bias where it is minus infinity. A query and a
    /// key meet the bias only after their product, which has to be a number.
    fn hidden(&self, name: &str) -> Option<Hidden<'_>> {
        let mask = self.mask.as_deref().zip(self.problem.mask);
        let mask = mask.map(|(mask, shape)| Hidden {
            shape,
            elements: mask.into(),
        });
        let bias = self.bias.as_ref().zip(self.problem.bias);
        let bias = bias
            .filter(|_| matches!(name, "v" | "do" | "dlse"))
            .map(|(bias, shape)| Hidden {
                shape,
                elements: bias
                    .values
                    .iter()
                    .map(|&x| x == f64::NEG_INFINITY)
                    .collect(),
            });
        match (mask, bias) {
            (Some(mask), Some(bias)) => Some(mask.or(bias)),
            (mask, bias) => mask.or(bias),
        }
    }
}

/// The scores that an element of the named tensor has to do with, as an index of [`Inputs::seen`].
fn scores_of(name: &str, index: &[usize]) -> [usize; 4] {
    match name {
        "k" | "v" => [index[0], index[1], 0, index[2]],
        "bias" => [index[0], index[1], index[2], index[3]],
        _ => [index[0], index[1], index[2], 0],
    }
}

/// Which tensors a file lacks, what it has and what is read.
fn missing(file: &SafeTensors) -> String {
    let mut there: Vec<&str> = file.names().into_iter().collect();
    there.sort_unstable();
    let lacks: Vec<&str> = REQUIRED
        .into_iter()
        .filter(|name| !there.contains(name))
        .collect();
    let (what, are) = match lacks.len() {
        1 => ("tensor", "is"),
        _ => ("tensors", "are"),
    };
    let more = match there.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    there.truncate(LISTED);
    let has = match there.as_slice() {
        [] => "no tensor".to_string(),
        names => names.join(", ") + &more,
    };
    let (lacks, required, optional) = (lacks.join(", "), REQUIRED.join(", "), OPTIONAL.join(", "));
    format!(
        "{what} {lacks} {are} missing: the file has {has}; expected {required}, optional {optional}"
    )
}

/// Shape and element type, for the one check of all operands together.
fn operand(view: &TensorView) -> Operand {
    let element = match view.dtype() {
        // A mask may be stored as bytes too, where the writer has no booleans.
        Stored::BOOL | Stored::U8 => ElementType::Bool,
        other => match float(other) {
            Some(dtype) => dtype.into(),
            None => ElementType::Other(type_name(other)),
        },
    };
    Operand::new(view.shape(), element)
}

/// Adds to what a mask may be the bytes that [`operand`] takes for booleans.
fn expect_bytes_too(reason: &mut Reason) {
    if let Reason::ElementType {
        operand: "mask",
        expected,
        ..
    } = reason
    {
        *expected = "bool or u8";
    }
}

/// The tensor or flag that a reason is about.
fn culprit(reason: &Reason) -> String {
    let operand = match reason {
        Reason::Rank { operand, .. }
        | Reason::Mismatch { operand, .. }
        | Reason::Dim { operand, .. }
        | Reason::Sequence { operand, .. }
        | Reason::Elements { operand, .. }
        | Reason::Broadcast { operand, .. }
        | Reason::ElementType { operand, .. }
        | Reason::UnequalTypes { operand, .. } => operand,
        Reason::Scale { .. } => return "--scale".to_string(),
        Reason::Softcap { .. } => return "--softcap".to_string(),
        _ => "query",
    };
    let name = match operand {
        "query" => "q",
        "key" => "k",
        "value" => "v",
        other => other,
    };
    format!("tensor {name}")
}

fn expect(name: &str, view: &TensorView, shape: &[usize], element: Stored) -> Outcome<()> {
    if view.shape() != shape {
        let given = view.shape();
        return Err(format!("tensor {name} has shape {given:?}, expected {shape:?}").into());
    }
    if view.dtype() != element {
        let (given, expected) = (type_name(view.dtype()), type_name(element));
        return Err(format!("tensor {name} has element type {given}, expected {expected}").into());
    }
    Ok(())
}

fn read_mask(view: &TensorView) -> Outcome<Vec<bool>> {
    let flag = |&byte: &u8| match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(format!("tensor mask holds the byte {byte}, expected 0 or 1").into()),
    };
    view.data().iter().map(flag).collect()
}

/// The header of a file and its data.
fn parts(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    rest.split_at_checked(length)
}

/// The names in a header, in their order: where one is there twice, a map holds the last alone.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(header: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some((name, IgnoredAny)) = map.next_entry()? {
                    names.push(name);
                }
                Ok(Names(names))
            }
        }

        header.deserialize_map(Collect)
    }
}

/// A name that a header has twice, which the reader takes for one tensor.
fn repeated_tensor(bytes: &[u8]) -> Option<String> {
    let (header, _) = parts(bytes)?;
    let Names(mut names) = serde_json::from_slice(header).ok()?;
    names.sort_unstable();
    let mut pairs = names.windows(2);
    pairs
        .find(|pair| pair[0] == pair[1])
        .map(|pair| pair[0].clone())
}

/// Looks for the tensor that makes a file unreadable, which the reader's own error does not always name.
fn broken_tensor(bytes: &[u8]) -> Option<String> {
    let (header, data) = parts(bytes)?;
    let tensors: Map<String, Value> = serde_json::from_slice(header).ok()?;
    tensors
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .find_map(|(name, entry)| {
            let fault = broken_entry(entry, data.len())?;
            Some(format!("tensor {name} is broken: {fault}"))
        })
}

fn broken_entry(entry: Value, data: usize) -> Option<String> {
    let info: TensorInfo = match serde_json::from_value(entry) {
        Ok(info) => info,
        Err(error) => return Some(error.to_string()),
    };
    let (start, end) = info.data_offsets;
    if start > end || end > data {
        return Some(format!("its bytes are {start}..{end} of {data}"));
    }
    let elements = info
        .shape
        .iter()
        .try_fold(1_usize, |all, &n| all.checked_mul(n));
    let needs = elements.and_then(|n| n.checked_mul(info.dtype.bitsize()));
    let has = end - start;
    (needs != Some(8 * has)).then(|| {
        let (shape, element) = (&info.shape, type_name(info.dtype));
        format!("shape {shape:?} of {element} does not fill its {has} bytes")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flash_attention::Dtype;
    use std::time::{Duration, Instant};

    /// Catches a check that takes each padded number to every query: hours instead of an instant.
    #[test]
    fn padding_of_a_long_sequence_is_checked_in_linear_time() {
        const SEQ: usize = 1 << 17;
        let operand = Operand::new([1, 1, SEQ, 4], Dtype::F32);
        let mask = Operand::new([1, 1, 1, SEQ], ElementType::Bool);
        let operands = Operands::new(operand.clone(), operand.clone(), operand).mask(mask);
        let array = |name, number| Array {
            name,
            stored: Stored::F32,
            shape: vec![1, 1, SEQ, 4],
            values: vec![number; 4 * SEQ],
        };
        let inputs = Inputs {
            problem: Problem::new(&operands, &Options::new()).unwrap(),
            query: array("q", f64::NAN),
            key: array("k", f64::NAN),
            value: array("v", f64::NAN),
            mask: Some(vec![true; SEQ]),
            bias: None,
            output_gradient: None,
            lse_gradient: None,
            ignored: Vec::new(),
        };
        let start = Instant::now();
        inputs.check_numbers().unwrap();
        assert!(start.elapsed() < Duration::from_secs(60));

        let mut seen = inputs;
        seen.mask = Some((0..SEQ).map(|j| j + 1 < SEQ).collect());
        let error = seen.check_numbers().unwrap_err().to_string();
        assert!(
            error.starts_with("tensor q is NaN at [0, 0, 0, 0]"),
            "{error}"
        );
        seen.query.values.fill(0.0);
        let error = seen.check_numbers().unwrap_err().to_string();
        let place = format!("tensor k is NaN at [0, 0, {}, 0]", SEQ - 1);
        assert!(error.starts_with(&place), "{error}");
    }
}
