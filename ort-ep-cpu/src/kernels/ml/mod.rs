//! Kernels of classical machine learning.

mod features;
mod label_encoder;
mod tree_ensemble;
