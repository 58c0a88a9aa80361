//! The proof that a graph computes each item of a batch apart from the others, so that a run may be
//! split.
//!
//! Items are what a symbol of the inputs' shapes counts. From the inputs on, each value is shown to
//! be the same for all items, to tell sizes, or to hold the items one behind the other along one
//! axis; each operator's record says how (`OpSpec::batch`), and the inferred shape must agree. What
//! cannot be shown is refused, with the node that stands in the way.

use std::fmt;

use rustc_hash::FxHashMap;

use super::batch_places::{Condition, Places};
use crate::dim::{Bindings, Dim, Symbol};
use crate::ir::{Graph, Node, ValueId};
use crate::spec::Traits;
use crate::spec::batch::{BatchCx, BatchFact, apply};

/// How a run is split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSplit {
    /// The symbolic dimension that counts the items.
    pub dim: String,
    /// The items of each part, in order.
    pub parts: Vec<usize>,
    /// Bytes that the run allocates at most: whole outputs, and activations and workspaces of one
    /// part.
    pub planned_bytes: usize,
}

/// A proof that the items of a batch are computed apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchProof {
    /// What counts the items.
    pub symbol: Symbol,
    /// For each input of the graph the axis along which it holds items; none where it is the same
    /// for all.
    pub inputs: Vec<Option<usize>>,
    /// For each output the axis along which it holds items.
    pub outputs: Vec<usize>,
    /// The fewest items of a part that give the bits of the whole: 2 where kernels compute a single
    /// row in another order.
    pub least: usize,
    /// Pairs of sizes of which the first must not be the larger one: an index would reach over its
    /// item.
    pub conditions: Vec<(Dim, Dim)>,
}

impl BatchProof {
    /// Whether it holds for these sizes.
    ///
    /// # Errors
    ///
    /// The condition that does not, in words.
    pub fn check(&self, bindings: &Bindings) -> Result<(), String> {
        let holds = |(small, large): &&Condition| match (small.evaluate(bindings), large.evaluate(bindings)) {
            (Ok(small), Ok(large)) => small <= large,
            _ => false,
        };
        match self.conditions.iter().find(|condition| !holds(condition)) {
            Some((small, large)) => {
                Err(format!("an index reaches over its item where {small} is more than {large}"))
            }
            None => Ok(()),
        }
    }
}

/// Why there is no proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRefusal {
    /// What would count the items; none where the outputs have no symbolic size.
    pub symbol: Option<Symbol>,
    /// The input, node or output that stands in the way.
    pub place: String,
    /// What is with it.
    pub why: String,
}

impl fmt::Display for BatchRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

/// The most sizes of an output that are tried.
const MOST_SYMBOLS: usize = 4;

/// Proves it for the first symbol for which that can be done, of those that are a size of the first
/// output. The refusal is that of the first symbol.
///
/// # Errors
///
/// What stands in the way.
pub fn batch_parallel(graph: &Graph) -> Result<BatchProof, BatchRefusal> {
    let output = graph.outputs.first().and_then(|id| graph.value(*id).ty.shape()).unwrap_or_default();
    let symbols = output.iter().filter_map(|size| {
        let mut symbols = size.symbols().into_iter().filter(|symbol| items_in(size, symbol).is_some());
        symbols.next().filter(|symbol| !symbol.is_unknown())
    });
    let mut first = None;
    for symbol in symbols.take(MOST_SYMBOLS) {
        match prove(graph, &symbol) {
            Ok(proof) => return Ok(proof),
            Err(refusal) => first = first.or(Some(refusal)),
        }
    }
    Err(first.unwrap_or_else(|| BatchRefusal {
        symbol: None,
        place: "the first output".to_string(),
        why: "none of its sizes counts items".to_string(),
    }))
}

