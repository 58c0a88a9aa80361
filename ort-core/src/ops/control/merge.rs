//! Type joins: the type of a value with two possible definitions, such as the branches of `If` or
//! two iterations of `Loop`.

use crate::dim::Dim;
use crate::ir::{TensorType, ValueType};
use crate::{Result, ensure};

/// Joins two types. Sizes that differ become data-dependent, and shapes of different rank become
/// unknown.
pub(in crate::ops) fn merge(first: &ValueType, second: &ValueType) -> Result<ValueType> {
    merge_with(first, second, &mut |a, b| if a == b { a.clone() } else { Dim::unknown() })
}

/// Widens the type at the start of an iteration (`before`) by that at its end (`after`). A size
/// that changes becomes a fresh unknown, which then covers every size, so widening converges.
pub(super) fn widen(before: &ValueType, after: &ValueType) -> Result<ValueType> {
    merge_with(before, after, &mut |a, b| {
        let settled = a == b || a.as_symbol().is_some_and(|symbol| symbol.is_unknown());
        if settled { a.clone() } else { Dim::unknown() }
    })
}

fn merge_with(
    first: &ValueType,
    second: &ValueType,
    size: &mut dyn FnMut(&Dim, &Dim) -> Dim,
) -> Result<ValueType> {
    Ok(match (first, second) {
        // An unknown type has an unknown shape too, so only the element type of the other is kept.
        (ValueType::Unknown, other) | (other, ValueType::Unknown) => without_shape(other),
        (ValueType::Tensor(a), ValueType::Tensor(b)) => ValueType::Tensor(merge_tensors(a, b, size)?),
        (ValueType::Sparse(a), ValueType::Sparse(b)) => ValueType::Sparse(merge_tensors(a, b, size)?),
        (ValueType::Sequence(a), ValueType::Sequence(b)) => {
            ValueType::Sequence(Box::new(merge_with(a, b, size)?))
        }
        (ValueType::Optional(a), ValueType::Optional(b)) => {
            ValueType::Optional(Box::new(merge_with(a, b, size)?))
        }
        // ONNX lets a plain value stand for an optional that holds it.
        (ValueType::Optional(a), other) | (other, ValueType::Optional(a)) => {
            ValueType::Optional(Box::new(merge_with(a, other, size)?))
        }
        (a, b) => {
            ensure!(a == b, InvalidGraph, "a value is {a} in one branch and {b} in the other");
            a.clone()
        }
    })
}

fn merge_tensors(
    first: &TensorType,
    second: &TensorType,
    size: &mut dyn FnMut(&Dim, &Dim) -> Dim,
) -> Result<TensorType> {
    ensure!(
        first.dtype == second.dtype,
        InvalidGraph,
        "a value is {first} in one branch and {second} in the other"
    );
    let shape = match (&first.shape, &second.shape) {
        (Some(a), Some(b)) if a.len() == b.len() => Some(a.iter().zip(b).map(|(a, b)| size(a, b)).collect()),
        _ => None,
    };
    Ok(TensorType { dtype: first.dtype, shape })
}

fn without_shape(ty: &ValueType) -> ValueType {
    match ty {
        ValueType::Tensor(tensor) => ValueType::tensor(tensor.dtype, None),
        other => other.clone(),
    }
}

/// Replaces sizes that are data-dependent inside a subgraph by fresh unknowns. The subgraph's
/// symbols stand for one iteration, so they must not leak into the outer graph.
pub(in crate::ops) fn outside(ty: &ValueType) -> ValueType {
    let renew = |tensor: &TensorType| TensorType {
        dtype: tensor.dtype,
        shape: tensor.shape.as_ref().map(|shape| shape.iter().map(renewed).collect()),
    };
    match ty {
        ValueType::Tensor(tensor) => ValueType::Tensor(renew(tensor)),
        ValueType::Sequence(element) => ValueType::Sequence(Box::new(outside(element))),
        ValueType::Optional(element) => ValueType::Optional(Box::new(outside(element))),
        other => other.clone(),
    }
}

fn renewed(size: &Dim) -> Dim {
    if size.has_unknown() { Dim::unknown() } else { size.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn tensor(shape: &[&str]) -> ValueType {
        ValueType::tensor(DType::F32, Some(shape.iter().map(|size| Dim::parse(size)).collect()))
    }

    #[test]
    fn sizes_that_differ_are_unknown() -> Result<()> {
        let merged = merge(&tensor(&["n", "4"]), &tensor(&["n", "5"]))?;
        let shape = merged.shape().unwrap_or_default();
        assert_eq!(shape[0], Dim::parse("n"));
        assert!(shape[1].has_unknown());
        assert_eq!(merge(&tensor(&["n"]), &tensor(&["n", "5"]))?.shape(), None);
        assert!(merge(&tensor(&[]), &ValueType::tensor(DType::I64, None)).is_err());
        Ok(())
    }

    #[test]
    fn widening_comes_to_an_end() -> Result<()> {
        let once = widen(&tensor(&["3"]), &tensor(&["4"]))?;
        let twice = widen(&once, &tensor(&["n"]))?;
        assert_eq!(once, twice);
        Ok(())
    }
}
