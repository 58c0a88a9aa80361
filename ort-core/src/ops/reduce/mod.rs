//! Reductions, prefix sums, top-k and contractions.

mod arg;
mod cumulative;
mod det;
mod einsum;
mod einsum_equation;
mod einsum_gradient;
mod folds;
mod gradients;
pub mod problem;
mod sum_to;
mod top_k;

pub use einsum_equation::{Equation, Label};