/// Proves it for the items that `symbol` counts.
///
/// # Errors
///
/// What stands in the way.
pub fn prove(graph: &Graph, symbol: &Symbol) -> Result<BatchProof, BatchRefusal> {
    let refuse = |place: String, why: String| BatchRefusal { symbol: Some(symbol.clone()), place, why };
    let (facts, places, conditions) = (vec![None; graph.value_count()], FxHashMap::default(), Vec::new());
    let mut prover = Prover { graph, symbol, facts, places, least: 1, conditions };
    let mut inputs = Vec::with_capacity(graph.inputs.len());
    for &id in &graph.inputs {
        let axis = prover.input(id).map_err(|why| refuse(prover.name("input", id), why))?;
        inputs.push(axis);
    }
    for node in &graph.nodes {
        prover.node(node).map_err(|why| refuse(node.place(), why))?;
    }
    let mut outputs = Vec::with_capacity(graph.outputs.len());
    for &id in &graph.outputs {
        match prover.facts.get(id.index()) {
            Some(Some(BatchFact::Along(axis))) => outputs.push(*axis),
            _ => return Err(refuse(prover.name("output", id), "it holds no items".to_string())),
        }
    }
    let Prover { least, conditions, .. } = prover;
    Ok(BatchProof { symbol: symbol.clone(), inputs, outputs, least, conditions })
}

struct Prover<'a> {
    graph: &'a Graph,
    symbol: &'a Symbol,
    /// By value; none for constants, which are in no node's outputs.
    facts: Vec<Option<BatchFact>>,
    /// What is known of integers that count.
    places: FxHashMap<ValueId, Places>,
    least: usize,
    conditions: Vec<Condition>,
}

