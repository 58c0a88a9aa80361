//! Batch rules: how the items of a batch pass through an operator.
//!
//! They prove that a run can be split along the batch.
//!
//! A value either is the same for all items, or holds them one after another along one axis, each
//! with the same size. A rule says along which axis the outputs hold the items, or why they do not
//! keep them apart. An operator that mixes items has no valid rule. An operator without a rule is
//! assumed to mix them.

use smallvec::SmallVec;

use super::Traits;
use crate::dim::{Dim, Symbol};
use crate::ir::{Attributes, Graph, Node, ValueId};

/// How a value relates to the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchFact {
    /// The same for all items and any number of them.
    Independent,
    /// Sizes, some of which depend on the number of items. Only inputs that decide shapes may take
    /// them.
    Sizes,
    /// The positions of the items in the batch. Valid only as the index of a gather that picks each
    /// item's own elements.
    Places,
    /// The items, one after another along this axis.
    Along(usize),
}

/// Result of a rule. The error says why items are not kept apart, worded as the end of a sentence.
pub type BatchResult = Result<(), String>;

/// The source of an operator's batch rule.
#[derive(Clone, Copy, Debug)]
pub enum BatchRule {
    /// As [`elementwise`] if the operator has that trait; otherwise unknown.
    FromTraits,
    /// The operator's own rule.
    Rule(fn(&mut BatchCx<'_>) -> BatchResult),
}

/// Context of a batch rule: a node at least one of whose inputs holds items.
#[derive(Debug)]
pub struct BatchCx<'a> {
    graph: &'a Graph,
    node: &'a Node,
    /// The symbol that counts the items.
    symbol: &'a Symbol,
    /// By input position; `None` for omitted inputs.
    inputs: SmallVec<[Option<BatchFact>; 4]>,
    /// By input position: whether the input is a constant.
    constants: SmallVec<[bool; 4]>,
    /// By output position, as the rule sets it.
    outputs: SmallVec<[Option<BatchFact>; 2]>,
    /// Minimum number of items per part.
    least: usize,
}

impl<'a> BatchCx<'a> {
    /// Returns the context of a node whose inputs are analyzed. `fact` returns `None` for
    /// constants.
    pub(crate) fn new(
        (graph, node): (&'a Graph, &'a Node),
        symbol: &'a Symbol,
        fact: impl Fn(ValueId) -> Option<BatchFact>,
    ) -> BatchCx<'a> {
        let known = node.inputs.iter().map(|input| input.map(&fact));
        let inputs = known.clone().map(|known| known.map(|fact| fact.unwrap_or(BatchFact::Independent)));
        let constants = known.map(|known| matches!(known, Some(None)));
        // A constant is the same for all items. An omitted input has no fact.
        let (inputs, constants) = (inputs.collect(), constants.collect());
        BatchCx {
            graph,
            node,
            symbol,
            inputs,
            constants,
            outputs: SmallVec::from_elem(None, node.outputs.len()),
            least: 1,
        }
    }

    /// Returns what the rule set for each output, and the minimum number of items per part.
    pub(crate) fn finish(self) -> (SmallVec<[Option<BatchFact>; 2]>, usize) {
        (self.outputs, self.least)
    }

    /// Returns the attributes of the node.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// Returns the positions of the inputs that are not omitted.
    pub fn given(&self) -> impl Iterator<Item = usize> + use<> {
        // Collected, so that the iterator does not borrow the context that the rule changes.
        let given: SmallVec<[usize; 8]> =
            self.inputs.iter().enumerate().filter_map(|(index, fact)| fact.map(|_| index)).collect();
        given.into_iter()
    }

    /// Returns how the input at `index` relates to the batch. `None` if it is omitted.
    pub fn fact(&self, index: usize) -> Option<BatchFact> {
        self.inputs.get(index).copied().flatten()
    }

    /// Returns the axis of the items in the input at `index`. `None` if it holds none.
    pub fn axis(&self, index: usize) -> Option<usize> {
        match self.fact(index) {
            Some(BatchFact::Along(axis)) => Some(axis),
            _ => None,
        }
    }

    /// Returns the axis of the items in the input at `index`. An error if it holds none.
    pub fn items(&self, index: usize) -> Result<usize, String> {
        self.axis(index).ok_or_else(|| format!("{} holds no items", self.name(index)))
    }

    /// Fails if an input other than those at `with_items` holds items.
    pub fn others_are_independent(&self, with_items: &[usize]) -> BatchResult {
        let mut others = self.given().filter(|index| !with_items.contains(index));
        match others.find(|index| self.axis(*index).is_some()) {
            Some(index) => Err(format!("{} holds items of the batch", self.name(index))),
            None => Ok(()),
        }
    }

    /// Returns the input at `index` as errors name it.
    pub fn name(&self, index: usize) -> String {
        let value = self.node.inputs.get(index).copied().flatten();
        let value = value.map_or("", |value| &*self.graph.value(value).name);
        format!("its input '{value}'")
    }

