//! The examples run to their end.
#![cfg(feature = "cpu")]
#![allow(clippy::duplicate_mod, reason = "each example brings what it needs")]

use ort_runtime::Result;

#[path = "../examples/io_binding.rs"]
mod io_binding;
#[path = "../examples/kv_cache_decode.rs"]
mod kv_cache_decode;
#[path = "../examples/memory_profiling.rs"]
mod memory_profiling;
#[path = "../examples/reuse_sessions.rs"]
mod reuse_sessions;

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
