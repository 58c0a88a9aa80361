//! Fusion of attention with its KV cache, into one `Attention` with `past_key` and `present_key`.
//!
//! Decoders append new keys and values to those of a past (`Concat`), return the result and attend
//! to it. Transpositions around all of this split queries, keys and values into heads and join the
//! result. The fused operator reads and writes heads without transpositions, and writes new rows
//! straight into the cache. No rule can express this, because a rule replaces the outputs of one
//! root. Here the caches are outputs of other nodes.

use rustc_hash::{FxHashMap, FxHashSet};

use super::environment::FirstClaim;
use super::nodes::{in_order, is_no_later, new_node};
use super::report::Report;
use crate::Result;
use crate::dim::Dim;
use crate::ir::{Attribute, Graph, Node, NodeId, ValueId, ValueType};
use crate::spec::ONNX;
use crate::tensor::Tensor;

/// The rule name of this pass.
pub(super) const RULE: &str = "attention_cache";

/// Maximum number of nodes to visit between a cache and its attention. Beyond that the attention
/// stays as it is.
const MOST_LOOKED_AT: usize = 1000;

/// Fuses every attention that has a cache; returns whether there was any.
pub(super) fn apply(graph: &mut Graph, first_claim: FirstClaim<'_>, report: &mut Report) -> Result<bool> {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut fused: FxHashMap<usize, Vec<Node>> = FxHashMap::default();
    let mut gone: FxHashSet<usize> = FxHashSet::default();
    for index in 0..graph.nodes.len() {
        let finder = Finder { graph, producers: &producers, consumers: &consumers };
        // Skip a match that shares a node with one fused before.
        let Some(found) =
            finder.find(index).filter(|found| found.nodes.iter().all(|node| !gone.contains(node)))
        else {
            continue;
        };
        let Some(nodes) = found.replacement(graph, index, first_claim)? else { continue };
        gone.extend(found.nodes);
        fused.insert(index, nodes);
        report.count(RULE);
    }
    if fused.is_empty() {
        return Ok(false);
    }
    for (index, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        match fused.remove(&index) {
            Some(nodes) => graph.nodes.extend(nodes),
            None if gone.contains(&index) => {}
            None => graph.nodes.push(node),
        }
    }
    // Nodes that read a cache may stand before the attention that now computes it.
    if !in_order(graph) {
        graph.sort()?;
    }
    Ok(true)
}

/// A value of shape (batch, rows, heads, size): the heads of a token are adjacent.
struct Heads {
    value: ValueId,
    count: i64,
    size: i64,
}

/// An attention with its cache.
struct Cached {
    /// The indices of the attention, of both concatenations, and of the transposition of the
    /// result.
    nodes: [usize; 4],
    queries: Heads,
    /// Keys and values: the new ones, those of the past, and both together.
    fresh: [Heads; 2],
    past: [ValueId; 2],
    present: [ValueId; 2],
    mask: Option<ValueId>,
    /// The result, of shape (batch, rows, heads, size).
    result: ValueId,
}

struct Finder<'a> {
    graph: &'a Graph,
    producers: &'a [Option<NodeId>],
    consumers: &'a [Vec<NodeId>],
}

impl Finder<'_> {
    fn find(&self, index: usize) -> Option<Cached> {
        let node = self.graph.nodes.get(index).filter(|node| is(node, "Attention"))?;
        let &[Some(y)] = node.outputs.as_slice() else { return None };
        let input = |place: usize| node.inputs.get(place).copied().flatten();
        let sees_all = ["is_causal", "left_window_size", "right_window_size"].into_iter().zip([0, -1, -1]);
        let sees_all =
            sees_all.into_iter().all(|(name, all)| node.attrs.find_int(name).is_none_or(|int| int == all));
        // Causal masks and windows count from the first query: behind a past, positions would
        // shift. Further inputs belong to another form of cache.
        if !sees_all || node.inputs.iter().skip(4).any(Option::is_some) {
            return None;
        }
        let [(k_place, k_past, k), (v_place, v_past, v)] = [self.cache(input(1)?)?, self.cache(input(2)?)?];
        let (queries, mask) = (self.heads(input(0)?)?, input(3));
        // The fused operator does not compute `y`, so only the transposition may read it.
        let &[reader] = self.consumers.get(y.index())?.as_slice() else { return None };
        let result = self.transposed(reader.index()).filter(|_| !self.graph.outputs.contains(&y))?;
        let nodes = [index, k_place, v_place, reader.index()];
        let present = [input(1)?, input(2)?];
        let fits = k.count == v.count && k_place != v_place && queries.size == k.size;
        let found = Cached { nodes, queries, fresh: [k, v], past: [k_past, v_past], present, mask, result };
        (fits && self.is_free_of(&found)).then_some(found)
    }

    fn producer(&self, value: ValueId) -> Option<(usize, &Node)> {
        let index = self.producers.get(value.index()).copied().flatten()?.index();
        Some((index, self.graph.nodes.get(index)?))
    }

    /// Returns the result of a node that moves heads to the front, or back.
    fn transposed(&self, index: usize) -> Option<ValueId> {
        let node = self.graph.nodes.get(index).filter(|node| is(node, "Transpose"))?;
        let is_swap = node.attrs.find_ints("perm").is_some_and(|perm| perm == [0, 2, 1, 3]);
        node.outputs.first().copied().flatten().filter(|_| is_swap)
    }

    /// Returns the heads that a transposition moved to the front.
    fn heads(&self, value: ValueId) -> Option<Heads> {
        let (index, node) = self.producer(value)?;
        self.transposed(index)?;
        let value = node.inputs.first().copied().flatten()?;
        let [_, _, count, size] = self.graph.value(value).ty.shape()? else { return None };
        let (count, size) = (count.as_constant()?, size.as_constant()?);
        (count > 0 && size > 0).then_some(Heads { value, count, size })
    }

    /// Returns the index of the node that appends heads to a past, with the past and the heads.
    fn cache(&self, value: ValueId) -> Option<(usize, ValueId, Heads)> {
        let (index, node) = self.producer(value).filter(|(_, node)| is(node, "Concat"))?;
        let &[Some(past), Some(fresh)] = node.inputs.as_slice() else { return None };
        // Heads are in front of the rows here: (batch, heads, rows, size).
        let is_along_rows = matches!(node.attrs.find_int("axis"), Some(2 | -2));
        let has_rank = self.graph.value(past).ty.shape().is_some_and(|shape| shape.len() == 4);
        let fresh = self.heads(fresh).filter(|_| is_along_rows && has_rank)?;
        Some((index, past, fresh))
    }

    /// Whether no input of the fused attention depends on the caches that it will write: that would
    /// be a cycle.
    fn is_free_of(&self, found: &Cached) -> bool {
        let [_, k, v, _] = found.nodes;
        let first = k.min(v);
        let heads = std::iter::once(&found.queries).chain(&found.fresh).map(|heads| heads.value);
        let mut open: Vec<ValueId> = heads.chain(found.past).chain(found.mask).collect();
        let mut seen: FxHashSet<usize> = FxHashSet::default();
        while let Some(value) = open.pop() {
            // The nodes are in topological order, so none before the concatenations depends on
            // them.
            let Some((index, node)) = self.producer(value).filter(|(index, _)| *index >= first) else {
                continue;
            };
            if [k, v].contains(&index) || seen.len() > MOST_LOOKED_AT {
                return false;
            }
            if seen.insert(index) {
                open.extend(node.reads());
            }
        }
        true
    }
}

