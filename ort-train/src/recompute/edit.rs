//! Recomputation rewrite: adds clones of forward nodes for backward nodes to read.
//!
//! Each clone is placed right before the first backward node that needs it, so that its result
//! lives as briefly as possible.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use std::collections::HashMap;

use ort_core::ir::{Graph, Node, ValueId};

use super::liveness::Joint;

/// Returns the graph in which the dropped blocks are recomputed before the backward nodes that read
/// them.
pub(crate) fn recomputed(joint: &Joint<'_>, dropped: &[bool]) -> Graph {
    // A view belongs to the block of its base, so it is recomputed together with it.
    let mut block_of: HashMap<ValueId, usize> = HashMap::new();
    for step in &joint.steps {
        let Some(node) = step.node.and_then(|node| joint.graph.nodes.get(node)) else { continue };
        let outputs = node.outputs.iter().zip(&step.outputs);
        block_of.extend(outputs.filter_map(|(value, block)| Some(((*value)?, (*block)?))));
    }
    let again: HashMap<ValueId, usize> = block_of.into_iter().filter(|(_, block)| dropped[*block]).collect();
    let mut graph = joint.graph.clone();
    let producers = graph.producers();
    let nodes = std::mem::take(&mut graph.nodes);
    let makers = again
        .keys()
        .filter_map(|value| Some((*value, producers.get(value.index()).copied().flatten()?.index())));
    let mut edit = Edit { makers: makers.collect(), nodes: &nodes, clones: HashMap::new(), graph };
    for (step, is_forward) in joint.steps.iter().zip(&joint.is_forward) {
        let Some(node) = step.node.and_then(|node| nodes.get(node)) else { continue };
        let mut node = node.clone();
        if !is_forward {
            edit.read_clones(&mut node);
        }
        edit.graph.nodes.push(node);
    }
    edit.graph
}

/// The state of the rewrite.
struct Edit<'a> {
    /// The producer of each value that is recomputed.
    makers: HashMap<ValueId, usize>,
    nodes: &'a [Node],
    /// The clone of each value that has one.
    clones: HashMap<ValueId, ValueId>,
    graph: Graph,
}

impl Edit<'_> {
    /// Makes a node read clones, which are added before it.
    fn read_clones(&mut self, node: &mut Node) {
        let wanted: Vec<ValueId> = node.reads().filter(|value| self.makers.contains_key(value)).collect();
        for value in wanted {
            self.add_clone(value);
        }
        let now = |value: &mut ValueId| {
            if let Some(clone) = self.clones.get(value) {
                *value = *clone;
            }
        };
        node.inputs.iter_mut().flatten().for_each(now);
        let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
        captures.for_each(|capture| now(&mut capture.outer));
    }

    /// Adds the clone of a value's producer, after the clones that it needs itself. The search is
    /// iterative, because chains of clones may be as long as the model.
    fn add_clone(&mut self, value: ValueId) {
        let mut stack = vec![(value, false)];
        while let Some((value, ready)) = stack.pop() {
            let Some(original) = self.makers.get(&value).and_then(|maker| self.nodes.get(*maker)) else {
                continue;
            };
            if self.clones.contains_key(&value) {
                continue;
            }
            if !ready {
                // Pushed first, so that it comes up again once everything that it reads has a
                // clone.
                stack.push((value, true));
                stack.extend(
                    original.reads().filter(|read| self.makers.contains_key(read)).map(|read| (read, false)),
                );
                continue;
            }
            let mut node = original.clone();
            node.name = format!("{}_recompute", original.name).into();
            let now = |value: &mut ValueId| {
                if let Some(clone) = self.clones.get(value) {
                    *value = *clone;
                }
            };
            // Nodes with subgraphs are never recomputed, so there are no captures to redirect.
            node.inputs.iter_mut().flatten().for_each(now);
            for (position, output) in node.outputs.iter_mut().enumerate() {
                // Outputs that are kept need no clone, but every node must have its first output.
                *output =
                    output.filter(|output| position == 0 || self.makers.contains_key(output)).map(|output| {
                        let info = self.graph.value(output).clone();
                        let clone = self.graph.add_value(format!("{}_recompute", info.name), info.ty);
                        self.graph.value_mut(clone).symbolic = info.symbolic;
                        if self.makers.contains_key(&output) {
                            self.clones.insert(output, clone);
                        }
                        clone
                    });
            }
            self.graph.nodes.push(node);
        }
    }
}
