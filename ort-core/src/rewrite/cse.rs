//! Common-subexpression elimination.
//!
//! Nodes merge if they have the same operator, attributes and inputs. Small constants of equal
//! bytes are the same input. Random operators, and nodes with subgraphs or with tensors as
//! attributes, never merge.

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use super::report::Report;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, ValueId};
use crate::seeded;
use crate::spec::Traits;
use crate::tensor::Shape;

/// Constants of up to this many bytes are compared by content.
const SMALL: usize = 1024;

/// Maps a value to the equal one that replaces it.
type Same = FxHashMap<ValueId, ValueId>;

/// Merges nodes that apply the same operator to the same values, or to small constants of the same
/// bytes.
pub(super) fn merge(graph: &mut Graph, report: &mut Report) {
    let mut same = Same::default();
    let constants = equal_constants(graph);
    // One node per hash, so a lookup compares only once. If hashes collide, only the first node can
    // have twins.
    let mut first: seeded::HashMap<u64, usize> = seeded::HashMap::default();
    let is_output: rustc_hash::FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    for index in 0..graph.nodes.len() {
        let Some(node) = graph.nodes.get_mut(index) else { continue };
        rename(node, &same);
        let Some(key) = key(node, &constants) else { continue };
        let Some(node) = graph.nodes.get(index) else { continue };
        let twin = first.get(&key).and_then(|twin| graph.nodes.get(*twin));
        let twin = twin.filter(|twin| alike(twin, node, &constants));
        // A graph output must keep its name, so it keeps its own node.
        let named = node.outputs.iter().flatten().any(|output| is_output.contains(output));
        match twin.filter(|_| !named) {
            Some(twin) => {
                let mut made = twin.outputs.clone();
                // The twin may list fewer outputs.
                made.resize(made.len().max(node.outputs.len()), None);
                let mut left = node.outputs.clone();
                // An optional output that the twin omits moves to the twin.
                for (to, own) in made.iter_mut().zip(&mut left) {
                    match (*own, *to) {
                        (Some(from), Some(to)) => drop(same.insert(from, to)),
                        (Some(_), None) => *to = own.take(),
                        (None, _) => {}
                    }
                }
                let twin = first.get(&key).copied();
                for (at, outputs) in [(twin, made), (Some(index), left)] {
                    let node = at.and_then(|at| graph.nodes.get_mut(at));
                    node.into_iter().for_each(|node| node.outputs.clone_from(&outputs));
                }
                report.common += 1;
            }
            None => {
                first.entry(key).or_insert(index);
            }
        }
    }
}

/// Maps each small constant to the first of the same type, shape and bytes.
fn equal_constants(graph: &Graph) -> Same {
    // A seeded hash: the keys are bytes of the file, which must not be able to force collisions.
    let mut first: seeded::HashMap<(DType, &Shape, &[u8]), ValueId> = seeded::HashMap::default();
    let outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let shapes: Vec<(ValueId, DType, Shape, &[u8])> = graph
        .constants
        .iter()
        .filter(|(id, tensor)| tensor.byte_count() <= SMALL && !outputs.contains(id))
        .filter_map(|(id, tensor)| {
            Some((*id, tensor.dtype(), tensor.shape().into(), tensor.bytes()?.as_ref()))
        })
        .collect();
    let mut same = Same::default();
    for (id, dtype, shape, bytes) in &shapes {
        let kept = *first.entry((*dtype, shape, bytes)).or_insert(*id);
        if kept != *id {
            same.insert(*id, kept);
        }
    }
    same
}

/// Makes a node read the values that others are the same as.
pub(super) fn rename(node: &mut Node, same: &Same) {
    if same.is_empty() {
        return;
    }
    let kept = |id: ValueId| same.get(&id).copied().unwrap_or(id);
    node.inputs.iter_mut().flatten().for_each(|input| *input = kept(*input));
    let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
    captures.for_each(|capture| capture.outer = kept(capture.outer));
}

/// Returns the inputs of a node, with one representative for equal constants.
fn inputs(node: &Node, constants: &Same) -> impl Iterator<Item = Option<ValueId>> {
    node.inputs.iter().map(|input| input.map(|id| constants.get(&id).copied().unwrap_or(id)))
}

/// Hashes what a node computes. `None` for nodes that may compute something else each time, or that
/// are too large to compare.
fn key(node: &Node, constants: &Same) -> Option<u64> {
    if node.spec.traits.has(Traits::RANDOM) || !node.subgraphs.is_empty() {
        return None;
    }
    let mut hasher = FxHasher::default();
    // Each operator has one static record, so its address identifies it.
    std::ptr::from_ref(node.spec).hash(&mut hasher);
    inputs(node, constants).for_each(|input| input.hash(&mut hasher));
    for (name, value) in node.attrs.iter() {
        name.hash(&mut hasher);
        match value {
            Attribute::Int(value) => value.hash(&mut hasher),
            Attribute::Float(value) => value.to_bits().hash(&mut hasher),
            Attribute::String(value) => value.hash(&mut hasher),
            Attribute::Ints(value) => value.hash(&mut hasher),
            Attribute::Floats(value) => value.iter().for_each(|value| value.to_bits().hash(&mut hasher)),
            Attribute::Strings(value) => value.hash(&mut hasher),
            Attribute::Bytes(_)
            | Attribute::Tensor(_)
            | Attribute::Tensors(_)
            | Attribute::Sparse(_)
            | Attribute::Type(_) => return None,
        }
    }
    Some(hasher.finish())
}

/// Whether two nodes that have a [`key`] compute the same.
fn alike(twin: &Node, node: &Node, constants: &Same) -> bool {
    std::ptr::eq(twin.spec, node.spec)
        && inputs(twin, constants).eq(inputs(node, constants))
        && attrs_alike(&twin.attrs, &node.attrs)
}

fn attrs_alike(a: &Attributes, b: &Attributes) -> bool {
    let value_alike = |a: &Attribute, b: &Attribute| match (a, b) {
        (Attribute::Int(a), Attribute::Int(b)) => a == b,
        // Compare bits: 0.0 == -0.0, but the two are different attributes.
        (Attribute::Float(a), Attribute::Float(b)) => a.to_bits() == b.to_bits(),
        (Attribute::String(a), Attribute::String(b)) => a == b,
        (Attribute::Ints(a), Attribute::Ints(b)) => a == b,
        (Attribute::Floats(a), Attribute::Floats(b)) => {
            a.iter().map(|a| a.to_bits()).eq(b.iter().map(|b| b.to_bits()))
        }
        (Attribute::Strings(a), Attribute::Strings(b)) => a == b,
        _ => false,
    };
    let within = |a: &Attributes, b: &Attributes| {
        a.iter().all(|(name, value)| b.get(name).is_some_and(|other| value_alike(value, other)))
    };
    within(a, b) && within(b, a)
}
