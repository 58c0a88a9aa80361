//! The examples run to their end.
#![cfg(feature = "cpu")]
#![allow(clippy::duplicate_mod, reason = "each example brings what it needs")]

use ort_runtime::Result;

#[cfg(feature = "train")]
#[path = "../examples/distillation.rs"]
mod distillation;
#[cfg(feature = "train")]
#[path = "../examples/fine_tuning.rs"]
mod fine_tuning;
#[cfg(feature = "train")]
#[path = "../examples/gradient_accumulation.rs"]
mod gradient_accumulation;
#[path = "../examples/io_binding.rs"]
mod io_binding;
#[path = "../examples/kv_cache_decode.rs"]
mod kv_cache_decode;
#[cfg(feature = "train")]
#[path = "../examples/largest_batch.rs"]
mod largest_batch;
#[cfg(feature = "train")]
#[path = "../examples/memory_optimizer.rs"]
mod memory_optimizer;
#[path = "../examples/memory_profiling.rs"]
mod memory_profiling;
#[path = "../examples/reuse_sessions.rs"]
mod reuse_sessions;
#[cfg(feature = "train")]
#[path = "../examples/training_memory.rs"]
mod training_memory;

#[test]
fn io_binding() -> Result<()> {
    io_binding::main()
}

#[test]
fn kv_cache_decode() -> Result<()> {
    kv_cache_decode::main()
}

#[test]
fn memory_profiling() -> Result<()> {
    memory_profiling::main()
}

#[test]
fn reuse_sessions() -> Result<()> {
    reuse_sessions::main()
}

#[cfg(feature = "train")]
#[test]
fn distillation() -> Result<()> {
    distillation::main()
}

#[cfg(feature = "train")]
#[test]
fn fine_tuning() -> Result<()> {
    fine_tuning::main()
}

#[cfg(feature = "train")]
#[test]
fn gradient_accumulation() -> Result<()> {
    gradient_accumulation::main()
}

#[cfg(feature = "train")]
#[test]
fn largest_batch() -> Result<()> {
    largest_batch::main()
}

#[cfg(feature = "train")]
#[test]
fn memory_optimizer() -> Result<()> {
    memory_optimizer::main()
}

#[cfg(feature = "train")]
#[test]
fn training_memory() -> Result<()> {
    training_memory::main()
}
