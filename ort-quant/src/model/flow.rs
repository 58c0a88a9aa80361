//! Makers and readers of values.

use std::collections::BTreeMap;

use ort_core::onnx::proto::NodeProto;

use super::draft::{reads, subgraphs};
use super::work::Work;

/// Which node makes a value, and how many inputs of nodes and bodies it is.
pub(super) struct Flow<'n> {
    pub(super) makers: BTreeMap<&'n str, usize>,
    readers: BTreeMap<String, usize>,
}

impl Flow<'_> {
    pub(super) fn of(nodes: &[NodeProto]) -> Flow<'_> {
        let mut makers = BTreeMap::new();
        let mut readers: BTreeMap<String, usize> = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            makers.extend(node.output.iter().map(|output| (output.as_str(), index)));
            let captured = subgraphs(node).flat_map(|graph| reads(&graph.node));
            for name in node.input.iter().cloned().chain(captured) {
                *readers.entry(name).or_default() += 1;
            }
        }
        Flow { makers, readers }
    }

    /// Whether these are all readers of a value.
    pub(super) fn has_no_more_readers(&self, work: &Work, name: &str, count: usize) -> bool {
        self.readers.get(name) == Some(&count) && !work.outputs.contains(name)
    }
}
