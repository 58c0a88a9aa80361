//! Kernels of the classical machine-learning operators (domain `ai.onnx.ml`).

#![allow(
    clippy::indexing_slicing,
    reason = "ids of nodes, targets and classes are checked when a kernel is made, the number of features and columns that are asked for at each run"
)]

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
