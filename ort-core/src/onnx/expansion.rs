//! What a message takes in memory once it is decoded, counted before it is.
//!
//! An empty message is two bytes in a file and hundreds in memory, so a small file could claim a hundred times its
//! size. The count walks the messages as the decoder would, over the table below, and skips all data.

use bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto,
    StringStringEntryProto, TensorAnnotation, TensorProto, TensorShapeProto, TrainingInfoProto, TypeProto,
    ValueInfoProto, tensor_shape_proto,
};
use crate::limits::Raise;
use crate::{Result, error};

/// What a model may take besides its file, for each byte of the file. A node with short names and small attributes, of
/// which large generated models consist, takes up to 55.
const FACTOR: u64 = 64;
/// Deeper messages are refused by the decoder.
const DEPTH: usize = 100;

/// A message: its size in memory, and its fields that are messages, with their places in [`MESSAGES`].
struct Message(usize, &'static [(u32, usize)]);

const MODEL: usize = 0;
const GRAPH: usize = 1;
const NODE: usize = 2;
const ATTRIBUTE: usize = 3;
const TENSOR: usize = 4;
const SPARSE: usize = 5;
const VALUE_INFO: usize = 6;
const TYPE: usize = 7;
const TENSOR_TYPE: usize = 8;
const NESTED_TYPE: usize = 9;
const SHAPE: usize = 10;
const DIMENSION: usize = 11;
const ENTRY: usize = 12;
const FUNCTION: usize = 13;
const TRAINING: usize = 14;
const ANNOTATION: usize = 15;
const MAP_TYPE: usize = 16;

#[rustfmt::skip]
const MESSAGES: [Message; 17] = [
    Message(size_of::<ModelProto>(), &[(7, GRAPH), (8, ENTRY), (14, ENTRY), (20, TRAINING), (25, FUNCTION), (26, ANNOTATION)]),
    Message(size_of::<GraphProto>(), &[(1, NODE), (5, TENSOR), (11, VALUE_INFO), (12, VALUE_INFO), (13, VALUE_INFO), (14, ANNOTATION), (15, SPARSE), (16, ENTRY)]),
    Message(size_of::<NodeProto>(), &[(1, ENTRY), (2, ENTRY), (5, ATTRIBUTE), (9, ENTRY), (10, ANNOTATION)]),
    Message(size_of::<AttributeProto>(), &[(5, TENSOR), (6, GRAPH), (9, ENTRY), (10, TENSOR), (11, GRAPH), (14, TYPE), (15, TYPE), (22, SPARSE), (23, SPARSE)]),
    Message(size_of::<TensorProto>(), &[(6, ENTRY), (13, ENTRY), (16, ENTRY)]),
    Message(size_of::<SparseTensorProto>(), &[(1, TENSOR), (2, TENSOR)]),
    Message(size_of::<ValueInfoProto>(), &[(2, TYPE), (4, ENTRY)]),
    Message(size_of::<TypeProto>(), &[(1, TENSOR_TYPE), (4, NESTED_TYPE), (5, MAP_TYPE), (8, TENSOR_TYPE), (9, NESTED_TYPE)]),
    Message(0, &[(2, SHAPE)]),
    Message(0, &[(1, TYPE)]),
    Message(size_of::<TensorShapeProto>(), &[(1, DIMENSION)]),
    Message(size_of::<tensor_shape_proto::Dimension>(), &[]),
    // Also stands for what is as small: operator set ids, and strings of a list.
    Message(size_of::<StringStringEntryProto>(), &[]),
    Message(size_of::<FunctionProto>(), &[(4, ENTRY), (5, ENTRY), (6, ENTRY), (7, NODE), (9, ENTRY), (11, ATTRIBUTE), (12, VALUE_INFO), (14, ENTRY)]),
    Message(size_of::<TrainingInfoProto>(), &[(1, GRAPH), (2, GRAPH), (3, ENTRY), (4, ENTRY)]),
    // Also stands for device annotations, whose lists are as small.
    Message(size_of::<TensorAnnotation>(), &[(2, ENTRY), (3, ENTRY)]),
    Message(0, &[(2, TYPE)]),
];

/// Refuses a model whose messages would take out of all proportion to its file.
pub(super) fn check_expansion(bytes: &[u8], allowed: u64) -> Result<()> {
    let allowed = allowed.max(FACTOR.saturating_mul(bytes.len() as u64));
    let taken = expansion(bytes, MODEL, 0);
    if taken <= allowed {
        return Ok(());
    }
    let bytes = bytes.len();
    Err(error!(
        InvalidProtobuf,
        "a file of {bytes} bytes would take {taken} bytes in memory, at most {allowed} are allowed"
    )
    .raise("bytes"))
}

#[allow(clippy::indexing_slicing, reason = "messages are constants below the length of the table")]
/// The bytes that the messages inside `bytes` take. Damage ends the count; the decoder reports it.
fn expansion(mut bytes: &[u8], message: usize, depth: usize) -> u64 {
    let mut taken = 0;
    while depth < DEPTH && bytes.has_remaining() {
        let Ok((tag, wire_type)) = decode_key(&mut bytes) else { break };
        let length = match wire_type {
            WireType::Varint if decode_varint(&mut bytes).is_ok() => 0,
            WireType::ThirtyTwoBit => 4,
            WireType::SixtyFourBit => 8,
            WireType::LengthDelimited => match decode_varint(&mut bytes) {
                Ok(length) => length,
                Err(_) => break,
            },
            _ => break,
        };
        let Some((inner, rest)) =
            usize::try_from(length).ok().and_then(|length| bytes.split_at_checked(length))
        else {
            break;
        };
        bytes = rest;
        let field = MESSAGES[message].1.iter().find(|(number, _)| *number == tag);
        if let (Some(&(_, inner_message)), WireType::LengthDelimited) = (field, wire_type) {
            // Lists grow by doubling.
            taken += 2 * MESSAGES[inner_message].0 as u64 + expansion(inner, inner_message, depth + 1);
        }
    }
    taken
}
