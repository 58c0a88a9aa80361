//! How a batch goes through an operator: what a rule sees and says, and the rule that follows from
//! the traits.
//!
//! A value either is the same for all items of the batch, or holds them one behind the other along
//! one axis, each as long as the others. A rule says where the items are in the outputs, or why
//! they are not apart there: an operator that mixes items has no rule that holds, and one without a
//! rule is taken to mix them.

use smallvec::SmallVec;

use super::Traits;
use crate::dim::{Dim, Symbol};
use crate::ir::{Attributes, Graph, Node, ValueId};

/// What a value has to do with the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchFact {
    /// The same whatever the items are, and however many.
    Independent,
    /// Sizes, of which some tell the number of items: for inputs that decide shapes.
    Sizes,
    /// The places of items in the batch, for an index that picks what is theirs and for nothing
    /// else.
    Places,
    /// The items one behind the other along this axis.
    Along(usize),
}

/// What a rule ends in: an error says why items are not apart, as the end of a sentence.
pub type BatchResult = Result<(), String>;

/// How the batch goes through an operator.
#[derive(Clone, Copy, Debug)]
pub enum BatchRule {
    /// As in [`elementwise`] where the operator has the trait; otherwise it is not known.
    FromTraits,
    /// As this function says.
    Rule(fn(&mut BatchCx<'_>) -> BatchResult),
}

/// What a rule sees and sets: a node of which some input holds items.
#[derive(Debug)]
pub struct BatchCx<'a> {
    graph: &'a Graph,
    node: &'a Node,
    /// What counts the items.
    symbol: &'a Symbol,
    /// By input position; none for what is left out.
    inputs: SmallVec<[Option<BatchFact>; 4]>,
    /// By input position, whether it is a constant.
    constants: SmallVec<[bool; 4]>,
    outputs: SmallVec<[Option<BatchFact>; 2]>,
    least: usize,
}

impl<'a> BatchCx<'a> {
    /// A node whose inputs are known; `fact` is none for constants.
    pub(crate) fn new(
        (graph, node): (&'a Graph, &'a Node),
        symbol: &'a Symbol,
        fact: impl Fn(ValueId) -> Option<BatchFact>,
    ) -> BatchCx<'a> {
        let known = node.inputs.iter().map(|input| input.map(&fact));
        let inputs = known.clone().map(|known| known.map(|fact| fact.unwrap_or(BatchFact::Independent)));
        let constants = known.map(|known| matches!(known, Some(None)));
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

    /// What the rule has said of each output, and the fewest items that a part may have.
    pub(crate) fn finish(self) -> (SmallVec<[Option<BatchFact>; 2]>, usize) {
        (self.outputs, self.least)
    }

    /// The attributes of the node.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// The positions of the inputs that are given.
    pub fn given(&self) -> impl Iterator<Item = usize> + use<> {
        let given: SmallVec<[usize; 8]> =
            self.inputs.iter().enumerate().filter_map(|(index, fact)| fact.map(|_| index)).collect();
        given.into_iter()
    }

    /// What the input at `index` has to do with the batch; none where it is left out.
    pub fn fact(&self, index: usize) -> Option<BatchFact> {
        self.inputs.get(index).copied().flatten()
    }

    /// The axis of the items in the input at `index`; none where it has none.
    pub fn axis(&self, index: usize) -> Option<usize> {
        match self.fact(index) {
            Some(BatchFact::Along(axis)) => Some(axis),
            _ => None,
        }
    }

    /// The axis of the items in the input at `index`, which must have them.
    pub fn items(&self, index: usize) -> Result<usize, String> {
        self.axis(index).ok_or_else(|| format!("{} holds no items", self.name(index)))
    }

    /// Refuses inputs other than those at `with_items` that hold items.
    pub fn others_are_independent(&self, with_items: &[usize]) -> BatchResult {
        let mut others = self.given().filter(|index| !with_items.contains(index));
        match others.find(|index| self.axis(*index).is_some()) {
            Some(index) => Err(format!("{} holds items of the batch", self.name(index))),
            None => Ok(()),
        }
    }

