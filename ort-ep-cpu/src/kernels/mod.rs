//! The kernels of the CPU provider by family; each file registers what it holds.

pub mod broadcast;
mod control;
mod elementwise;
mod linalg;
mod microsoft;
mod ml;
mod movement;
mod nn;
mod norm;
mod quant;
mod random;
mod reduce;
mod sequence;
mod signal;
mod text;
mod training;
mod vision;
