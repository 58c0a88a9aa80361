//! Floor and ceiling division, modulo, maximum and minimum of expressions, with simplification.

use super::Dim;
use super::polynomial::{Atom, Terms, accumulate, build, from_atom, greatest_common_divisor};

/// Maximum number of arguments of one maximum or minimum.
const ARGUMENT_LIMIT: usize = 32;

impl Dim {
    /// Returns the quotient rounded towards minus infinity. Division by the constant 0 builds an
    /// expression that fails to evaluate.
    ///
    /// ```
    /// use ort_core::dim::Dim;
    /// let height = Dim::named("height");
    /// assert_eq!((&height * 64 + 3).floor_div(&Dim::constant(64)), height);
    /// ```
    pub fn floor_div(&self, divisor: &Dim) -> Dim {
        floor_div(self, divisor).unwrap_or_else(Dim::unknown)
    }

    /// Returns the quotient rounded towards plus infinity.
    pub fn ceil_div(&self, divisor: &Dim) -> Dim {
        ceil_div(self, divisor).unwrap_or_else(Dim::unknown)
    }

    /// Returns the remainder of [`Dim::floor_div`], which has the sign of the divisor.
    pub fn modulo(&self, divisor: &Dim) -> Dim {
        modulo(self, divisor).unwrap_or_else(Dim::unknown)
    }

    /// Returns the maximum of two expressions.
    pub fn max(&self, other: &Dim) -> Dim {
        max_or_min(&[self, other], true).unwrap_or_else(Dim::unknown)
    }

    /// Returns the minimum of two expressions.
    pub fn min(&self, other: &Dim) -> Dim {
        max_or_min(&[self, other], false).unwrap_or_else(Dim::unknown)
    }
}

/// Returns `a / b` rounded towards minus infinity. `None` for division by 0 and on overflow.
pub(super) fn floor_div_numbers(a: i128, b: i128) -> Option<i128> {
    let quotient = a.checked_div(b)?;
    // `checked_div` refused a divisor of 0 and `MIN / -1`, so `%` cannot panic.
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

/// Returns `a / b` rounded towards plus infinity. `None` for division by 0 and on overflow.
pub(super) fn ceil_div_numbers(a: i128, b: i128) -> Option<i128> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) == (b < 0) { quotient + 1 } else { quotient })
}

/// Returns `a - b * floor(a / b)`. `None` for division by 0 and on overflow.
pub(super) fn modulo_numbers(a: i128, b: i128) -> Option<i128> {
    let rest = a.checked_rem(b)?;
    Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
}

/// Applies a function to two constants. The outer `None` leaves the division to the caller, because
/// an operand is symbolic or the divisor is 0. The inner `None` is an overflow.
fn of_constants(a: &Dim, b: &Dim, function: fn(i128, i128) -> Option<i128>) -> Option<Option<Dim>> {
    let (a, b) = (a.as_constant()?, b.as_constant()?);
    if b == 0 {
        return None;
    }
    Some(function(a.into(), b.into()).and_then(|value| i64::try_from(value).ok()).map(Dim::constant))
}

fn floor_div(numerator: &Dim, divisor: &Dim) -> Option<Dim> {
    if let Some(value) = of_constants(numerator, divisor, floor_div_numbers) {
        return value;
    }
    match divisor.as_constant() {
        // The expression keeps the division by 0, so that evaluation can report it.
        Some(0) => from_atom(Atom::FloorDiv(numerator.clone(), divisor.clone())),
        Some(c) if c > 0 => floor_div_constant(numerator, c),
        Some(c) => floor_div_constant(&numerator.checked_mul(&Dim::constant(-1))?, c.checked_neg()?),
        None => divide_by_expression(numerator, divisor, Atom::FloorDiv),
    }
}

