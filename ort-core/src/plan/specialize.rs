//! Inference once more, under one binding of the dimensions.
//!
//! Some shapes follow from the sizes but not from their symbols: a branch taken because a size is 1
//! may have another rank than its sibling. Where inference on symbols left something open,
//! inference on numbers may close it.

use std::sync::Arc;

use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::ir::{Graph, TensorType, ValueType};
use crate::program::{Origin, Program};
use crate::spec::{SymTensor, infer_graph};

/// What is known of a given value: its type, and the elements of a small integer tensor.
pub(crate) type Known = (ValueType, Option<Arc<SymTensor>>);

/// The program's graph inferred under the bindings; none where its own inference tells as much, or
/// where the sizes contradict the graph, which the run then says. `given` is what is known of the
/// program's given values, or empty.
pub(crate) fn specialize(program: &Program, bindings: &Bindings, given: &[Known]) -> Option<Graph> {
    if program.graph.broken.is_some() || is_resolved(program, bindings) {
        return None;
    }
    let mut graph = Graph::clone(&program.graph);
    for (index, slot) in program.given.iter().enumerate() {
        let Some(slot) = program.slots.get(slot.index()) else { continue };
        let value = graph.value_mut(slot.value);
        let (ty, symbolic) = match given.get(index) {
            Some((ty, symbolic)) if *ty != ValueType::Unknown => (ty, symbolic.clone()),
            _ => (&value.ty, value.symbolic.clone()),
        };
        value.ty = bind_type(ty, bindings);
        value.symbolic = symbolic.map(|symbolic| {
            let elements = symbolic.elements.iter().map(|element| element.bind(bindings)).collect();
            Arc::new(SymTensor { shape: symbolic.shape.clone(), elements })
        });
    }
    match infer_graph(&mut graph) {
        Ok(()) => Some(graph),
        Err(problem) => {
            tracing::debug!("under {bindings} the graph is not inferred further: {problem}");
            None
        }
    }
}

/// Whether every tensor that the program computes has a known shape under the bindings.
fn is_resolved(program: &Program, bindings: &Bindings) -> bool {
    let mut computed = program.slots.iter().filter(|slot| matches!(slot.origin, Origin::Step));
    computed.all(|slot| match &program.graph.value(slot.value).ty {
        ValueType::Unknown => false,
        ValueType::Tensor(tensor) if tensor.dtype != DType::String => {
            let shape = tensor.shape.as_ref();
            shape.is_some_and(|shape| shape.iter().all(|size| size.evaluate(bindings).is_ok()))
        }
        _ => true,
    })
}

fn bind_type(ty: &ValueType, bindings: &Bindings) -> ValueType {
    match ty {
        ValueType::Tensor(TensorType { dtype, shape: Some(shape) }) => {
            let bound: Vec<Dim> = shape.iter().map(|size| size.bind(bindings)).collect();
            ValueType::tensor(*dtype, Some(bound))
        }
        other => other.clone(),
    }
}