impl Cached {
    /// Returns the nodes that replace the attention; `None` if they would move it to a later
    /// device.
    fn replacement(
        &self,
        graph: &mut Graph,
        index: usize,
        first_claim: FirstClaim<'_>,
    ) -> Result<Option<Vec<Node>>> {
        let Some(old) = graph.nodes.get(index).cloned() else { return Ok(None) };
        let [k, v] = &self.fresh;
        let (name, width) = (&*old.name, |heads: &Heads| heads.count.saturating_mul(heads.size));
        let mut nodes = Vec::new();
        let mut inputs = Vec::new();
        for (part, heads) in [("q", &self.queries), ("k", k), ("v", v)] {
            let joined = new_value(graph, &format!("{name}/{part}"), heads.value, &[width(heads)]);
            nodes.push(reshape(graph, (heads.value, joined), &[0, 0, width(heads)])?);
            inputs.push(Some(joined));
        }
        let result = [self.queries.count, v.size];
        let joined =
            new_value(graph, &format!("{name}/y"), self.result, &[result[0].saturating_mul(result[1])]);
        inputs.push(self.mask);
        inputs.extend(self.past.map(Some));
        // The fused operator gets three-dimensional inputs, so only these attributes tell how many
        // heads there are.
        let others = old.attrs.iter().filter(|(name, _)| !name.ends_with("num_heads"));
        let mut attrs: Vec<_> = others.map(|(name, value)| (name.to_owned(), value.clone())).collect();
        attrs.push(("q_num_heads".to_owned(), Attribute::Int(self.queries.count)));
        attrs.push(("kv_num_heads".to_owned(), Attribute::Int(k.count)));
        let outputs = [Some(joined), Some(self.present[0]), Some(self.present[1])];
        let attention = new_node(ONNX, "Attention", name, &inputs, &outputs, attrs)?;
        if !is_no_later(graph, first_claim, [&old, &attention]) {
            return Ok(None);
        }
        nodes.push(attention);
        // 0 copies a size, so batch and rows may be symbolic.
        nodes.push(reshape(graph, (joined, self.result), &[0, 0, result[0], result[1]])?);
        Ok(Some(nodes))
    }
}

fn is(node: &Node, op: &str) -> bool {
    (node.spec.domain, node.spec.name) == (ONNX, op)
}

/// Adds a value of the same element type, batch and rows as `like`, with further axes.
fn new_value(graph: &mut Graph, name: &str, like: ValueId, sizes: &[i64]) -> ValueId {
    let name = format!("{name}_{}", graph.value_count());
    let ty = &graph.value(like).ty;
    let shape = ty
        .shape()
        .map(|shape| shape.iter().take(2).cloned().chain(sizes.iter().map(|size| Dim::from(*size))));
    let ty =
        ty.dtype().map_or(ValueType::Unknown, |dtype| ValueType::tensor(dtype, shape.map(Iterator::collect)));
    graph.add_value(name.as_str(), ty)
}

/// Builds a node that reshapes one value into another.
fn reshape(graph: &mut Graph, (from, to): (ValueId, ValueId), sizes: &[i64]) -> Result<Node> {
    let name = format!("{}/Reshape_{}", graph.value(to).name, graph.value_count());
    let shape = graph.add_constant(format!("{name}.shape"), Tensor::from_slice(&[sizes.len()], sizes)?);
    new_node(ONNX, "Reshape", &name, &[Some(from), Some(shape)], &[Some(to)], Vec::new())
}
