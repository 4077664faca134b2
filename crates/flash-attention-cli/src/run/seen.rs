//! Which elements of an operand have to do with a visible score, in time linear in operand and mask.

use burn_flash_attention::Problem;
use std::borrow::Cow;
use std::ops::Range;

/// What hides scores, broadcast to `[batch, heads, seq_q, seq_kv]`.
pub struct Hidden<'a> {
    pub shape: [usize; 4],
    pub elements: Cow<'a, [bool]>,
}

/// Elements of the union of two tables that fit into the memory of any machine.
const UNION: usize = 1 << 26;

impl Hidden<'_> {
    /// What either hides; what the first hides alone if both are small beside their union, such as a
    /// row and a column of a long sequence.
    pub fn or(self, other: Self) -> Self {
        let shape: [usize; 4] = std::array::from_fn(|n| {
            let sizes = [self.shape[n], other.shape[n]];
            // A size of 1 is broadcast, to 0 too.
            if sizes[0] == 1 { sizes[1] } else { sizes[0] }
        });
        let elements = shape.iter().fold(1, |all: usize, &n| all.saturating_mul(n));
        if elements > UNION.max(self.elements.len()).max(other.elements.len()) {
            return self;
        }
        let hides = |n| self.at(shape, n) || other.at(shape, n);
        let elements = (0..elements).map(hides).collect();
        Self { shape, elements }
    }

    /// Element `n` of a table of shape `full` that this one is broadcast to.
    fn at(&self, full: [usize; 4], n: usize) -> bool {
        let (mut at, mut step, mut rest) = (0, 1, n);
        for dim in (0..4).rev() {
            at += step * (rest % full[dim]).min(self.shape[dim] - 1);
            step *= self.shape[dim];
            rest /= full[dim];
        }
        self.elements[at]
    }
}

/// A table over `[batch, heads, queries, keys]` in which a dimension that a tensor does not have is 1,
/// and `heads` may be key heads.
pub struct Seen {
    shape: [usize; 4],
    visible: Vec<bool>,
}

impl Seen {
    /// Whether any score of each element of `shape` is visible, where `hidden` comes with its shape.
    pub fn new(problem: &Problem, hidden: Option<Hidden>, shape: [usize; 4]) -> Self {
        if problem.score_shape().contains(&0) {
            let visible = vec![false; shape.iter().product()];
            return Self { shape, visible };
        }
        let shown = match hidden {
            Some(hidden) => Shown::new(&hidden, problem.heads, shape),
            None => Shown {
                shape: [1; 4],
                elements: vec![true],
            },
        };
        let (rows, keys) = (problem.seq_q, problem.seq_kv);
        let mut visible = Vec::with_capacity(shape.iter().product());
        for batch in 0..shape[0] {
            for head in 0..shape[1] {
                match [shape[2] == rows, shape[3] == keys] {
                    // Each score has an element of its own. A sequence of one row is all rows at once.
                    [true, true] => visible.extend((0..rows).flat_map(|i| {
                        let seen = problem.band.keys(i, keys);
                        let shown = &shown;
                        (0..keys).map(move |j| seen.contains(&j) && shown.at([batch, head, i, j]))
                    })),
                    [true, false] => visible.extend(rows_seen(problem, &shown, batch, head)),
                    [false, true] => visible.extend(keys_seen(problem, &shown, batch, head)),
                    [false, false] => {
                        let any = rows_seen(problem, &shown, batch, head).contains(&true);
                        visible.push(any);
                    }
                }
            }
        }
        Self { shape, visible }
    }

    /// Whether any score of the element is visible.
    pub fn at(&self, index: [usize; 4]) -> bool {
        let pairs = index.into_iter().zip(self.shape);
        self.visible[pairs.fold(0, |at, (n, size)| at * size + n)]
    }
}

/// What a mask shows, with the dimensions batch and heads of an operand, or 1 where the mask or the
/// operand has none.
struct Shown {
    shape: [usize; 4],
    elements: Vec<bool>,
}

impl Shown {
    /// Of what is hidden. The band is the same for every batch and head, so an element that stands for
    /// several of them sees what any of them is shown.
    fn new(hidden: &Hidden, heads: usize, operand: [usize; 4]) -> Self {
        let of = hidden.shape;
        let shape = [of[0].min(operand[0]), of[1].min(operand[1]), of[2], of[3]];
        let table = of[2] * of[3];
        let mut elements = vec![false; shape[0] * shape[1] * table];
        for batch in 0..of[0] {
            for head in 0..of[1] {
                // Query heads that read one key head follow one another.
                let to = match of[1] == heads {
                    true => head * shape[1] / heads,
                    false => 0,
                };
                let to = (batch.min(shape[0] - 1) * shape[1] + to) * table;
                let from = (batch * of[1] + head) * table;
                let hidden = &hidden.elements[from..from + table];
                for (shown, hidden) in elements[to..to + table].iter_mut().zip(hidden) {
                    *shown |= !hidden;
                }
            }
        }
        Self { shape, elements }
    }

    fn at(&self, index: [usize; 4]) -> bool {
        let pairs = index.into_iter().zip(self.shape);
        self.elements[pairs.fold(0, |at, (n, size)| at * size + n.min(size - 1))]
    }
}

/// Whether each query sees any key.
fn rows_seen(problem: &Problem, shown: &Shown, batch: usize, head: usize) -> Vec<bool> {
    let line = |i| Counts::new(problem.seq_kv, |j| shown.at([batch, head, i, j]));
    let mut counts = None;
    let rows = (0..problem.seq_q).map(|i| {
        // A mask with one row shows every query the same.
        if counts.is_none() || shown.shape[2] > 1 {
            counts = (shown.shape[3] > 1).then(|| line(i));
        }
        let seen = problem.band.keys(i, problem.seq_kv);
        match &counts {
            Some(counts) => counts.any(seen),
            None => !seen.is_empty() && shown.at([batch, head, i, 0]),
        }
    });
    rows.collect()
}

