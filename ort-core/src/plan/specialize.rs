//! Shape specialization: inference again, under one binding of the dimensions.
//!
//! Some shapes can be inferred from numbers but not from symbols. For example, a branch taken only
//! if a size is 1 may have another rank than its sibling. If symbolic inference left a shape open,
//! inference on numbers may resolve it.

use std::sync::Arc;

use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::ir::{Graph, TensorType, ValueType};
use crate::program::{Origin, Program};
use crate::spec::{SymTensor, infer_graph};

/// The facts known about a given value: its type, and the elements of a small integer tensor.
pub(crate) type Known = (ValueType, Option<Arc<SymTensor>>);

/// Infers the program's graph under the bindings. None if symbolic inference resolved everything or
/// rejected the graph, or if the sizes contradict it. `given` is what is known about the program's
/// given values, or empty.
pub(crate) fn specialize(program: &Program, bindings: &Bindings, given: &[Known]) -> Option<Graph> {
    if program.graph.broken.is_some() || is_resolved(program, bindings) {
        return None;
    }
    // A copy, because the program keeps the symbolic graph for other bindings.
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
            // The run reports a contradiction; planning continues with the symbolic shapes.
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
        // Strings are dynamic even if their shape is known.
        ValueType::Tensor(tensor) if tensor.dtype != DType::String => {
            let shape = tensor.shape.as_ref();
            shape.is_some_and(|shape| shape.iter().all(|size| size.evaluate(bindings).is_ok()))
        }
        _ => true,
    })
}

/// Substitutes the bindings in the shape of a tensor type.
fn bind_type(ty: &ValueType, bindings: &Bindings) -> ValueType {
    match ty {
        ValueType::Tensor(TensorType { dtype, shape: Some(shape) }) => {
            let bound: Vec<Dim> = shape.iter().map(|size| size.bind(bindings)).collect();
            ValueType::tensor(*dtype, Some(bound))
        }
        other => other.clone(),
    }
}
