//! Attention fusion before differentiation.
//!
//! It replaces attention as exporters write it with one operator, `TrainingAttention`. The backward
//! pass of that operator recomputes the scores, so none are kept for it.
//!
//! The pattern is `MatMul(dropout(Softmax(masked(MatMul(q, k^T) * scale))), v)`. The mask is an
//! `Add` or `Where`, the scale a `Mul` or `Div` by one number. Everything except the two matmuls
//! and the softmax may be missing.

use std::collections::HashSet;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, Node, NodeId, ValueId};
use ort_core::spec::RUNTIME;

use crate::values::is_standard;

/// Fuses attention into `TrainingAttention`, unless a mask depends on `trained` values: masks get
/// no gradient.
pub(crate) fn fuse_attention(mut graph: Graph, trained: &[ValueId]) -> Result<Graph> {
    let finder = Finder::new(&graph, trained);
    let found: Vec<Option<Found>> = (0..graph.nodes.len()).map(|index| finder.find(index)).collect();
    if found.iter().all(Option::is_none) {
        return Ok(graph);
    }
    // The fused node replaces the last matmul. The other nodes of the pattern have no reader left.
    let replaced: HashSet<usize> = found.iter().flatten().flat_map(|found| &found.inside).copied().collect();
    let (nodes, outputs) = (std::mem::take(&mut graph.nodes), graph.outputs.clone());
    let mut builder = GraphBuilder::extend(graph);
    builder.set_scope("attention");
    for (index, (node, found)) in nodes.into_iter().zip(found).enumerate() {
        match found {
            Some(found) => found.emit(&mut builder, node)?,
            None if replaced.contains(&index) => {}
            None => builder.graph_mut().nodes.push(node),
        }
    }
    builder.finish(&outputs)
}

/// An occurrence of the pattern, which ends in one matmul.
#[derive(Default)]
struct Found {
    /// The nodes of the pattern except the last, which nothing else reads.
    inside: Vec<usize>,
    queries: Option<ValueId>,
    /// The operator and number that queries are scaled by.
    scale: Option<(&'static str, ValueId)>,
    keys: Keys,
    values: Option<ValueId>,
    mask: Option<Mask>,
    /// The ratio, seed and step of dropout, and its stream.
    dropout: Option<([Option<ValueId>; 3], i64)>,
}

/// The keys as a transpose of an existing value.
#[derive(Default)]
struct Keys {
    of: Option<ValueId>,
    /// The permutation from `of` to the keys.
    order: Vec<i64>,
}

/// A mask on the scores.
enum Mask {
    Added(ValueId),
    /// Scores stay where `condition` is true (`stays`) or where it is false, and are set to `fill`
    /// elsewhere.
    Where {
        condition: ValueId,
        stays: bool,
        fill: f32,
    },
}

impl Found {
    /// Emits the fused node, with the name and outputs of the last matmul.
    fn emit(self, builder: &mut GraphBuilder, mut node: Node) -> Result<()> {
        let mut inputs = vec![self.queries, self.keys.of, self.values];
        if let (Some(queries), Some((op, scale))) = (self.queries, self.scale)
            && let Some(input) = inputs.first_mut()
        {
            *input = Some(builder.node(op, &[queries, scale], &[])?);
        }
        // If the exporter's transpose only swapped the last two axes, the keys are read as they
        // are.
        let is_turned = !self.keys.order.is_sorted();
        if let (Some(keys), true, Some(input)) = (self.keys.of, is_turned, inputs.get_mut(1)) {
            let order = Attribute::Ints(self.keys.order);
            *input = Some(builder.node("Transpose", &[keys], &[("perm", order)])?);
        }
        let mut attrs = Vec::new();
        inputs.push(match self.mask {
            None => None,
            Some(Mask::Added(mask)) => Some(mask),
            Some(Mask::Where { condition, stays, fill }) => {
                attrs.push(("fill", Attribute::Float(fill)));
                // The operator keeps scores where its mask is true.
                Some(if stays { condition } else { builder.node("Not", &[condition], &[])? })
            }
        });
        if let Some((dropout, stream)) = self.dropout {
            inputs.extend(dropout);
            attrs.push(("stream", Attribute::Int(stream)));
        } else if inputs.last() == Some(&None) {
            inputs.pop();
        }
        builder.add((RUNTIME, "TrainingAttention"), &inputs, &attrs, 1, Vec::new())?;
        if let Some(made) = builder.graph_mut().nodes.last_mut() {
            (made.name, made.outputs) = (node.name, std::mem::take(&mut node.outputs));
        }
        Ok(())
    }
}

/// Pattern matcher for attention.
struct Finder<'g> {
    graph: &'g Graph,
    producers: Vec<Option<NodeId>>,
    /// The number of readers of each value: nodes, and graph outputs.
    reads: Vec<usize>,
    /// Whether each value depends on a trained value.
    follows: Vec<bool>,
}

