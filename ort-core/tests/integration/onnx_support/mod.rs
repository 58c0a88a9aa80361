//! Small models made of messages, over operators of a domain of their own.
// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use ort_core::dtype::TypeSet;
use ort_core::ir::Attribute;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::*;
use ort_core::onnx::{ExternalData, load_proto, tensor_to_proto};
use ort_core::spec::{AttrKind, OP, OpSpec, Upgrade, attr, many_mixed, one, opt, var};
use ort_core::tensor::Tensor;
use ort_core::{Result, ir::Graph};

/// The domain of the operators below.
pub const TEST: &str = "test";

static PAIR: OpSpec = OpSpec {
    domain: TEST,
    name: "Pair",
    since: 3,
    inputs: &[one("a", "T"), opt("b", "T")],
    outputs: &[one("y", "T"), opt("z", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[
        attr::float("alpha", 1.0),
        attr::int("axis", -1),
        attr::string("mode", "plain"),
        attr::optional("ints", AttrKind::Ints),
        attr::optional("floats", AttrKind::Floats),
        attr::optional("strings", AttrKind::Strings),
        attr::optional("tensor", AttrKind::Tensor),
        attr::optional("type", AttrKind::Type),
    ],
    internal_attrs: &[attr::int("mark", 0)],
    upgrades: &[
        Upgrade {
            before: 2,
            apply: |draft| {
                let value = draft.take_attr("slope").unwrap_or(Attribute::Float(0.5));
                draft.set_attr("alpha", value);
                Ok(())
            },
        },
        Upgrade {
            before: 3,
            apply: |draft| {
                draft.set_attr("mode", Attribute::String("upgraded".into()));
                Ok(())
            },
        },
    ],
    ..OP
};

static OLD_TRIANGLE: OpSpec = OpSpec {
    domain: TEST,
    name: "OldTriangle",
    since: 1,
    inputs: &[one("a", "T")],
    outputs: &[one("y", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    upgrades: &[Upgrade {
        before: i64::MAX,
        apply: |draft| {
            let input = draft.required(0)?;
            draft.become_op("Trilu", &[input], &[("upper", Attribute::Int(0))]);
            Ok(())
        },
    }],
    ..OP
};

static RUN: OpSpec = OpSpec {
    domain: TEST,
    name: "Run",
    since: 1,
    inputs: &[many_mixed("inputs", "T", 0)],
    outputs: &[many_mixed("outputs", "T", 1)],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::required("body", AttrKind::Graph)],
    ..OP
};

ort_core::ops![PAIR, OLD_TRIANGLE, RUN];

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        name: Some(format!("{}_{}", op.to_lowercase(), outputs.first().unwrap_or(&""))),
        op_type: Some(op.into()),
        domain: Some(if matches!(op, "Constant" | "Identity" | "Trilu") { "" } else { TEST }.into()),
        input: inputs.iter().map(|name| name.to_string()).collect(),
        output: outputs.iter().map(|name| name.to_string()).collect(),
        ..NodeProto::default()
    }
}

/// The node with one more attribute.
pub fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(attribute);
    node
}

pub fn attribute(name: &str, ty: attribute_proto::AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(ty as i32), ..AttributeProto::default() }
}

pub fn graph_attribute(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(Box::new(graph)), ..attribute(name, attribute_proto::AttributeType::Graph) }
}

pub fn reference(name: &str, to: &str, ty: attribute_proto::AttributeType) -> AttributeProto {
    AttributeProto { ref_attr_name: Some(to.into()), ..attribute(name, ty) }
}

/// A float tensor; dimensions are numbers, names, or empty for unknown ones.
pub fn value(name: &str, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = match text.parse() {
            Ok(number) => Some(dimension::Value::DimValue(number)),
            Err(_) if text.is_empty() => None,
            Err(_) => Some(dimension::Value::DimParam(text.to_string())),
        };
        Dimension { value, ..Dimension::default() }
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(1), shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

pub fn weight(name: &str, elements: &[f32]) -> TensorProto {
    tensor_to_proto(name, &Tensor::from_slice(&[elements.len()], elements).unwrap()).unwrap()
}

pub fn graph(nodes: Vec<NodeProto>, inputs: &[&str], outputs: &[&str]) -> GraphProto {
    GraphProto {
        name: Some("g".into()),
        node: nodes,
        input: inputs.iter().map(|name| value(name, &["n", "4"])).collect(),
        output: outputs.iter().map(|name| value(name, &["n", "4"])).collect(),
        ..GraphProto::default()
    }
}

pub fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) }
}

pub fn model_of(graph: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![opset("", 21), opset(TEST, 3), opset("local", 1)],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

pub fn model(nodes: Vec<NodeProto>, inputs: &[&str], outputs: &[&str]) -> ModelProto {
    model_of(graph(nodes, inputs, outputs))
}

pub fn load(model: ModelProto) -> Result<Graph> {
    load_proto(model, ExternalData::unavailable()).map(|loaded| loaded.graph)
}

/// The nodes in order: `output = Op(inputs)`.
pub fn lines(graph: &Graph) -> Vec<String> {
    let name = |id: &Option<ort_core::ir::ValueId>| match id {
        Some(id) => graph.value(*id).name.to_string(),
        None => "_".into(),
    };
    let list = |ids: &[Option<ort_core::ir::ValueId>]| ids.iter().map(name).collect::<Vec<_>>().join(", ");
    let line = |node: &ort_core::ir::Node| {
        format!("{} = {}({})", list(&node.outputs), node.spec.name, list(&node.inputs))
    };
    graph.nodes.iter().map(line).collect()
}
