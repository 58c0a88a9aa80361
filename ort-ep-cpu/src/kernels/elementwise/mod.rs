//! Elementwise operators: float formulas run as small programs over blocks; integers, comparisons and moves have typed loops.

mod blocks;
mod cast;
mod choose;
pub(super) mod codes;
mod compare;
mod dropout;
pub(super) mod formula;
mod identity;
mod integer;
mod lanes;
mod power;
mod program;
