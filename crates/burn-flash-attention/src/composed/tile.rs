//! One block of scores: the only place where composed scores are formed and hidden.

use super::guard::{Guard, tame};
use super::{Blocks, Operands, cast, reshape, slice, slices};
use burn::backend::tensor::{BoolTensor, Device, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, DType, FloatDType, TensorData};
use flash_attention_spec::{Problem, visibility::in_band};
use std::collections::HashMap;
use std::ops::Range;

/// Cuts a problem into blocks.
pub(super) struct Tiles<'a, B: Backend> {
    problem: &'a Problem,
    operands: Operands<B>,
    blocks: Blocks,
    bool_dtype: BoolDType,
    /// Whether a value that a row does not see could reach it as `0 * infinity`.
    guarded: bool,
    /// Hidden elements of the blocks that an edge of the band crosses, by the distance of their
    /// first query from their first key, and by size: blocks along the band share them.
    band_masks: HashMap<(i64, usize, usize), BoolTensor<B>>,
}

/// Scores of one block, `[batch, kv_heads, rows, keys]`; the rows of a group of query heads follow
/// one another.
pub(super) struct Tile<B: Backend> {
    pub scores: FloatTensor<B>,
    /// Derivative of the soft cap, where it was asked for and there is a soft cap.
    pub slope: Option<FloatTensor<B>>,
    /// Set where products must be kept from hidden elements.
    pub guard: Option<Guard<B>>,
}

impl<'a, B: Backend> Tiles<'a, B> {
    /// `suspects` are the tensors that are multiplied by the zeros of hidden elements.
    pub fn new(
        problem: &'a Problem,
        operands: Operands<B>,
        blocks: Blocks,
        suspects: impl IntoIterator<Item = FloatTensor<B>>,
    ) -> Self {
        let bool_dtype = get_or_init_device_settings::<B>(&operands.query.device()).bool_dtype;
        let mut tiles = Self {
            problem,
            operands,
            blocks,
            bool_dtype,
            guarded: false,
            band_masks: HashMap::new(),
        };
        let everything = (0..problem.seq_q, 0..problem.seq_kv);
        tiles.guarded = tiles.hides(&everything.0, &everything.1) && !tame::<B>(suspects);
        tiles
    }

    pub fn device(&self) -> Device<B> {
        self.operands.query.device()
    }

