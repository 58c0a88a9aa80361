//! Chains of elementwise operators become one operator each: what lies between them is never
//! written to memory.

use rustc_hash::{FxHashMap, FxHashSet};

use super::matching::scalar;
use super::{FirstClaim, Report};
use crate::Result;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, ValueId};
use crate::spec::{BinaryFn, OpSpec, RUNTIME, Registry, ScalarExpr};

/// The most inputs of one fused operator.
const MOST_INPUTS: usize = 8;
/// The most functions in one formula, each node's counted once.
const MOST_FUNCTIONS: usize = 64;
/// The most functions that the text of a formula applies. A value that is used twice is written
/// twice, so that a chain in which every node reads its predecessor twice would double at each.
const MOST_WRITTEN: usize = 256;

/// A value as a formula of others.
struct Chain {
    formula: ScalarExpr,
    /// How many functions its nodes apply.
    functions: usize,
    /// How many the formula applies, in which a value stands as often as it is used.
    written: usize,
    inputs: Vec<ValueId>,
    /// The nodes that it is made of, its own last.
    nodes: Vec<usize>,
}

/// Fuses every chain of two or more elementwise operators of floats whose inner values nobody else
/// reads.
pub(super) fn fuse(graph: &mut Graph, first_claim: FirstClaim<'_>, report: &mut Report) -> Result<()> {
    let Some(spec) = Registry::global()?.find(RUNTIME, "FusedElementwise") else { return Ok(()) };
    // What a first round has made one node may be a cheap formula for its readers.
    for _ in 0..2 {
        repeat_for_readers(graph);
        fuse_chains(graph, spec, first_claim, report)?;
    }
    Ok(())
}

fn fuse_chains(
    graph: &mut Graph,
    spec: &'static OpSpec,
    first_claim: FirstClaim<'_>,
    report: &mut Report,
) -> Result<()> {
    let read_once = read_by_one_node(graph);
    let mut chains: FxHashMap<ValueId, Chain> = FxHashMap::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        if let Some((output, chain)) = chain_of(graph, index, node, &mut chains, &read_once) {
            chains.insert(output, chain);
        }
    }
    let mut dead = vec![false; graph.nodes.len()];
    let mut ends: Vec<Chain> = chains.into_values().filter(|chain| chain.nodes.len() > 1).collect();
    ends.sort_unstable_by_key(|chain| chain.nodes.last().copied());
    for chain in ends {
        let Some((&last, inner)) = chain.nodes.split_last() else { continue };
        let formula = vec![("formula".to_string(), Attribute::String(chain.formula.to_string()))];
        let attrs = Attributes::new(spec, formula)?;
        let Some(end) = graph.nodes.get(last) else { continue };
        let inputs = chain.inputs.into_iter().map(Some).collect();
        let fused = Node { spec, inputs, attrs, ..end.clone() };
        let parts = chain.nodes.iter().filter_map(|index| graph.nodes.get(*index));
        let device = parts.filter_map(|node| first_claim(graph, node)).min();
        let claimed = first_claim(graph, &fused);
        if device.is_some_and(|device| claimed.is_none_or(|claimed| claimed > device)) {
            continue;
        }
        let Some(node) = graph.nodes.get_mut(last) else { continue };
        *node = fused;
        for &inner in inner {
            dead.iter_mut().skip(inner).take(1).for_each(|dead| *dead = true);
        }
        report.count(super::ELEMENTWISE_CHAIN);
    }
    let mut dead = dead.into_iter();
    graph.nodes.retain(|_| !dead.next().unwrap_or(false));
    Ok(())
}

/// The most functions of a formula that is rather computed for each of its readers than written to
/// memory.
const CHEAP: usize = 4;

