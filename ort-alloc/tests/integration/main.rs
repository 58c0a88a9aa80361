//! The integration tests of this crate in one program, because each test program links the whole
//! crate. Tests that read the state of their process or measure time are programs of their own, in
//! `tests/`.

mod arena;
mod budget;
mod buffer;
mod dlpack;
mod foreign;
mod mapping;
mod plan;
mod split;
