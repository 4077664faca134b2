//! What there is time for under `--time-limit`.

use super::grid::{Pass, Point};
use crate::Outcome;
use std::time::{Duration, Instant};

/// Calls of a point at least: one to be verified, one to warm up, one to be timed.
const CALLS: f64 = 3.0;

/// Shortest sequence of a probe.
const SHORTEST: usize = 64;

/// When to stop, and how fast points have been so far.
#[derive(Debug, Default)]
pub struct Limit {
    deadline: Option<Instant>,
    /// What was last measured in each pass.
    rates: Vec<Rate>,
}

#[derive(Clone, Copy, Debug)]
struct Rate {
    pass: Pass,
    /// Seconds an operation.
    seconds: f64,
    /// Of the point that it is from.
    operations: f64,
}

impl Limit {
    /// So many seconds after `start`; without a number there is no limit.
    pub fn new(start: Instant, seconds: Option<f64>) -> Outcome<Self> {
        let seconds = seconds.map(Duration::try_from_secs_f64).transpose()?;
        Ok(Self {
            deadline: seconds.and_then(|seconds| start.checked_add(seconds)),
            rates: Vec::new(),
        })
    }

    /// Time left; `None` without a limit.
    pub fn left(&self) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Whether work of that many seconds would be done in time.
    pub fn fits(&self, seconds: f64) -> bool {
        self.left()
            .is_none_or(|left| !left.is_zero() && seconds <= left.as_secs_f64())
    }

    /// Whether the time is up.
    pub fn is_over(&self) -> bool {
        !self.fits(0.0)
    }

    /// Whether the point would be done in time.
    ///
    /// Where that cannot be told from points before it, `probe` returns the seconds of a call of
    /// smaller ones, of growing size: each is a fraction of the next, and as small ones keep a large
    /// device waiting, one that makes the point look too long is followed by a larger one. None is
    /// run that would not be done in time itself.
    pub fn allows(
        &mut self,
        point: &Point,
        mut probe: impl FnMut(&Point) -> Outcome<f64>,
    ) -> Outcome<bool> {
        if self.deadline.is_none() {
            return Ok(true);
        }
        for smaller in smaller(point) {
            match self.needed(point) {
                Some(seconds) if self.fits(seconds) => return Ok(true),
                _ if self.is_over() => return Ok(false),
                // A point as large is known already.
                _ if self
                    .rate(&smaller)
                    .is_some_and(|rate| rate.operations >= smaller.operations()) => {}
                Some(_) if !self.fits(self.needed(&smaller).unwrap_or(0.0)) => return Ok(false),
                _ => self.learn(&smaller, probe(&smaller)?),
            }
        }
        Ok(self.fits(self.needed(point).unwrap_or(0.0)))
    }

    /// Keeps what a call of `point` took.
    pub fn learn(&mut self, point: &Point, seconds: f64) {
        self.rates.retain(|known| known.pass != point.pass);
        let operations = point.operations();
        self.rates.push(Rate {
            pass: point.pass,
            seconds: seconds / operations,
            operations,
        });
    }

    fn rate(&self, point: &Point) -> Option<Rate> {
        let mut rates = self.rates.iter();
        rates.find(|known| known.pass == point.pass).copied()
    }

    fn needed(&self, point: &Point) -> Option<f64> {
        let rate = self.rate(point)?;
        Some(CALLS * rate.seconds * point.operations())
    }
}

/// Points like this one and smaller, the smallest first.
fn smaller(point: &Point) -> Vec<Point> {
    let mut points = Vec::new();
    let mut next = point.clone();
    loop {
        if next.batch > 1 {
            next.batch = next.batch.div_ceil(4);
        } else if next.seq >= 2 * SHORTEST {
            next.seq /= 2;
        } else {
            break;
        }
        points.push(next.clone());
    }
    points.reverse();
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::grid::{Choice, Grid};
    use burn_flash_attention::Dtype;

    /// The largest point of the paper grid on one pass.
    fn large(pass: Pass) -> Point {
        let points = Grid::Paper.points(&Choice::default(), Dtype::F32);
        let mut points = points.into_iter().filter(|point| point.pass == pass);
        points.rfind(|point| !point.variant.causal()).unwrap()
    }

    fn limit(seconds: f64) -> Limit {
        Limit::new(Instant::now(), Some(seconds)).unwrap()
    }

    /// Catches a first point of a pass that takes hours where seconds are left.
    #[test]
    fn a_point_of_unknown_length_is_probed_and_left_out() {
        let point = large(Pass::Forward);
        // A slow device: 1 GFLOP/s.
        let mut probed = Vec::new();
        let mut limit = limit(1_000.0);
        let allowed = limit.allows(&point, |smaller| {
            probed.push(smaller.operations());
            Ok(smaller.operations() / 1e9)
        });
        assert!(point.operations() / 1e9 > 2_000.0);
        assert!(!allowed.unwrap());
        assert!(probed.is_sorted() && probed.len() > 2, "{probed:?}");
        let most = probed.iter().fold(0.0, |most: f64, n| most.max(*n));
        assert!(CALLS * most / 1e9 <= 1_000.0, "{probed:?}");
        assert!(probed[0] < 1e9, "{probed:?}");
        // Nothing new can be learnt of it.
        let allowed = limit.allows(&point, |_| panic!("probed again"));
        assert!(!allowed.unwrap());
    }

    /// Catches a large device that is judged by what it makes of a small problem.
    #[test]
    fn probes_grow_until_the_point_fits() {
        let point = large(Pass::Backward);
        // 100 TFLOP/s, and 50 ms a call whatever its size.
        let call = |point: &Point| 0.05 + point.operations() / 1e14;
        assert!(CALLS * call(&point) < 5.0);
        let mut probes = 0;
        let mut limit = limit(5.0);
        let allowed = limit.allows(&point, |smaller| {
            probes += 1;
            Ok(call(smaller))
        });
        assert!(allowed.unwrap() && probes > 1, "{probes} probes");
        // What is known now is enough for the next point.
        let allowed = limit.allows(&point, |_| panic!("probed again"));
        assert!(allowed.unwrap());
    }

    #[test]
    fn without_a_limit_nothing_is_probed() {
        let mut limit = Limit::new(Instant::now(), None).unwrap();
        let allowed = limit.allows(&large(Pass::Forward), |_| panic!("probed"));
        assert!(allowed.unwrap() && limit.fits(1e30) && !limit.is_over());
    }

    #[test]
    fn nothing_is_begun_when_the_time_is_up() {
        let mut limit = limit(1e-9);
        let allowed = limit.allows(&large(Pass::Forward), |_| panic!("probed"));
        assert!(!allowed.unwrap() && limit.is_over());
    }
}
