//! Batch independence: a proof that a graph computes each item of a batch independently of the
//! others.
//!
//! A run of such a graph can be split into micro-batches. A symbolic dimension of the inputs, such
//! as `batch`, counts the items. Starting at the inputs, the prover finds a fact for each value:
//! the value is the same for all items, holds sizes that depend on their number, or holds the items
//! one after another along one axis. Each operator's record says how facts propagate
//! (`OpSpec::batch`), and the inferred shape must agree. If a value has no such fact, the proof
//! fails and names the node at fault.

use std::fmt;

use rustc_hash::FxHashMap;

use super::batch_places::{Condition, Places};
use crate::dim::{Bindings, Dim, Symbol};
use crate::ir::{Graph, Node, ValueId};
use crate::spec::Traits;
use crate::spec::batch::{BatchCx, BatchFact, apply};

/// How a run is split into micro-batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSplit {
    /// The symbolic dimension that counts the items.
    pub dim: String,
    /// The number of items in each part, in order.
    pub parts: Vec<usize>,
    /// The most bytes that the run allocates: all outputs, and the activations and workspaces of
    /// one part.
    pub planned_bytes: usize,
}

/// A proof that a graph computes the items of a batch independently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchProof {
    /// The symbol that counts the items.
    pub symbol: Symbol,
    /// The axis along which each graph input holds items; none if all items share the input.
    pub inputs: Vec<Option<usize>>,
    /// The axis along which each graph output holds items.
    pub outputs: Vec<usize>,
    /// The fewest items that a part must have for results that are bit-identical to those of the
    /// whole batch. This is 2 if some kernel sums in another order for a single row.
    pub least: usize,
    /// Pairs of sizes. The first must be at most the second, because otherwise an index would reach
    /// past its item.
    pub conditions: Vec<(Dim, Dim)>,
}

impl BatchProof {
    /// Checks that the proof holds for these sizes.
    ///
    /// # Errors
    ///
    /// Returns a description of the violated condition.
    pub fn check(&self, bindings: &Bindings) -> Result<(), String> {
        let holds = |(small, large): &&Condition| match (small.evaluate(bindings), large.evaluate(bindings)) {
            (Ok(small), Ok(large)) => small <= large,
            _ => false,
        };
        match self.conditions.iter().find(|condition| !holds(condition)) {
            Some((small, large)) => {
                Err(format!("an index leaves its item, because {small} is more than {large}"))
            }
            None => Ok(()),
        }
    }
}

/// Why there is no proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRefusal {
    /// The symbol for which the proof failed; none if no size of the first output can be the batch
    /// size.
    pub symbol: Option<Symbol>,
    /// The input, node or output at fault.
    pub place: String,
    /// What is wrong with it.
    pub why: String,
}

impl fmt::Display for BatchRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

/// How many sizes of the first output are tried.
const MOST_SYMBOLS: usize = 4;

/// Proves independence for the first symbol that allows it, among the sizes of the first output. If
/// no symbol does, returns the refusal of the first.
///
/// # Errors
///
/// Returns what prevents the proof.
pub fn batch_parallel(graph: &Graph) -> Result<BatchProof, BatchRefusal> {
    let output = graph.outputs.first().and_then(|id| graph.value(*id).ty.shape()).unwrap_or_default();
    let symbols = output.iter().filter_map(|size| {
        let mut symbols = size.symbols().into_iter().filter(|symbol| items_in(size, symbol).is_some());
        // The batch size must be known before the run, so a data-dependent symbol cannot count
        // items.
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

/// Proves that the items counted by `symbol` are computed independently.
///
/// # Errors
///
/// Returns what prevents the proof.
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

/// The state of a proof.
struct Prover<'a> {
    graph: &'a Graph,
    symbol: &'a Symbol,
    /// By value; none for constants, because no node computes them.
    facts: Vec<Option<BatchFact>>,
    /// Index arithmetic, by value: the positions of items that an integer tensor holds.
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

    /// Returns the axis along which an input holds items. At most one of its sizes may depend on
    /// the number of items.
    fn input(&mut self, id: ValueId) -> Result<Option<usize>, String> {
        let shape = self.graph.value(id).ty.shape().ok_or("its shape is not known")?;
        let axis = shape.iter().position(|size| self.has(size));
        let fact = axis.map_or(BatchFact::Independent, BatchFact::Along);
        self.check(id, fact)?;
        self.set(id, fact);
        Ok(axis)
    }

    /// Derives the facts of a node's outputs, or says why it cannot.
    fn node(&mut self, node: &Node) -> Result<(), String> {
        // An item would get other random numbers in a part than in the whole batch.
        if node.spec.traits.has(Traits::RANDOM) {
            return Err("its results are random".to_string());
        }
        let wanted = |node: &Node| node.outputs.clone().into_iter().flatten();
        let mut open = false;
        // Shape arithmetic needs no rule: its symbolic elements say whether it depends on the
        // batch.
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
        // If no input of a node depends on the batch, its outputs do not, either.
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

    /// Handles index arithmetic: nodes that number the items, and a `Gather` that picks rows of an
    /// item by such numbers. Returns false for all other nodes.
    fn places(&mut self, node: &Node) -> Result<bool, String> {
        let Some(&Some(output)) = node.outputs.first() else { return Ok(false) };
        if let Some(places) = Places::of((self.graph, node), self.symbol, |id| self.places.get(&id)) {
            let numbers_items = places.axis.is_some();
            self.places.insert(output, places);
            if numbers_items {
                self.set(output, BatchFact::Places);
            }
            // Without an axis the indices are within an item, so the usual rules apply.
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
        // From one item to the next, the indices must advance by the number of rows that the data
        // has per item.
        if rows.as_ref() != Some(&places.step) {
            return Err(
                "its indices step from item to item by another number of rows than its data".to_string()
            );
        }
        // Conditions that symbols cannot decide are checked with the sizes of each run
        // (`BatchProof::check`).
        self.conditions.extend(places.within_item());
        self.check(output, BatchFact::Along(axis))?;
        self.set(output, BatchFact::Along(axis));
        Ok(true)
    }

    /// Returns the fact of a small integer tensor whose elements follow from the input shapes
    /// alone.
    fn sizes(&self, id: ValueId) -> Option<BatchFact> {
        let symbolic = self.graph.value(id).symbolic.as_ref()?;
        if symbolic.elements.iter().any(Dim::has_unknown) {
            return None;
        }
        let tells_items = symbolic.elements.iter().any(|element| self.has(element));
        Some(if tells_items { BatchFact::Sizes } else { BatchFact::Independent })
    }

    /// Checks that a shape agrees with a fact: only the size of the items' axis depends on the
    /// number of items.
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
        // A size known only at run time may depend on the number of items.
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

/// Rejects inputs that would let results depend on how the batch is split. An input that decides
/// shapes may depend on the number of items, but may not hold items. Any other input may hold
/// items, but may not depend on their number. No input may hold positions of items.
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

/// Returns how many elements of a size belong to each item: the factor of `symbol` in `size`. None
/// if `size` is not such a product, or if the factor depends on `symbol`.
fn items_in(size: &Dim, symbol: &Symbol) -> Option<Dim> {
    let one = [(symbol.clone(), Dim::constant(1))].into_iter().collect();
    let each = size.substitute(&one);
    let items = Dim::symbol(symbol.clone());
    let counts = size.symbols().contains(symbol) && !each.symbols().contains(symbol);
    (counts && !each.has_unknown() && &each * &items == *size).then_some(each)
}
