//! Small models made of messages, and the binary run on them.
// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ort_runtime::Tensor;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::*;
use ort_runtime::onnx::tensor_to_proto;
use prost::Message;

/// What a finished command left behind.
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub time: Duration,
}

impl Finished {
    /// The last line on standard error.
    pub fn error(&self) -> &str {
        self.stderr.lines().last().unwrap_or_default()
    }

    /// The JSON on standard output, which is one line.
    pub fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        assert_eq!(self.stdout.lines().count(), 1, "one line: {}", self.stdout);
        serde_json::from_str(&self.stdout).expect("JSON")
    }
}

pub fn ort() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ort"))
}

/// Runs the binary; one that takes longer than `limit` is ended and fails the test.
pub fn run_within(limit: Duration, args: &[&str]) -> Finished {
    let start = Instant::now();
    let mut child =
        ort().args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut read = [None, None];
    read[0] = child.stdout.take().map(|pipe| drain(Box::new(pipe)));
    read[1] = child.stderr.take().map(|pipe| drain(Box::new(pipe)));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > limit {
            child.kill().unwrap();
            panic!("{args:?} took longer than {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let time = start.elapsed();
    let [stdout, stderr] = read.map(|thread| thread.unwrap().join().unwrap());
    Finished { code: status.code(), stdout, stderr, time }
}

fn drain(mut pipe: Box<dyn Read + Send>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

pub fn run(args: &[&str]) -> Finished {
    run_within(Duration::from_secs(60), args)
}

/// Asserts a failure as all commands fail: exit code 1, a last line `error: ...`, no panic.
pub fn assert_fails(name: &str, finished: &Finished, words: &[&str]) {
    assert_eq!(finished.code, Some(1), "{name}: {} {}", finished.stdout, finished.stderr);
    let error = finished.error();
    assert!(error.starts_with("error: "), "{name}: {}", finished.stderr);
    for word in words {
        assert!(error.contains(word), "{name}: `{word}` is missing in: {error}");
    }
    assert!(
        !finished.stderr.contains("panick") && !error.contains("internal error"),
        "{name}: {}",
        finished.stderr
    );
}

/// Asserts a wrong command line: exit code 2, and an error with these words.
pub fn assert_wrong_usage(finished: &Finished, words: &[&str]) {
    assert_eq!(finished.code, Some(2), "{words:?}: {} {}", finished.stdout, finished.stderr);
    for word in ["error: "].iter().chain(words) {
        assert!(finished.stderr.contains(word), "`{word}` is missing in: {}", finished.stderr);
    }
}

/// A folder for one test's files.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns its path as text.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        text(&path)
    }

    pub fn model(&self, name: &str, model: &ModelProto) -> String {
        self.write(name, model.encode_to_vec())
    }

    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_string()
}

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        name: Some(format!("{}_{}", op.to_lowercase(), outputs[0])),
        op_type: Some(op.into()),
        input: inputs.iter().map(|name| name.to_string()).collect(),
        output: outputs.iter().map(|name| name.to_string()).collect(),
        ..NodeProto::default()
    }
}

pub fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(attribute);
    node
}

fn attribute(name: &str, ty: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(ty as i32), ..AttributeProto::default() }
}

pub fn graph_attribute(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(Box::new(graph)), ..attribute(name, AttributeType::Graph) }
}

pub fn int_attribute(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
}

/// A value of a type by ONNX's code (1 float, 7 int64, 9 bool); dimensions are numbers or names.
pub fn value(name: &str, code: i32, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = match text.parse() {
            Ok(number) => dimension::Value::DimValue(number),
            Err(_) => dimension::Value::DimParam(text.to_string()),
        };
        Dimension { value: Some(value), ..Dimension::default() }
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(code), shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// An output of whatever shape comes out.
pub fn open_value(name: &str, code: i32) -> ValueInfoProto {
    let tensor = type_proto::Tensor { elem_type: Some(code), shape: None };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

pub fn ints(name: &str, shape: &[usize], values: &[i64]) -> TensorProto {
    tensor_to_proto(name, &Tensor::from_slice(shape, values).unwrap()).unwrap()
}

pub fn floats(name: &str, shape: &[usize], values: &[f32]) -> TensorProto {
    tensor_to_proto(name, &Tensor::from_slice(shape, values).unwrap()).unwrap()
}

pub fn bools(name: &str, values: &[bool]) -> TensorProto {
    tensor_to_proto(name, &Tensor::from_bools(&[], values).unwrap()).unwrap()
}

pub fn graph(
    nodes: Vec<NodeProto>,
    inputs: Vec<ValueInfoProto>,
    outputs: Vec<ValueInfoProto>,
    weights: Vec<TensorProto>,
) -> GraphProto {
    GraphProto {
        name: Some("g".into()),
        node: nodes,
        input: inputs,
        output: outputs,
        initializer: weights,
        ..GraphProto::default()
    }
}

pub fn model(graph: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(21) }],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

/// y = Relu(x) + x for x float[n, 4].
pub fn small() -> ModelProto {
    model(graph(
        vec![node("Relu", &["x"], &["r"]), node("Add", &["r", "x"], &["y"])],
        vec![value("x", 1, &["n", "4"])],
        vec![value("y", 1, &["n", "4"])],
        vec![],
    ))
}

/// The bytes of a `.npy` file.
pub fn npy(dtype: &str, shape: &str, bytes: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(bytes);
    file
}

pub fn npy_floats(shape: &str, values: &[f32]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    npy("<f4", shape, &bytes)
}
