//! Decompression-bomb check: bounds the memory of a decoded message before decoding it.
//!
//! An empty message takes two bytes in a file and hundreds in memory, so a small file could claim a
//! hundred times its size. The check walks the messages as the decoder would, using the table
//! below, and skips all data. It also measures how deep graphs nest, because decoding and loading
//! recurse.

use bytes::Buf;
use ort_alloc::exact_bytes;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto,
    StringStringEntryProto, TensorAnnotation, TensorProto, TensorShapeProto, TrainingInfoProto, TypeProto,
    ValueInfoProto, tensor_shape_proto,
};
use crate::limits::{Raise, at_most};
use crate::{Limits, Result, ensure, error};

/// The memory allowed per byte of the file. Nodes with short names and small attributes, which
/// large generated models consist of, take up to 55.
const FACTOR: u64 = 64;
/// The deepest nesting of messages that the decoder accepts.
const DECODER_DEPTH: usize = 100;
/// The deepest nesting of graphs that is counted. The counter recurses too, so it needs a bound
/// itself.
const COUNTED_GRAPHS: usize = 256;

/// A message type: its size in memory, and its fields that are messages, as indices into
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
    // Size 0: these types are stored inside of `TypeProto`, whose size contains them.
    Message(0, &[(2, SHAPE)]),
    Message(0, &[(1, TYPE)]),
    Message(size_of::<TensorShapeProto>(), &[(1, DIMENSION)]),
    Message(size_of::<tensor_shape_proto::Dimension>(), &[]),
    // Also stands for other small list elements: operator set ids and strings.
    Message(size_of::<StringStringEntryProto>(), &[]),
    Message(size_of::<FunctionProto>(), &[(4, ENTRY), (5, ENTRY), (6, ENTRY), (7, NODE), (9, ENTRY), (11, ATTRIBUTE), (12, VALUE_INFO), (14, ENTRY)]),
    Message(size_of::<TrainingInfoProto>(), &[(1, GRAPH), (2, GRAPH), (3, ENTRY), (4, ENTRY)]),
    // Also stands for device annotations, whose list elements are as small.
    Message(size_of::<TensorAnnotation>(), &[(2, ENTRY), (3, ENTRY)]),
    Message(0, &[(2, TYPE)]),
];

/// Refuses a model whose decoded messages would be far larger than its file, or nested too deep.
/// Returns the number of nodes of the main graph, without those of subgraphs.
pub(super) fn check_expansion(bytes: &[u8], limits: &Limits) -> Result<usize> {
    let mut count = Count { graph_bound: limits.nesting.min(COUNTED_GRAPHS), ..Count::default() };
    count.message(bytes, MODEL, 0, 0);
    let what = || "subgraphs are nested too deep".to_string();
    at_most(count.graphs, count.graph_bound, "nesting", what)?;
    ensure!(
        count.depth <= DECODER_DEPTH,
        InvalidProtobuf,
        help = "move inner graphs into functions of the model",
        "messages are nested {} levels deep or more, at most {DECODER_DEPTH} are allowed: about 30 subgraphs",
        count.depth
    );
    // Large files may take more than the fixed limit, in proportion to their length.
    let allowed = limits.bytes.max(FACTOR.saturating_mul(bytes.len() as u64));
    let taken = count.taken;
    if taken <= allowed {
        return Ok(count.nodes);
    }
    let text = |bytes: u64| exact_bytes(usize::try_from(bytes).unwrap_or(usize::MAX));
    Err(error!(
        InvalidProtobuf,
        "a file of {} would take {} in memory, at most {} are allowed",
        exact_bytes(bytes.len()),
        text(taken),
        text(allowed)
    )
    .raise("bytes"))
}

/// The totals over the messages of a file.
#[derive(Default)]
struct Count {
    /// Bytes in memory.
    taken: u64,
    /// The deepest nesting of messages.
    depth: usize,
    /// Nodes of the main graph.
    nodes: usize,
    /// The deepest nesting of graphs, not counting the main graph.
    graphs: usize,
    /// The nesting of graphs at which the walk stops.
    graph_bound: usize,
}

impl Count {
    /// Counts a message at `depth`, enclosed by `graphs` graphs. A malformed message ends the
    /// count; the decoder will report it.
    fn message(&mut self, mut bytes: &[u8], message: usize, depth: usize, graphs: usize) {
        self.depth = self.depth.max(depth);
        self.graphs = self.graphs.max(graphs.saturating_sub(1));
        // A level of subgraphs adds three messages (graph, node, attribute). The innermost graph
        // may contain a few more levels of types.
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
                // Twice the size, because vectors grow by doubling.
                let size = MESSAGES.get(kind).map_or(0, |message| message.0);
                self.taken = self.taken.saturating_add(2 * size as u64);
                // Graphs of training and in functions are deeper than the main graph.
                self.nodes += usize::from(message == GRAPH && kind == NODE && depth == 1);
                self.message(inner, kind, depth + 1, graphs + usize::from(kind == GRAPH));
            }
        }
    }
}