    /// Blocks of keys that one of `rows` sees, each with its number.
    pub fn keys(
        &self,
        rows: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<B> {
        let Problem { band, seq_kv, .. } = *self.problem;
        let block = self.blocks.key;
        let start = band.keys(rows.start, seq_kv).start;
        let end = band.keys(rows.end - 1, seq_kv).end.min(seq_kv);
        let seen = if start < end {
            start / block..end.div_ceil(block)
        } else {
            0..0
        };
        seen.map(move |n| (n, n * block..((n + 1) * block).min(seq_kv)))
    }

    /// Rows `rows` of a tensor of `heads` heads, in `f32`, with the heads of a group stacked:
    /// `[batch, kv_heads, group * rows, dim]`.
    pub fn rows(&self, tensor: FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
        let Problem {
            batch, kv_heads, ..
        } = *self.problem;
        let dim = tensor.shape()[3];
        let tensor = cast::<B>(slice::<B>(tensor, 2, rows.clone()), FloatDType::F32);
        reshape::<B, 4>(
            tensor,
            [batch, kv_heads, self.problem.group() * rows.len(), dim],
        )
    }

    /// Inverse of stacking: `[batch, heads, rows, dim]`.
    pub fn heads(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        let Problem { batch, heads, .. } = *self.problem;
        let [_, _, stacked, dim] = tensor.shape().dims();
        reshape::<B, 4>(tensor, [batch, heads, stacked / self.problem.group(), dim])
    }

    /// Rows of the query, times [`Scale::query`].
    pub fn query(&self, rows: &Range<usize>) -> FloatTensor<B> {
        let query = self.rows(self.operands.query.clone(), rows);
        scaled::<B>(query, Scale::of(self.problem).query)
    }

    /// Rows of the key, in `f32`.
    pub fn key(&self, keys: &Range<usize>) -> FloatTensor<B> {
        cast::<B>(
            slice::<B>(self.operands.key.clone(), 2, keys.clone()),
            FloatDType::F32,
        )
    }

    /// Rows of the value, in `f32`.
    pub fn value(&self, keys: &Range<usize>) -> FloatTensor<B> {
        cast::<B>(
            slice::<B>(self.operands.value.clone(), 2, keys.clone()),
            FloatDType::F32,
        )
    }

    /// Scores of a block, from its [`Tiles::query`] and [`Tiles::key`]; with the derivative of the
    /// soft cap if `slope` asks for it.
    pub fn scores(
        &mut self,
        query: FloatTensor<B>,
        key: FloatTensor<B>,
        rows: &Range<usize>,
        keys: &Range<usize>,
        slope: bool,
    ) -> Tile<B> {
        let product = B::float_matmul(query, B::float_swap_dims(key, 2, 3));
        let mut scores = scaled::<B>(product, Scale::of(self.problem).product);
        let mut derivative = None;
        if let Some(softcap) = self.problem.softcap {
            let tanh = B::float_tanh(B::float_div_scalar(scores, softcap.into()));
            if slope {
                // 1 - tanh^2
                let square = B::float_mul(tanh.clone(), tanh.clone());
                derivative = Some(B::float_add_scalar(B::float_neg(square), 1f32.into()));
            }
            scores = B::float_mul_scalar(tanh, softcap.into());
        }
        if !self.hides(rows, keys) {
            return Tile {
                scores,
                slope: derivative,
                guard: None,
            };
        }
        let stacked = scores.shape().dims::<4>();
        scores = self.heads(scores);
        if let Some(bias) = &self.operands.bias {
            let [rows, keys] = broadcast(bias.shape().dims(), rows, keys);
            let bias = slice::<B>(slice::<B>(bias.clone(), 2, rows), 3, keys);
            scores = B::float_add(scores, cast::<B>(bias, FloatDType::F32));
        }
        if self.band_hides(rows, keys) {
            let hidden = self.band_mask(rows, keys);
            scores = B::float_mask_fill(scores, hidden, f32::NEG_INFINITY.into());
        }
        if let Some(mask) = &self.operands.mask {
            let shape = mask.shape();
            let [rows, keys] = broadcast(shape.dims(), rows, keys);
            let mut part = slices(&shape, 2, rows);
            part[3] = keys.into();
            let hidden = B::bool_slice(mask.clone(), &part);
            scores = B::float_mask_fill(scores, hidden, f32::NEG_INFINITY.into());
        }
        scores = reshape::<B, 4>(scores, stacked);
        let guard = self
            .guarded
            .then(|| Guard::new(scores.clone(), self.bool_dtype));
        let slope = match &guard {
            Some(guard) => derivative.map(|slope| guard.clear(slope)),
            None => derivative,
        };
        Tile {
            scores,
            slope,
            guard,
        }
    }

    /// Whether some row may not see some key. A bias may be minus infinity.
    fn hides(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        self.operands.mask.is_some() || self.operands.bias.is_some() || self.band_hides(rows, keys)
    }

    /// Whether the band hides some key from some row. Both ends of what a row sees grow with the
    /// row, so the first row has the nearest end and the last row the farthest start.
    fn band_hides(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        let Problem { band, seq_kv, .. } = *self.problem;
        !rows.is_empty()
            && (band.keys(rows.start, seq_kv).end < keys.end
                || band.keys(rows.end - 1, seq_kv).start > keys.start)
    }

    /// What the band hides of a block, `[1, 1, rows, keys]`.
    fn band_mask(&mut self, rows: &Range<usize>, keys: &Range<usize>) -> BoolTensor<B> {
        let band = self.problem.band;
        let device = self.device();
        let distance = rows.start as i64 - keys.start as i64;
        self.band_masks
            .entry((distance, rows.len(), keys.len()))
            .or_insert_with(|| {
                let hidden: Vec<bool> = rows
                    .clone()
                    .flat_map(|i| keys.clone().map(move |j| (i as i32, j as i32)))
                    .map(|(i, j)| !in_band(i, j, band.offset, band.left, band.right))
                    .collect();
                let hidden = TensorData::new(hidden, [1, 1, rows.len(), keys.len()]);
                B::bool_from_data(hidden.convert_dtype(DType::from(self.bool_dtype)), &device)
            })
            .clone()
    }
}

/// The scale, in the place where it is applied; the other factor is 1.
///
/// Scores are finite then wherever the specification's are: a small scale keeps the product from
/// overflowing and is cheaper before it, a large one would make the query itself overflow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// On the query, before the product with the key.
    pub query: f64,
    /// On that product.
    pub product: f64,
}

