//! The kernels of the CPU provider by family; each file registers what it holds.

mod movement;