    /// Returns the shape of the input at `index`.
    pub fn shape(&self, index: usize) -> Result<&'a [Dim], String> {
        let value = self.node.inputs.get(index).copied().flatten();
        let shape = value.and_then(|value| self.graph.value(value).ty.shape());
        shape.ok_or_else(|| format!("the shape of {} is not known", self.name(index)))
    }

    /// Returns whether the output at `index` has a reader.
    pub fn wants(&self, index: usize) -> bool {
        self.node.outputs.get(index).is_some_and(Option::is_some)
    }

    /// Returns the shape of the output at `index`.
    pub fn output(&self, index: usize) -> Result<&'a [Dim], String> {
        let value = self.node.outputs.get(index).copied().flatten();
        let shape = value.and_then(|value| self.graph.value(value).ty.shape());
        shape.ok_or_else(|| "the shape of its output is not known".to_string())
    }

    /// Returns the elements of the integer input at `index`, if all are known numbers.
    pub fn ints(&self, index: usize) -> Option<Vec<i64>> {
        let value = self.node.inputs.get(index).copied().flatten()?;
        match &self.graph.value(value).symbolic {
            // A constant need not be tracked: its elements are in the graph.
            Some(symbolic) => symbolic.as_ints(),
            None => crate::spec::known_ints(self.graph.constants.get(&value).map(|tensor| tensor.view())),
        }
    }

    /// Returns whether a size depends on the number of items.
    pub fn counts_items(&self, size: Option<&Dim>) -> bool {
        size.is_some_and(|size| size.symbols().contains(self.symbol))
    }

    /// Returns whether the input at `index` is a constant, which kernels pack.
    pub fn is_constant(&self, index: usize) -> bool {
        self.constants.get(index) == Some(&true)
    }

    /// Sets the axis along which the output at `index` holds the items. Outputs without a reader
    /// may be set too.
    pub fn set(&mut self, index: usize, axis: usize) {
        if let Some(output) = self.outputs.get_mut(index) {
            *output = Some(BatchFact::Along(axis));
        }
    }

    /// Sets the axis of the items for all outputs.
    pub fn set_all(&mut self, axis: usize) {
        self.outputs.fill(Some(BatchFact::Along(axis)));
    }

    /// Requires at least this many items per part: with fewer, kernels accumulate in another order,
    /// and the result differs in bits.
    pub fn at_least(&mut self, items: usize) {
        self.least = self.least.max(items);
    }
}

/// Applies the rule of the operator, or the one that follows from its traits.
pub(crate) fn apply(cx: &mut BatchCx<'_>) -> BatchResult {
    match cx.node.spec.batch {
        BatchRule::Rule(rule) => rule(cx),
        BatchRule::FromTraits if cx.node.spec.traits.has(Traits::ELEMENTWISE) => elementwise(cx),
        // Refuse what is not proven: splitting a batch that the operator mixes would change
        // results.
        BatchRule::FromTraits => Err("how a batch goes through it is not known".to_string()),
    }
}

/// Batch rule of elementwise operators with broadcasting. Inputs with items must hold them along
/// the same axis of the broadcast shape. The others must have size 1 there, or no such axis.
pub fn elementwise(cx: &mut BatchCx<'_>) -> BatchResult {
    let output = cx.output(0)?;
    let given: SmallVec<[usize; 8]> = cx.given().collect();
    // Broadcasting aligns shapes at the last axis.
    // Broadcasting never lowers the rank, so the difference is exact.
    let aligned = |index: usize, axis: usize| Ok(axis + output.len().saturating_sub(cx.shape(index)?.len()));
    let axes = given.iter().filter_map(|&index| cx.axis(index).map(|axis| aligned(index, axis)));
    let axes: Vec<usize> = axes.collect::<Result<_, String>>()?;
    let Some(&axis) = axes.first() else { return Err("none of its inputs holds items".to_string()) };
    if axes.iter().any(|other| *other != axis) {
        return Err("its inputs hold the items along different axes".to_string());
    }
    for &index in &given {
        broadcasts(cx, index, (output, axis))?;
    }
    cx.set(0, axis);
    Ok(())
}

/// Fails if an input does not broadcast along the batch axis of `shape`. An input with items must
/// have the same size on that axis. Others must have size 1 there, or no such axis.
pub fn broadcasts(cx: &BatchCx<'_>, index: usize, (shape, axis): (&[Dim], usize)) -> BatchResult {
    let own = cx.shape(index)?;
    // `None` if the input has too few dimensions to reach the batch axis.
    let place = (axis + own.len()).checked_sub(shape.len());
    let size = place.and_then(|place| own.get(place));
    // Sizes are compared as expressions: a symbolic size equal to the batch is proven, not assumed.
    let fits = match (cx.axis(index), size) {
        (Some(own_axis), size) => Some(own_axis) == place && size == shape.get(axis),
        (None, size) => size.is_none_or(|size| size.as_constant() == Some(1)),
    };
    match fits {
        true => Ok(()),
        false => Err(format!("{} does not hold an element for each item, nor one for all", cx.name(index))),
    }
}
