//! How long a call takes: by the device's own clock where it has one, else by the host's.

use super::call::Operands;
use super::grid::{Pass, Point};
use super::limit::Limit;
use crate::Outcome;
use burn::tensor::{Device, ProfileOptions, TimingMethod};
use burn_flash_attention::Problem;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Calls before the first sample go on for this long, and are at least one.
const WARM_UP: Duration = Duration::from_millis(200);

/// A sample is as many calls as fill about this time.
const SAMPLE: Duration = Duration::from_millis(10);

/// Calls of a sample at most.
const MOST_CALLS: usize = 64;

/// Inputs of all sets together are at least this large, which is more than any device's cache.
const ROTATED: usize = 512 << 20;

/// Sets of inputs at most.
const MOST_SETS: usize = 8;

/// The clock that a time was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Events on the device's own queue, before the first and after the last call of a sample.
    Device,
    /// The host's, from the first call of a sample until the device is done.
    Host,
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Clock::Device => "device",
            Clock::Host => "host",
        })
    }
}

/// What was timed.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Seconds a call, of each sample.
    pub seconds: Vec<f64>,
    /// Calls of a sample.
    pub calls: usize,
    pub clock: Clock,
}

/// How many sets of inputs the calls of `point` take in turn, so that none finds its own in a
/// cache. A single set that is larger than any cache is enough.
pub fn sets(point: &Point) -> usize {
    ROTATED
        .div_ceil(point.operand_bytes().max(1))
        .clamp(1, MOST_SETS)
}

/// Times calls on `sets` in turn until there are `samples`, or the next one would not be done in
/// time; `None` if that holds for the first.
pub fn time(
    point: &Point,
    problem: &Problem,
    device: &Device,
    sets: &[Operands],
    samples: usize,
    limit: &Limit,
) -> Outcome<Option<Timing>> {
    let mut turn = 0;
    let mut next = |count: usize| -> Vec<Operands> {
        let taken = (turn..turn + count).map(|n| sets[n % sets.len()].clone());
        turn += count;
        taken.collect()
    };
    let (start, mut warm_up_calls) = (Instant::now(), 0);
    if limit.is_over() {
        return Ok(None);
    }
    while warm_up_calls == 0 || (start.elapsed() < WARM_UP && !limit.is_over()) {
        run(next(1), point, problem)?;
        device.sync()?;
        warm_up_calls += 1;
    }
    let call = start.elapsed().as_secs_f64() / f64::from(warm_up_calls);
    let calls = ((SAMPLE.as_secs_f64() / call).ceil() as usize).clamp(1, MOST_CALLS);

    let mut timing = Timing {
        seconds: Vec::new(),
        calls,
        clock: match point.pass {
            Pass::Training => Clock::Host,
            Pass::Forward | Pass::Backward => Clock::Device,
        },
    };
    while timing.seconds.len() < samples && limit.fits(call * calls as f64) {
        device.sync()?;
        let operands = next(calls);
        let seconds = match timing.clock {
            Clock::Host => by_host(operands, point, problem, device)?,
            Clock::Device => match by_device(next(1), operands, point, problem, device)? {
                Some(seconds) => seconds,
                None => {
                    timing.clock = Clock::Host;
                    continue;
                }
            },
        };
        timing.seconds.push(seconds / calls as f64);
    }
    Ok((!timing.seconds.is_empty()).then_some(timing))
}

fn run(operands: Vec<Operands>, point: &Point, problem: &Problem) -> Result<(), String> {
    for operands in operands {
        // Results are dropped call by call: the memory of one serves the next.
        operands.run(point, problem)?;
    }
    Ok(())
}

fn by_host(
    operands: Vec<Operands>,
    point: &Point,
    problem: &Problem,
    device: &Device,
) -> Outcome<f64> {
    let start = Instant::now();
    run(operands, point, problem)?;
    device.sync()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Calls `before` and then those of the sample, which find the device at work: its idle time until a first
/// launch is no part of them. `None` from a device that has no clock of its own, or measured nothing.
fn by_device(
    before: Vec<Operands>,
    operands: Vec<Operands>,
    point: &Point,
    problem: &Problem,
    device: &Device,
) -> Outcome<Option<f64>> {
    let (point, problem) = (point.clone(), *problem);
    run(before, &point, &problem)?;
    let flush = ProfileOptions::default().flush();
    let (done, profile) = device.profile_with(flush, move || run(operands, &point, &problem))?;
    done?;
    if profile.timing_method() == TimingMethod::System {
        return Ok(None);
    }
    device.sync()?;
    Ok(wait(profile.resolve()).map(|ticks| ticks.duration().as_secs_f64()))
}

/// Wakes the thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future on this thread.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::grid::{Choice, Grid};
    use burn_flash_attention::Dtype;

    /// Catches inputs that stay in a cache between calls, and more sets than a device has room for.
    #[test]
    fn sets_of_inputs_pass_the_cache_and_no_more() {
        let sets_of = |grid: Grid| -> Vec<usize> {
            let points = grid.points(&Choice::default(), Dtype::BF16);
            points.iter().map(sets).collect()
        };
        // 192 MiB forward, 256 MiB backward.
        assert_eq!(sets_of(Grid::Paper), [[3; 36], [2; 36]].concat());
        assert_eq!(sets_of(Grid::Small), [MOST_SETS; 5]);
        assert_eq!(sets_of(Grid::Long), [2, 1, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn a_future_is_waited_for() {
        let (send, receive) = std::sync::mpsc::channel::<Waker>();
        let worker = thread::spawn(move || receive.recv().map(Waker::wake));
        let mut polls = 0;
        let future = std::future::poll_fn(move |context| {
            polls += 1;
            match polls {
                1 => {
                    send.send(context.waker().clone()).unwrap();
                    Poll::Pending
                }
                _ => Poll::Ready(polls),
            }
        });
        assert!(wait(future) >= 2);
        worker.join().unwrap().unwrap();
    }
}
