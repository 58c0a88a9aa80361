//! Shape arithmetic: symbolic evaluation of small integer tensors.
//!
//! Models compute shapes with ordinary operators (`Shape`, `Gather`, `Mul`, `Concat`, `Reshape`).
//! Evaluating their elements as symbolic dimensions keeps the resulting shapes known.

use crate::Result;
use crate::dim::{Dim, Symbol};
use crate::dtype::DType;
use crate::spec::{InferCx, SymTensor, broadcast};
use crate::tensor::element_count;

/// Evaluates a unary `function` on the input's symbolic elements. `None` is an unknown value.
pub(super) fn unary(cx: &mut InferCx<'_>, function: fn(&Dim) -> Option<Dim>) -> Result<()> {
    if let Some(x) = cx.symbolic(0) {
        // An element that cannot be followed becomes unknown alone; the others stay known.
        let elements = x.elements.iter().map(|x| function(x).unwrap_or_else(unknown)).collect();
        cx.set_symbolic(0, SymTensor::new(&x.shape, elements)?);
    }
    Ok(())
}

/// Evaluates a binary `function` on the symbolic elements of the first two inputs, broadcast.
pub(super) fn binary(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    if let (Some(a), Some(b)) = (cx.symbolic(0), cx.symbolic(1))
        && let Some(result) = zip(&a, &b, function)?
    {
        cx.set_symbolic(0, result);
    }
    Ok(())
}

/// Folds the symbolic elements of all inputs, at least one, with `function`.
pub(super) fn fold(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    let Some(first) = cx.symbolic(0) else { return Ok(()) };
    let mut result = SymTensor::clone(&first);
    for index in 1..cx.input_count() {
        let Some(next) = cx.symbolic(index) else { return Ok(()) };
        let Some(folded) = zip(&result, &next, function)? else { return Ok(()) };
        result = folded;
    }
    cx.set_symbolic(0, result);
    Ok(())
}

/// Evaluates `Where` on symbolic elements. An unknown condition still selects if both sides are
/// equal.
pub(super) fn select(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(condition), Some(a), Some(b)) = (cx.symbolic(0), cx.symbolic(1), cx.symbolic(2)) else {
        return Ok(());
    };
    let shape = broadcast::shapes(&[&condition.shape, &a.shape, &b.shape])?;
    let count = element_count(&shape)?;
    if !SymTensor::follows(DType::I64, count) {
        return Ok(());
    }
    let choose = |at: usize| {
        let (x, y) = (element(&a, &shape, at)?, element(&b, &shape, at)?);
        Some(match element(&condition, &shape, at)?.as_constant() {
            Some(0) => y.clone(),
            Some(_) => x.clone(),
            None if x == y => x.clone(),
            None => unknown(),
        })
    };
    if let Some(elements) = (0..count).map(choose).collect() {
        cx.set_symbolic(0, SymTensor::new(&shape, elements)?);
    }
    Ok(())
}

/// Combines the elements of two tensors, broadcast. `None` if the result is too large to follow.
fn zip(a: &SymTensor, b: &SymTensor, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<Option<SymTensor>> {
    let shape = broadcast::shapes(&[&a.shape, &b.shape])?;
    let count = element_count(&shape)?;
    // Only followed types have symbolic elements, so any of them serves to check the count.
    if !SymTensor::follows(DType::I64, count) {
        return Ok(None);
    }
    let combine = |at: usize| {
        let (a, b) = (element(a, &shape, at)?, element(b, &shape, at)?);
        Some(function(a, b).unwrap_or_else(unknown))
    };
    let elements: Option<Vec<Dim>> = (0..count).map(combine).collect();
    elements.map(|elements| SymTensor::new(&shape, elements)).transpose()
}

/// Returns the element of `tensor` that broadcasts to index `at` of `shape`, in row-major order.
fn element<'a>(tensor: &'a SymTensor, shape: &[usize], mut at: usize) -> Option<&'a Dim> {
    let (mut offset, mut stride) = (0, 1);
    // Aligns at the last axis; `None` are the leading axes that the tensor lacks.
    let sizes = tensor.shape.iter().rev().map(Some).chain(std::iter::repeat(None));
    for (&wanted, size) in shape.iter().rev().zip(sizes) {
        // An empty shape has no index, so the bound only keeps the division defined.
        let place = at % wanted.max(1);
        at /= wanted.max(1);
        let Some(&size) = size else { continue };
        if size != 1 {
            offset += place * stride;
        }
        stride *= size;
    }
    tensor.elements.get(offset)
}

/// A fresh unknown, which may be negative.
fn unknown() -> Dim {
    Dim::symbol(Symbol::unknown_value())
}

/// A boolean as a constant.
fn truth(value: bool) -> Option<Dim> {
    Some(Dim::constant(i64::from(value)))
}

/// The absolute value.
pub(super) fn abs(x: &Dim) -> Option<Dim> {
    match x.as_constant() {
        Some(value) => value.checked_abs().map(Dim::constant),
        None => x.is_known_nonneg().then(|| x.clone()),
    }
}

