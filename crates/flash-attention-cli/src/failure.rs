//! Kinds of failure: a command line that asks for what cannot be, and panics as errors, for what no
//! `Result` reports, a failing driver for example, is still one line.

use crate::Outcome;
use crate::report::one_line;
use std::error::Error;
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// What is wrong with a command line whose arguments are right one by one.
#[derive(Debug)]
pub struct Usage(String);

impl Usage {
    pub fn new(what: impl fmt::Display) -> Self {
        Self(what.to_string())
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// A number of things, one at least.
pub fn parse_count(text: &str) -> Result<NonZeroUsize, String> {
    let wrong = |_| "expected a whole number of at least 1".to_string();
    text.parse().map_err(wrong)
}

/// The latest panic of any thread. A worker's is the cause of the one it makes its caller have.
static LATEST: Mutex<Option<String>> = Mutex::new(None);

fn replace(text: Option<String>) -> Option<String> {
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::replace(&mut latest, text)
}

/// Keeps the text of a panic for [`guard`] instead of printing it; who asks for backtraces gets both.
pub fn keep_panics() {
    let asked = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if asked {
            usual(info);
        }
        let text = one_line(info.payload_as_str().unwrap_or("panic"));
        let place = info.location().map(|place| format!(" ({place})"));
        replace(Some(text + &place.unwrap_or_default()));
    }));
}

/// Runs `work`, and returns a panic in it as an error.
pub fn guard<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    // Nothing that a panic could leave half done is used again: results are dropped with it.
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        let text = replace(None);
        Err(text.unwrap_or_else(|| "panic".to_string()).into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_one_line() {
        keep_panics();
        let outcome: Outcome<()> = guard(|| panic!("the device\nis lost"));
        drop(panic::take_hook());
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.starts_with("the device is lost (") && !text.contains('\n'),
            "{text}"
        );
    }
}
