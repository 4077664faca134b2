//! What goes into the kernels and comes out, and how a problem becomes their arguments: the same for
//! every family.

use crate::schedule::GeometryLaunch;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};
use flash_attention_spec::{Problem, Wanted};
use std::array::from_fn;

/// What cubes that run side by side may read of their heads, in bytes: half of an H200's cache.
pub(crate) const CACHED: usize = 24 << 20;

/// Operands as they lie in memory: any strides, offsets in their handles.
pub struct Operands {
    /// `[batch, heads, seq_q, head_dim]`.
    pub query: TensorBinding,
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub key: TensorBinding,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub value: TensorBinding,
    /// Broadcasts to the scores; non-zero hides. With its element type.
    pub mask: Option<(TensorBinding, ElemType)>,
    /// Broadcasts to the scores.
    pub bias: Option<TensorBinding>,
}

impl Clone for Operands {
    fn clone(&self) -> Self {
        Self {
            query: self.query.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
            mask: self.mask.clone(),
            bias: self.bias.clone(),
        }
    }
}

/// What the forward pass returned, and the gradients of it.
pub struct Outputs {
    /// `[batch, heads, seq_q, value_dim]`, packed.
    pub output: TensorBinding,
    /// `[2, batch, heads, seq_q]` in `f32`, packed: row maximum, and logarithm of the sum of
    /// `exp(score - maximum)`.
    pub statistics: Handle,
    /// In the output's shape, with any strides.
    pub output_gradient: TensorBinding,
    /// `[batch, heads, seq_q]` in `f32`, with any strides.
    pub lse_gradient: Option<TensorBinding>,
}

/// Gradients, packed, in the shapes and element type of their operands.
pub struct Gradients {
    /// Gradient of the query, if wanted.
    pub query: Option<Handle>,
    /// Gradient of the key, if wanted.
    pub key: Option<Handle>,
    /// Gradient of the value, if wanted.
    pub value: Option<Handle>,
    /// Gradient of the bias, if wanted.
    pub bias: Option<Handle>,
}

impl Gradients {
    /// Buffers for the wanted ones.
    pub(crate) fn allocate(client: &Client, problem: &Problem, wanted: Wanted) -> Self {
        let rows = problem.lse_shape().iter().product::<usize>();
        let keys = problem.batch * problem.kv_heads * problem.seq_kv;
        let bytes = problem.dtype.size();
        let buffer = |wanted: bool, elements: usize| wanted.then(|| client.empty(elements * bytes));
        Self {
            query: buffer(wanted.query, rows * problem.head_dim),
            key: buffer(wanted.key, keys * problem.head_dim),
            value: buffer(wanted.value, keys * problem.value_dim),
            bias: buffer(wanted.bias, bias_elements(problem)),
        }
    }
}

/// Elements of a problem's bias.
pub(crate) fn bias_elements(problem: &Problem) -> usize {
    problem.bias.map_or(0, |shape| shape.iter().product())
}

/// Mask and bias as the kernels step through them.
pub(crate) struct ScoreOperands {
    pub mask: Option<TensorBinding>,
    /// The mask's element type; any type where there is no mask.
    pub mask_element: ElemType,
    pub bias: Option<TensorBinding>,
}

impl ScoreOperands {
    pub(crate) fn of(operands: &Operands) -> Self {
        let (mask, mask_element) = match operands.mask.clone() {
            Some((mask, element)) => (Some(broadcast(mask)), element),
            None => (None, ElemType::UInt(UIntKind::U32)),
        };
        Self {
            mask,
            mask_element,
            bias: operands.bias.clone().map(broadcast),
        }
    }

    /// What addresses the longest of mask, bias and `lengths`.
    pub(crate) fn address_type(&self, lengths: &[usize]) -> AddressType {
        let longest = [&self.bias, &self.mask]
            .into_iter()
            .flatten()
            .map(|x| x.handle.size as usize)
            .chain(lengths.iter().copied())
            .max();
        AddressType::from_len(longest.unwrap_or(0))
    }
}

/// The run-time numbers of a problem.
pub(crate) fn geometry(problem: &Problem) -> GeometryLaunch {
    GeometryLaunch::new(
        problem.batch,
        problem.heads,
        problem.group(),
        problem.seq_q as i32,
        problem.seq_kv as i32,
        problem.band.offset,
        problem.band.left,
        problem.band.right,
        problem.scale as f32,
        problem.softcap.unwrap_or(1.0) as f32,
        f32::NEG_INFINITY,
    )
}

/// The width of indices that reaches every element of what a call reads, by strides, and writes,
/// where kernels count elements of `bytes` bytes.
pub(crate) fn address_type(
    problem: &Problem,
    bytes: usize,
    operands: &Operands,
    output_gradient: Option<&TensorBinding>,
) -> AddressType {
    let parts = problem.dtype.size() / bytes;
    let floats = [
        Some(&operands.query),
        Some(&operands.key),
        Some(&operands.value),
        output_gradient,
        operands.bias.as_ref(),
    ];
    let mask = operands.mask.as_ref().map(|(mask, _)| mask);
    let rows = problem.lse_shape().iter().product::<usize>();
    let keys = problem.batch * problem.kv_heads * problem.seq_kv;
    let longest = floats
        .into_iter()
        .flatten()
        .map(|x| x.handle.size() as usize / bytes)
        .chain(mask.map(|mask| mask.handle.size() as usize))
        .chain([
            parts * problem.output_shape().iter().product::<usize>(),
            parts * rows * problem.head_dim.max(3),
            // Key and value gradients may share a buffer, with a gap between them.
            parts * keys * (problem.head_dim + problem.value_dim) + 256,
            bias_elements(problem),
        ])
        .max()
        .unwrap_or(0);
    AddressType::from_len(longest)
}

/// Whether every row starts at a multiple of `vector` elements and lies without gaps.
pub(crate) fn in_vectors(x: &TensorBinding, vector: usize, bytes: usize) -> bool {
    let offset = x.handle.offset_start.unwrap_or(0) as usize;
    x.strides[3] == 1
        && x.strides[..3].iter().all(|stride| stride % vector == 0)
        && offset.is_multiple_of(vector * bytes)
}

/// `cubes` spread over x and y; the kernels stop where there are a few too many.
pub(crate) fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    let (limit, _, _) = client.properties().hardware.max_cube_count;
    let x = cubes.min(limit as usize).max(1);
    let y = cubes.div_ceil(x).max(1);
    // Even columns leave the fewest idle cubes.
    let x = cubes.div_ceil(y).max(1);
    CubeCount::Static(x as u32, y as u32, 1)
}

/// The operand with stride 0, and one element, on every dimension it is broadcast on: what is repeated
/// is not counted, for a table of the size of the scores may have more elements than an index reaches.
fn broadcast(x: TensorBinding) -> TensorBinding {
    let repeated = |d: usize| x.shape[d] == 1 || x.strides[d] == 0;
    let strides: [usize; 4] = from_fn(|d| if repeated(d) { 0 } else { x.strides[d] });
    let shape: [usize; 4] = from_fn(|d| if repeated(d) { 1 } else { x.shape[d] });
    TensorBinding {
        strides: Strides::new(&strides),
        shape: Shape::new(shape),
        ..x
    }
}

/// A kernel's optional operand.
pub(crate) fn optional<T: LaunchArg<RuntimeArg = TensorArg> + CubeType>(
    x: &Option<TensorBinding>,
) -> ComptimeOptionArgs<T> {
    x.clone().map(TensorBinding::into_tensor_arg).into()
}
