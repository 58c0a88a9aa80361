//! The checks of an inference rule that are left to the runs: those of sizes that are symbols while
//! a model is loaded.
//!
//! A rule accepts two sizes that it cannot compare. A plan knows them as numbers and asks the rule
//! again, but most rules would find nothing, and a plan is made for each new set of shapes. So each
//! node is tried when it is compiled, with numbers that contradict wherever two sizes must agree.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::infer::{InputFacts, infer_node};
use super::sym_tensor::SymTensor;
use crate::Error;
use crate::dim::{Bindings, Dim, Symbol};
use crate::ir::{Graph, Node, ValueId, ValueType};

/// Different sizes that divide nothing and are divided by nothing: where sizes must agree, or be
/// multiples, these contradict.
const PRIMES: [i64; 8] = [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049];

/// The least size, which is too small for windows and for reflected borders.
const ONE: [i64; 1] = [1];

/// Whether the rule of a node refuses some sizes of its inputs. False if all of them are numbers,
/// because then the model was loaded with them.
pub(crate) fn depends_on_sizes(graph: &Graph, node: &Node) -> bool {
    // Rules of control flow change the subgraphs.
    if !node.subgraphs.is_empty() {
        return false;
    }
    let symbols: BTreeSet<Symbol> =
        node.inputs.iter().flatten().flat_map(|id| symbols_of(&graph.value(*id).ty)).collect();
    if symbols.is_empty() {
        return false;
    }
    let refuses = |sizes: &[i64]| {
        let mut bindings = Bindings::new();
        for (symbol, size) in symbols.iter().zip(sizes.iter().cycle()) {
            bindings.insert(symbol.clone(), *size);
        }
        let facts: Vec<_> =
            node.inputs.iter().map(|id| id.map(|id| bound_facts(graph, id, &bindings))).collect();
        refusal(node, &facts).is_some()
    };
    refuses(&PRIMES) || refuses(&ONE)
}

/// Returns why the rule of a node refuses its inputs.
pub(crate) fn refusal(node: &Node, inputs: &[Option<InputFacts<'_>>]) -> Option<Error> {
    infer_node(node, inputs, &mut []).err()
}

/// What is known of a value under the bindings.
pub(crate) fn bound_facts<'g>(graph: &'g Graph, id: ValueId, bindings: &Bindings) -> InputFacts<'g> {
    let value = graph.value(id);
    let ty = match &value.ty {
        ValueType::Tensor(tensor) => {
            let shape = tensor.shape.as_ref();
            let bound = shape.map(|shape| shape.iter().map(|size| size.bind(bindings)).collect());
            Cow::Owned(ValueType::tensor(tensor.dtype, bound))
        }
        _ => Cow::Borrowed(&value.ty),
    };
    let symbolic = value.symbolic.as_ref().map(|symbolic| {
        let elements = symbolic.elements.iter().map(|element| element.bind(bindings)).collect();
        Arc::new(SymTensor { shape: symbolic.shape.clone(), elements })
    });
    InputFacts { ty, known: graph.constants.get(&id).map(|tensor| tensor.view()), symbolic }
}

fn symbols_of(ty: &ValueType) -> BTreeSet<Symbol> {
    ty.shape().into_iter().flatten().flat_map(Dim::symbols).collect()
}
