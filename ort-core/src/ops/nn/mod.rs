//! Operators of neural networks.

mod loss;
mod norm_batch;
mod norm_layer;
mod norm_local;
mod softmax;
//! Operators of neural networks: convolutions, pools, recurrent layers, attention.
mod attention;
mod causal_conv;
mod conv;
mod deform_conv;
mod flex_attention;
pub mod geometry;
mod linear_attention;
mod max_unpool;
mod pool;
mod recurrent;
mod rotary;
