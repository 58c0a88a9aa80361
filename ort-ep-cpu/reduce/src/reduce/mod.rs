//! Reductions, scans and selections: kernels that combine many elements into one.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; axes and counts that come as tensors are checked before their first use"
)]

mod arg;
mod cumulative;
mod det;
mod folds;
pub(super) mod rows;
mod top_k;
