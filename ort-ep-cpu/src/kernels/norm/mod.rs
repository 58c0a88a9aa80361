//! Kernels of normalizations, softmax and the losses of classification.

mod batch;
mod groups;
mod layer;
mod loss;
mod lrn;
pub(super) mod row;
mod softmax;
