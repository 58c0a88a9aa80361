//! Element-wise operators.
//!
//! Formulas run as small programs over blocks, of floats, integers and booleans. Typed loops have
//! what does not follow from a formula of one type: comparisons, powers of mixed types, bit
//! operations and moves.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and strides are counted over broadcast shapes, which inference checked and views are as long as"
)]

mod blocks;
mod cast;
mod choose;
mod compare;
mod dropout;
pub(super) mod formula;
mod identity;
mod integer;
mod integer_lanes;
mod lanes;
mod power;
mod program;
pub(super) mod quantized;
