//! The forward recurrence.

use super::guard::product;
use super::tile::{Tile, Tiles};
use super::{Blocks, Operands, cast, cut, reshape};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::FloatDType;
use flash_attention_spec::Problem;

/// The output, and the row statistics `[3, batch, heads, seq_q]` in `f32`: the row maximum, the logarithm of
/// the sum of `exp(score - maximum)`, and the reciprocal of that sum; `0`, `-inf` and `0` where a row sees
/// nothing. The reciprocal is kept because the rounding of a logarithm, which is not small beside 1, would be
/// an error of the whole row in the gradients.
pub(crate) fn forward<B: Backend>(
    operands: Operands<B>,
    problem: &Problem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    forward_in_blocks::<B>(operands, problem, Blocks::of(problem))
}

pub(super) fn forward_in_blocks<B: Backend>(
    operands: Operands<B>,
    problem: &Problem,
    sizes: Blocks,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = FloatDType::from(operands.query.dtype());
    let device = operands.query.device();
    if problem.output_shape().contains(&0) || problem.seq_kv == 0 {
        let (output, statistics) = unseen::<B>(problem, problem.seq_q, dtype, &device);
        return (output, B::float_cat(statistics.into(), 0));
    }
    let suspects = [operands.value.clone()];
    let headroom = (2.0 * problem.seq_kv as f64).ln() as f32;
    let mut tiles = Tiles::new(problem, operands, sizes, suspects);
    let (mut outputs, mut parts) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    for rows in cut(problem.seq_q, sizes.query) {
        let query = tiles.query(&rows);
        let mut running: Option<Running<B>> = None;
        for (_, keys) in tiles.keys(&rows) {
            let tile = tiles.scores(query.clone(), tiles.key(&keys), &rows, &keys, false);
            let value = tiles.value(&keys);
            running = Some(match running {
                Some(running) => running.next(tile, value),
                None => Running::first(tile, value, headroom),
            });
        }
        let (output, statistics) = match running {
            Some(running) => running.finish(&tiles, problem, dtype),
            None => unseen::<B>(problem, rows.len(), dtype, &device),
        };
        outputs.push(output);
        for (parts, part) in parts.iter_mut().zip(statistics) {
            parts.push(part);
        }
    }
    let statistics = parts.map(|parts| B::float_cat(parts, 3));
    (B::float_cat(outputs, 2), B::float_cat(statistics.into(), 0))
}

/// Output `[batch, heads, rows, value_dim]` and the three statistics `[1, batch, heads, rows]` of rows that
/// see nothing.
fn unseen<B: Backend>(
    problem: &Problem,
    rows: usize,
    dtype: FloatDType,
    device: &Device<B>,
) -> (FloatTensor<B>, [FloatTensor<B>; 3]) {
    let Problem {
        batch,
        heads,
        value_dim,
        ..
    } = *problem;
    let row = |value: f32| {
        B::float_full(
            [1, batch, heads, rows].into(),
            value.into(),
            device,
            FloatDType::F32,
        )
    };
    let output = B::float_zeros([batch, heads, rows, value_dim].into(), device, dtype);
    (output, [row(0.0), row(f32::NEG_INFINITY), row(0.0)])
}

/// Rows `[batch, kv_heads, group * rows, 1 or value_dim]` part of the way through the keys.
struct Running<B: Backend> {
    /// Above the greatest score, for exponentials that sum up to at most 1/2.
    headroom: f32,
    maximum: FloatTensor<B>,
    /// The maximum and the headroom, rounded: what exponentials are taken from.
    level: FloatTensor<B>,
    denominator: FloatTensor<B>,
    accumulator: FloatTensor<B>,
}

impl<B: Backend> Running<B> {
    fn first(tile: Tile<B>, value: FloatTensor<B>, headroom: f32) -> Self {
        // A finite start keeps minus infinity from meeting itself where a row sees nothing yet;
        // it gives way to every finite score.
        let maximum = B::float_clamp_min(B::float_max_dim(tile.scores.clone(), 3), f32::MIN.into());
        let level = B::float_add_scalar(maximum.clone(), headroom.into());
        let (denominator, accumulator) = block::<B>(tile, level.clone(), value);
        Self {
            headroom,
            maximum,
            level,
            denominator,
            accumulator,
        }
    }

    fn next(self, tile: Tile<B>, value: FloatTensor<B>) -> Self {
        let of_block = B::float_max_dim(tile.scores.clone(), 3);
        let device = of_block.device();
        let bool_dtype = get_or_init_device_settings::<B>(&device).bool_dtype;
        let greater = B::float_greater(of_block.clone(), self.maximum.clone(), bool_dtype);
        let maximum = B::float_mask_where(self.maximum, greater, of_block);
        let level = B::float_add_scalar(maximum.clone(), self.headroom.into());
        let rescale = B::float_exp(B::float_sub(self.level, level.clone()));
        let (denominator, accumulator) = block::<B>(tile, level.clone(), value);
        Self {
            headroom: self.headroom,
            maximum,
            level,
            denominator: B::float_add(B::float_mul(self.denominator, rescale.clone()), denominator),
            accumulator: B::float_add(B::float_mul(self.accumulator, rescale), accumulator),
        }
    }

    /// Output and statistics of the rows, as [`unseen`] shapes them.
    fn finish(
        self,
        tiles: &Tiles<'_, B>,
        problem: &Problem,
        dtype: FloatDType,
    ) -> (FloatTensor<B>, [FloatTensor<B>; 3]) {
        let Problem { batch, heads, .. } = *problem;
        let rows = self.maximum.shape().num_elements() / (batch * heads);
        let row = |tensor| reshape::<B, 4>(tensor, [1, batch, heads, rows]);
        let bool_dtype = get_or_init_device_settings::<B>(&tiles.device()).bool_dtype;
        // The greatest score adds far more than 0 to the denominator, so 0 means that there was none.
        let unseen = B::float_equal_elem(self.denominator.clone(), 0f32.into(), bool_dtype);
        // What the level is above the maximum in fact, which is not the headroom where scores are
        // large. Without a maximum it does not matter: -inf is the logarithm.
        let above = B::float_sub(self.level, self.maximum.clone());
        let logarithm = B::float_add(B::float_log(self.denominator.clone()), above.clone());
        let maximum = B::float_mask_fill(self.maximum, unseen.clone(), 0f32.into());
        let divisor = B::float_mask_fill(self.denominator, unseen.clone(), 1f32.into());
        let output = B::float_div(self.accumulator, divisor.clone());
        let reciprocal = B::float_div(B::float_exp(B::float_neg(above)), divisor);
        let reciprocal = B::float_mask_fill(reciprocal, unseen, 0f32.into());
        (
            cast::<B>(tiles.heads(output), dtype),
            [maximum, logarithm, reciprocal].map(row),
        )
    }
}

/// What a block adds to denominator and accumulator.
fn block<B: Backend>(
    tile: Tile<B>,
    level: FloatTensor<B>,
    value: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let exponentials = B::float_exp(B::float_sub(tile.scores, level));
    let denominator = B::float_sum_dim(exponentials.clone(), 3);
    (
        denominator,
        product(tile.guard.as_ref(), exponentials, value),
    )
}
