//! Models of random weights that several tests of this crate quantize or prune.

use std::path::{Path, PathBuf};

use ort_core::onnx::proto::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use ort_core::onnx::{FileAccess, Source, tensor_to_proto};
use ort_core::tensor::Tensor;
use prost::Message;

/// A random number from -0.5 to 0.5, as the scripts of the reference values have it.
pub(crate) fn unit(step: usize) -> f32 {
    let mut hash = (step as u32).wrapping_mul(0x9e37_79b1);
    hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77);
    ((hash ^ hash >> 13) >> 8) as f32 / 16_777_216.0 - 0.5
}

pub(crate) fn floats(name: &str, shape: &[usize], values: &[f32]) -> TensorProto {
    tensor_to_proto(name, &Tensor::from_slice(shape, values).unwrap()).unwrap()
}

/// Random numbers from `-factor / 2` to `factor / 2`; `from` seeds them.
pub(crate) fn random(name: &str, shape: &[usize], from: usize, factor: f32) -> TensorProto {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (from..from + count).map(|step| factor * unit(step)).collect();
    floats(name, shape, &values)
}

pub(crate) fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("{op}_{output}")),
        op_type: Some(op.into()),
        input: inputs.iter().map(|name| (*name).to_string()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

/// Writes a model of opset 21 into a folder, and returns its path.
pub(crate) fn save(folder: &Path, graph: GraphProto) -> PathBuf {
    let model = ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(21) }],
        graph: Some(GraphProto { name: Some("g".into()), ..graph }),
        ..ModelProto::default()
    };
    let path = folder.join("model.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    path
}

pub(crate) fn source(path: &Path) -> Source {
    Source::open(path, FileAccess::default()).unwrap()
}
