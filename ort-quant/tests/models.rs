//! Quantized models against those of onnxruntime.quantization 1.31.1: nodes, names, scales, zero
//! points and codes.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};

use ort_core::onnx::proto::{ModelProto, NodeProto, TensorProto};
use ort_core::onnx::{ExternalData, FileAccess, Source, Weights, tensor_from_proto};
use ort_core::session::Model;
use ort_quant::{DynamicOptions, Mode, Quantizer, StaticFormat, StaticOptions, read_ranges};
use prost::Message;

fn folder() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn dynamic(per_tensor: bool) -> ModelProto {
    quantized(Mode::Dynamic(DynamicOptions { per_tensor, reduce_range: false }), 7)
}

/// Quantizes the model of this number of layers.
fn quantized(mode: Mode, layers: usize) -> ModelProto {
    // Otherwise it would vanish into the product before it.
    let exclude = vec!["relu".parse().unwrap()];
    let quantizer = Quantizer { mode, only: Vec::new(), exclude };
    let source = Source::open(folder().join("layers.onnx"), FileAccess::default()).unwrap();
    let target = tempfile::tempdir().unwrap();
    let path = target.path().join("out.onnx");
    let mut checked = 0;
    let mut check = |model: &Model| {
        checked += model.graph().nodes.len();
        Ok(())
    };
    let done = quantizer.quantize(&source).unwrap();
    assert_eq!(done.layers().len(), layers);
    let written = done.write(&path, &Weights::Inside, &mut check).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!((written.model, written.data), (bytes.len() as u64, 0));
    assert!(checked > 10);
    ModelProto::decode(&*bytes).unwrap()
}

fn read(name: &str) -> ModelProto {
    ModelProto::decode(&*std::fs::read(folder().join(name)).unwrap()).unwrap()
}

/// What a node is, except for the order of its attributes.
fn described(node: &NodeProto) -> (String, String, Vec<String>, Vec<String>, BTreeMap<String, String>) {
    let attributes =
        node.attribute.iter().map(|attribute| (attribute.name().to_string(), format!("{attribute:?}")));
    (node.op_type().into(), node.name().into(), node.input.clone(), node.output.clone(), attributes.collect())
}

fn nodes(
    model: &ModelProto,
) -> BTreeSet<(String, String, Vec<String>, Vec<String>, BTreeMap<String, String>)> {
    model.graph.as_ref().unwrap().node.iter().map(described).collect()
}

fn initializers(model: &ModelProto) -> BTreeMap<String, String> {
    let tensors = &model.graph.as_ref().unwrap().initializer;
    let described = |tensor: &TensorProto| {
        let value = tensor_from_proto(tensor.clone(), &mut ExternalData::unavailable()).unwrap();
        (tensor.name().to_string(), format!("{:?} {:?} {:?}", value.dtype(), value.shape(), value.bytes()))
    };
    tensors.iter().map(described).collect()
}

#[test]
fn per_tensor_models_have_the_same_nodes_and_weights() {
    let (found, expected) = (dynamic(true), read("layers_per_tensor.onnx"));
    assert_eq!(nodes(&found), nodes(&expected));
    assert_eq!(initializers(&found), initializers(&expected));
    assert_eq!(found.opset_import, expected.opset_import);
    let types = |model: &ModelProto| {
        let graph = model.graph.clone().unwrap();
        (graph.input, graph.output)
    };
    assert_eq!(types(&found), types(&expected));
}

/// Convolutions have a scale for each channel here, and only one there.
#[test]
fn per_channel_models_differ_in_convolutions_alone() {
    let (found, expected) = (dynamic(false), read("layers_per_channel.onnx"));
    assert_eq!(nodes(&found), nodes(&expected));
    let (found, expected) = (initializers(&found), initializers(&expected));
    assert!(found.keys().eq(expected.keys()));
    for (name, value) in &found {
        let is_conv = name.starts_with("CW") && !name.ends_with("zero_point");
        assert_eq!(value == &expected[name], !is_conv, "{name}");
    }
}

/// With the ranges that onnxruntime.quantization's calibration wrote. Its options are those of what
/// this mode does: inputs of products only, and biases in floating point.
#[test]
fn static_models_have_the_same_nodes_and_weights() {
    for (per_tensor, format, name) in [
        (true, StaticFormat::Qdq, "layers_static_per_tensor.onnx"),
        (false, StaticFormat::Qdq, "layers_static.onnx"),
        (true, StaticFormat::QOperator, "layers_qoperator_per_tensor.onnx"),
        (false, StaticFormat::QOperator, "layers_qoperator.onnx"),
    ] {
        let ranges = read_ranges(&folder().join("layers_ranges.json")).unwrap();
        let mode = Mode::Static(StaticOptions { format, ranges, per_tensor, ..StaticOptions::default() });
        let (found, expected) = (quantized(mode, 6), read(name));
        assert_eq!(nodes(&found), nodes(&expected), "{name}");
        assert_eq!(initializers(&found), initializers(&expected), "{name}");
    }
}
