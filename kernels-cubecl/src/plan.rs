//! Which kernels and block sizes serve a problem on a device: a pure function of plain data.
//!
//! The portable family serves every valid problem that fits the device. Faster families are asked
//! first; each serves a problem exactly as the specification has it, or names its reason.

use crate::device::{Device, WITHOUT};
use crate::hopper;
use crate::mma;
use crate::portable;
use crate::portable::Tile;
use flash_attention_spec::{Dtype, F32Precision, Problem};
use thiserror::Error;

/// Name of the register-tile family that serves every device.
pub const PORTABLE: &str = "portable";

/// Name of the family on NVIDIA's warpgroup products and tensor copies.
pub const HOPPER: &str = "hopper";

/// Name of the family on NVIDIA's register fragments.
pub const MMA: &str = "mma";

/// Why no kernel family serves a problem on a device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// [`WITHOUT`] names a family that there is none of, or that cannot be left out.
    #[error("{WITHOUT} names {given}, expected {HOPPER} or {MMA}")]
    Family {
        /// The name.
        given: String,
    },
    /// The device cannot hold the element type.
    #[error("device {device} has no {given}, expected one of {expected}")]
    Dtype {
        /// The device's name.
        device: String,
        /// The element type asked for.
        given: Dtype,
        /// Those it has.
        expected: String,
    },
    /// A kernel needs more buffers than the device binds.
    #[error(
        "device {device} binds {given} buffers in a kernel, expected at least {expected} for \
         gradients"
    )]
    Bindings {
        /// The device's name.
        device: String,
        /// Buffers it binds.
        given: u32,
        /// Buffers needed.
        expected: u32,
    },
    /// The smallest blocks need more than the device has.
    #[error(
        "device {device} has {shared_memory} bytes of shared memory and {units} units in a cube, \
         expected at least {} bytes and {} units", Tile::SMALLEST.shared_memory(), Tile::SMALLEST.units()
    )]
    Cube {
        /// The device's name.
        device: String,
        /// Its shared memory.
        shared_memory: usize,
        /// Its units of a cube.
        units: u32,
    },
    /// The device ends the loops of a kernel before they are through, and says nothing.
    #[error(
        "the loops of a kernel would go round {given} times, device {device} ends them after \
         {expected}: expected shorter sequences, or a bias broadcast over fewer positions"
    )]
    Iterations {
        /// The device's name.
        device: String,
        /// Times the loops of one unit go round, at most.
        given: u128,
        /// Times that the device lets them.
        expected: u64,
    },
    /// An operand is larger than a buffer of the device.
    #[error("{operand} needs {given} bytes, device {device} holds at most {expected} in a buffer")]
    Buffer {
        /// The device's name.
        device: String,
        /// Name of the operand.
        operand: &'static str,
        /// Bytes it needs.
        given: u128,
        /// Bytes a buffer holds.
        expected: u64,
    },
}

/// What is decided before a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blueprint {
    /// The portable kernels, which serve what the other families decline.
    pub portable: portable::Blueprint,
    /// Warpgroup products and tensor copies for the forward pass, or why not. They also have to be
    /// able to read the operands as they lie in memory ([`hopper::check_operands`]).
    pub hopper: Result<hopper::ForwardBlueprint, hopper::Declined>,
    /// The same for the backward pass ([`hopper::check_gradient_operands`]).
    pub hopper_backward: Result<hopper::BackwardBlueprint, hopper::Declined>,
    /// Register fragments, or why not.
    pub mma: Result<mma::Blueprint, mma::Decline>,
}

/// One pass of a blueprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The kernel family.
    pub family: &'static str,
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
}

impl Blueprint {
    /// What runs the forward pass, on operands that lie packed in memory.
    pub fn forward(&self) -> Served {
        if let Ok(hopper) = &self.hopper {
            return Served {
                family: HOPPER,
                block_q: hopper.block_q(),
                block_kv: hopper.block_kv,
            };
        }
        match &self.mma {
            Ok(mma) => Served {
                family: MMA,
                block_q: mma.forward.owned(),
                block_kv: mma.forward.walked,
            },
            Err(_) => Served::portable(self.portable.forward),
        }
    }

    /// What runs the backward pass, on operands that lie packed in memory: of several kernels, the
    /// one of all gradients or else of the query gradient.
    pub fn backward(&self) -> Served {
        if let Ok(hopper) = &self.hopper_backward {
            return Served {
                family: HOPPER,
                block_q: hopper.key_value.walked,
                block_kv: hopper.key_value.owned(),
            };
        }
        match &self.mma {
            Ok(mma) => match mma.one_pass {
                Some(one_pass) => Served {
                    family: MMA,
                    block_q: one_pass.walked,
                    block_kv: one_pass.owned(),
                },
                None => Served {
                    family: MMA,
                    block_q: mma.query_gradient.owned(),
                    block_kv: mma.query_gradient.walked,
                },
            },
            Err(_) => Served::portable(self.portable.backward),
        }
    }

    /// How products of `f32` operands are formed: in full, also where a problem permits less and the
    /// families that serve it have no faster form.
    pub fn f32_precision(&self) -> F32Precision {
        let mma = self.mma.as_ref();
        mma.map_or(F32Precision::Full, mma::Blueprint::f32_precision)
    }

    /// Families that declined, each with its reason.
    pub fn declined(&self) -> Vec<(&'static str, String)> {
        let forward = self.hopper.as_ref().err().map(ToString::to_string);
        let backward = self.hopper_backward.as_ref().err();
        let backward = backward
            .map(|reason| format!("{reason} (backward)"))
            // The same reason against both passes is said once.
            .filter(|_| self.hopper.as_ref().err() != self.hopper_backward.as_ref().err());
        let mma = self.mma.as_ref().err().map(ToString::to_string);
        let hopper = forward.into_iter().chain(backward);
        hopper
            .map(|reason| (HOPPER, reason))
            .chain(mma.map(|reason| (MMA, reason)))
            .collect()
    }
}

impl Served {
    fn portable(tile: Tile) -> Self {
        Self {
            family: PORTABLE,
            block_q: tile.block_q(),
            block_kv: tile.block_kv(),
        }
    }
}

/// The blueprint of `problem` on `device`.
///
/// # Errors
/// [`PlanError`] names what the device lacks.
pub fn plan(problem: &Problem, device: &Device) -> Result<Blueprint, PlanError> {
    let unknown = |name: &&String| ![HOPPER, MMA].contains(&name.as_str());
    if let Some(given) = device.left_out.iter().find(unknown) {
        return Err(PlanError::Family {
            given: given.clone(),
        });
    }
    Ok(Blueprint {
        portable: portable::plan(problem, device)?,
        hopper: hopper::plan_forward(problem, device),
        hopper_backward: hopper::plan_backward(problem, device),
        mma: mma::plan(problem, device),
    })
}
