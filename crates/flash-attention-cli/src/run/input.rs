//! Reads and checks the tensors of a run, before anything is computed.

use super::array::{Array, float, type_name};
use crate::Outcome;
use burn_flash_attention::{ElementType, Operand, Operands, Options, Problem, Reason};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Stored, TensorInfo, TensorView};
use serde_json::{Map, Value};
use std::ops::Range;

/// Names a run reads; every other tensor of the file is reported as ignored.
const NAMES: [&str; 7] = ["q", "k", "v", "mask", "bias", "do", "dlse"];

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
        let file = match SafeTensors::deserialize(bytes) {
            Ok(file) => file,
            Err(error) => return Err(broken_tensor(bytes).unwrap_or(error.to_string()).into()),
        };
        let optional = |name: &str| file.tensor(name).ok();
        let required = |name| optional(name).ok_or_else(|| format!("tensor {name} is missing"));
        let (query, key, value) = (required("q")?, required("k")?, required("v")?);
        let (mask, bias) = (optional("mask"), optional("bias"));
        let (output_gradient, lse_gradient) = (optional("do"), optional("dlse"));

        let operands = Operands {
            query: operand(&query),
            key: operand(&key),
            value: operand(&value),
            mask: mask.as_ref().map(operand),
            bias: bias.as_ref().map(operand),
        };
        let problem = Problem::new(&operands, options).map_err(|error| {
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
        ignored.retain(|name| !NAMES.contains(&name.as_str()));
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
    /// query sees it is legal padding, as it is in a query that sees nothing.
    fn check_numbers(&self) -> Outcome<()> {
        let optional = [&self.bias, &self.output_gradient, &self.lse_gradient];
        let required = [&self.query, &self.key, &self.value];
        for array in required.into_iter().chain(optional.into_iter().flatten()) {
            let hides = |x: f64| array.name == "bias" && x == f64::NEG_INFINITY;
            let elements = array.values.iter().enumerate();
            for (at, &x) in elements.filter(|&(_, &x)| !x.is_finite() && !hides(x)) {
                let index = array.index(at);
                if self.is_visible(self.scores_of(array.name, &index)) {
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

    /// The scores `[batch, heads, seq_q, seq_kv]` that an element of the named tensor has to do with.
    fn scores_of(&self, name: &str, index: &[usize]) -> [Range<usize>; 4] {
        let one = |n: usize| n..n + 1;
        let problem = &self.problem;
        let full = problem.score_shape().map(|size| 0..size);
        match name {
            "k" | "v" => {
                let group = problem.group();
                let first = index[1] * group;
                [
                    one(index[0]),
                    first..first + group,
                    full[2].clone(),
                    one(index[2]),
                ]
            }
            "bias" => {
                let shape = problem.bias.unwrap_or_default();
                let at = |n: usize| match shape[n] {
                    1 => full[n].clone(),
                    _ => one(index[n]),
                };
                [at(0), at(1), at(2), at(3)]
            }
            _ => [one(index[0]), one(index[1]), one(index[2]), full[3].clone()],
        }
    }

    /// Whether any of these scores is visible.
    fn is_visible(&self, [batch, heads, queries, keys]: [Range<usize>; 4]) -> bool {
        queries.into_iter().any(|i| {
            let seen = self.problem.band.keys(i, self.problem.seq_kv);
            let mut keys = keys.start.max(seen.start)..keys.end.min(seen.end);
            keys.any(|j| {
                let mut heads = heads.clone();
                heads.any(|h| batch.clone().any(|b| !self.is_masked([b, h, i, j])))
            })
        })
    }

    fn is_masked(&self, score: [usize; 4]) -> bool {
        let (Some(mask), Some(shape)) = (&self.mask, self.problem.mask) else {
            return false;
        };
        let at = score.iter().zip(shape).fold(0, |at, (&n, size)| {
            at * size + if size == 1 { 0 } else { n }
        });
        mask[at]
    }
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

/// The tensor or flag that a reason is about.
fn culprit(reason: &Reason) -> String {
    let operand = match reason {
        Reason::Rank { operand, .. }
        | Reason::Mismatch { operand, .. }
        | Reason::Dim { operand, .. }
        | Reason::Sequence { operand, .. }
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

/// Looks for the tensor that makes a file unreadable, which the reader's own error does not always name.
fn broken_tensor(bytes: &[u8]) -> Option<String> {
    let (length, rest) = bytes.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (header, data) = rest.split_at_checked(length)?;
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