impl<'g> Finder<'g> {
    fn new(graph: &'g Graph, trained: &[ValueId]) -> Finder<'g> {
        let mut reads: Vec<usize> = graph.consumers().iter().map(Vec::len).collect();
        for output in &graph.outputs {
            reads.get_mut(output.index()).into_iter().for_each(|count| *count += 1);
        }
        let mut follows = vec![false; graph.value_count()];
        for value in trained {
            follows.get_mut(value.index()).into_iter().for_each(|follows| *follows = true);
        }
        // One pass is enough, because nodes come after what they read.
        for node in &graph.nodes {
            if node.reads().any(|read| follows.get(read.index()) == Some(&true)) {
                for output in node.outputs.iter().flatten() {
                    follows.get_mut(output.index()).into_iter().for_each(|follows| *follows = true);
                }
            }
        }
        Finder { graph, producers: graph.producers(), reads, follows }
    }

    /// Matches the pattern backwards from the node `end`.
    fn find(&self, end: usize) -> Option<Found> {
        let node = self.graph.nodes.get(end).filter(|node| is_standard(node, "MatMul"))?;
        let mut found = Found { values: input(node, 1), ..Found::default() };
        let (index, mut weights) = self.inside(input(node, 0)?)?;
        found.inside.push(index);
        if weights.spec.domain == RUNTIME && weights.spec.name == "CounterDropout" {
            let given = [1, 2, 3].map(|position| input(weights, position));
            found.dropout = Some((given, weights.attrs.find_int("stream").unwrap_or(0)));
            weights = self.step_in(&mut found, input(weights, 0)?)?;
        } else if is_standard(weights, "Dropout") && weights.inputs.len() < 3 {
            // Without its third input, `training_mode`, `Dropout` is the identity.
            weights = self.step_in(&mut found, input(weights, 0)?)?;
        }
        let rank = self.rank(input(weights, 0)?)?;
        let axis = weights.attrs.find_int("axis").unwrap_or(-1);
        if !is_standard(weights, "Softmax") || ![-1, rank as i64 - 1].contains(&axis) {
            return None;
        }
        let mut scores = self.step_in(&mut found, input(weights, 0)?)?;
        if let Some((mask, inner)) = self.mask(scores) {
            found.mask = Some(mask);
            scores = self.step_in(&mut found, inner)?;
        }
        if let Some((op, scale, inner)) = self.scale(scores) {
            found.scale = Some((op, scale));
            scores = self.step_in(&mut found, inner)?;
        }
        found.queries = input(scores, 0);
        found.keys = self.keys(input(scores, 1)?)?;
        (is_standard(scores, "MatMul") && self.are_heads(&found, input(scores, 1)?)).then_some(found)
    }

    /// Returns the producer of a value, if the value has one reader.
    fn inside(&self, value: ValueId) -> Option<(usize, &'g Node)> {
        let index = self.producers.get(value.index()).copied().flatten()?.index();
        let node = self.graph.nodes.get(index)?;
        // What others read must be computed anyway, and fusion would compute it twice.
        let alone = self.reads.get(value.index()) == Some(&1);
        // Other outputs, such as the mask of a `Dropout`, may exist if nothing reads them.
        let unread = |output: &ValueId| self.reads.get(output.index()) == Some(&0);
        (alone && node.outputs.iter().flatten().skip(1).all(unread)).then_some((index, node))
    }

    /// Follows a value to its producer and adds that to the pattern.
    fn step_in(&self, found: &mut Found, value: ValueId) -> Option<&'g Node> {
        let (index, node) = self.inside(value)?;
        found.inside.push(index);
        Some(node)
    }

    fn rank(&self, value: ValueId) -> Option<usize> {
        self.graph.value(value).ty.shape().map(<[_]>::len)
    }

