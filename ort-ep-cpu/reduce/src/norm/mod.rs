//! Normalizations, softmax, and classification losses.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; labels are checked before their first use"
)]

mod batch;
mod batch_gradient;
mod batch_statistics;
mod channel;
mod groups;
mod layer;
mod loss;
mod lrn;
pub(super) mod row;
mod skip;
mod softmax;
mod softmax_quantized;
