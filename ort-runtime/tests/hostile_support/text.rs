//! Models as a few lines of text, so that a broken one is quickly written and quickly read.
//!
//! ```text
//! input x float[2,n]          also `output`; the type may be left out
//! feed k int64[2] 1 2         an input, and what the run gives it
//! const k int64[2] 1 2        numbers, or `strings a b`; `zeros 7` is 7 bytes whatever the shape says
//! sparse s float[9] 1 2 @ 3 4 values and their indices
//! external w float[2] location=w.bin offset=0
//! y, z = Op(x, _, k) axis=-1 pads=[0,1] alpha=0.5 mode='edge' body=@inner
//! graph inner ... end         a graph for attributes; lines as above
//! function local.F(a) -> (b) ... end
//! opset 21, domain ai.onnx.ml 3, ir 10
//! deadline 300                milliseconds that the run has, for what would never end
//! ```

use std::time::Duration;

use bytes::Bytes;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::*;
use ort_runtime::onnx::{ExternalData, tensor_from_proto};
use ort_runtime::{DType, Value};

/// The model that the lines describe.
pub(crate) fn model(text: &str) -> ModelProto {
    let opset =
        |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
    let mut model = ModelProto {
        ir_version: Some(10),
        opset_import: vec![opset("", 21), opset("local", 1), opset("com.microsoft", 1)],
        ..ModelProto::default()
    };
    let mut open = vec![GraphProto { name: Some("main".into()), ..GraphProto::default() }];
    let mut function: Option<FunctionProto> = None;
    let mut inner: Vec<GraphProto> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "opset" => model.opset_import[0].version = Some(rest.parse().unwrap()),
            "deadline" => {}
            "ir" => model.ir_version = Some(rest.parse().unwrap()),
            "domain" => {
                let (domain, version) = rest.split_once(' ').unwrap();
                model.opset_import.push(opset(domain, version.parse().unwrap()));
            }
            "graph" => open.push(GraphProto { name: Some(rest.into()), ..GraphProto::default() }),
            "function" => {
                function = Some(function_of(rest));
                open.push(GraphProto::default());
            }
            "end" => {
                let graph = open.pop().unwrap();
                match function.take() {
                    Some(mut function) => {
                        function.node = graph.node;
                        model.functions.push(function);
                    }
                    None => inner.push(graph),
                }
            }
            _ => statement(open.last_mut().unwrap(), word, rest, line, &inner),
        }
    }
    model.graph = open.pop();
    model
}

/// What the lines give to inputs.
pub(crate) fn feeds(text: &str) -> Vec<(String, Value)> {
    let feed = |line: &str| {
        let (name, rest) = line.trim().strip_prefix("feed ")?.split_once(' ')?;
        let tensor = tensor_from_proto(constant(name, rest), &mut ExternalData::unavailable()).unwrap();
        Some((name.to_string(), Value::Tensor(tensor)))
    };
    text.lines().filter_map(feed).collect()
}

/// How long the run of the lines may take, where they say so.
pub(crate) fn deadline(text: &str) -> Option<Duration> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix("deadline "))?;
    Some(Duration::from_millis(line.parse().unwrap()))
}

fn function_of(text: &str) -> FunctionProto {
    let (head, outputs) = text.split_once("->").unwrap();
    let (name, inputs) = head.split_once('(').unwrap();
    let (domain, name) = name.rsplit_once('.').unwrap();
    FunctionProto {
        domain: Some(domain.trim().into()),
        name: Some(name.into()),
        input: names(inputs),
        output: names(outputs),
        ..FunctionProto::default()
    }
}

fn names(text: &str) -> Vec<String> {
    let text = text.trim().trim_matches(['(', ')']);
    let name = |name: &str| if name == "_" { String::new() } else { name.to_string() };
    text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(name).collect()
}

fn statement(graph: &mut GraphProto, word: &str, rest: &str, line: &str, inner: &[GraphProto]) {
    let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    match word {
        "input" => graph.input.push(value(name, rest)),
        "feed" => {
            let ty = rest.split_once(' ').map_or(rest, |(ty, _)| ty);
            graph.input.push(value(name, ty));
        }
        "output" => graph.output.push(value(name, rest)),
        "const" => graph.initializer.push(constant(name, rest)),
        "sparse" => {
            let (values, indices) = rest.split_once('@').unwrap();
            let mut values = constant(name, values.trim());
            let dims = std::mem::take(&mut values.dims);
            let count = values.int64_data.len() + values.float_data.len();
            values.dims = vec![count as i64];
            let indices: Vec<i64> =
                indices.split_whitespace().map(|number| number.parse().unwrap()).collect();
            let indices = TensorProto {
                data_type: Some(7),
                dims: vec![indices.len() as i64],
                int64_data: indices,
                ..TensorProto::default()
            };
            let sparse = SparseTensorProto { values: Some(values), indices: Some(indices), dims };
            graph.sparse_initializer.push(sparse);
        }
        "external" => {
            let (ty, entries) = rest.split_once(' ').unwrap_or((rest, ""));
            let entry = |entry: &str| {
                let (key, value) = entry.split_once('=').unwrap();
                StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) }
            };
            graph.initializer.push(TensorProto {
                data_location: Some(1),
                external_data: entries.split_whitespace().map(entry).collect(),
                ..constant(name, ty)
            });
        }
        _ => graph.node.push(node(line, inner)),
    }
}

