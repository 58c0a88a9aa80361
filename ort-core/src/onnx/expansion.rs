//! What a message takes in memory once it is decoded, counted before it is.
//!
//! An empty message is two bytes in a file and hundreds in memory, so a small file could claim a
//! hundred times its size. The count walks the messages as the decoder would, over the table below,
//! and skips all data. On the way it sees how deep graphs lie in one another, which is the stack
//! that decoding and loading take.

use bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto,
    StringStringEntryProto, TensorAnnotation, TensorProto, TensorShapeProto, TrainingInfoProto, TypeProto,
    ValueInfoProto, tensor_shape_proto,
};
use crate::limits::{Raise, at_most};
use crate::{Limits, Result, ensure, error};

/// What a model may take besides its file, for each byte of the file. A node with short names and
/// small attributes, of which large generated models consist, takes up to 55.
const FACTOR: u64 = 64;
/// Messages inside one another that the decoder goes through.
const DECODER_DEPTH: usize = 100;
/// Graphs inside one another that are counted; the count itself takes stack, too.
const COUNTED_GRAPHS: usize = 256;

/// A message: its size in memory, and its fields that are messages, with their places in
/// [`MESSAGES`].
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

/// Refuses a model whose messages would take out of all proportion to its file, or are nested too
/// deep. Tells how many nodes its graph has, those of inner graphs left out.
pub(super) fn check_expansion(bytes: &[u8], limits: &Limits) -> Result<usize> {
    let mut count = Count { graph_bound: limits.nesting.min(COUNTED_GRAPHS), ..Count::default() };
    count.message(bytes, MODEL, 0, 0);
    let what = || "subgraphs are nested too deep".to_string();
    at_most(count.graphs, count.graph_bound, "nesting", what)?;
    ensure!(
        count.depth <= DECODER_DEPTH,
        InvalidProtobuf,
        help = "move inner graphs into functions of the model",
        "messages are nested {} deep or more, the decoder goes {DECODER_DEPTH} deep: about 30 subgraphs",
        count.depth
    );
    let allowed = limits.bytes.max(FACTOR.saturating_mul(bytes.len() as u64));
    let taken = count.taken;
    if taken <= allowed {
        return Ok(count.nodes);
    }
    let bytes = bytes.len();
    Err(error!(
        InvalidProtobuf,
        "a file of {bytes} bytes would take {taken} bytes in memory, at most {allowed} are allowed"
    )
    .raise("bytes"))
}

/// What the messages of a file take.
#[derive(Default)]
struct Count {
    /// Bytes in memory.
    taken: u64,
    /// The most messages inside one another.
    depth: usize,
    /// Nodes of the model's own graph.
    nodes: usize,
    /// The most graphs inside one another, the model's own not counted.
    graphs: usize,
    /// More graphs inside one another are not walked.
    graph_bound: usize,
}

impl Count {
    /// Counts a message at this depth, inside so many graphs. Damage ends the count; the decoder
    /// reports it.
    fn message(&mut self, mut bytes: &[u8], message: usize, depth: usize, graphs: usize) {
        self.depth = self.depth.max(depth);
        self.graphs = self.graphs.max(graphs.saturating_sub(1));
        // Each graph adds three messages, and the types inside the last one a few more.
        if self.graphs > self.graph_bound || depth > 3 * self.graph_bound + DECODER_DEPTH {
            return;
        }
        while bytes.has_remaining() {
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
            let inner = usize::try_from(length).ok().and_then(|length| bytes.split_at_checked(length));
            let Some((inner, rest)) = inner else { break };
            bytes = rest;
            let fields = MESSAGES.get(message).map_or(&[][..], |message| message.1);
            let field = fields.iter().find(|(number, _)| *number == tag);
            if let (Some(&(_, kind)), WireType::LengthDelimited) = (field, wire_type) {
                // Lists grow by doubling.
                let size = MESSAGES.get(kind).map_or(0, |message| message.0);
                self.taken = self.taken.saturating_add(2 * size as u64);
                self.nodes += usize::from(message == GRAPH && kind == NODE && graphs == 1);
                self.message(inner, kind, depth + 1, graphs + usize::from(kind == GRAPH));
            }
        }
    }
}
