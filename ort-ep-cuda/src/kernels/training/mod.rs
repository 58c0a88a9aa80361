//! What a training step runs beside a forward pass: steps of optimizers, a family of kernels for
//! each and for a type of parameters (`cu/optimizer.cuh`), numbers of all gradients
//! (`cu/gradients.cu`), normalizations of batches (`cu/training_norm.cu`), dropout
//! (`cu/dropout.cu`), attention with its gradient (`cu/training_attention.cuh`), gradients of
//! convolutions (`cu/training_conv.cu`), losses (`cu/loss.cu`), and updates that are added up
//! (`cu/scatter.cu`).
//!
//! What is one number (the learning rate, the step, what gradients are multiplied by, whether
//! anything changes) stays on the device: kernels read it, so that a step waits for nothing. So
//! nobody refuses a step below 1, or a share of dropout that is none, as the CPU does.

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
