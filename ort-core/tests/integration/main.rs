//! The integration tests of this crate in one program, because each test program links the whole
//! crate.
#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batch_proof;
mod dlpack;
mod dtype;
mod microsoft_shapes;
mod onnx_damage;
mod onnx_external;
mod onnx_functions;
mod onnx_hostile;
mod onnx_identity;
mod onnx_load;
mod onnx_ort_format;
mod onnx_proto;
mod onnx_save;
mod onnx_source;
mod onnx_support;
mod onnx_values;
mod op_schemas;
