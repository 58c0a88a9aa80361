//! The integration tests of this crate in one program, because each test program links the whole
//! crate. Tests that read the state of their process or measure time are programs of their own, in
//! `tests/`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

mod api;
mod attention;
mod captured_weights;
mod constants;
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