impl Scale {
    pub fn of(problem: &Problem) -> Self {
        let scale = problem.scale;
        match scale.abs() <= 1.0 {
            true => Self {
                query: scale,
                product: 1.0,
            },
            false => Self {
                query: 1.0,
                product: scale,
            },
        }
    }
}

/// `tensor` times `factor`.
pub(super) fn scaled<B: Backend>(tensor: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
    match factor == 1.0 {
        true => tensor,
        false => B::float_mul_scalar(tensor, factor.into()),
    }
}

/// The part of dimensions 2 and 3 of a mask or bias that covers a block.
fn broadcast(shape: [usize; 4], rows: &Range<usize>, keys: &Range<usize>) -> [Range<usize>; 2] {
    [(shape[2], rows), (shape[3], keys)].map(|(n, range)| if n == 1 { 0..1 } else { range.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Flex, ops::FloatTensorOps};
    use flash_attention_spec::{Alignment, Dtype, Operand, Options, Window};

    #[test]
    fn blocks_that_no_row_sees_are_passed_over_and_whole_ones_not_masked() {
        let sides = [None, Some(0), Some(2), Some(5)];
        let lengths = [(7, 7), (3, 11), (11, 3), (13, 12)];
        for (left, right) in sides.into_iter().flat_map(|l| sides.map(|r| (l, r))) {
            for (alignment, (seq_q, seq_kv)) in [Alignment::BottomRight, Alignment::TopLeft]
                .into_iter()
                .flat_map(|alignment| lengths.map(|lengths| (alignment, lengths)))
            {
                let options = Options {
                    alignment,
                    window: Window { left, right },
                    ..Options::default()
                };
                check_walk(seq_q, seq_kv, &options);
            }
        }
    }

    /// Compares the walk with the band, key by key.
    fn check_walk(seq_q: usize, seq_kv: usize, options: &Options) {
        let operand = |rows| Operand::new([1, 1, rows, 1], Dtype::F32);
        let shapes = flash_attention_spec::Operands {
            query: operand(seq_q),
            key: operand(seq_kv),
            value: operand(seq_kv),
            mask: None,
            bias: None,
        };
        let problem = Problem::new(&shapes, options).unwrap();
        let tensor = |rows: usize| {
            Flex::float_zeros([1, 1, rows, 1].into(), &Default::default(), FloatDType::F32)
        };
        let operands = Operands::<Flex> {
            query: tensor(seq_q),
            key: tensor(seq_kv),
            value: tensor(seq_kv),
            mask: None,
            bias: None,
        };
        let sizes = Blocks { query: 3, key: 2 };
        let tiles = Tiles::new(&problem, operands, sizes, []);
        for rows in super::super::cut(seq_q, sizes.query) {
            let walked: Vec<_> = tiles.keys(&rows).collect();
            let mut expected = Vec::new();
            for (n, keys) in super::super::cut(seq_kv, sizes.key).enumerate() {
                let seen = rows
                    .clone()
                    .map(|i| {
                        let band = problem.band.keys(i, seq_kv);
                        keys.clone().filter(|j| band.contains(j)).count()
                    })
                    .sum::<usize>();
                if seen > 0 {
                    expected.push((n, keys.clone()));
                    let hides = seen < rows.len() * keys.len();
                    assert_eq!(
                        tiles.hides(&rows, &keys),
                        hides,
                        "{problem:?} {rows:?} {keys:?}"
                    );
                }
            }
            assert_eq!(walked, expected, "{problem:?} {rows:?}");
        }
    }
}
