//! The tests of this crate in one program: each program links the whole crate. Those that look at their process, or
//! measure times, are programs of their own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

mod api;
mod attention;
mod captured_weights;
mod curves;
mod limits;
mod losses;
mod mixed;
mod recompute;
mod recompute_plans;
mod resume;
mod sequences;
mod slices;
mod support;
