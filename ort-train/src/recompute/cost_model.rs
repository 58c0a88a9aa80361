//! Analytic cost model: the estimated time of a node from its operator and sizes.
//!
//! It weighs choices before anything has run.

use ort_core::ir::{Node, ValueId};
use ort_core::spec::Cost;

/// Floating-point operations per second and bytes per second of one core. Only their ratio matters.
const OPERATIONS: f64 = 80e9;
const BYTES: f64 = 8e9;
/// The fixed overhead of a node.
const START: f64 = 2e-6;

/// Estimates the seconds that a node takes.
pub(super) fn seconds_of(node: &Node, shape_of: &dyn Fn(ValueId) -> Option<Vec<usize>>) -> f64 {
    if node.spec.cost == Cost::Free || node.spec.view.is_some() {
        return 0.0;
    }
    let count = |id: &ValueId| shape_of(*id).map_or(0.0, |shape| shape.iter().product::<usize>() as f64);
    // Four bytes an element: the types of a model differ less than its sizes.
    let moved: f64 = node.inputs.iter().chain(&node.outputs).flatten().map(count).sum::<f64>() * 4.0;
    let made = node.outputs.first().copied().flatten();
    let mut operations = 0.0;
    if let (Cost::Compute, Some(made)) = (node.spec.cost, made) {
        // A multiplication and an addition for each term of an inner product.
        operations = 2.0 * count(&made) * inner_size(node, made, shape_of);
    }
    START + moved / BYTES + operations / OPERATIONS
}

/// The length of the inner product per output element: the elements of the second operand divided
/// by the columns, or channels, of the output.
fn inner_size(node: &Node, made: ValueId, shape_of: &dyn Fn(ValueId) -> Option<Vec<usize>>) -> f64 {
    let second = node.inputs.get(1).copied().flatten().and_then(shape_of);
    let (Some(second), Some(made)) = (second, shape_of(made)) else { return 1.0 };
    let is_convolution = node.spec.name.contains("Conv");
    let elements: usize = second.iter().product();
    let columns = if is_convolution {
        // Convolution weights have their output channels first.
        second.first().copied().unwrap_or(1)
    } else {
        let batch: usize = second.iter().rev().skip(2).product();
        batch * made.last().copied().unwrap_or(1)
    };
    elements as f64 / columns.max(1) as f64
}
