//! The kernels of the CPU provider, by operator family. Each file registers its own kernels.

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
