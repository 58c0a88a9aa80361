//! Opening a model: what is no model says what it is, and nothing hangs or panics.

use std::io::Write;
use std::path::PathBuf;

use bytes::Bytes;
use ort_core::ErrorKind;
use ort_core::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TrainingInfoProto,
};
use ort_core::onnx::{FileAccess, Source};
use prost::Message;
use tempfile::TempDir;

const READ: FileAccess = FileAccess { map: false, hard_links: false };
const MAP: FileAccess = FileAccess { map: true, hard_links: false };

fn model(weight_bytes: usize) -> ModelProto {
    let weight = TensorProto {
        name: Some("weight".into()),
        dims: vec![weight_bytes as i64],
        data_type: Some(2),
        raw_data: Some(Bytes::from(vec![7; weight_bytes])),
        ..TensorProto::default()
    };
    let node = NodeProto { op_type: Some("Relu".into()), ..NodeProto::default() };
    let graph = GraphProto { node: vec![node], initializer: vec![weight], ..GraphProto::default() };
    ModelProto { ir_version: Some(8), graph: Some(graph), ..ModelProto::default() }
}

fn write(folder: &TempDir, name: &str, content: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::File::create(&path).unwrap().write_all(content).unwrap();
    path
}

#[test]
fn every_way_in_gives_the_same_model() {
    let folder = TempDir::new().unwrap();
    let expected = model(100);
    let wire = expected.encode_to_vec();
    let path = write(&folder, "model.onnx", &wire);
    let sources = [
        Source::open(&path, READ).unwrap(),
        Source::open(&path, MAP).unwrap(),
        Source::from_bytes(wire.clone()),
        Source::from_reader(wire.as_slice()).unwrap(),
    ];
    for source in sources {
        assert_eq!(source.decode().unwrap(), expected, "{}", source.name());
    }
}

#[test]
fn weights_of_a_mapped_file_are_slices_of_the_map() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "model.onnx", &model(10_000).encode_to_vec());
    let source = Source::open(&path, MAP).unwrap();
    let graph = source.decode().unwrap().graph.unwrap();
    let raw = graph.initializer[0].raw_data.as_ref().unwrap();
    assert!(source.mapping().unwrap().contains(raw));
    assert!(Source::open(&path, READ).unwrap().mapping().is_none());
}

/// `inner` followed by `hole` further bytes, as a field.
fn field_before_hole(tag: u8, inner: &[u8], hole: usize) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    prost::encode_length_delimiter(inner.len() + hole, &mut bytes).unwrap();
    bytes.extend(inner);
    bytes
}

#[test]
#[cfg(target_pointer_width = "64")]
fn a_model_of_more_than_two_gigabytes_loads() {
    // The weight is a hole at the file's end, so the file takes neither disk nor time.
    let hole = 5 << 29;
    let mut small = model(0).graph.unwrap();
    let mut weight = small.initializer.remove(0);
    (weight.dims, weight.raw_data) = (vec![hole as i64], None);
    let tensor = [weight.encode_to_vec(), field_before_hole(9, &[], hole)].concat();
    let graph = [small.encode_to_vec(), field_before_hole(5, &tensor, hole)].concat();
    let head = [vec![0x08, 0x08], field_before_hole(7, &graph, hole)].concat();
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "large.onnx", &head);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((head.len() + hole) as u64).unwrap();
    let source = Source::open(&path, MAP).unwrap();
    let decoded = source.decode().unwrap().graph.unwrap();
    let raw = decoded.initializer[0].raw_data.clone().unwrap();
    assert_eq!(raw.len(), hole);
    assert!(source.mapping().unwrap().contains(&raw));
    file.set_len((head.len() + hole - 5) as u64).unwrap();
    let error = Source::open(&path, MAP).unwrap().decode().unwrap_err();
    assert!(error.to_string().contains("5 bytes are missing"), "{error}");
}

fn safetensors() -> Vec<u8> {
    let header = br#"{"__metadata__":{"format":"pt"}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header].concat()
}

