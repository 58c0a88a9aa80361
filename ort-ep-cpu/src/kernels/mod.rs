//! The kernels of the CPU provider by family; each file registers what it holds.

pub mod broadcast;
mod control;
mod elementwise;
mod movement;
mod norm;
mod reduce;
mod trilu;
