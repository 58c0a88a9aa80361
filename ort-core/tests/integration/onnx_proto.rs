//! Each message has every field of the `onnx` package's, under the same number, name, type and
//! label.

use std::collections::BTreeMap;
use std::fmt::Debug;

use bytes::Bytes;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::tensor_proto::{DataLocation, DataType};
use ort_core::onnx::proto::*;
use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    messages: BTreeMap<String, Vec<Sample>>,
    enums: BTreeMap<String, BTreeMap<String, i32>>,
}

#[derive(Deserialize)]
struct Sample {
    fields: Vec<Field>,
    hex: String,
}

#[derive(Deserialize)]
struct Field {
    name: String,
    oneof: bool,
    value: Option<String>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../data/onnx_proto.json")).unwrap()
}

fn from_hex(text: &str) -> Bytes {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn camel(name: &str) -> String {
    name.split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// The fields of a message as they are on the wire, sorted: their order carries no meaning.
fn fields(mut wire: &[u8]) -> Vec<&[u8]> {
    let mut fields = Vec::new();
    while !wire.is_empty() {
        let start = wire;
        let (tag, wire_type) = decode_key(&mut wire).unwrap();
        skip_field(wire_type, tag, &mut wire, DecodeContext::default()).unwrap();
        fields.push(&start[..start.len() - wire.len()]);
    }
    fields.sort_unstable();
    fields
}

/// Decodes a sample, checks that each named field holds what the sample put there, and encodes it
/// again.
fn check<M: Message + Default + Debug>(message: &str, sample: &Sample) {
    let wire = from_hex(&sample.hex);
    let decoded = M::decode(wire.clone()).unwrap_or_else(|error| panic!("{message}: {error}"));
    let printed = format!("{decoded:?}");
    for field in &sample.fields {
        let ways = match (&field.value, field.oneof) {
            (_, true) => vec![format!("Some({}(", camel(&field.name))],
            // The one field that is text in the standard and bytes here.
            (Some(value), _) if field.name == "doc_string" => vec![format!("doc_string: Some(b{value})")],
            (Some(value), _) => {
                vec![format!("{}: Some({value})", field.name), format!("{}: [{value}, ", field.name)]
            }
            (None, _) => vec![format!("{}: Some(", field.name), format!("{}: [", field.name)],
        };
        assert!(
            ways.iter().any(|way| printed.contains(way)),
            "{message}.{} is not as expected in {printed}",
            field.name
        );
    }
    assert_eq!(
        fields(&decoded.encode_to_vec()),
        fields(&wire),
        "{message} loses or changes something: {printed}"
    );
}

type Check = fn(&str, &Sample);

#[rustfmt::skip]
const MESSAGES: &[(&str, Check)] = &[
    ("AttributeProto", check::<AttributeProto>),
    ("DeviceConfigurationProto", check::<DeviceConfigurationProto>),
    ("FunctionProto", check::<FunctionProto>),
    ("GraphProto", check::<GraphProto>),
    ("IntIntListEntryProto", check::<IntIntListEntryProto>),
    ("MapProto", check::<MapProto>),
    ("ModelProto", check::<ModelProto>),
    ("NodeDeviceConfigurationProto", check::<NodeDeviceConfigurationProto>),
    ("NodeProto", check::<NodeProto>),
    ("OperatorSetIdProto", check::<OperatorSetIdProto>),
    ("OptionalProto", check::<OptionalProto>),
    ("SequenceProto", check::<SequenceProto>),
    ("ShardedDimProto", check::<ShardedDimProto>),
    ("ShardingSpecProto", check::<ShardingSpecProto>),
    ("SimpleShardedDimProto", check::<SimpleShardedDimProto>),
    ("SparseTensorProto", check::<SparseTensorProto>),
    ("StringStringEntryProto", check::<StringStringEntryProto>),
    ("TensorAnnotation", check::<TensorAnnotation>),
    ("TensorProto", check::<TensorProto>),
    ("TensorProto.Segment", check::<tensor_proto::Segment>),
    ("TensorShapeProto", check::<TensorShapeProto>),
    ("TensorShapeProto.Dimension", check::<tensor_shape_proto::Dimension>),
    ("TrainingInfoProto", check::<TrainingInfoProto>),
    ("TypeProto", check::<TypeProto>),
    ("TypeProto.Map", check::<type_proto::Map>),
    ("TypeProto.Opaque", check::<type_proto::Opaque>),
    ("TypeProto.Optional", check::<type_proto::Optional>),
    ("TypeProto.Sequence", check::<type_proto::Sequence>),
    ("TypeProto.SparseTensor", check::<type_proto::SparseTensor>),
    ("TypeProto.Tensor", check::<type_proto::Tensor>),
    ("ValueInfoProto", check::<ValueInfoProto>),
];

#[test]
fn every_message_is_the_standards() {
    let golden = golden();
    let known: Vec<&str> = MESSAGES.iter().map(|(name, _)| *name).collect();
    let standard: Vec<&str> = golden.messages.keys().map(String::as_str).collect();
    assert_eq!(known, standard);
    for (name, check) in MESSAGES {
        for sample in &golden.messages[*name] {
            check(name, sample);
        }
    }
}

type Lookup = fn(i32) -> Option<String>;

/// The name of an enumeration's value as the standard would write it, without case and underscores.
fn name_of<E: TryFrom<i32> + Debug>(number: i32) -> Option<String> {
    E::try_from(number).ok().map(|value| format!("{value:?}").to_uppercase())
}

const ENUMERATIONS: &[(&str, Lookup)] = &[
    ("AttributeProto.AttributeType", name_of::<AttributeType>),
    ("OptionalProto.DataType", name_of::<sequence_proto::DataType>),
    ("SequenceProto.DataType", name_of::<sequence_proto::DataType>),
    ("TensorProto.DataLocation", name_of::<DataLocation>),
    ("TensorProto.DataType", name_of::<DataType>),
];

#[test]
fn every_enumeration_is_the_standards() {
    let golden = golden();
    let known: Vec<&str> = ENUMERATIONS.iter().map(|(name, _)| *name).collect();
    let standard: Vec<&str> = golden.enums.keys().map(String::as_str).collect();
    assert_eq!(known, standard);
    for (name, lookup) in ENUMERATIONS {
        let values = &golden.enums[*name];
        for (variant, number) in values {
            assert_eq!(lookup(*number), Some(variant.replace('_', "")), "{name}.{variant}");
        }
        let beyond = values.values().max().unwrap() + 1;
        assert_eq!(lookup(beyond), None, "{name} knows more than the standard");
    }
}

#[test]
fn an_enumeration_value_from_the_future_survives() {
    let tensor = TensorProto { data_type: Some(9999), ..TensorProto::default() };
    let decoded = TensorProto::decode(Bytes::from(tensor.encode_to_vec())).unwrap();
    assert_eq!(decoded.data_type, Some(9999));
}

#[test]
fn raw_data_stays_where_it_is() {
    let tensor = TensorProto { raw_data: Some(Bytes::from(vec![7; 64])), ..TensorProto::default() };
    let model = ModelProto {
        graph: Some(GraphProto { initializer: vec![tensor], ..GraphProto::default() }),
        ..ModelProto::default()
    };
    let file = Bytes::from(model.encode_to_vec());
    let decoded = ModelProto::decode(file.clone()).unwrap();
    let graph = decoded.graph.unwrap();
    let raw = graph.initializer[0].raw_data.as_ref().unwrap();
    assert!(file.as_ptr_range().contains(&raw.as_ptr()));
}
