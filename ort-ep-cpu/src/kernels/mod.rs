//! The kernels of the CPU provider by family; each file registers what it holds.

pub mod broadcast;
mod linalg;
mod movement;
mod quant;
mod trilu;
