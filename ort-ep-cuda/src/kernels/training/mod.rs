//! Training kernels beside the forward pass.
//!
//! - Optimizer steps, one family per optimizer and parameter type (`cu/optimizer.cuh`).
//! - Statistics of all gradients (`cu/gradients.cu`).
//! - Batch normalization (`cu/training_norm.cu`) and dropout (`cu/dropout.cu`).
//! - Attention (`cu/training_attention.cuh`) and convolution gradients (`cu/training_conv.cu`).
//! - Losses (`cu/loss.cu`) and scatter with accumulation (`cu/scatter.cu`).
//!
//! Scalars stay on the device: the learning rate, the step number, the gradient scale, and whether
//! anything is updated. Kernels read them there, so a step never waits for the host. As a
//! consequence, a step number below 1 or an invalid dropout ratio is not reported, unlike on the
//! CPU.

mod accumulate;
mod adafactor;
mod adam;
mod attention;
mod batch_norm;
mod conv;
mod counter_dropout;
mod loss;
mod norm;
mod scatter;
mod sgd;
mod standard;
mod step;
