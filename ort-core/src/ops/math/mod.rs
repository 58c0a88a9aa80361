//! Elementwise operators: arithmetic, logic, comparison, casts and activations.
//!
//! Most have a scalar formula, from which providers generate kernels and gradients are derived.

mod activation;
mod arithmetic;
mod bits;
mod cast;
mod choice;
mod comparison;
mod dropout;
mod experimental;
mod identity;
pub(super) mod legacy;
mod logic;
pub(super) mod shared;
mod symbolic;
mod unary;
