//! Nodes that are right, from the tables of reference cases, and edits that make them wrong in one
//! or two places: they get further than junk does.

use bytes::Bytes;
use ort_runtime::DType;
use ort_runtime::dtype::{CastOptions, TypeSet, convert};
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::*;
use ort_runtime::onnx::tensor_to_proto;
use ort_runtime::spec::{AttrKind, OpSpec, Registry};
use ort_runtime::tensor::Tensor;
use serde_json::Value as Json;

use crate::hostile_support::{Dice, EDGES, TEXTS};

/// An input: its type, shape and elements as numbers or texts.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    dtype: DType,
    shape: Vec<usize>,
    elements: Elements,
    constant: bool,
}

#[derive(Clone, Debug)]
enum Elements {
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Texts(Vec<String>),
}

/// A node that is valid until it is edited.
#[derive(Clone, Debug)]
pub(crate) struct Seed {
    pub(crate) name: String,
    spec: &'static OpSpec,
    opset: i64,
    attributes: Vec<AttributeProto>,
    operands: Vec<Option<Operand>>,
    outputs: Vec<bool>,
}

/// Every entry of the tables that needs no graph, once for the newest of its opsets.
pub(crate) fn all() -> Vec<Seed> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../xtask/data/reference");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut seeds = Vec::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "json")) {
        let table: Vec<Json> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        seeds.extend(table.iter().enumerate().filter_map(|(place, entry)| read(entry, place)));
    }
    seeds
}

fn text<'a>(entry: &'a Json, key: &str) -> &'a str {
    entry.get(key).and_then(Json::as_str).unwrap_or_default()
}

fn read(entry: &Json, place: usize) -> Option<Seed> {
    let (domain, op) = (text(entry, "domain"), text(entry, "op"));
    let spec = Registry::global().unwrap().find(domain, op)?;
    let name = format!("{op} {} {place}", text(entry, "name"));
    let opset = entry.get("opsets")?.as_array()?.last()?.as_i64()?;
    let mut dice = Dice::new(&name, 0);
    let mut attributes = Vec::new();
    for (name, value) in entry.get("attributes").and_then(Json::as_object).into_iter().flatten() {
        attributes.push(attribute(spec, name, value, &mut dice)?);
    }
    let inputs = entry.get("inputs")?.as_array()?;
    let operand =
        |value: &Json| if value.is_null() { Some(None) } else { operand(value, &mut dice).map(Some) };
    let operands: Option<Vec<Option<Operand>>> = inputs.iter().map(operand).collect();
    let outputs = match entry.get("outputs") {
        Some(Json::Array(wanted)) => wanted.iter().map(|wanted| wanted.as_bool().unwrap_or(true)).collect(),
        Some(Json::Number(count)) => vec![true; count.as_u64()? as usize],
        _ => vec![true],
    };
    Some(Seed { name, spec, opset, attributes, operands: operands?, outputs })
}

fn operand(value: &Json, dice: &mut Dice) -> Option<Operand> {
    let name = match text(value, "type") {
        "float32" => "float",
        "float64" => "double",
        name => name,
    };
    let dtype = DType::from_name(name)?;
    let mut given = Vec::new();
    flatten(value.get("values"), &mut given);
    let shape = match (value.get("shape").and_then(Json::as_array), value.get("values")) {
        (Some(sizes), _) => sizes.iter().map(|size| size.as_u64().map(|size| size as usize)).collect(),
        (None, Some(Json::Array(_))) => Some(vec![given.len()]),
        _ => Some(Vec::new()),
    }?;
    let count: usize = shape.iter().product();
    let elements = if dtype == DType::String {
        let text = |place: usize| given.get(place).and_then(Json::as_str).unwrap_or("a").to_string();
        Elements::Texts((0..count).map(text).collect())
    } else if TypeSet::ALL_FLOATS.contains(dtype) {
        let float = |place: usize| given.get(place).map_or(dice.below(9) as f64 / 4.0 - 1.0, number);
        Elements::Floats((0..count).map(float).collect())
    } else {
        let bound =
            |place: usize| value.get("range").and_then(|range| range.get(place)).and_then(Json::as_i64);
        let (low, high) = (bound(0).unwrap_or(0), bound(1).unwrap_or(10));
        let span = (high - low).max(1) as usize;
        let int = |place: usize| given.get(place).map_or(low + dice.below(span) as i64, |n| number(n) as i64);
        Elements::Ints((0..count).map(int).collect())
    };
    let constant = value.get("constant").and_then(Json::as_bool).unwrap_or(false);
    Some(Operand { dtype, shape, elements, constant })
}

