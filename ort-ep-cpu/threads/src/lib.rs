//! Threads of the CPU provider: the pool, parallel loops over outputs, cancellation and scratch
//! memory.
//!
//! [`parallel`] is what kernels use. It splits outputs into tasks for the workers of the pool and
//! the calling thread.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod affinity;
pub mod environment;
pub mod interrupt;
pub mod parallel;
mod pool;
mod sync;
pub mod thread_scratch;
