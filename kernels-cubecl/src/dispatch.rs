//! Runs the family that a blueprint names for each pass, and says in the log which and why.

use crate::hopper;
use crate::mma;
use crate::operands::{Gradients, Operands, Outputs};
use crate::plan::{Blueprint, HOPPER, MMA, PORTABLE};
use crate::portable;
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_attention_spec::{F32Precision, Problem, Wanted};

/// The output `[batch, heads, seq_q, value_dim]` and the statistics `[2, batch, heads, seq_q]` in
/// `f32` (row maximum, logarithm of the sum of `exp(score - maximum)`), both packed.
///
/// `blueprint` is what [`plan`](crate::plan::plan) returned for `problem` on the client's device.
pub fn attention_forward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    operands: Operands,
) -> (Handle, Handle) {
    match &blueprint.hopper {
        Ok(hopper) => match hopper::check_operands(&operands) {
            Ok(()) => {
                log::debug!("forward by {HOPPER}");
                return hopper::attention_forward(client, problem, hopper, operands);
            }
            Err(reason) => log::debug!("{HOPPER} declined: {reason}"),
        },
        Err(reason) => log::debug!("{HOPPER} declined: {reason}"),
    }
    match &blueprint.mma {
        Ok(mma) => {
            log::debug!("forward by {MMA}{}", rounding(mma));
            mma::attention_forward(client, problem, mma, operands)
        }
        Err(reason) => {
            log::debug!("{MMA} declined: {reason}; forward by {PORTABLE}");
            portable::attention_forward(client, problem, &blueprint.portable, operands)
        }
    }
}

/// The wanted gradients. `outputs` holds what [`attention_forward`] returned.
pub fn attention_backward(
    client: &Client,
    problem: &Problem,
    blueprint: &Blueprint,
    operands: Operands,
    outputs: Outputs,
    wanted: Wanted,
) -> Gradients {
    let tile = blueprint.portable.backward;
    match &blueprint.hopper_backward {
        Ok(hopper) => match hopper::check_gradient_operands(&operands, &outputs.output_gradient) {
            Ok(()) => {
                log::debug!("backward by {HOPPER}");
                return hopper::attention_backward(
                    client, problem, hopper, tile, operands, outputs, wanted,
                );
            }
            Err(reason) => log::debug!("{HOPPER} declined: {reason}"),
        },
        Err(reason) => log::debug!("{HOPPER} declined: {reason}"),
    }
    match &blueprint.mma {
        Ok(mma) => {
            log::debug!("backward by {MMA}{}", rounding(mma));
            mma::attention_backward(client, problem, mma, tile, operands, outputs, wanted)
        }
        Err(reason) => {
            log::debug!("{MMA} declined: {reason}; backward by {PORTABLE}");
            let portable = &blueprint.portable;
            portable::attention_backward(client, problem, portable, operands, outputs, wanted)
        }
    }
}

/// What the log says of products that are not in full.
fn rounding(mma: &mma::Blueprint) -> &'static str {
    match mma.f32_precision() {
        F32Precision::Full => "",
        F32Precision::Tf32 => ", f32 rounded to TF32",
    }
}
