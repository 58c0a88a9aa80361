//! What is known of an expression's value without bindings, by interval arithmetic.

use super::polynomial::{Atom, Monomial};
use super::{Dim, Repr};

/// Values from `low` to `high`, both inside; `None` is no bound on that side.
#[derive(Clone, Copy)]
struct Interval {
    low: Option<i64>,
    high: Option<i64>,
}

const ANY: Interval = Interval { low: None, high: None };

impl Dim {
    /// A number that the expression is never below, with symbols at least 0; `None` where none is
    /// known.
    pub fn lower_bound(&self) -> Option<i64> {
        self.interval().low
    }

    /// A number that the expression is never above, with symbols at least 0; `None` where none is
    /// known.
    pub fn upper_bound(&self) -> Option<i64> {
        self.interval().high
    }

    /// Whether the expression is at least 1 for all sizes.
    pub fn is_known_positive(&self) -> bool {
        self.lower_bound().is_some_and(|low| low >= 1)
    }

    /// Whether the expression is at least 0 for all sizes.
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

/// The product of factors that are all at least 0; nothing is claimed where one may be negative.
fn monomial_interval(monomial: &Monomial) -> Interval {
    let mut product = Interval { low: Some(1), high: Some(1) };
    for (atom, exponent) in monomial.factors() {
        let factor = atom_interval(atom);
        if let (1, [_]) = (*exponent, monomial.factors()) {
            return factor;
        }
        let Some(low) = factor.low.filter(|low| *low >= 0) else { return ANY };
        for _ in 0..*exponent {
            // A lower bound that overflows is still one at the largest number that fits.
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
            let bound = |value: Option<i64>| value.filter(|v| *v > i64::MIN).map(|value| divide(value, c));
            Interval { low: bound(a.low), high: bound(a.high) }
        }
        // A divisor is not 0, so one that is not negative is at least 1 and the quotient stays
        // inside 0..=a.
        None if low.is_some_and(|low| low >= 0) && a.low.is_some_and(|low| low >= 0) => {
            Interval { low: Some(0), high: a.high }
        }
        _ => ANY,
    }
}

/// Of a maximum one known lower bound is enough, and all upper bounds must be known; of a minimum
/// the reverse.
fn extreme_interval(list: &[Dim], choose: fn(i64, i64) -> i64, is_max: bool) -> Interval {
    // Each argument is looked at once: twice would double the work with each level of nesting.
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
