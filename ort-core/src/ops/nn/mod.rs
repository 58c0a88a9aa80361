//! Operators of neural networks.

mod loss;
mod norm_batch;
mod norm_layer;
mod norm_local;
mod softmax;
