//! Elementwise fusion.
//!
//! A chain of elementwise operators becomes one `FusedElementwise`, so its intermediate values are
//! never written to memory.

use rustc_hash::{FxHashMap, FxHashSet};

use super::environment::FirstClaim;
use super::matching::scalar;
use super::report::Report;
use crate::Result;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, ValueId};
use crate::spec::{BinaryFn, OpSpec, RUNTIME, Registry, ScalarExpr};

/// The rule name of this pass, which no pattern can express.
pub(super) const RULE: &str = "elementwise_chain";

/// Maximum number of inputs of one fused operator.
const MOST_INPUTS: usize = 8;
/// Maximum number of functions in one formula, counting those of each node once.
const MOST_FUNCTIONS: usize = 64;
/// Maximum number of functions in the text of a formula, which repeats a value at each use. Without
/// a bound, a chain in which every node reads its predecessor twice would double at each.
const MOST_WRITTEN: usize = 256;

/// A value as a formula of other values.
struct Chain {
    formula: ScalarExpr,
    /// Number of functions that its nodes apply.
    functions: usize,
    /// Number of functions in the formula, which repeats a value at each use.
    written: usize,
    inputs: Vec<ValueId>,
    /// The nodes it consists of; the one that computes the value is last.
    nodes: Vec<usize>,
}

/// Fuses every chain of two or more elementwise float operators whose intermediate values have no
/// other reader.
pub(super) fn fuse(graph: &mut Graph, first_claim: FirstClaim<'_>, report: &mut Report) -> Result<()> {
    let Some(spec) = Registry::global()?.find(RUNTIME, "FusedElementwise") else { return Ok(()) };
    // Two rounds: a node that the first one fused may be a cheap formula for its readers.
    for _ in 0..2 {
        duplicate_cheap_producers(graph);
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
    // The map's order is arbitrary, the graph's must not be.
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
        // Leave the chain unfused if the fused node would move to a later device.
        if device.is_some_and(|device| claimed.is_none_or(|claimed| claimed > device)) {
            continue;
        }
        let Some(node) = graph.nodes.get_mut(last) else { continue };
        *node = fused;
        for &inner in inner {
            dead.iter_mut().skip(inner).take(1).for_each(|dead| *dead = true);
        }
        report.count(RULE);
    }
    let mut dead = dead.into_iter();
    graph.nodes.retain(|_| !dead.next().unwrap_or(false));
    Ok(())
}

/// Maximum number of functions of a formula that is recomputed for each reader rather than written
/// to memory.
const CHEAP: usize = 4;

/// Copies the node of a cheap formula to each of its elementwise readers. A copy has a single
/// reader and fuses into it, so its result is not stored.
///
/// This must not cost memory: the formula must have one input of the size of its result, and that
/// input must be alive until the reader anyway.
fn duplicate_cheap_producers(graph: &mut Graph) {
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
        // The original serves the other readers, or the first of these if there are no others.
        let stays = fusing.len() < readers.len() || outputs.contains(&output);
        copies.extend(fusing.into_iter().skip(usize::from(!stays)).map(|reader| (reader, index, output)));
    }
    // In the order of their readers: the loop below puts each copy right before its reader.
    copies.sort_unstable_by_key(|(reader, ..)| *reader);
    let mut copies = copies.into_iter().peekable();
    // The loop consumes the nodes, but a later reader may need another copy of one.
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

/// Returns the one input of the size of the result, if the node's formula is cheap.
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

/// Whether a node is elementwise and returns the type and shape of a value that it reads.
fn is_elementwise_like(graph: &Graph, node: &Node, read: ValueId) -> bool {
    let &[Some(output)] = node.outputs.as_slice() else { return false };
    formula_of(graph, node).is_some() && graph.value(output).ty == graph.value(read).ty
}

/// Whether a formula consists of additions, subtractions, multiplications, minima and maxima.
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

/// Returns for each value whether exactly one node reads it and it is not a graph output.
fn read_by_one_node(graph: &Graph) -> Vec<bool> {
    let mut reader: Vec<Option<usize>> = vec![None; graph.value_count()];
    let mut once = vec![false; graph.value_count()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in node.reads() {
            let (Some(reader), Some(once)) = (reader.get_mut(id.index()), once.get_mut(id.index())) else {
                continue;
            };
            // A node that reads the value twice is still one reader.
            *once = reader.is_none_or(|reader| reader == index) && (*once || reader.is_none());
            *reader = Some(index);
        }
    }
    for id in &graph.outputs {
        once.iter_mut().skip(id.index()).take(1).for_each(|once| *once = false);
    }
    once
}