/// `float[2,n]`: the code and the dimensions.
fn type_of(text: &str) -> (i32, Option<Vec<String>>) {
    let (dtype, dims) = text.split_once('[').map_or((text, None), |(dtype, dims)| (dtype, Some(dims)));
    let code = dtype.parse().ok().or_else(|| DType::from_name(dtype).map(DType::onnx_code));
    let split = |dims: &str| {
        dims.trim_end_matches(']').split(',').filter(|dim| !dim.is_empty()).map(str::to_string).collect()
    };
    (code.unwrap_or_else(|| panic!("no type {dtype}")), dims.map(split))
}

fn value(name: &str, ty: &str) -> ValueInfoProto {
    let mut info = ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() };
    if !ty.is_empty() {
        let (code, dims) = type_of(ty);
        let dim = |text: &String| {
            let number = text.parse().map(dimension::Value::DimValue);
            let value = number.unwrap_or_else(|_| dimension::Value::DimParam(text.clone()));
            Dimension { value: Some(value), ..Dimension::default() }
        };
        let shape = dims.map(|dims| TensorShapeProto { dim: dims.iter().map(dim).collect() });
        let tensor = type_proto::Value::TensorType(type_proto::Tensor { elem_type: Some(code), shape });
        info.r#type = Some(TypeProto { value: Some(tensor), ..TypeProto::default() });
    }
    info
}

fn constant(name: &str, text: &str) -> TensorProto {
    let (ty, elements) = text.split_once(' ').unwrap_or((text, ""));
    let (code, dims) = type_of(ty);
    let dims = dims.unwrap_or_default();
    let mut tensor = TensorProto {
        name: Some(name.into()),
        data_type: Some(code),
        dims: dims.iter().map(|dim| dim.parse().unwrap()).collect(),
        ..TensorProto::default()
    };
    let words: Vec<&str> = elements.split_whitespace().collect();
    match (words.as_slice(), code) {
        (["zeros", count], _) => tensor.raw_data = Some(Bytes::from(vec![0; count.parse().unwrap()])),
        (["strings", words @ ..], _) => {
            tensor.string_data = words.iter().map(|word| Bytes::from(word.to_string())).collect();
        }
        (["latin1", words @ ..], _) => {
            tensor.string_data = words.iter().map(|_| Bytes::from_static(b"caf\xe9")).collect();
        }
        (["ones"], 1) => tensor.float_data = vec![1.0; dims_product(&tensor.dims)],
        (["ones"], 7) => tensor.int64_data = vec![1; dims_product(&tensor.dims)],
        (["ones"], _) => tensor.int32_data = vec![1; dims_product(&tensor.dims)],
        (words, 1) => tensor.float_data = words.iter().map(|word| word.parse().unwrap()).collect(),
        (words, 11) => tensor.double_data = words.iter().map(|word| word.parse().unwrap()).collect(),
        (words, 7) => tensor.int64_data = words.iter().map(|word| word.parse().unwrap()).collect(),
        (words, _) => tensor.int32_data = words.iter().map(|word| word.parse().unwrap()).collect(),
    }
    tensor
}

fn dims_product(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

fn node(line: &str, inner: &[GraphProto]) -> NodeProto {
    let (outputs, call) = line.split_once(" = ").unwrap_or_else(|| panic!("what is {line}?"));
    let (operator, rest) = call.split_once('(').unwrap();
    let (inputs, attributes) = rest.split_once(')').unwrap();
    let (domain, op) = operator.trim().rsplit_once('.').unwrap_or(("", operator.trim()));
    NodeProto {
        op_type: Some(op.into()),
        domain: Some(domain.into()),
        input: names(inputs),
        output: names(outputs),
        attribute: attributes.split_whitespace().map(|text| attribute(text, inner)).collect(),
        ..NodeProto::default()
    }
}

fn attribute(text: &str, inner: &[GraphProto]) -> AttributeProto {
    let (name, value) = text.split_once('=').unwrap();
    let mut attribute = AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    let numbers = value.trim_matches(['[', ']']).split(',').filter(|number| !number.is_empty());
    let ty = if let Some(graph) = value.strip_prefix('@') {
        let graph = inner.iter().find(|other| other.name() == graph);
        attribute.g = Some(Box::new(graph.unwrap_or_else(|| panic!("no graph {value}")).clone()));
        AttributeType::Graph
    } else if value.starts_with("['") {
        attribute.strings = numbers.map(|text| Bytes::from(text.trim_matches('\'').to_string())).collect();
        AttributeType::Strings
    } else if value.starts_with('\'') {
        attribute.s = Some(Bytes::from(value.trim_matches('\'').to_string()));
        AttributeType::String
    } else if value.starts_with('[') && value.contains('.') {
        attribute.floats = numbers.map(|number| number.parse().unwrap()).collect();
        AttributeType::Floats
    } else if value.starts_with('[') {
        attribute.ints = numbers.map(|number| number.parse().unwrap()).collect();
        AttributeType::Ints
    } else if value.contains('.') {
        attribute.f = Some(value.parse().unwrap());
        AttributeType::Float
    } else {
        attribute.i = Some(value.parse().unwrap());
        AttributeType::Int
    };
    attribute.r#type = Some(ty as i32);
    attribute
}