/// Whether any query sees each key.
fn keys_seen(problem: &Problem, shown: &Shown, batch: usize, head: usize) -> Vec<bool> {
    let line = |j| Counts::new(problem.seq_q, |i| shown.at([batch, head, i, j]));
    let mut counts = None;
    let keys = (0..problem.seq_kv).map(|j| {
        if counts.is_none() || shown.shape[3] > 1 {
            counts = (shown.shape[2] > 1).then(|| line(j));
        }
        let seen = problem.band.queries(j, problem.seq_q);
        match &counts {
            Some(counts) => counts.any(seen),
            None => !seen.is_empty() && shown.at([batch, head, 0, j]),
        }
    });
    keys.collect()
}

/// How many of the elements before each position of a line are shown.
struct Counts(Vec<usize>);

impl Counts {
    fn new(length: usize, shown: impl Fn(usize) -> bool) -> Self {
        let mut counts = vec![0];
        let mut count = 0;
        counts.extend((0..length).map(|n| {
            count += usize::from(shown(n));
            count
        }));
        Self(counts)
    }

    fn any(&self, range: Range<usize>) -> bool {
        !range.is_empty() && self.0[range.end] > self.0[range.start]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flash_attention::{Dtype, ElementType, Operand, Operands, Options};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Catches an element that is taken for hidden though it is seen, or the reverse: every broadcast
    /// of mask and operand, held to a look at every score.
    #[test]
    fn elements_are_seen_where_any_of_their_scores_is() {
        let mut rng = StdRng::seed_from_u64(1);
        let full = [2, 4, 3, 5];
        for choice in 0..16 * 19 {
            let (mask_dims, operand) = (choice % 16, choice / 16);
            let broadcast =
                |bits: usize| std::array::from_fn(|n| if bits >> n & 1 == 1 { full[n] } else { 1 });
            let of: [usize; 4] = broadcast(mask_dims);
            // All broadcasts of a bias, then query, key and a single key head.
            let shape = match operand {
                16 => [2, 4, 3, 1],
                17 => [2, 2, 1, 5],
                18 => [2, 1, 1, 5],
                bits => broadcast(bits),
            };
            let kv_heads = if operand == 17 { 2 } else { 1 };
            let mask: Vec<bool> = (0..of.iter().product())
                .map(|_| rng.random_range(0..4) > 0)
                .collect();
            for options in [
                Options::new(),
                Options::new().causal(),
                Options::new().window(Some(1), Some(0)),
            ] {
                let operand = |heads, rows| Operand::new([2, heads, rows, 4], Dtype::F32);
                let key = operand(kv_heads, 5);
                let operands = Operands::new(operand(4, 3), key.clone(), key)
                    .mask(Operand::new(of, ElementType::Bool));
                let problem = Problem::new(&operands, &options).unwrap();
                let hidden = Hidden {
                    shape: of,
                    elements: Cow::Borrowed(&mask),
                };
                let seen = Seen::new(&problem, Some(hidden), shape);
                assert_eq!(
                    seen.visible,
                    by_score(&problem, &mask, of, shape),
                    "{of:?} {shape:?}"
                );
            }
        }
    }

    /// Catches a union that reads one of the tables at the place of another element.
    #[test]
    fn a_union_hides_what_either_hides() {
        let full = [2, 1, 3, 5];
        let table = |bits: usize, hidden: usize| {
            let shape: [usize; 4] =
                std::array::from_fn(|n| if bits >> n & 1 == 1 { full[n] } else { 1 });
            let len = shape.iter().product();
            let elements = (0..len).map(|n| n % len == hidden % len).collect();
            Hidden { shape, elements }
        };
        for bits in 0..16 * 16 {
            let (one, other) = (bits / 16, bits % 16);
            let union = table(one, 7).or(table(other, 11));
            let shape: [usize; 4] = std::array::from_fn(|n| {
                if (one | other) >> n & 1 == 1 {
                    full[n]
                } else {
                    1
                }
            });
            assert_eq!(union.shape, shape);
            let wide = |table: &Hidden| -> Vec<bool> {
                let len = full.iter().product::<usize>();
                (0..len).map(|n| table.at(full, n)).collect()
            };
            let (first, second) = (wide(&table(one, 7)), wide(&table(other, 11)));
            let both = first.iter().zip(second).map(|(a, b)| a | b);
            assert!(wide(&union).into_iter().eq(both), "{one:b} {other:b}");
        }
        // Neither a row nor a column of so long a sequence is worth a table of every pair.
        let line = |shape: [usize; 4]| Hidden {
            shape,
            elements: vec![true; 1 << 17].into(),
        };
        let row = [1, 1, 1, 1 << 17];
        assert_eq!(line(row).or(line([1, 1, 1 << 17, 1])).shape, row);
    }

    fn by_score(problem: &Problem, mask: &[bool], of: [usize; 4], shape: [usize; 4]) -> Vec<bool> {
        let full = problem.score_shape();
        let mut seen = vec![false; shape.iter().product()];
        for n in 0..full.iter().product() {
            let mut index = [0; 4];
            let mut rest = n;
            for dim in (0..4).rev() {
                (index[dim], rest) = (rest % full[dim], rest / full[dim]);
            }
            let place = |of: [usize; 4]| {
                (0..4).fold(0, |at, dim| at * of[dim] + index[dim] * of[dim] / full[dim])
            };
            let in_band = problem.band.keys(index[2], full[3]).contains(&index[3]);
            seen[place(shape)] |= in_band && !mask[place(of)];
        }
        seen
    }
}