fn tar() -> Vec<u8> {
    let mut bytes = vec![b'a'; 512];
    bytes[257..262].copy_from_slice(b"ustar");
    bytes
}

#[test]
fn a_file_that_is_no_model_says_what_it_is() {
    let whole = model(1000).encode_to_vec();
    let mut flipped = whole.clone();
    flipped[3] ^= 0x80;
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 102400\n";
    let no_graph = ModelProto { graph: None, ..model(4) };
    let training = TrainingInfoProto { algorithm: model(4).graph, ..TrainingInfoProto::default() };
    let training = ModelProto { training_info: vec![training], ..no_graph.clone() };
    let body = AttributeProto { g: model(4).graph.map(Box::new), ..AttributeProto::default() };
    let node = NodeProto { attribute: vec![body], ..NodeProto::default() };
    let function = FunctionProto { node: vec![node], ..FunctionProto::default() };
    let functions = ModelProto { functions: vec![function], ..no_graph };
    use ErrorKind::{InvalidArgument, InvalidProtobuf};
    let cases: Vec<(&str, Vec<u8>, ErrorKind, &str)> = vec![
        ("empty", vec![], InvalidArgument, "No graph was found in the protobuf: the file is empty"),
        ("git-lfs pointer", lfs.to_vec(), InvalidProtobuf, "git lfs pull"),
        ("page", b"<!DOCTYPE html><html>404</html>".to_vec(), InvalidProtobuf, "web page"),
        ("page after space", b"\n\n  <html lang=en>".to_vec(), InvalidProtobuf, "web page"),
        ("page with a byte order mark", b"\xef\xbb\xbf<!doctype html>".to_vec(), InvalidProtobuf, "web page"),
        ("JSON", b"{\"error\": \"not found\"}".to_vec(), InvalidProtobuf, "JSON"),
        ("text", b"Entry not found".to_vec(), InvalidProtobuf, "text"),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0".to_vec(), InvalidProtobuf, "gzip"),
        ("zip", b"PK\x03\x04\x14\0\0\0".to_vec(), InvalidProtobuf, "zip"),
        ("zstd", b"\x28\xb5\x2f\xfd\x04\0".to_vec(), InvalidProtobuf, "zstd"),
        ("tar", tar(), InvalidProtobuf, "tar"),
        ("pickle", b"\x80\x02}q\x00.".to_vec(), InvalidProtobuf, "pickle"),
        ("safetensors", safetensors(), InvalidProtobuf, "safetensors"),
        ("GGUF", b"GGUF\x03\0\0\0".to_vec(), InvalidProtobuf, "GGUF"),
        ("HDF5", b"\x89HDF\r\n\x1a\n".to_vec(), InvalidProtobuf, "HDF5"),
        ("TensorFlow Lite", b"\x1c\0\0\0TFL3\0\0".to_vec(), InvalidProtobuf, "TensorFlow Lite"),
        ("NumPy", b"\x93NUMPY\x01\0".to_vec(), InvalidProtobuf, "NumPy"),
        ("zeros", vec![0; 4096], InvalidProtobuf, "zeros"),
        ("cut in the graph", whole[..600].to_vec(), InvalidProtobuf, "cut short"),
        ("cut at the last byte", whole[..whole.len() - 1].to_vec(), InvalidProtobuf, "1 bytes are missing"),
        ("no graph", b"\x08\x08".to_vec(), InvalidArgument, "No graph was found in the protobuf"),
        (
            "no graph but that of training",
            training.encode_to_vec(),
            InvalidArgument,
            "No graph was found in the protobuf",
        ),
        (
            "no graph but one in a function",
            functions.encode_to_vec(),
            InvalidArgument,
            "No graph was found in the protobuf",
        ),
        ("damaged", flipped, InvalidProtobuf, "damaged"),
        (
            "length of 2^63",
            b"\x08\x08\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f".to_vec(),
            InvalidProtobuf,
            "damaged",
        ),
        ("endless varint", vec![0xff; 64], InvalidProtobuf, "damaged"),
    ];
    let folder = TempDir::new().unwrap();
    for (name, content, kind, part) in cases {
        let path = write(&folder, "file.onnx", &content);
        for access in [READ, MAP] {
            let error = Source::open(&path, access).and_then(|source| source.decode()).unwrap_err();
            assert_eq!(error.kind(), kind, "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("file.onnx"), "{name}: {text}");
        }
        let error = Source::from_bytes(content).decode().unwrap_err();
        assert_eq!(error.kind(), kind, "{name}: {error}");
    }
}

#[test]
fn what_is_no_file_is_not_opened() {
    let folder = TempDir::new().unwrap();
    let missing = folder.path().join("missing.onnx");
    let pipe = folder.path().join("pipe.onnx");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success());
    let mut cases = vec![
        (missing, ErrorKind::NoSuchFile, "it does not exist"),
        (folder.path().to_path_buf(), ErrorKind::InvalidProtobuf, "a folder"),
    ];
    if made {
        cases.push((pipe, ErrorKind::Fail, "a pipe"));
    }
    if cfg!(target_os = "linux") {
        cases.push((PathBuf::from("/dev/zero"), ErrorKind::Fail, "a pipe, socket or device"));
    }
    for (path, kind, part) in cases {
        for access in [READ, MAP] {
            let error = Source::open(&path, access).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}

/// A message nested in itself, `depth` times: an attribute with a graph with a node with an
/// attribute ...
fn nested(depth: usize) -> Vec<u8> {
    let wrap = |tag: u8, inner: Vec<u8>| {
        let mut bytes = vec![tag << 3 | 2];
        prost::encode_length_delimiter(inner.len(), &mut bytes).unwrap();
        bytes.extend(inner);
        bytes
    };
    let graph = (0..depth).fold(Vec::new(), |graph, _| wrap(1, wrap(5, wrap(6, graph))));
    wrap(7, graph)
}

#[test]
fn deep_nesting_is_an_error_and_no_overflow() {
    assert!(Source::from_bytes(nested(20)).decode().is_ok());
    for (depth, kind, part) in [
        (2_000, ErrorKind::InvalidGraph, "limit `nesting`"),
        (40, ErrorKind::InvalidProtobuf, "at most 100 are allowed"),
    ] {
        let error = Source::from_bytes(nested(depth)).decode().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn a_file_of_empty_messages_is_refused_before_it_takes_memory() {
    // Two bytes each: nodes, attributes of one node, weights.
    let wrap = |tag: u8, inner: &[u8]| {
        let mut bytes = vec![tag << 3 | 2];
        prost::encode_length_delimiter(inner.len(), &mut bytes).unwrap();
        bytes.extend(inner);
        bytes
    };
    let nodes = wrap(7, &[0x0a, 0x00].repeat(4 << 20));
    let attributes = wrap(7, &wrap(1, &[0x2a, 0x00].repeat(4 << 20)));
    let tensors = wrap(7, &[0x2a, 0x00].repeat(4 << 20));
    for (name, bytes) in [("nodes", nodes), ("attributes", attributes), ("tensors", tensors)] {
        let error = Source::from_bytes(bytes).decode().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidProtobuf, "{name}: {error}");
        assert!(error.to_string().contains("in memory"), "{name}: {error}");
    }
    let few = wrap(7, &[0x0a, 0x00].repeat(10_000));
    assert_eq!(Source::from_bytes(few).decode().unwrap().graph.unwrap().node.len(), 10_000);
}

#[test]
fn every_prefix_of_a_model_is_an_error_or_a_model() {
    let whole = model(40).encode_to_vec();
    for length in 0..whole.len() {
        let cut = Source::from_bytes(whole[..length].to_vec());
        assert!(cut.decode().is_err(), "the first {length} bytes were taken for a model");
    }
}
