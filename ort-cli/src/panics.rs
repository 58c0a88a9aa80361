//! Panics, which are bugs of this program, as errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow};

/// Runs `work` and turns a panic, which is a bug of this program, into an error.
pub(crate) fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(defect(&*panic)))
}

fn defect(panic: &(dyn Any + Send)) -> anyhow::Error {
    // `panic!` has a `String` payload with arguments, and a `&str` without.
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    anyhow!("internal error: {text}; this is a bug of `ort`: report it with the output of `-vv`")
}
