//! Evaluation, substitution and unification of dimension expressions. Unification solves a declared
//! dimension for its open symbol.

use std::collections::BTreeMap;

use super::function::{ceil_div_numbers, floor_div_numbers, modulo_numbers};
use super::polynomial::Atom;
use super::{Bindings, Dim, Repr, Symbol};

/// Error of [`Dim::evaluate`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluateError {
    /// A symbol is not bound.
    #[error("dimension `{0}` has no value")]
    Unbound(Symbol),
    /// The value or an intermediate result overflows.
    #[error("dimension `{0}` overflows 64 bits")]
    Overflow(Dim),
    /// A divisor is 0.
    #[error("dimension `{0}` divides by zero")]
    DivisionByZero(Dim),
}

/// Outcome of [`unify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unified {
    /// The declared dimension equals the actual size. A symbol may have been bound to make it so.
    Solved,
    /// Several symbols are open, or one inside a function. Evaluate once more symbols are bound.
    Deferred,
}

/// Mismatch between a declared dimension and an actual size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("size {actual}, expected {formal}{}", with(formal, known))]
pub struct UnifyError {
    /// The declared dimension.
    pub formal: Dim,
    /// The actual size.
    pub actual: i64,
    /// The bindings before the attempt.
    pub known: Bindings,
}

/// Formats the values of the dimension's symbols for the error message.
fn with(formal: &Dim, known: &Bindings) -> String {
    let mut own = Bindings::new();
    for symbol in formal.symbols() {
        if let Some(value) = known.get(&symbol) {
            own.insert(symbol, value);
        }
    }
    if own.iter().next().is_none() { String::new() } else { format!(" with {own}") }
}

impl Dim {
    /// Returns the value of the expression under these bindings.
    ///
    /// # Errors
    /// A symbol is not bound, a divisor is 0, or the value leaves 64 bits. Terms are computed in
    /// 128 bits.
    pub fn evaluate(&self, bindings: &Bindings) -> Result<i64, EvaluateError> {
        if let Repr::Constant(value) = self.0 {
            return Ok(value);
        }
        let overflow = || EvaluateError::Overflow(self.clone());
        let mut sum: i128 = 0;
        for (monomial, coefficient) in self.terms() {
            let mut product = i128::from(coefficient);
            for (atom, exponent) in monomial.factors() {
                let value = self.evaluate_atom(atom, bindings)?;
                // The weight limit of expressions bounds exponents, so the loop is short.
                for _ in 0..*exponent {
                    product = product.checked_mul(value.into()).ok_or_else(overflow)?;
                }
            }
            sum = sum.checked_add(product).ok_or_else(overflow)?;
        }
        i64::try_from(sum).map_err(|_| overflow())
    }

    fn evaluate_atom(&self, atom: &Atom, bindings: &Bindings) -> Result<i64, EvaluateError> {
        let binary = |a: &Dim, b: &Dim, function: fn(i128, i128) -> Option<i128>| {
            let (a, b) = (a.evaluate(bindings)?, b.evaluate(bindings)?);
            let value =
                function(a.into(), b.into()).ok_or_else(|| EvaluateError::DivisionByZero(self.clone()))?;
            i64::try_from(value).map_err(|_| EvaluateError::Overflow(self.clone()))
        };
        let extreme = |list: &[Dim], choose: fn(i64, i64) -> i64| {
            let mut values = list.iter().map(|dim| dim.evaluate(bindings));
            let first = values.next().unwrap_or(Ok(0))?;
            values.try_fold(first, |best, value| Ok(choose(best, value?)))
        };
        match atom {
            Atom::Symbol(symbol) => {
                bindings.get(symbol).ok_or_else(|| EvaluateError::Unbound(symbol.clone()))
            }
            Atom::FloorDiv(a, b) => binary(a, b, floor_div_numbers),
            Atom::CeilDiv(a, b) => binary(a, b, ceil_div_numbers),
            Atom::Modulo(a, b) => binary(a, b, modulo_numbers),
            Atom::Max(list) => extreme(list, i64::max),
            Atom::Min(list) => extreme(list, i64::min),
        }
    }

    /// Replaces symbols by expressions, all at once. Symbols that are not in the map stay.
    pub fn substitute(&self, map: &BTreeMap<Symbol, Dim>) -> Dim {
        self.substitute_with(&|symbol| map.get(symbol).cloned())
    }

