//! Kernels that combine many elements into one: reductions, scans, selections.

mod arg;
mod cumulative;
mod det;
mod einsum;
mod folds;
pub(super) mod layout;
pub(super) mod lines;
pub(super) mod number;
pub(super) mod rows;
mod top_k;
