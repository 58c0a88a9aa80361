//! Variances that float16 is too coarse for: the mean of squares less the square of the mean. Most
//! digits of the two are equal, and their difference has few that mean something.

use std::collections::BTreeSet;

use ort_core::onnx::proto::NodeProto;

use super::flow::Flow;
use super::work::is_standard;

/// Why the nodes stay in float32.
pub(super) const REASON: &str = "a variance as the difference of two means needs float32";

/// Operators between a sum and the square root of a variance.
const INNER: [&str; 9] = ["Add", "Sub", "Mul", "Div", "Max", "Clip", "Reshape", "Squeeze", "Unsqueeze"];

/// More nodes than this belong to something else.
const MOST: usize = 16;

/// The nodes that compute such variances, from the sums to what a square root is taken of.
pub(super) fn nodes(nodes: &[NodeProto]) -> BTreeSet<usize> {
    let flow = Flow::of(nodes);
    let roots = nodes.iter().filter(|node| is_standard(node, "Sqrt"));
    roots.filter_map(|root| variance(&flow, nodes, root)).flatten().collect()
}

/// The nodes of the variance that a square root is taken of.
fn variance(flow: &Flow<'_>, nodes: &[NodeProto], root: &NodeProto) -> Option<BTreeSet<usize>> {
    let is_any =
        |node: &NodeProto, operators: &[&str]| operators.iter().any(|operator| is_standard(node, operator));
    let (mut chain, mut sums, mut differences) = (BTreeSet::new(), 0, 0);
    let mut open: Vec<&String> = root.input.iter().collect();
    while let Some(name) = open.pop() {
        let Some((index, node)) =
            flow.makers.get(name.as_str()).and_then(|index| Some((*index, nodes.get(*index)?)))
        else {
            continue;
        };
        let is_sum = is_any(node, &["ReduceSum", "ReduceMean"]);
        if !(is_sum || is_any(node, &INNER)) || !chain.insert(index) {
            continue;
        }
        sums += usize::from(is_sum);
        differences += usize::from(is_standard(node, "Sub"));
        if !is_sum {
            open.extend(&node.input);
        }
    }
    (sums > 1 && differences > 0 && chain.len() <= MOST).then_some(chain)
}