    /// Replaces every bound symbol by its value.
    pub fn bind(&self, bindings: &Bindings) -> Dim {
        self.substitute_with(&|symbol| bindings.get(symbol).map(Dim::constant))
    }

    fn substitute_with(&self, replace: &dyn Fn(&Symbol) -> Option<Dim>) -> Dim {
        // Rebuilding normalizes every term again, so expressions without a replaced symbol are
        // shared.
        if self.as_constant().is_some() || !self.symbols().iter().any(|symbol| replace(symbol).is_some()) {
            return self.clone();
        }
        let mut sum = Dim::constant(0);
        for (monomial, coefficient) in self.terms() {
            let mut product = Dim::constant(coefficient);
            for (atom, exponent) in monomial.factors() {
                let value = substitute_atom(atom, replace);
                for _ in 0..*exponent {
                    product = product * &value;
                }
            }
            sum = sum + product;
        }
        sum
    }
}

fn substitute_atom(atom: &Atom, replace: &dyn Fn(&Symbol) -> Option<Dim>) -> Dim {
    let inner = |dim: &Dim| dim.substitute_with(replace);
    let fold = |list: &[Dim], choose: fn(&Dim, &Dim) -> Dim| {
        let values = list.iter().map(inner);
        values.reduce(|best, value| choose(&best, &value)).unwrap_or(Dim::constant(0))
    };
    match atom {
        Atom::Symbol(symbol) => replace(symbol).unwrap_or_else(|| Dim::symbol(symbol.clone())),
        Atom::FloorDiv(a, b) => inner(a).floor_div(&inner(b)),
        Atom::CeilDiv(a, b) => inner(a).ceil_div(&inner(b)),
        Atom::Modulo(a, b) => inner(a).modulo(&inner(b)),
        Atom::Max(list) => fold(list, Dim::max),
        Atom::Min(list) => fold(list, Dim::min),
    }
}

/// Unifies a declared dimension with an actual size, binding the symbol that is still open.
///
/// Solves constants, expressions whose symbols are all bound, and `k*symbol + c`.
///
/// # Errors
/// The size is negative, or no value of the open symbol yields it.
///
/// ```
/// use ort_core::dim::{Bindings, Dim, Unified, unify};
/// let mut bindings = Bindings::new();
/// assert_eq!(unify(&Dim::parse("2*pairs + 1"), 7, &mut bindings), Ok(Unified::Solved));
/// assert_eq!(bindings.to_string(), "pairs=3");
/// assert!(unify(&Dim::parse("pairs"), 4, &mut bindings).is_err());
/// ```
pub fn unify(formal: &Dim, actual: i64, bindings: &mut Bindings) -> Result<Unified, UnifyError> {
    let error = |known: &Bindings| UnifyError { formal: formal.clone(), actual, known: known.clone() };
    if actual < 0 {
        return Err(error(bindings));
    }
    let open = formal.bind(bindings);
    if let Some(value) = open.as_constant() {
        return if value == actual { Ok(Unified::Solved) } else { Err(error(bindings)) };
    }
    let Some((symbol, scale, offset)) = as_linear(&open) else { return Ok(Unified::Deferred) };
    // 128 bits, because `actual - offset` may leave `i64`.
    let solution = i128::from(actual) - i128::from(offset);
    let (value, rest) = (solution / i128::from(scale), solution % i128::from(scale));
    match i64::try_from(value) {
        Ok(value) if rest == 0 && (value >= 0 || !symbol.is_size()) => {
            bindings.insert(symbol, value);
            Ok(Unified::Solved)
        }
        _ => Err(error(bindings)),
    }
}

/// Splits `scale * symbol + offset` into its parts. The scale is not 0.
fn as_linear(dim: &Dim) -> Option<(Symbol, i64, i64)> {
    let mut terms = dim.terms();
    let (monomial, scale) = terms.next()?;
    let symbol = match monomial.factors() {
        [(atom, 1)] => match atom.as_ref() {
            Atom::Symbol(symbol) => symbol.clone(),
            _ => return None,
        },
        _ => return None,
    };
    // Terms are sorted by degree, so a constant can only come second.
    match (terms.next(), terms.next()) {
        (None, _) => Some((symbol, scale, 0)),
        (Some((unit, offset)), None) if unit.is_unit() => Some((symbol, scale, offset)),
        _ => None,
    }
}