/// Has elementwise readers of a cheap formula be the only ones, by copies of its node: they become
/// parts of their readers, and what it computes is not kept for them.
///
/// That is done where it takes no memory: the formula has one input of the size of its result,
/// which is alive until the reader anyway.
fn repeat_for_readers(graph: &mut Graph) {
    let readers = graph.consumers();
    let outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let last_read =
        |id: ValueId| readers.get(id.index()).and_then(|ids| ids.iter().map(|id| id.index()).max());
    let mut copies: Vec<(usize, usize, ValueId)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let &[Some(output)] = node.outputs.as_slice() else { continue };
        let Some(source) = cheap_source(graph, node, output) else { continue };
        let readers = readers.get(output.index()).map_or(&[][..], Vec::as_slice);
        let fuses = |reader: &&NodeId| {
            let node = graph.nodes.get(reader.index());
            let lives = last_read(source) >= Some(reader.index());
            lives && node.is_some_and(|node| is_elementwise_like(graph, node, output))
        };
        let fusing: Vec<usize> = readers.iter().filter(fuses).map(|reader| reader.index()).collect();
        // The node itself is for the others, or for the first of these.
        let stays = fusing.len() < readers.len() || outputs.contains(&output);
        copies.extend(fusing.into_iter().skip(usize::from(!stays)).map(|reader| (reader, index, output)));
    }
    copies.sort_unstable_by_key(|(reader, ..)| *reader);
    let mut copies = copies.into_iter().peekable();
    let originals = graph.nodes.clone();
    let nodes = std::mem::take(&mut graph.nodes);
    for (index, mut node) in nodes.into_iter().enumerate() {
        while let Some((_, maker, output)) = copies.next_if(|(reader, ..)| *reader == index) {
            let Some(mut copy) = originals.get(maker).cloned() else { continue };
            let info = graph.value(output).clone();
            let value = graph.add_value(format!("{}_{index}", info.name), info.ty);
            graph.value_mut(value).symbolic = info.symbolic;
            copy.name = format!("{}_{index}", copy.name).into();
            copy.outputs = std::iter::once(Some(value)).collect();
            graph.nodes.push(copy);
            let reads = node.inputs.iter_mut().flatten().filter(|read| **read == output);
            reads.for_each(|read| *read = value);
        }
        graph.nodes.push(node);
    }
}

/// The one input that is as large as the result of a node with a cheap formula.
fn cheap_source(graph: &Graph, node: &Node, output: ValueId) -> Option<ValueId> {
    let shape = graph.value(output).ty.shape()?;
    let formula = formula_of(graph, node)?;
    if functions(&formula) > CHEAP || !is_arithmetic(&formula) {
        return None;
    }
    let mut sources = node.reads().filter(|id| graph.value(*id).ty.shape() == Some(shape));
    let source = sources.next()?;
    sources.all(|other| other == source).then_some(source)
}

/// Whether a node is elementwise, of the type and shape of a value that it reads.
fn is_elementwise_like(graph: &Graph, node: &Node, read: ValueId) -> bool {
    let &[Some(output)] = node.outputs.as_slice() else { return false };
    formula_of(graph, node).is_some() && graph.value(output).ty == graph.value(read).ty
}

/// Whether a formula adds, subtracts, multiplies and compares only.
fn is_arithmetic(formula: &ScalarExpr) -> bool {
    match formula {
        ScalarExpr::Input(_) | ScalarExpr::Constant(_) => true,
        ScalarExpr::Binary(
            BinaryFn::Add | BinaryFn::Sub | BinaryFn::Mul | BinaryFn::Min | BinaryFn::Max,
            a,
            b,
        ) => is_arithmetic(a) && is_arithmetic(b),
        _ => false,
    }
}

/// Which values exactly one node reads, and the caller does not get.
fn read_by_one_node(graph: &Graph) -> Vec<bool> {
    let mut reader: Vec<Option<usize>> = vec![None; graph.value_count()];
    let mut once = vec![false; graph.value_count()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in node.reads() {
            let (Some(reader), Some(once)) = (reader.get_mut(id.index()), once.get_mut(id.index())) else {
                continue;
            };
            *once = reader.is_none_or(|reader| reader == index) && (*once || reader.is_none());
            *reader = Some(index);
        }
    }
    for id in &graph.outputs {
        once.iter_mut().skip(id.index()).take(1).for_each(|once| *once = false);
    }
    once
}