/// Returns the chain that ends at a node, with the value it computes, if the node is elementwise.
/// Chains that it absorbs are removed from `chains`.
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
    // A node may have inputs that its formula holds as constants, such as the bounds of `Clip`.
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
    // Reserve one input for each operand still to come.
    let mut to_come = given.len();
    for (position, id) in given.iter().copied().enumerate() {
        to_come -= 1;
        if let Some(earlier) = given.iter().take(position).position(|earlier| *earlier == id) {
            let same: Option<&ScalarExpr> = parts.get(earlier);
            parts.push(same?.clone());
            continue;
        }
        let uses = uses.get(position).copied().unwrap_or(1);
        // Absorb only values of the result's shape: a smaller one would be recomputed for each
        // element it is broadcast to.
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
                    // With no input before it, the absorbed formula keeps its input numbers and
                    // moves over without a walk. Long chains thus fuse in linear time.
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

/// Counts the uses of each input of a formula. Uses of a repeated value count at its first
/// position.
fn uses_of_inputs(formula: &ScalarExpr, given: &[ValueId]) -> Vec<usize> {
    let mut uses = vec![0; given.len()];
    formula.visit_inputs(&mut |index| {
        let value = given.get(index);
        let first = given.iter().position(|id| Some(id) == value).unwrap_or(index);
        uses.iter_mut().skip(first).take(1).for_each(|uses| *uses += 1);
    });
    uses
}

/// Returns the formula of an elementwise node over its inputs.
fn formula_of(graph: &Graph, node: &Node) -> Option<ScalarExpr> {
    if let Some(formula) = node.spec.scalar {
        return formula(&node.attrs).ok();
    }
    // `Clip` takes its bounds as inputs: it has a formula only if they are constants.
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

/// Returns the rank of a result, not counting the inputs that are one-element constants.
fn rank_without_constants(graph: &Graph, inputs: &[ValueId]) -> usize {
    let is_number = |id: &&ValueId| constant(graph, **id, usize::MAX).is_some();
    let others = inputs.iter().filter(|id| !is_number(id));
    others.filter_map(|id| graph.value(*id).ty.shape()).map(<[_]>::len).max().unwrap_or(0)
}

/// Returns the number of a one-element constant. `None` if it is not finite, or has more axes than
/// a result of this rank and would add some.
fn constant(graph: &Graph, id: ValueId, rank: usize) -> Option<f64> {
    let tensor = graph.constants.get(&id)?;
    let number = scalar(tensor).filter(|_| tensor.shape().len() <= rank);
    number.filter(|number| number.is_finite())
}

/// Returns the formula input for a value, adding the value if it is new.
fn place(inputs: &mut Vec<ValueId>, id: ValueId) -> ScalarExpr {
    let known = inputs.iter().position(|known| *known == id);
    ScalarExpr::Input(known.unwrap_or_else(|| {
        inputs.push(id);
        inputs.len() - 1
    }))
}

/// Substitutes formulas for the inputs of a formula.
fn substitute(formula: ScalarExpr, parts: Vec<ScalarExpr>) -> ScalarExpr {
    let mut uses = vec![0; parts.len()];
    formula.visit_inputs(&mut |index| uses.iter_mut().skip(index).take(1).for_each(|uses| *uses += 1));
    let mut parts: Vec<(ScalarExpr, usize)> = parts.into_iter().zip(uses).collect();
    replace_inputs(formula, &mut parts)
}

/// Substitutes `parts`, each with the number of its remaining uses: the last use moves it, the
/// others copy it.
fn replace_inputs(formula: ScalarExpr, parts: &mut [(ScalarExpr, usize)]) -> ScalarExpr {
    let mut part = |formula: Box<ScalarExpr>| Box::new(replace_inputs(*formula, parts));
    match formula {
        ScalarExpr::Input(index) => match parts.get_mut(index) {
            None => ScalarExpr::Input(index),
            Some((part, uses)) => {
                *uses -= 1;
                // No use is left that could read the 0.
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

/// Counts the functions of a formula.
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