fn number(value: &Json) -> f64 {
    match value {
        Json::Bool(flag) => f64::from(u8::from(*flag)),
        Json::String(text) => text.parse().unwrap_or(0.0),
        value => value.as_f64().unwrap_or(0.0),
    }
}

fn flatten(value: Option<&Json>, into: &mut Vec<Json>) {
    match value {
        Some(Json::Array(values)) => values.iter().for_each(|value| flatten(Some(value), into)),
        Some(value) => into.push(value.clone()),
        None => {}
    }
}

fn attribute(spec: &OpSpec, name: &str, value: &Json, dice: &mut Dice) -> Option<AttributeProto> {
    let mut proto = AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    let kind = spec.attrs.iter().find(|attr| attr.name == name).map(|attr| attr.kind);
    let floats = matches!(kind, Some(AttrKind::Float | AttrKind::Floats));
    let is_float = |value: &Json| floats || value.is_f64();
    let ty = match value {
        Json::Number(_) if is_float(value) => {
            proto.f = Some(number(value) as f32);
            AttributeType::Float
        }
        Json::Number(_) => {
            proto.i = value.as_i64();
            AttributeType::Int
        }
        Json::String(text) => {
            proto.s = Some(Bytes::from(text.clone()));
            AttributeType::String
        }
        Json::Array(values) if values.first().is_some_and(Json::is_string) => {
            proto.strings = values
                .iter()
                .map(|text| Bytes::from(text.as_str().unwrap_or_default().to_string()))
                .collect();
            AttributeType::Strings
        }
        Json::Array(values) if values.iter().any(is_float) || kind == Some(AttrKind::Floats) => {
            proto.floats = values.iter().map(|value| number(value) as f32).collect();
            AttributeType::Floats
        }
        Json::Array(values) => {
            proto.ints = values.iter().filter_map(Json::as_i64).collect();
            AttributeType::Ints
        }
        Json::Object(object) => {
            let tensor = operand(object.get("tensor")?, dice)?;
            proto.t = Some(Box::new(tensor_to_proto("", &tensor.tensor()).unwrap()));
            AttributeType::Tensor
        }
        _ => return None,
    };
    proto.r#type = Some(ty as i32);
    Some(proto)
}

impl Operand {
    /// The tensor; elements come again where the shape asks for more than there are.
    fn tensor(&self) -> Tensor {
        let count: usize = self.shape.iter().product();
        let (from, source): (DType, Vec<u8>) = match &self.elements {
            Elements::Texts(texts) => {
                let texts = texts.iter().cloned().chain(std::iter::repeat("a".into())).take(count).collect();
                return Tensor::from_strings(&self.shape, texts).unwrap();
            }
            Elements::Floats(floats) => {
                let floats = floats.iter().copied().chain(std::iter::repeat(0.5)).take(count);
                (DType::F64, floats.flat_map(f64::to_le_bytes).collect())
            }
            Elements::Ints(ints) => {
                let ints = ints.iter().copied().chain(std::iter::repeat(1)).take(count);
                (DType::I64, ints.flat_map(i64::to_le_bytes).collect())
            }
        };
        let mut bytes = vec![0; self.dtype.byte_len(count).unwrap()];
        convert(from, &source, self.dtype, &mut bytes, count, CastOptions::default()).unwrap();
        Tensor::from_bytes(self.dtype, &self.shape, bytes.into()).unwrap().to_owned_copy().unwrap()
    }
}

impl Seed {
    /// Makes it wrong in one place, as the dice have it.
    pub(crate) fn edit(&mut self, dice: &mut Dice) {
        let (inputs, attributes) = (self.operands.len(), self.attributes.len());
        match dice.below(8) {
            0..3 if inputs > 0 => {
                let at = dice.below(inputs);
                if let Some(operand) = &mut self.operands[at] {
                    edit_elements(operand, dice);
                }
            }
            3..5 if inputs > 0 => {
                let at = dice.below(inputs);
                if let Some(operand) = &mut self.operands[at] {
                    edit_shape(operand, dice);
                }
            }
            5 if inputs > 0 => {
                let at = dice.below(inputs);
                match &mut self.operands[at] {
                    Some(operand) if dice.chance(60) => operand.constant = !operand.constant,
                    operand => *operand = None,
                }
            }
            _ if attributes > 0 => {
                let at = dice.below(attributes);
                if dice.chance(15) {
                    self.attributes.remove(at);
                } else {
                    edit_attribute(&mut self.attributes[at], dice);
                }
            }
            _ => {}
        }
    }

