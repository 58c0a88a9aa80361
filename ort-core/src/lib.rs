//! Tensors, graph IR, operator records, provider contract, plan and session of ort-runtime.

pub mod dim;
pub mod dtype;
pub mod onnx;
