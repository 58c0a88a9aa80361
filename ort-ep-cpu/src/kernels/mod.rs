//! The kernels of the CPU provider by family; each file registers what it holds.

pub mod broadcast;
mod control;
mod elementwise;
mod linalg;
mod ml;
mod movement;
mod norm;
mod quant;
mod reduce;
mod sequence;
mod text;
mod training;
mod trilu;
