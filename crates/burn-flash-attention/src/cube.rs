//! Burn's CubeCL tensors to kernel bindings and back.

use crate::ops::{FlashAttentionOps, MaybeBool, MaybeFloat, OperandGradients};
use burn::backend::DispatchDevice;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::server::Handle;
use flash_attention_spec::{Problem, Wanted};
use kernels_cubecl::device::Device as Limits;
use kernels_cubecl::operands::{Operands, Outputs};
use kernels_cubecl::plan::{Blueprint, plan};
use std::sync::{Arc, Mutex, PoisonError};

/// The limits of a CubeCL device; none for other backends.
pub(crate) fn limits(device: &Device) -> Option<Arc<Limits>> {
    fn inner(device: &DispatchDevice) -> Option<Arc<Limits>> {
        match device {
            DispatchDevice::Cube(device) => Some(limits_of(device)),
            #[cfg(feature = "autodiff")]
            DispatchDevice::Autodiff(device) => inner(&device.clone().inner()),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
    inner(device.as_dispatch())
}

/// Read once for each device: every call asks for them.
fn limits_of(device: &CubeDevice) -> Arc<Limits> {
    static READ: Mutex<Vec<(CubeDevice, Arc<Limits>)>> = Mutex::new(Vec::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, limits)) = read.iter().find(|(known, _)| known == device) {
        return limits.clone();
    }
    let limits = Arc::new(Limits::read(&device.client()));
    read.push((device.clone(), limits.clone()));
    limits
}

impl FlashAttentionOps for CubeBackend {
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let like = query.clone();
        let operands = operands(query, key, value, mask, bias);
        let (output, statistics) = kernels_cubecl::attention_forward(
            &like.client,
            &problem,
            &blueprint(&like, &problem),
            operands,
        );
        (
            packed(&like, problem.output_shape(), output, like.dtype),
            packed(
                &like,
                crate::ops::statistics_shape(&problem),
                statistics,
                DType::F32,
            ),
        )
    }

    fn attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeBool<Self>,
        bias: MaybeFloat<Self>,
        output: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        output_gradient: FloatTensor<Self>,
        lse_gradient: MaybeFloat<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> OperandGradients<Self> {
        let like = query.clone();
        let outputs = Outputs {
            output: untile(output).binding(),
            statistics: statistics.handle,
            output_gradient: untile(output_gradient).binding(),
            lse_gradient: lse_gradient
                .into_option()
                .map(|gradient| untile(gradient).binding()),
        };
        let gradients = kernels_cubecl::attention_backward(
            &like.client,
            &problem,
            &blueprint(&like, &problem),
            operands(query, key, value, mask, bias),
            outputs,
            wanted,
        );
        let Problem {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
            ..
        } = problem;
        let float = |gradient: Option<Handle>, shape: [usize; 4]| {
            MaybeFloat::from(gradient.map(|handle| packed(&like, shape, handle, like.dtype)))
        };
        OperandGradients {
            query: float(gradients.query, [batch, heads, seq_q, head_dim]),
            key: float(gradients.key, [batch, kv_heads, seq_kv, head_dim]),
            value: float(gradients.value, [batch, kv_heads, seq_kv, value_dim]),
            bias: float(gradients.bias, problem.bias.unwrap_or([0; 4])),
        }
    }
}

/// The public functions have asked for this plan before; asking again is pure arithmetic.
fn blueprint(like: &CubeTensor, problem: &Problem) -> Blueprint {
    plan(problem, &limits_of(&like.device)).unwrap_or_else(|error| panic!("{error}"))
}

fn operands(
    query: CubeTensor,
    key: CubeTensor,
    value: CubeTensor,
    mask: MaybeBool<CubeBackend>,
    bias: MaybeFloat<CubeBackend>,
) -> Operands {
    Operands {
        query: untile(query).binding(),
        key: untile(key).binding(),
        value: untile(value).binding(),
        mask: mask.into_option().map(|mask| {
            let element = dtype_to_elem_type(mask.dtype);
            (untile(mask).binding(), element)
        }),
        bias: bias.into_option().map(|bias| untile(bias).binding()),
    }
}

/// A packed tensor on the device of `like`.
fn packed(like: &CubeTensor, shape: [usize; 4], handle: Handle, dtype: DType) -> CubeTensor {
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        Shape::new(shape),
        handle,
        dtype,
    )
}
