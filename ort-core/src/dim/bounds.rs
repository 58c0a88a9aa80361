//! Bounds of dimension expressions by interval arithmetic, without bindings.

use super::polynomial::{Atom, Monomial};
use super::{Dim, Repr};

/// The closed interval from `low` to `high`. `None` means unbounded on that side.
#[derive(Clone, Copy)]
struct Interval {
    low: Option<i64>,
    high: Option<i64>,
}

const ANY: Interval = Interval { low: None, high: None };

impl Dim {
    /// Returns a lower bound of the expression, assuming symbols of at least 0. `None` if none is
    /// known.
    pub fn lower_bound(&self) -> Option<i64> {
        self.interval().low
    }

    /// Returns an upper bound of the expression, assuming symbols of at least 0. `None` if none is
    /// known.
    pub fn upper_bound(&self) -> Option<i64> {
        self.interval().high
    }

    /// Returns whether the expression is at least 1 for all sizes.
    pub fn is_known_positive(&self) -> bool {
        self.lower_bound().is_some_and(|low| low >= 1)
    }

    /// Returns whether the expression is at least 0 for all sizes.
    pub fn is_known_nonneg(&self) -> bool {
        self.lower_bound().is_some_and(|low| low >= 0)
    }

    fn interval(&self) -> Interval {
        if let Repr::Constant(value) = self.0 {
            return Interval { low: Some(value), high: Some(value) };
        }
        self.terms().fold(Interval { low: Some(0), high: Some(0) }, |sum, (monomial, coefficient)| {
            let term = scale(monomial_interval(monomial), coefficient);
            Interval { low: add(sum.low, term.low), high: add(sum.high, term.high) }
        })
    }
}

fn add(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    // An overflow leaves the side open, which is always true.
    a?.checked_add(b?)
}

fn multiply(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a?.checked_mul(b?)
}

fn scale(interval: Interval, coefficient: i64) -> Interval {
    let low = multiply(interval.low, Some(coefficient));
    let high = multiply(interval.high, Some(coefficient));
    if coefficient < 0 { Interval { low: high, high: low } } else { Interval { low, high } }
}

/// Returns the interval of a product whose factors are all at least 0. If a factor may be negative,
/// the result is unbounded on both sides.
fn monomial_interval(monomial: &Monomial) -> Interval {
    let mut product = Interval { low: Some(1), high: Some(1) };
    for (atom, exponent) in monomial.factors() {
        let factor = atom_interval(atom);
        // A lone factor may be negative, because nothing is multiplied.
        if let (1, [_]) = (*exponent, monomial.factors()) {
            return factor;
        }
        let Some(low) = factor.low.filter(|low| *low >= 0) else { return ANY };
        for _ in 0..*exponent {
            // If the bound overflows, `i64::MAX` is still a lower bound.
            let bound = product.low.unwrap_or(0).saturating_mul(low);
            product = Interval { low: Some(bound), high: multiply(product.high, factor.high) };
        }
    }
    product
}

fn atom_interval(atom: &Atom) -> Interval {
    match atom {
        Atom::Symbol(symbol) if symbol.is_size() => Interval { low: Some(0), high: None },
        Atom::Symbol(_) => ANY,
        Atom::FloorDiv(a, b) => quotient_interval(a, b, i64::div_euclid),
        Atom::CeilDiv(a, b) => quotient_interval(a, b, |x, c| -((-x).div_euclid(c))),
        // The remainder has the sign of the divisor and is smaller in magnitude.
        Atom::Modulo(_, b) => match b.interval() {
            Interval { low: Some(low), high } if low >= 0 => {
                Interval { low: Some(0), high: add(high, Some(-1)) }
            }
            _ => ANY,
        },
        Atom::Max(list) => extreme_interval(list, i64::max, true),
        Atom::Min(list) => extreme_interval(list, i64::min, false),
    }
}

fn quotient_interval(a: &Dim, b: &Dim, divide: fn(i64, i64) -> i64) -> Interval {
    let (a, low) = (a.interval(), b.lower_bound());
    match b.as_constant() {
        Some(c) if c > 0 => {
            // `i64::MIN` cannot be negated, which ceiling division does.
            let bound = |value: Option<i64>| value.filter(|v| *v > i64::MIN).map(|value| divide(value, c));
            Interval { low: bound(a.low), high: bound(a.high) }
        }
        // Divisors are not 0, so a nonnegative one is at least 1. The quotient is then in 0..=a.
        None if low.is_some_and(|low| low >= 0) && a.low.is_some_and(|low| low >= 0) => {
            Interval { low: Some(0), high: a.high }
        }
        _ => ANY,
    }
}

/// Returns the interval of a maximum or minimum. For a maximum, one known lower bound is enough,
/// but all upper bounds must be known. For a minimum it is the reverse.
fn extreme_interval(list: &[Dim], choose: fn(i64, i64) -> i64, is_max: bool) -> Interval {
    // Compute each interval once: twice would double the work per nesting level.
    let intervals: Vec<Interval> = list.iter().map(Dim::interval).collect();
    let any = |side: fn(&Interval) -> Option<i64>| intervals.iter().filter_map(side).reduce(choose);
    let all = |side: fn(&Interval) -> Option<i64>| {
        intervals.iter().map(side).collect::<Option<Vec<_>>>()?.into_iter().reduce(choose)
    };
    if is_max {
        Interval { low: any(|i| i.low), high: all(|i| i.high) }
    } else {
        Interval { low: all(|i| i.low), high: any(|i| i.high) }
    }
}