/// The chain that ends at a node, and the value it computes, where the node is elementwise. Chains
/// that become part of it are taken out of `elementwise_fusion`.
fn chain_of(
    graph: &Graph,
    index: usize,
    node: &Node,
    chains: &mut FxHashMap<ValueId, Chain>,
    read_once: &[bool],
) -> Option<(ValueId, Chain)> {
    let &[Some(output)] = node.outputs.as_slice() else { return None };
    let ty = graph.value(output).ty.as_tensor()?;
    if !TypeSet::FLOATS.contains(ty.dtype) {
        return None;
    }
    let shape = ty.shape.as_deref()?;
    let own = formula_of(graph, node)?;
    let given: Vec<ValueId> = node.inputs.iter().take(own.input_count()).copied().collect::<Option<_>>()?;
    let same_type = |id: &ValueId| graph.value(*id).ty.dtype() == Some(ty.dtype);
    if given.is_empty() || given.len() > MOST_INPUTS || !given.iter().all(same_type) {
        return None;
    }
    let rank = rank_without_constants(graph, &given);
    let functions = functions(&own);
    let uses = uses_of_inputs(&own, &given);
    let mut chain =
        Chain { formula: own, functions, written: functions, inputs: Vec::new(), nodes: Vec::new() };
    let mut parts = Vec::with_capacity(given.len());
    // Inputs that are still to come need a place each.
    let mut to_come = given.len();
    for (position, id) in given.iter().copied().enumerate() {
        to_come -= 1;
        if let Some(earlier) = given.iter().take(position).position(|earlier| *earlier == id) {
            let same: Option<&ScalarExpr> = parts.get(earlier);
            parts.push(same?.clone());
            continue;
        }
        let uses = uses.get(position).copied().unwrap_or(1);
        // What has the shape of the result is computed as often here as there.
        let fits = chains.get(&id).is_some_and(|inner| {
            read_once.get(id.index()).copied().unwrap_or(false)
                && chain.functions + inner.functions <= MOST_FUNCTIONS
                && chain.written.saturating_add(inner.written.saturating_mul(uses)) <= MOST_WRITTEN
                && chain.inputs.len() + inner.inputs.len() + to_come <= MOST_INPUTS
                && graph.value(id).ty.shape() == Some(shape)
        });
        let inner = if fits { chains.remove(&id) } else { None };
        parts.push(match (inner, constant(graph, id, rank)) {
            (Some(inner), _) => {
                chain.functions += inner.functions;
                chain.written += inner.written * uses;
                chain.nodes.extend(inner.nodes);
                match chain.inputs.is_empty() {
                    // The places stay as they are.
                    true => {
                        chain.inputs = inner.inputs;
                        inner.formula
                    }
                    false => {
                        let places = inner.inputs.iter().map(|id| place(&mut chain.inputs, *id)).collect();
                        substitute(inner.formula, places)
                    }
                }
            }
            (None, Some(number)) => ScalarExpr::Constant(number),
            (None, None) => place(&mut chain.inputs, id),
        });
    }
    chain.formula = substitute(chain.formula, parts);
    chain.nodes.push(index);
    Some((output, chain))
}

/// How often a formula uses each of its inputs; of a value that is given several times, at its
/// first place.
fn uses_of_inputs(formula: &ScalarExpr, given: &[ValueId]) -> Vec<usize> {
    let mut uses = vec![0; given.len()];
    formula.visit_inputs(&mut |index| {
        let value = given.get(index);
        let first = given.iter().position(|id| Some(id) == value).unwrap_or(index);
        uses.iter_mut().skip(first).take(1).for_each(|uses| *uses += 1);
    });
    uses
}