fn ceil_div(numerator: &Dim, divisor: &Dim) -> Option<Dim> {
    if let Some(value) = of_constants(numerator, divisor, ceil_div_numbers) {
        return value;
    }
    match divisor.as_constant() {
        Some(0) => from_atom(Atom::CeilDiv(numerator.clone(), divisor.clone())),
        // ceil(n / c) = floor((n + c - 1) / c), so both roundings share one form.
        Some(c) if c > 0 => floor_div_constant(&numerator.checked_add(&Dim::constant(c - 1))?, c),
        Some(c) => ceil_div(&numerator.checked_mul(&Dim::constant(-1))?, &Dim::constant(c.checked_neg()?)),
        None => divide_by_expression(numerator, divisor, Atom::CeilDiv),
    }
}

/// Returns `floor(numerator / divisor)` for a positive divisor. Whole multiples move out of the
/// fraction, the fraction is reduced, and nested divisions merge into one.
fn floor_div_constant(numerator: &Dim, divisor: i64) -> Option<Dim> {
    let (mut whole, mut rest, mut constant) = (Terms::new(), Terms::new(), 0);
    let mut common = divisor.unsigned_abs();
    for (monomial, coefficient) in numerator.terms() {
        // Euclidean division, so that every coefficient that stays in the fraction is at least 0.
        accumulate(&mut whole, monomial.clone(), coefficient.div_euclid(divisor))?;
        let left = coefficient.rem_euclid(divisor);
        if monomial.is_unit() {
            constant = left;
        } else if left != 0 {
            common = greatest_common_divisor(common, left.unsigned_abs());
            rest.insert(monomial.clone(), left);
        }
    }
    let whole = build(whole)?;
    if rest.is_empty() {
        return Some(whole);
    }
    // floor((g*r + k) / (g*c)) = floor((r + floor(k/g)) / c) for integers r and k.
    let common = i64::try_from(common).ok()?;
    let (divisor, constant) = (divisor / common, constant / common);
    rest.values_mut().for_each(|coefficient| *coefficient /= common);
    let rest = build(rest)?;
    if let Some(Atom::FloorDiv(inner, by)) = rest.only_atom()
        && let Some(by) = by.as_constant().filter(|by| *by > 0)
    {
        // floor((floor(n/a) + k) / c) = floor((n + k*a) / (a*c)).
        let inner = inner.checked_add(&Dim::constant(constant.checked_mul(by)?))?;
        return whole.checked_add(&floor_div_constant(&inner, by.checked_mul(divisor)?)?);
    }
    let rest = rest.checked_add(&Dim::constant(constant))?;
    // A proper fraction rounds down to 0.
    let is_proper = rest.is_known_nonneg() && rest.upper_bound().is_some_and(|high| high < divisor);
    if is_proper {
        return Some(whole);
    }
    whole.checked_add(&from_atom(Atom::FloorDiv(rest, Dim::constant(divisor)))?)
}

/// Returns the quotient by an expression, exact if possible. Otherwise common factors cancel, and
/// multiples of a single-term divisor move out of the fraction.
fn divide_by_expression(numerator: &Dim, divisor: &Dim, function: fn(Dim, Dim) -> Atom) -> Option<Dim> {
    if let Some(quotient) = numerator.exact_quotient(divisor) {
        return Some(quotient);
    }
    let (numerator, divisor) = numerator.cancel_common(divisor)?;
    if divisor.as_constant().is_some() {
        // Cancelling left a constant divisor, for which more simplifications exist.
        let is_floor = matches!(function(Dim::constant(0), Dim::constant(1)), Atom::FloorDiv(..));
        return if is_floor { floor_div(&numerator, &divisor) } else { ceil_div(&numerator, &divisor) };
    }
    let (whole, rest) = split_multiples(&numerator, &divisor)?;
    let fraction = from_atom(function(rest, divisor))?;
    whole.checked_add(&fraction)
}

