//! ONNX files: their messages, where their bytes come from, and the way to the graph and back.

pub mod proto;