/// The formula of an elementwise node over its inputs.
fn formula_of(graph: &Graph, node: &Node) -> Option<ScalarExpr> {
    if let Some(formula) = node.spec.scalar {
        return formula(&node.attrs).ok();
    }
    if node.spec.domain == crate::spec::ONNX && node.spec.name == "Clip" {
        let bound = |index: usize| match node.inputs.get(index).copied().flatten() {
            None => Some(None),
            Some(id) => graph.constants.get(&id).and_then(scalar).map(Some),
        };
        let (low, high) = (bound(1)?, bound(2)?);
        let raised = low.map_or(ScalarExpr::Input(0), |low| ScalarExpr::Input(0).max(low));
        return Some(match high {
            Some(high) => raised.min(high),
            None => raised,
        });
    }
    None
}

/// The rank that a result has by its inputs of more than one element, or that are not constant.
fn rank_without_constants(graph: &Graph, inputs: &[ValueId]) -> usize {
    let is_number = |id: &&ValueId| constant(graph, **id, usize::MAX).is_some();
    let others = inputs.iter().filter(|id| !is_number(id));
    others.filter_map(|id| graph.value(*id).ty.shape()).map(<[_]>::len).max().unwrap_or(0)
}

/// The number that a constant of one element holds, where it does not add axes to a result of this
/// rank.
fn constant(graph: &Graph, id: ValueId, rank: usize) -> Option<f64> {
    let tensor = graph.constants.get(&id)?;
    let number = scalar(tensor).filter(|_| tensor.shape().len() <= rank);
    number.filter(|number| number.is_finite())
}

/// The input of a formula that a value is.
fn place(inputs: &mut Vec<ValueId>, id: ValueId) -> ScalarExpr {
    let known = inputs.iter().position(|known| *known == id);
    ScalarExpr::Input(known.unwrap_or_else(|| {
        inputs.push(id);
        inputs.len() - 1
    }))
}

/// A formula with others in the places of its inputs.
fn substitute(formula: ScalarExpr, parts: Vec<ScalarExpr>) -> ScalarExpr {
    let mut uses = vec![0; parts.len()];
    formula.visit_inputs(&mut |index| uses.iter_mut().skip(index).take(1).for_each(|uses| *uses += 1));
    let mut parts: Vec<(ScalarExpr, usize)> = parts.into_iter().zip(uses).collect();
    replace_inputs(formula, &mut parts)
}

/// Each part is there with how often it is still to be used: the last use takes it, instead of a
/// copy.
fn replace_inputs(formula: ScalarExpr, parts: &mut [(ScalarExpr, usize)]) -> ScalarExpr {
    let mut part = |formula: Box<ScalarExpr>| Box::new(replace_inputs(*formula, parts));
    match formula {
        ScalarExpr::Input(index) => match parts.get_mut(index) {
            None => ScalarExpr::Input(index),
            Some((part, uses)) => {
                *uses -= 1;
                if *uses == 0 { std::mem::replace(part, ScalarExpr::Constant(0.0)) } else { part.clone() }
            }
        },
        ScalarExpr::Constant(number) => ScalarExpr::Constant(number),
        ScalarExpr::Unary(function, x) => ScalarExpr::Unary(function, part(x)),
        ScalarExpr::Binary(function, a, b) => {
            let a = part(a);
            ScalarExpr::Binary(function, a, part(b))
        }
        ScalarExpr::Select(condition, then, otherwise) => {
            let (condition, then) = (part(condition), part(then));
            ScalarExpr::Select(condition, then, part(otherwise))
        }
    }
}

/// How many functions a formula applies.
fn functions(formula: &ScalarExpr) -> usize {
    match formula {
        ScalarExpr::Input(_) | ScalarExpr::Constant(_) => 0,
        ScalarExpr::Unary(_, x) => 1 + functions(x),
        ScalarExpr::Binary(_, a, b) => 1 + functions(a) + functions(b),
        ScalarExpr::Select(condition, then, otherwise) => {
            1 + functions(condition) + functions(then) + functions(otherwise)
        }
    }
}
