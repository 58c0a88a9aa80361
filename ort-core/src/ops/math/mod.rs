//! Operators that compute each element from the elements at its place.

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
