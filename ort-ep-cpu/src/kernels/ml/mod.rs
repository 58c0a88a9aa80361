//! Kernels of classical machine learning.

mod features;
mod label_encoder;
mod scaler;
mod tree_ensemble;
