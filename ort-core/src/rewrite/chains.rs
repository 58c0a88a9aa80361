//! Chains of elementwise operators become one operator each: what lies between them is never written to memory.

use rustc_hash::{FxHashMap, FxHashSet};

use super::Report;
use super::matching::scalar;
use crate::Result;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, Attributes, Graph, Node, ValueId};
use crate::spec::{RUNTIME, Registry, ScalarExpr};

/// The most inputs of one fused operator.
const MOST_INPUTS: usize = 8;
/// The most functions in one formula.
const MOST_FUNCTIONS: usize = 64;

/// A value as a formula of others.
struct Chain {
    formula: ScalarExpr,
    inputs: Vec<ValueId>,
    /// The nodes that it is made of, its own last.
    nodes: Vec<usize>,
}

/// Fuses every chain of two or more elementwise operators of floats whose inner values nobody else reads.
pub(super) fn fuse(graph: &mut Graph, report: &mut Report) -> Result<()> {
    let Some(spec) = Registry::global()?.find(RUNTIME, "FusedElementwise") else { return Ok(()) };
    let mut readers: FxHashMap<ValueId, FxHashSet<usize>> = FxHashMap::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        node.reads().for_each(|id| {
            readers.entry(id).or_default().insert(index);
        });
    }
    let outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut chains: FxHashMap<ValueId, Chain> = FxHashMap::default();
    let mut absorbed = FxHashSet::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some((output, chain)) = chain_of(graph, index, node, &chains, |id| {
            !outputs.contains(&id) && readers.get(&id).is_some_and(|readers| readers.len() == 1)
        }) else {
            continue;
        };
        absorbed.extend(chain.nodes.iter().copied().filter(|inner| *inner != index));
        chains.insert(output, chain);
    }
    let ends: Vec<Chain> = chains
        .into_values()
        .filter(|chain| {
            chain.nodes.len() > 1 && chain.nodes.last().is_some_and(|last| !absorbed.contains(last))
        })
        .collect();
    let mut dead = FxHashSet::default();
    for chain in ends {
        let (Some(&last), true) = (chain.nodes.last(), !chain.inputs.is_empty()) else { continue };
        let formula = vec![("formula".to_string(), Attribute::String(chain.formula.to_string()))];
        let attrs = Attributes::new(spec, formula)?;
        let Some(node) = graph.nodes.get_mut(last) else { continue };
        node.spec = spec;
        node.inputs = chain.inputs.into_iter().map(Some).collect();
        node.attrs = attrs;
        dead.extend(chain.nodes.iter().copied().filter(|inner| *inner != last));
        report.count(super::ELEMENTWISE_CHAIN);
    }
    let mut index = 0;
    graph.nodes.retain(|_| {
        index += 1;
        !dead.contains(&(index - 1))
    });
    Ok(())
}

/// The chain that ends at a node, and the value it computes, where the node is elementwise.
fn chain_of(
    graph: &Graph,
    index: usize,
    node: &Node,
    chains: &FxHashMap<ValueId, Chain>,
    read_once: impl Fn(ValueId) -> bool,
) -> Option<(ValueId, Chain)> {
    let &[Some(output)] = node.outputs.as_slice() else { return None };
    let ty = graph.value(output).ty.as_tensor()?;
    if !TypeSet::FLOATS.contains(ty.dtype) || ty.shape.is_none() {
        return None;
    }
    let own = formula_of(graph, node)?;
    let given: Vec<ValueId> = node.inputs.iter().take(own.input_count()).copied().collect::<Option<_>>()?;
    let same_type = |id: &ValueId| graph.value(*id).ty.dtype() == Some(ty.dtype);
    if given.is_empty() || !given.iter().all(same_type) {
        return None;
    }
    let mut chain = Chain { formula: ScalarExpr::Constant(0.0), inputs: Vec::new(), nodes: Vec::new() };
    let mut size = functions(&own);
    let mut parts = Vec::with_capacity(given.len());
    for id in given {
        // What has the shape of the result is computed as often here as there.
        let inner = chains.get(&id).filter(|inner| {
            let room = size + functions(&inner.formula) <= MOST_FUNCTIONS;
            let few = chain.inputs.len() + inner.inputs.len() < MOST_INPUTS;
            read_once(id) && room && few && graph.value(id).ty.shape() == ty.shape.as_deref()
        });
        parts.push(match (inner, constant(graph, id, ty.shape.as_deref())) {
            (Some(inner), _) => {
                size += functions(&inner.formula);
                chain.nodes.extend(
                    inner
                        .nodes
                        .iter()
                        .copied()
                        .filter(|node| !chain.nodes.contains(node))
                        .collect::<Vec<_>>(),
                );
                let places: Vec<ScalarExpr> =
                    inner.inputs.iter().map(|id| place(&mut chain.inputs, *id)).collect();
                substitute(&inner.formula, &places)
            }
            (None, Some(number)) => ScalarExpr::Constant(number),
            (None, None) => place(&mut chain.inputs, id),
        });
    }
    chain.formula = substitute(&own, &parts);
    chain.nodes.push(index);
    (chain.inputs.len() <= MOST_INPUTS).then_some((output, chain))
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

/// The number that a constant of one element holds, where it does not add axes to a result of this shape.
fn constant(graph: &Graph, id: ValueId, shape: Option<&[crate::dim::Dim]>) -> Option<f64> {
    let tensor = graph.constants.get(&id)?;
    let number = scalar(tensor).filter(|_| tensor.shape().len() <= shape.map_or(0, <[_]>::len));
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
fn substitute(formula: &ScalarExpr, parts: &[ScalarExpr]) -> ScalarExpr {
    let part = |formula: &ScalarExpr| Box::new(substitute(formula, parts));
    match formula {
        ScalarExpr::Input(index) => parts.get(*index).cloned().unwrap_or(ScalarExpr::Input(*index)),
        ScalarExpr::Constant(number) => ScalarExpr::Constant(*number),
        ScalarExpr::Unary(function, x) => ScalarExpr::Unary(*function, part(x)),
        ScalarExpr::Binary(function, a, b) => ScalarExpr::Binary(*function, part(a), part(b)),
        ScalarExpr::Select(condition, then, otherwise) => {
            ScalarExpr::Select(part(condition), part(then), part(otherwise))
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