    fn same_shape(&self, one: ValueId, other: ValueId) -> bool {
        let [one, other] = [one, other].map(|value| self.graph.value(value).ty.shape());
        one.is_some() && one == other
    }

    /// Returns the mask that a node applies to scores, and the scores. The mask must not broadcast
    /// the scores to a larger shape.
    fn mask(&self, node: &Node) -> Option<(Mask, ValueId)> {
        let output = node.outputs.first().copied().flatten()?;
        let follows = |value: ValueId| self.follows.get(value.index()) == Some(&true);
        if is_standard(node, "Add") {
            let [one, other] = [input(node, 0)?, input(node, 1)?];
            // The scores are the operand that depends on a weight.
            let (scores, mask) = if follows(other) { (other, one) } else { (one, other) };
            let fits = follows(scores) && !follows(mask) && self.same_shape(scores, output);
            return fits.then_some((Mask::Added(mask), scores));
        }
        if !is_standard(node, "Where") {
            return None;
        }
        let [condition, one, other] = [input(node, 0)?, input(node, 1)?, input(node, 2)?];
        let stays = follows(one);
        let (scores, fill) = if stays { (one, other) } else { (other, one) };
        let fill = self.number(fill)?;
        let fits = follows(scores) && !follows(condition) && self.same_shape(scores, output);
        fits.then_some((Mask::Where { condition, stays, fill }, scores))
    }

    /// Returns the element of a float32 constant that has exactly one.
    fn number(&self, value: ValueId) -> Option<f32> {
        let tensor = self.graph.constants.get(&value)?;
        if tensor.dtype() != DType::F32 || tensor.element_count() != 1 {
            return None;
        }
        tensor.to_vec::<f32>().ok()?.first().copied()
    }

    /// Returns how a node scales the scores: the operator, the number and the scores.
    fn scale(&self, node: &Node) -> Option<(&'static str, ValueId, ValueId)> {
        // The factor moves to the queries and must not raise their rank.
        let is_number = |value: ValueId| {
            let shape = self.graph.value(value).ty.shape();
            shape.is_some_and(|shape| shape.iter().all(|size| size.as_constant() == Some(1)))
                && self.rank(value).is_some_and(|rank| rank < 2)
        };
        let [one, other] = [input(node, 0)?, input(node, 1)?];
        match node.spec.name {
            "Div" if is_standard(node, "Div") && is_number(other) => Some(("Div", other, one)),
            "Mul" if is_standard(node, "Mul") && is_number(other) => Some(("Mul", other, one)),
            "Mul" if is_standard(node, "Mul") && is_number(one) => Some(("Mul", one, other)),
            _ => None,
        }
    }

    /// Returns the keys, given the right operand of the matmul, which has their last two axes
    /// swapped.
    fn keys(&self, turned: ValueId) -> Option<Keys> {
        let rank = self.rank(turned)?;
        let mut order: Vec<i64> = (0..rank as i64).collect();
        let mut of = turned;
        let producer = self.producers.get(turned.index()).copied().flatten();
        let producer = producer.and_then(|id| self.graph.nodes.get(id.index()));
        if let Some(node) = producer.filter(|node| is_standard(node, "Transpose"))
            && let Some(given) = node.attrs.find_ints("perm").filter(|given| given.len() == rank)
        {
            // The exporter's permutation and the swap of the last axes become one.
            (order, of) = (given.to_vec(), input(node, 0)?);
        }
        if rank > 1 {
            order.swap(rank - 2, rank - 1);
        }
        Some(Keys { of: Some(of), order })
    }

    /// Whether queries, transposed keys and values have the same leading axes, and at least one.
    fn are_heads(&self, found: &Found, turned: ValueId) -> bool {
        let leading = |value: Option<ValueId>| {
            let shape = self.graph.value(value?).ty.shape()?;
            shape.len().checked_sub(2).and_then(|count| shape.get(..count))
        };
        let [q, k, v] = [found.queries, Some(turned), found.values].map(leading);
        q.is_some_and(|heads| !heads.is_empty()) && q == k && q == v
    }
}

/// Returns an input, or `None` if it is absent.
fn input(node: &Node, index: usize) -> Option<ValueId> {
    node.inputs.get(index).copied().flatten()
}