impl Prover<'_> {
    fn name(&self, kind: &str, id: ValueId) -> String {
        format!("{kind} '{}'", self.graph.value(id).name)
    }

    fn set(&mut self, id: ValueId, fact: BatchFact) {
        if let Some(place) = self.facts.get_mut(id.index()) {
            *place = Some(fact);
        }
    }

    fn has(&self, dim: &Dim) -> bool {
        dim.symbols().contains(self.symbol)
    }

    /// An input has the items along the one axis whose size they count.
    fn input(&mut self, id: ValueId) -> Result<Option<usize>, String> {
        let shape = self.graph.value(id).ty.shape().ok_or("its shape is not known")?;
        let axis = shape.iter().position(|size| self.has(size));
        let fact = axis.map_or(BatchFact::Independent, BatchFact::Along);
        self.check(id, fact)?;
        self.set(id, fact);
        Ok(axis)
    }

    fn node(&mut self, node: &Node) -> Result<(), String> {
        if node.spec.traits.has(Traits::RANDOM) {
            return Err("its results are random".to_string());
        }
        let wanted = |node: &Node| node.outputs.clone().into_iter().flatten();
        let mut open = false;
        for id in wanted(node) {
            match self.sizes(id) {
                Some(fact) => self.set(id, fact),
                None => open = true,
            }
        }
        if !open || self.places(node)? {
            return Ok(());
        }
        let independent = |fact: &Option<BatchFact>| matches!(fact, None | Some(BatchFact::Independent));
        if node.reads().all(|id| self.facts.get(id.index()).is_some_and(independent)) {
            wanted(node).for_each(|id| self.set(id, BatchFact::Independent));
            return wanted(node).try_for_each(|id| self.check(id, BatchFact::Independent));
        }
        if !node.subgraphs.is_empty() {
            return Err("what its subgraphs do with items is not known".to_string());
        }
        let mut cx =
            BatchCx::new((self.graph, node), self.symbol, |id| self.facts.get(id.index()).copied().flatten());
        check_sizes(&cx, node)?;
        apply(&mut cx)?;
        let (facts, least) = cx.finish();
        self.least = self.least.max(least);
        for (id, fact) in node.outputs.iter().zip(facts) {
            let Some(id) = id.filter(|id| self.sizes(*id).is_none()) else { continue };
            let fact = fact.ok_or("where an output holds items is not known")?;
            self.check(id, fact)?;
            self.set(id, fact);
        }
        Ok(())
    }

    /// Numbers the items, or picks what is theirs by such numbers; false where the node is no such.
    fn places(&mut self, node: &Node) -> Result<bool, String> {
        let Some(&Some(output)) = node.outputs.first() else { return Ok(false) };
        if let Some(places) = Places::of((self.graph, node), self.symbol, |id| self.places.get(&id)) {
            let numbers_items = places.axis.is_some();
            self.places.insert(output, places);
            if numbers_items {
                self.set(output, BatchFact::Places);
            }
            return Ok(numbers_items);
        }
        let (true, &[Some(data), Some(index)]) = (node.spec.name == "Gather", node.inputs.as_slice()) else {
            return Ok(false);
        };
        let (Some(&Some(BatchFact::Along(0))), Some(places)) =
            (self.facts.get(data.index()), self.places.get(&index))
        else {
            return Ok(false);
        };
        let rows = self.graph.value(data).ty.shape().and_then(|shape| items_in(shape.first()?, self.symbol));
        let (Some(axis), true) = (places.axis, node.attrs.find_int("axis") == Some(0)) else {
            return Ok(false);
        };
        if rows.as_ref() != Some(&places.step) {
            return Err("its indices number items by another step than its data".to_string());
        }
        self.conditions.extend(places.within_item());
        self.check(output, BatchFact::Along(axis))?;
        self.set(output, BatchFact::Along(axis));
        Ok(true)
    }

    /// A small integer tensor whose elements follow from the shapes of the inputs alone.
    fn sizes(&self, id: ValueId) -> Option<BatchFact> {
        let symbolic = self.graph.value(id).symbolic.as_ref()?;
        if symbolic.elements.iter().any(Dim::has_unknown) {
            return None;
        }
        let tells_items = symbolic.elements.iter().any(|element| self.has(element));
        Some(if tells_items { BatchFact::Sizes } else { BatchFact::Independent })
    }

    /// The shape must say the same: items are counted along their axis and nowhere else.
    fn check(&self, id: ValueId, fact: BatchFact) -> Result<(), String> {
        let info = self.graph.value(id);
        let axis = match fact {
            BatchFact::Along(axis) => Some(axis),
            _ => None,
        };
        let Some(shape) = info.ty.shape() else {
            return match axis {
                None => Ok(()),
                Some(_) => Err(format!("the shape of '{}' is not known", info.name)),
            };
        };
        let fits = shape.iter().enumerate().all(|(place, size)| match Some(place) == axis {
            true => items_in(size, self.symbol).is_some(),
            false => !self.has(size) && (axis.is_none() || !size.has_unknown()),
        });
        match fits && axis.is_none_or(|axis| axis < shape.len()) {
            true => Ok(()),
            false => Err(format!("'{}' is {}, whose sizes do not keep items apart", info.name, info.ty)),
        }
    }
}

/// Inputs that decide shapes may tell the number of items, others may not: it would be among the
/// data.
fn check_sizes(cx: &BatchCx<'_>, node: &Node) -> Result<(), String> {
    for index in cx.given() {
        let is_host = node.spec.input_param(index).is_some_and(|param| param.host);
        match cx.fact(index) {
            Some(BatchFact::Sizes) if !is_host => {
                return Err(format!("the number of items is among the data of {}", cx.name(index)));
            }
            Some(BatchFact::Places) => {
                return Err(format!("{} tells the places of items in the batch", cx.name(index)));
            }
            Some(BatchFact::Along(_)) if is_host => {
                return Err(format!("{}, which decides shapes, holds items", cx.name(index)));
            }
            _ => {}
        }
    }
    Ok(())
}

/// How often each item is counted in a size: `size` is that number times the symbol, and the number
/// knows nothing of it.
fn items_in(size: &Dim, symbol: &Symbol) -> Option<Dim> {
    let one = [(symbol.clone(), Dim::constant(1))].into_iter().collect();
    let each = size.substitute(&one);
    let items = Dim::symbol(symbol.clone());
    let counts = size.symbols().contains(symbol) && !each.symbols().contains(symbol);
    (counts && !each.has_unknown() && &each * &items == *size).then_some(each)
}