/// The sign: -1, 0 or 1.
pub(super) fn sign(x: &Dim) -> Option<Dim> {
    match x.as_constant() {
        Some(value) => Some(Dim::constant(value.signum())),
        None => x.is_known_positive().then(|| Dim::constant(1)),
    }
}

/// The quotient, truncated. That equals the floor for a nonnegative dividend and a positive
/// divisor, the only symbolic case.
pub(super) fn divide(a: &Dim, b: &Dim) -> Option<Dim> {
    match (a.as_constant(), b.as_constant()) {
        // A division by 0 and `i64::MIN / -1` stay unknown.
        (Some(a), Some(b)) => a.checked_div(b).map(Dim::constant),
        _ => (a.is_known_nonneg() && b.is_known_positive()).then(|| a.floor_div(b)),
    }
}

/// The remainder. Truncated and floored remainders agree for a nonnegative dividend and a positive
/// divisor, the only case that is followed.
pub(super) fn remainder(a: &Dim, b: &Dim) -> Option<Dim> {
    (a.is_known_nonneg() && b.is_known_positive()).then(|| a.modulo(b))
}

/// A power with a small constant exponent, as repeated multiplication.
pub(super) fn power(a: &Dim, b: &Dim) -> Option<Dim> {
    let exponent = b.as_constant().filter(|exponent| (0..=8).contains(exponent))?;
    (0..exponent).try_fold(Dim::constant(1), |product, _| product.checked_mul(a))
}

/// Whether `a = b`; `None` if that depends on the symbols.
pub(super) fn equal(a: &Dim, b: &Dim) -> Option<Dim> {
    if a == b {
        return truth(true);
    }
    // Two different normal forms may agree for some sizes, so only a strict order proves a
    // difference.
    let differ = less(a, b) == truth(true) || less(b, a) == truth(true);
    if differ { truth(false) } else { None }
}

/// Whether `a < b`; `None` if that depends on the symbols.
pub(super) fn less(a: &Dim, b: &Dim) -> Option<Dim> {
    let gap = b.checked_sub(a)?;
    if gap.is_known_positive() {
        return truth(true);
    }
    if gap.upper_bound().is_some_and(|high| high <= 0) { truth(false) } else { None }
}

/// Whether `a <= b`; `None` if that depends on the symbols.
pub(super) fn less_or_equal(a: &Dim, b: &Dim) -> Option<Dim> {
    // Integers are totally ordered, so `a <= b` is the negation of `b < a`.
    less(b, a).and_then(|greater| truth(greater == Dim::constant(0)))
}

/// Logical and, which a known false on one side decides.
pub(super) fn and(a: &Dim, b: &Dim) -> Option<Dim> {
    match (a.as_constant(), b.as_constant()) {
        (Some(0), _) | (_, Some(0)) => truth(false),
        (Some(_), Some(_)) => truth(true),
        _ => None,
    }
}

/// Logical or, which a known true on one side decides.
pub(super) fn or(a: &Dim, b: &Dim) -> Option<Dim> {
    match (a.as_constant(), b.as_constant()) {
        (Some(0), Some(0)) => truth(false),
        (Some(1..), _) | (_, Some(1..)) => truth(true),
        _ => None,
    }
}

/// Exclusive or.
pub(super) fn xor(a: &Dim, b: &Dim) -> Option<Dim> {
    truth((a.as_constant()? != 0) != (b.as_constant()? != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_certain_is_decided() {
        let (n, m, any) = (Dim::named("n"), Dim::named("m"), unknown());
        let one = Dim::constant(1);
        assert_eq!(equal(&n, &Dim::constant(-1)), truth(false), "a size is not -1");
        assert_eq!(equal(&(&n + 1), &(&n + 1)), truth(true));
        assert_eq!(equal(&n, &m), None);
        assert_eq!(less(&n, &(&n + &one)), truth(true));
        assert_eq!(less_or_equal(&(&n + &one), &n), truth(false));
        assert_eq!(divide(&(&n * 4), &Dim::constant(2)), Some(&n * 2));
        assert_eq!(divide(&Dim::constant(-7), &Dim::constant(2)), Some(Dim::constant(-3)));
        assert_eq!(divide(&any, &Dim::constant(2)), None, "an unknown sign may round either way");
        assert_eq!(divide(&n, &Dim::constant(0)), None);
        assert_eq!(power(&n, &Dim::constant(2)), Some(&n * &n));
    }

    #[test]
    fn elements_broadcast() -> Result<()> {
        let column = SymTensor::new(&[2, 1], vec![1.into(), 2.into()])?;
        let row = SymTensor::vector(vec![10.into(), 20.into(), 30.into()]);
        let sum = zip(&column, &row, |a, b| a.checked_add(b))?.and_then(|sum| sum.as_ints());
        assert_eq!(sum, Some(vec![11, 21, 31, 12, 22, 32]));
        Ok(())
    }
}
