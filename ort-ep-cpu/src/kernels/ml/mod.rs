//! Kernels of classical machine learning.

mod features;
mod forest;
mod label_encoder;
mod linear;
mod map;
mod scaler;
mod scores;
mod simple;
mod svm;
mod svm_kernel;
mod tree_ensemble;
mod tree_ensemble_split;
