//! Models of the budget and of the thread pool: their own files, over loom's atomics, locks and
//! threads.
//!
//! Loom runs a model again and again, each time in another order of the threads' steps, with all
//! values that a load may see. The files take what threads share from `crate::sync`, which is
//! loom's here; nothing else of their crates is built.
#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "models are tests")]

#[path = "../../ort-alloc/src/budget.rs"]
pub mod budget;
#[allow(dead_code, reason = "what the budget's models need of it is its messages")]
#[path = "../../ort-alloc/src/error.rs"]
mod error;
mod interrupt;
#[path = "../../ort-ep-cpu/src/pool.rs"]
pub mod pool;
mod processors;
mod sync;

mod budget_models;
mod pool_models;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use budget::Category;
pub use error::AllocError;
pub use ort_alloc::DeviceId;

/// Runs a model in all orders in which a thread is interrupted at most `preemptions` times, or in
/// all there are.
fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
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
    assert!(orders > 1, "nothing ran at the same time");
}