/// Splits the numerator into the quotient of the terms that a single-term divisor divides, and the
/// remaining terms.
fn split_multiples(numerator: &Dim, divisor: &Dim) -> Option<(Dim, Dim)> {
    let Some((by, by_coefficient)) = divisor.only_term() else {
        return Some((Dim::constant(0), numerator.clone()));
    };
    let (mut whole, mut rest) = (Terms::new(), Terms::new());
    for (monomial, coefficient) in numerator.terms() {
        match monomial.divide(by) {
            Some(quotient) if coefficient.checked_rem(by_coefficient) == Some(0) => {
                accumulate(&mut whole, quotient, coefficient.checked_div(by_coefficient)?)?;
            }
            _ => accumulate(&mut rest, monomial.clone(), coefficient)?,
        }
    }
    Some((build(whole)?, build(rest)?))
}

fn modulo(numerator: &Dim, divisor: &Dim) -> Option<Dim> {
    if let Some(value) = of_constants(numerator, divisor, modulo_numbers) {
        return value;
    }
    let rest = match divisor.as_constant() {
        Some(c) if c > 0 => {
            let mut terms = Terms::new();
            for (monomial, coefficient) in numerator.terms() {
                // Multiples of the divisor do not change the remainder: (n + k*c) mod c = n mod c.
                accumulate(&mut terms, monomial.clone(), coefficient.rem_euclid(c))?;
            }
            build(terms)?
        }
        Some(_) => numerator.clone(),
        None if numerator.exact_quotient(divisor).is_some() => return Some(Dim::constant(0)),
        None => split_multiples(numerator, divisor)?.1,
    };
    let constant = divisor.as_constant().filter(|c| *c > 0);
    let is_proper =
        constant.is_some_and(|c| rest.is_known_nonneg() && rest.upper_bound().is_some_and(|high| high < c));
    if is_proper { Some(rest) } else { from_atom(Atom::Modulo(rest, divisor.clone())) }
}

/// Returns the maximum or minimum. Nested ones are flattened, and arguments that another one
/// dominates are dropped.
fn max_or_min(arguments: &[&Dim], is_max: bool) -> Option<Dim> {
    let mut flat: Vec<Dim> = Vec::new();
    for argument in arguments {
        match argument.only_atom() {
            Some(Atom::Max(list)) if is_max => flat.extend(list.iter().cloned()),
            Some(Atom::Min(list)) if !is_max => flat.extend(list.iter().cloned()),
            _ => flat.push((*argument).clone()),
        }
    }
    // Sorted, because `max(a, b)` and `max(b, a)` must have one normal form.
    flat.sort_by(|left, right| left.0.cmp(&right.0));
    flat.dedup();
    // Dominance is tested for each pair, so the list must stay short.
    if flat.len() > ARGUMENT_LIMIT {
        return None;
    }
    let covers = |kept: &Dim, other: &Dim| {
        // A minimum never exceeds any of its arguments; a maximum is never below one.
        let choices = match other.only_atom() {
            Some(Atom::Min(list)) if is_max => list.as_slice(),
            Some(Atom::Max(list)) if !is_max => list.as_slice(),
            _ => &[],
        };
        if choices.contains(kept) {
            return true;
        }
        let difference = if is_max { kept.checked_sub(other) } else { other.checked_sub(kept) };
        difference.is_some_and(|difference| difference.is_known_nonneg())
    };
    // Equal arguments are already merged. Two different ones may still dominate each other, if the
    // bounds show that they are equal. Checking the kept ones first keeps exactly one of the pair.
    let mut kept: Vec<Dim> = Vec::new();
    for candidate in flat {
        if kept.iter().any(|other| covers(other, &candidate)) {
            continue;
        }
        kept.retain(|other| !covers(&candidate, other));
        kept.push(candidate);
    }
    match kept.as_slice() {
        [only] => Some(only.clone()),
        _ => from_atom(if is_max { Atom::Max(kept) } else { Atom::Min(kept) }),
    }
}
