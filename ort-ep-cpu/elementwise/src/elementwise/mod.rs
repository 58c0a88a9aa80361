//! Element-wise operators.
//!
//! Float formulas run as small programs over blocks. Integers, comparisons and moves have typed
//! loops.

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
mod lanes;
mod power;
mod program;
pub(super) mod quantized;
