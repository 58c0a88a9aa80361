//! The tests of this crate in one program: each program links the whole crate. Those that look at their process, or
//! measure times, are programs of their own.

mod arena;
mod budget;
mod buffer;
mod dlpack;
mod foreign;
mod mapping;
mod plan;
mod split;