    /// The input at `index`, in words.
    pub fn name(&self, index: usize) -> String {
        let value = self.node.inputs.get(index).copied().flatten();
        let value = value.map_or("", |value| &*self.graph.value(value).name);
        format!("its input '{value}'")
    }

    /// The shape of the input at `index`.
    pub fn shape(&self, index: usize) -> Result<&'a [Dim], String> {
        let value = self.node.inputs.get(index).copied().flatten();
        let shape = value.and_then(|value| self.graph.value(value).ty.shape());
        shape.ok_or_else(|| format!("the shape of {} is not known", self.name(index)))
    }

    /// Whether somebody wants the output at `index`.
    pub fn wants(&self, index: usize) -> bool {
        self.node.outputs.get(index).is_some_and(Option::is_some)
    }

    /// The shape of the output at `index`.
    pub fn output(&self, index: usize) -> Result<&'a [Dim], String> {
        let value = self.node.outputs.get(index).copied().flatten();
        let shape = value.and_then(|value| self.graph.value(value).ty.shape());
        shape.ok_or_else(|| "the shape of its output is not known".to_string())
    }

    /// The elements of the integer input at `index`, where they are known as numbers.
    pub fn ints(&self, index: usize) -> Option<Vec<i64>> {
        let value = self.node.inputs.get(index).copied().flatten()?;
        match &self.graph.value(value).symbolic {
            Some(symbolic) => symbolic.as_ints(),
            None => crate::spec::known_ints(self.graph.constants.get(&value).map(|tensor| tensor.view())),
        }
    }

    /// Whether a size counts items.
    pub fn counts_items(&self, size: Option<&Dim>) -> bool {
        size.is_some_and(|size| size.symbols().contains(self.symbol))
    }

    /// Whether the input at `index` is a constant, which kernels pack.
    pub fn is_constant(&self, index: usize) -> bool {
        self.constants.get(index) == Some(&true)
    }

    /// Says that the items of the output at `index` lie along `axis`. An output that nobody wants
    /// may be set, too.
    pub fn set(&mut self, index: usize, axis: usize) {
        if let Some(output) = self.outputs.get_mut(index) {
            *output = Some(BatchFact::Along(axis));
        }
    }

    /// Says so of all outputs.
    pub fn set_all(&mut self, axis: usize) {
        self.outputs.fill(Some(BatchFact::Along(axis)));
    }

    /// Says that a part of fewer items than this is computed in another way, with other bits.
    pub fn at_least(&mut self, items: usize) {
        self.least = self.least.max(items);
    }
}

/// The rule of an operator, or what follows from its traits.
pub(crate) fn apply(cx: &mut BatchCx<'_>) -> BatchResult {
    match cx.node.spec.batch {
        BatchRule::Rule(rule) => rule(cx),
        BatchRule::FromTraits if cx.node.spec.traits.has(Traits::ELEMENTWISE) => elementwise(cx),
        BatchRule::FromTraits => Err("how a batch goes through it is not known".to_string()),
    }
}

/// Where elements at one place of the broadcast inputs give the element at that place of the
/// output: items lie along the same axis of the broadcast shape in all inputs that have it, and
/// what is the same for all items has size 1 there.
pub fn elementwise(cx: &mut BatchCx<'_>) -> BatchResult {
    let output = cx.output(0)?;
    let given: SmallVec<[usize; 8]> = cx.given().collect();
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

/// Refuses an input that does not broadcast to items along an axis of `shape`: one with items has
/// the same size there, another one has none or 1.
pub fn broadcasts(cx: &BatchCx<'_>, index: usize, (shape, axis): (&[Dim], usize)) -> BatchResult {
    let own = cx.shape(index)?;
    let place = (axis + own.len()).checked_sub(shape.len());
    let size = place.and_then(|place| own.get(place));
    let fits = match (cx.axis(index), size) {
        (Some(own_axis), size) => Some(own_axis) == place && size == shape.get(axis),
        (None, size) => size.is_none_or(|size| size.as_constant() == Some(1)),
    };
    match fits {
        true => Ok(()),
        false => Err(format!("{} does not hold an element for each item, nor one for all", cx.name(index))),
    }
}
