//! Loom models of the memory budget and the thread pool. Their source files are included here and
//! built over loom's atomics, locks and threads.
//!
//! Loom runs a model repeatedly, each time with another interleaving of the threads' steps, and
//! with every value that a load may observe. The included files import synchronisation primitives
//! from `crate::sync`, which is loom's here. Nothing else of their crates is built.
#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "models are tests")]

mod affinity;
#[path = "../../ort-alloc/src/budget.rs"]
pub mod budget;
#[path = "../../ort-alloc/src/category.rs"]
mod category;
#[allow(dead_code, reason = "what the budget's models need of it is its messages")]
#[path = "../../ort-alloc/src/error.rs"]
mod error;
mod interrupt;
#[path = "../../ort-ep-cpu/threads/src/pool.rs"]
pub mod pool;
mod sync;

mod budget_models;
mod pool_models;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use category::Category;
pub use error::AllocError;
pub use ort_alloc::{DeviceId, exact_bytes};

/// Explores all interleavings with at most `preemptions` preemptions of a thread, or all
/// interleavings if `None`.
fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    // Atomics of the standard library, which loom does not reset from run to run.
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let orders = orders.load(Ordering::Relaxed);
    println!("{orders} orders");
    // A model with a single interleaving has no concurrency, so it tests nothing.
    assert!(orders > 1, "nothing ran at the same time");
}
