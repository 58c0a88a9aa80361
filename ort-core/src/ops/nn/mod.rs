//! Neural network layers.
//!
//! Convolutions, pools, normalizations, softmax, losses, recurrent layers, attention.

pub mod attention;
pub(super) mod attention_gradients;
mod causal_conv;
pub(super) mod conv;
mod conv_backward;
mod conv_gradients;
mod deform_conv;
mod flex_attention;
pub mod geometry;
pub(super) mod linear_attention;
mod loss;
mod max_unpool;
mod norm_backward;
mod norm_batch;
mod norm_gradients;
pub(super) mod norm_layer;
mod norm_local;
mod norm_statistics;
pub(super) mod pool;
pub mod problem;
mod recurrent;
mod recurrent_gradients;
pub(super) mod recurrent_steps;
mod rotary;
mod softmax;

pub use attention_gradients::HIDDEN_IS_NAN;
