//! The launch of the key and value gradients of wide heads.

use super::launch::{section, tensor_map};
use super::launch_backward::Backward;
use super::wide_key_value_gradient::wide_key_value_gradient_kernel;
use crate::device::elem_type;
use crate::operands::{cube_count, geometry, optional};
use cubecl::prelude::*;
use cubecl::server::Handle;

impl Backward<'_> {
    /// Both gradients, `[batch, kv_heads, seq_kv, dim]`, packed.
    pub(super) fn wide_key_value(&self, key_gradient: Handle, value_gradient: Handle) {
        let (client, problem, blueprint) = (self.client, self.problem, self.blueprint.key_value);
        let heads = problem.batch * problem.kv_heads;
        let cubes = problem.seq_kv.div_ceil(blueprint.owned()) * heads;
        let element = elem_type(problem.dtype);
        let operands = self.operands.clone();
        let (owned, walked) = (blueprint.owned(), blueprint.walked);
        let key_elements = self.keys * problem.head_dim / 2;
        let value_elements = self.keys * problem.value_dim / 2;
        // SAFETY: tensor maps bound every read of the operands; mask and bias are read at positions of
        // the problem only; each element of the two packed gradients is written once, and every loop
        // ends at a number of blocks.
        unsafe {
            wide_key_value_gradient_kernel::launch_unchecked(
                client,
                cube_count(client, cubes),
                CubeDim::new_1d(blueprint.units()),
                self.scores
                    .address_type(&[key_elements, value_elements, cubes]),
                blueprint.score_registers(),
                blueprint.weight_registers(),
                blueprint.key_registers(),
                blueprint.value_registers(),
                blueprint.held_registers(),
                tensor_map(operands.query, walked, element),
                tensor_map(operands.key, owned, element),
                tensor_map(operands.value, owned, element),
                tensor_map(self.output_gradient.clone(), walked, element),
                self.statistics_map(walked),
                optional(&self.scores.mask),
                optional(&self.scores.bias),
                BufferArg::from_raw_parts(key_gradient, key_elements),
                BufferArg::from_raw_parts(value_gradient, value_elements),
                geometry(problem),
                section(problem, problem.seq_q * problem.group(), 1, heads),
                blueprint,
                element,
                self.scores.mask_element,
            );
        }
    }
}
