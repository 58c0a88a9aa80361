//! Which nodes of a static model read quantized values, besides products.

use std::collections::BTreeSet;

use ort_core::onnx::proto::NodeProto;

use super::options::{Quantizer, Scope};
use super::products::product;
use super::work::{Work, is_standard};

/// Operators that compute on integers, if all that they read was quantized anyway.
const ALL: [&str; 6] = ["Add", "AveragePool", "Concat", "GlobalAveragePool", "Mul", "Resize"];

/// Operators behind which a quantized value is still one of few codes.
const FOLLOW: [&str; 9] =
    ["Clip", "Flatten", "Identity", "MaxPool", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];

/// What onnxruntime.quantization quantizes by default, besides products.
const DEFAULTS: [&str; 30] = [
    "Add",
    "ArgMax",
    "AveragePool",
    "BatchNormalization",
    "Clip",
    "Concat",
    "CumSum",
    "Flatten",
    "Gather",
    "GatherElements",
    "GlobalAveragePool",
    "InstanceNormalization",
    "LayerNormalization",
    "LeakyRelu",
    "MaxPool",
    "Mul",
    "Pad",
    "Relu",
    "Reshape",
    "Resize",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
    "EmbedLayerNormalization",
];

/// The computed values that a node reads quantized, by position; none for a node that reads
/// floats. Products are not among them.
pub(super) fn quantized_inputs(
    work: &Work,
    nodes: &[NodeProto],
    (scope, quantizer): (Scope, &Quantizer),
) -> Vec<Vec<usize>> {
    // What was quantized, or follows from it without a sum or a function.
    let mut known: BTreeSet<&str> = BTreeSet::new();
    let mut inputs = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        let is_of = |operators: &[&str]| operators.iter().any(|operator| is_standard(node, operator));
        let is_allowed = quantizer.allows(work.place(index), node).is_ok();
        let floats = floats(work, node);
        let is_known =
            |place: &usize| node.input.get(*place).is_some_and(|name| known.contains(name.as_str()));
        let (is_read, is_made) = match scope {
            Scope::Heavy => (false, false),
            Scope::Default => (is_allowed && is_of(&DEFAULTS), false),
            Scope::All => {
                let are_known = !floats.is_empty() && floats.iter().all(is_known);
                // A constant is no code yet: its sum with codes is as fine as one of floats.
                let is_elementwise = is_of(&["Add", "Concat", "Mul"]);
                let has_constant =
                    is_elementwise && node.input.iter().any(|name| is_float_constant(work, name));
                let is_sum = is_allowed && are_known && !has_constant && is_of(&ALL);
                let is_product = is_allowed && matches!(product(work, node, true), Some(Ok(_)));
                (is_sum, is_sum || is_product || (are_known && is_of(&FOLLOW)))
            }
        };
        if is_made {
            known.extend(node.output.first().map(String::as_str));
        }
        inputs.push(if is_read { floats } else { Vec::new() });
    }
    inputs
}

/// The positions of the computed inputs of floating point.
fn floats(work: &Work, node: &NodeProto) -> Vec<usize> {
    // Behind the data come sizes, scales and regions.
    let most = if is_standard(node, "Resize") { 1 } else { usize::MAX };
    let places = node.input.iter().enumerate().take(most);
    let places = places.filter(|(_, name)| work.draft.constant(name).is_none() && work.is_single(name));
    places.map(|(place, _)| place).collect()
}

fn is_float_constant(work: &Work, name: &str) -> bool {
    work.draft.constant(name).is_some() && work.is_single(name)
}