    /// The model of the node, and what its inputs are given.
    pub(crate) fn model(&self) -> (ModelProto, Vec<(String, ort_runtime::Value)>) {
        let (mut graph, mut given) = (GraphProto::default(), Vec::new());
        let mut node = NodeProto {
            name: Some("node".into()),
            op_type: Some(self.spec.name.into()),
            domain: Some(self.spec.domain.into()),
            attribute: self.attributes.clone(),
            ..NodeProto::default()
        };
        for (index, operand) in self.operands.iter().enumerate() {
            let Some(operand) = operand else {
                node.input.push(String::new());
                continue;
            };
            let name = format!("x{index}");
            node.input.push(name.clone());
            let tensor = operand.tensor();
            if operand.constant {
                graph.initializer.push(tensor_to_proto(&name, &tensor).unwrap());
                continue;
            }
            let dim = |&size: &usize| Dimension {
                value: Some(dimension::Value::DimValue(size as i64)),
                ..Dimension::default()
            };
            let shape = Some(TensorShapeProto { dim: operand.shape.iter().map(dim).collect() });
            let ty = type_proto::Tensor { elem_type: Some(operand.dtype.onnx_code()), shape };
            let ty = TypeProto { value: Some(type_proto::Value::TensorType(ty)), ..TypeProto::default() };
            graph.input.push(ValueInfoProto {
                name: Some(name.clone()),
                r#type: Some(ty),
                ..Default::default()
            });
            given.push((name, tensor.into()));
        }
        for (index, wanted) in self.outputs.iter().enumerate() {
            let name = if *wanted { format!("y{index}") } else { String::new() };
            node.output.push(name.clone());
            if *wanted {
                graph.output.push(ValueInfoProto { name: Some(name), ..ValueInfoProto::default() });
            }
        }
        graph.node = vec![node];
        let import = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.into()),
            version: Some(version),
        };
        let mut opset_import = vec![import(self.spec.domain, self.opset)];
        if !self.spec.domain.is_empty() {
            opset_import.push(import("", 21));
        }
        (
            ModelProto { ir_version: Some(10), opset_import, graph: Some(graph), ..ModelProto::default() },
            given,
        )
    }
}

fn edit_elements(operand: &mut Operand, dice: &mut Dice) {
    let whole = dice.chance(20);
    match &mut operand.elements {
        Elements::Ints(ints) if !ints.is_empty() => {
            let value = if dice.chance(30) { dice.below(9) as i64 - 1 } else { dice.pick(EDGES) };
            // The conversion wraps, so that narrow types get edges of their own.
            match whole {
                true => ints.fill(value),
                false => *dice.pick_mut(ints) = value,
            }
        }
        Elements::Floats(floats) if !floats.is_empty() => {
            let value = dice.float();
            match whole {
                true => floats.fill(value),
                false => *dice.pick_mut(floats) = value,
            }
        }
        Elements::Texts(texts) if !texts.is_empty() => {
            *dice.pick_mut(texts) = dice.pick(TEXTS).to_string();
        }
        _ => {}
    }
}

fn edit_shape(operand: &mut Operand, dice: &mut Dice) {
    let shape = &mut operand.shape;
    match dice.below(6) {
        0 => shape.push(1),
        1 => shape.insert(0, 2),
        2 => drop(shape.pop()),
        3 if shape.len() > 1 => shape.swap(0, 1),
        _ if !shape.is_empty() => {
            let size = *dice.pick_mut(shape);
            *dice.pick_mut(shape) = dice.pick(&[0, 0, 1, size + 1, size.saturating_sub(1), 2 * size, 7]);
        }
        _ => {}
    }
}

fn edit_attribute(attribute: &mut AttributeProto, dice: &mut Dice) {
    let int = if dice.chance(40) { dice.below(9) as i64 - 1 } else { dice.pick(EDGES) };
    if let Some(value) = &mut attribute.i {
        *value = int;
    } else if let Some(value) = &mut attribute.f {
        *value = dice.float() as f32;
    } else if attribute.s.is_some() {
        attribute.s = Some(Bytes::from(dice.pick(TEXTS)));
    } else if !attribute.ints.is_empty() {
        match dice.below(4) {
            0 => attribute.ints.push(int),
            1 => drop(attribute.ints.pop()),
            _ => *dice.pick_mut(&mut attribute.ints) = int,
        }
    } else if !attribute.floats.is_empty() {
        match dice.below(4) {
            0 => attribute.floats.push(1.0),
            1 => drop(attribute.floats.pop()),
            _ => *dice.pick_mut(&mut attribute.floats) = dice.float() as f32,
        }
    } else if !attribute.strings.is_empty() {
        match dice.below(3) {
            0 => drop(attribute.strings.pop()),
            _ => *dice.pick_mut(&mut attribute.strings) = Bytes::from(dice.pick(TEXTS)),
        }
    }
}
