//! Tensors, graph IR, operator records, provider contract, plan and session of ort-runtime.

pub mod onnx;
