//! Recognises indices of the form `step * item + rest`, and proves that each stays within its own
//! batch item. Exporters gather from flattened masks with them.
//!
//! In a flat mask with `k` rows for each item, row `r` of item `i` is at `k * i + r`. Each part of
//! a batch numbers its items from 0 again, and its mask is split the same way. So the gather stays
//! correct.

use crate::dim::{Dim, Symbol};
use crate::dtype::DType;
use crate::ir::{Graph, Node, ValueId};

/// An integer tensor with the elements `step * item + rest`. `item` is the index along `axis`, and
/// `0 <= rest < below` is the same for all items. Without an axis the elements are `rest` alone.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) axis: Option<usize>,
    pub(super) step: Dim,
    below: Dim,
}

/// Holds if the first size is at most the second, so that an index stays within its item.
pub(super) type Condition = (Dim, Dim);

impl Places {
    /// Returns the condition that keeps an index within the `step` rows of its item. None if it
    /// holds for all sizes.
    pub(super) fn within_item(&self) -> Option<Condition> {
        let known = (&self.step - &self.below).is_known_nonneg();
        (!known).then(|| (self.below.clone(), self.step.clone()))
    }

    /// Derives the places of a node's output from those of its inputs.
    pub(super) fn of<'p>(
        (graph, node): (&Graph, &Node),
        symbol: &Symbol,
        known: impl Fn(ValueId) -> Option<&'p Places>,
    ) -> Option<Places> {
        // The operators below are those of the standard domain, whose name is empty.
        if !node.spec.domain.is_empty() {
            return None;
        }
        let input = |index: usize| node.inputs.get(index).copied().flatten();
        let output = graph.value(node.outputs.first().copied().flatten()?);
        let to = output.ty.shape()?;
        match node.spec.name {
            "Range" => {
                let [start, limit, delta] = [0, 1, 2].map(|index| element(graph, input(index)?));
                (start?.as_constant() == Some(0) && delta?.as_constant() == Some(1)).then_some(())?;
                counted(limit?, symbol)
            }
            "Cast" | "Identity" if output.ty.dtype() == Some(DType::I64) => {
                let from = input(0)?;
                (graph.value(from).ty.dtype() == Some(DType::I64)).then_some(())?;
                known(from).cloned()
            }
            "Reshape" | "Squeeze" | "Unsqueeze" => {
                let places = known(input(0)?)?;
                let Some(axis) = places.axis else { return Some(places.clone()) };
                // The items move to the axis of the same size that has as many elements in front of
                // it.
                let count = |sizes: Option<&[Dim]>| sizes.map(|sizes| sizes.iter().product::<Dim>());
                let front = count(graph.value(input(0)?).ty.shape()?.get(..axis));
                let items = Dim::symbol(symbol.clone());
                let axis = (0..to.len())
                    .find(|place| to.get(*place) == Some(&items) && count(to.get(..*place)) == front);
                Some(Places { axis: Some(axis?), ..places.clone() })
            }
            "Add" | "Mul" => {
                let (one, other) = (input(0)?, input(1)?);
                let combine = |one, other| match node.spec.name {
                    "Add" => sum(graph, (one, known(one)?), (other, known(other)?), to),
                    _ => multiple(graph, (one, known(one)?), other, to),
                };
                combine(one, other).or_else(|| combine(other, one))
            }
            _ => None,
        }
    }
}

/// Returns the only element of an integer tensor, if sizes or constants determine it.
fn element(graph: &Graph, id: ValueId) -> Option<Dim> {
    let element = match &graph.value(id).symbolic {
        Some(symbolic) => match symbolic.elements.as_slice() {
            [element] => element.clone(),
            _ => return None,
        },
        None => {
            let ints = crate::spec::known_ints(graph.constants.get(&id).map(|tensor| tensor.view()))?;
            match ints.as_slice() {
                [element] => Dim::constant(*element),
                _ => return None,
            }
        }
    };
    (!element.has_unknown()).then_some(element)
}

/// Returns the places that the tensor `0..limit` holds. These are the numbers of the items if
/// `limit` is the number of items, and indices within each item if `limit` does not depend on it.
fn counted(limit: Dim, symbol: &Symbol) -> Option<Places> {
    if limit.as_symbol() == Some(symbol) {
        return Some(Places { axis: Some(0), step: Dim::constant(1), below: Dim::constant(1) });
    }
    let same = !limit.symbols().contains(symbol);
    same.then(|| Places { axis: None, step: Dim::constant(0), below: limit })
}

/// Returns the axis of the items in the broadcast shape. None if the other operand varies along it.
fn aligned(graph: &Graph, (places, own): (&Places, ValueId), other: ValueId, to: &[Dim]) -> Option<usize> {
    let axis = places.axis? + to.len().checked_sub(graph.value(own).ty.shape()?.len())?;
    let shape = graph.value(other).ty.shape()?;
    let size = (axis + shape.len()).checked_sub(to.len()).and_then(|place| shape.get(place));
    size.is_none_or(|size| size.as_constant() == Some(1)).then_some(axis)
}

/// Adds an index within each item to numbers of items. The upper bounds add up.
fn sum(
    graph: &Graph,
    (own, places): (ValueId, &Places),
    (other, rest): (ValueId, &Places),
    to: &[Dim],
) -> Option<Places> {
    let axis = aligned(graph, (places, own), other, to).filter(|_| rest.axis.is_none())?;
    let below = &places.below + &rest.below - Dim::constant(1);
    Some(Places { axis: Some(axis), step: places.step.clone(), below })
}

/// Multiplies numbers of items by a size. The numbers must have no rest, because it would be
/// multiplied, too.
fn multiple(graph: &Graph, (own, places): (ValueId, &Places), other: ValueId, to: &[Dim]) -> Option<Places> {
    let factor = element(graph, other).filter(Dim::is_known_nonneg)?;
    let axis = aligned(graph, (places, own), other, to).filter(|_| places.below.as_constant() == Some(1))?;
    Some(Places { axis: Some(axis), step: &places.step * &factor, below: places.below.clone() })
}
