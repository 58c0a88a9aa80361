//! [`Dim`] and its normal form: an integer polynomial over atoms, with sorted and merged terms.
//!
//! Functions that build an expression return `None` if a coefficient leaves `i64` or the expression
//! exceeds the limits below. The limits keep a hostile model from slowing down planning or
//! overflowing the stack.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Symbol;

/// Maximum number of terms of one polynomial.
const TERM_LIMIT: usize = 256;
/// Maximum number of symbols, constants and functions in an expression, including nested ones.
const WEIGHT_LIMIT: u32 = 1024;
/// Maximum nesting depth of functions.
const DEPTH_LIMIT: u32 = 48;

/// An integer expression over symbols. Cloning is cheap.
///
/// ```
/// use ort_core::dim::Dim;
/// let (batch, sequence) = (Dim::parse("batch"), Dim::parse("seq"));
/// let doubled = (&batch + &sequence) * 2;
/// assert_eq!(doubled, &batch * 2 + &sequence * 2);
/// assert_eq!(doubled.floor_div(&Dim::constant(2)), batch + sequence);
/// assert_eq!(doubled.to_string(), "2*batch + 2*seq");
/// ```
// No `Ord`: its `max` and `min` would be mistaken for those of the values.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Dim(pub(super) Repr);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Repr {
    Constant(i64),
    Polynomial(Arc<Polynomial>),
}

/// A variable of a polynomial: a symbol, or a function of expressions that does not simplify
/// further.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Atom {
    Symbol(Symbol),
    FloorDiv(Dim, Dim),
    CeilDiv(Dim, Dim),
    Modulo(Dim, Dim),
    Max(Vec<Dim>),
    Min(Vec<Dim>),
}

impl Atom {
    pub(super) fn arguments(&self) -> Vec<&Dim> {
        match self {
            Atom::Symbol(_) => Vec::new(),
            Atom::FloorDiv(a, b) | Atom::CeilDiv(a, b) | Atom::Modulo(a, b) => vec![a, b],
            Atom::Max(list) | Atom::Min(list) => list.iter().collect(),
        }
    }

    fn rank(&self) -> (u8, Option<&Symbol>) {
        match self {
            Atom::Symbol(symbol) => (0, Some(symbol)),
            Atom::FloorDiv(..) => (1, None),
            Atom::CeilDiv(..) => (2, None),
            Atom::Modulo(..) => (3, None),
            Atom::Max(_) => (4, None),
            Atom::Min(_) => (5, None),
        }
    }

    fn weight(&self) -> u32 {
        self.arguments().iter().fold(1, |sum, dim| dim.weight().saturating_add(sum))
    }

    fn depth(&self) -> u32 {
        self.arguments().iter().map(|dim| dim.depth() + 1).max().unwrap_or(0)
    }
}

/// Symbols first, by name; then functions by kind, then by arguments.
impl Ord for Atom {
    fn cmp(&self, other: &Atom) -> Ordering {
        let arguments =
            |atom: &Atom| atom.arguments().into_iter().map(|dim| dim.0.clone()).collect::<Vec<_>>();
        self.rank().cmp(&other.rank()).then_with(|| arguments(self).cmp(&arguments(other)))
    }
}

impl PartialOrd for Atom {
    fn partial_cmp(&self, other: &Atom) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A product of atoms with exponents of at least 1, sorted by atom. The empty product is 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Monomial(Vec<(Arc<Atom>, u32)>);

static UNIT: Monomial = Monomial(Vec::new());

impl Monomial {
    pub(super) fn factors(&self) -> &[(Arc<Atom>, u32)] {
        &self.0
    }

    pub(super) fn is_unit(&self) -> bool {
        self.0.is_empty()
    }

    fn degree(&self) -> u64 {
        self.0.iter().map(|factor| u64::from(factor.1)).sum()
    }

    fn multiply(&self, other: &Monomial) -> Option<Monomial> {
        let mut product = self.clone();
        for (atom, exponent) in &other.0 {
            match product.0.binary_search_by(|factor| factor.0.cmp(atom)) {
                Ok(index) => {
                    let factor = product.0.get_mut(index)?;
                    factor.1 = factor.1.checked_add(*exponent)?;
                }
                Err(index) => product.0.insert(index, (atom.clone(), *exponent)),
            }
        }
        Some(product)
    }

    /// Returns `self / other`, or `None` if `other` does not divide `self`.
    pub(super) fn divide(&self, other: &Monomial) -> Option<Monomial> {
        let mut quotient = self.clone();
        for (atom, exponent) in &other.0 {
            let index = quotient.0.binary_search_by(|factor| factor.0.cmp(atom)).ok()?;
            let factor = quotient.0.get_mut(index)?;
            factor.1 = factor.1.checked_sub(*exponent)?;
            if factor.1 == 0 {
                quotient.0.remove(index);
            }
        }
        Some(quotient)
    }

    /// Returns the greatest common divisor of two monomials.
    fn common(&self, other: &Monomial) -> Monomial {
        let exponent_in =
            |atom: &Arc<Atom>| other.0.iter().find(|factor| factor.0 == *atom).map_or(0, |factor| factor.1);
        let shared = self.0.iter().map(|(atom, exponent)| (atom.clone(), (*exponent).min(exponent_in(atom))));
        Monomial(shared.filter(|factor| factor.1 > 0).collect())
    }

    fn weight(&self) -> u32 {
        let weights = self.0.iter().map(|(atom, exponent)| atom.weight().saturating_mul(*exponent));
        weights.fold(1, u32::saturating_add)
    }
}

/// Graded lexicographic order, highest degree first. Expressions print in this order. It is a
/// monomial order: the leading term of a product is the product of the leading terms. Polynomial
/// long division relies on that.
impl Ord for Monomial {
    fn cmp(&self, other: &Monomial) -> Ordering {
        let by_degree = other.degree().cmp(&self.degree());
        let mut by_factors =
            self.0.iter().zip(&other.0).map(|(left, right)| left.0.cmp(&right.0).then(right.1.cmp(&left.1)));
        by_degree.then_with(|| by_factors.find(|order| order.is_ne()).unwrap_or(Ordering::Equal))
    }
}

impl PartialOrd for Monomial {
    fn partial_cmp(&self, other: &Monomial) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A polynomial that is not a constant: terms in order, with nonzero coefficients.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Polynomial {
    terms: Vec<(Monomial, i64)>,
    weight: u32,
    depth: u32,
}

/// Terms under construction. Map order is term order.
pub(super) type Terms = BTreeMap<Monomial, i64>;

/// Adds a term, merging it with a like one. `None` on overflow.
pub(super) fn accumulate(terms: &mut Terms, monomial: Monomial, coefficient: i64) -> Option<()> {
    let entry = terms.entry(monomial).or_insert(0);
    *entry = entry.checked_add(coefficient)?;
    Some(())
}

/// Returns the expression of these terms, or `None` beyond the size limits.
pub(super) fn build(terms: Terms) -> Option<Dim> {
    // Drop cancelled terms first. Equality is structural, so a constant must become
    // `Repr::Constant`.
    let terms: Vec<_> = terms.into_iter().filter(|term| term.1 != 0).collect();
    match terms.as_slice() {
        [] => return Some(Dim::constant(0)),
        [(monomial, coefficient)] if monomial.is_unit() => return Some(Dim::constant(*coefficient)),
        _ => {}
    }
    // Weight and depth are cached in the polynomial, so that these checks do not walk nested
    // expressions again.
    let weight = terms.iter().map(|term| term.0.weight()).fold(0, u32::saturating_add);
    let atoms = terms.iter().flat_map(|term| term.0.factors());
    let depth = atoms.map(|factor| factor.0.depth()).max().unwrap_or(0);
    if terms.len() > TERM_LIMIT || weight > WEIGHT_LIMIT || depth > DEPTH_LIMIT {
        return None;
    }
    Some(Dim(Repr::Polynomial(Arc::new(Polynomial { terms, weight, depth }))))
}

pub(super) fn from_atom(atom: Atom) -> Option<Dim> {
    build(Terms::from([(Monomial(vec![(Arc::new(atom), 1)]), 1)]))
}

impl Dim {
    fn weight(&self) -> u32 {
        match &self.0 {
            Repr::Constant(_) => 1,
            Repr::Polynomial(polynomial) => polynomial.weight,
        }
    }

    fn depth(&self) -> u32 {
        match &self.0 {
            Repr::Constant(_) => 0,
            Repr::Polynomial(polynomial) => polynomial.depth,
        }
    }

    /// Returns the terms in order. A constant is one term without atoms.
    pub(super) fn terms(&self) -> impl Iterator<Item = (&Monomial, i64)> + Clone {
        let (constant, terms) = match &self.0 {
            Repr::Constant(value) => (Some((&UNIT, *value)), &[][..]),
            Repr::Polynomial(polynomial) => (None, polynomial.terms.as_slice()),
        };
        constant.into_iter().chain(terms.iter().map(|(monomial, coefficient)| (monomial, *coefficient)))
    }

    pub(super) fn only_term(&self) -> Option<(&Monomial, i64)> {
        let mut terms = self.terms();
        let first = terms.next()?;
        terms.next().is_none().then_some(first)
    }

    /// Returns the atom if the expression is a single one.
    pub(super) fn only_atom(&self) -> Option<&Atom> {
        match self.only_term()? {
            (monomial, 1) => match monomial.factors() {
                [(atom, 1)] => Some(atom),
                _ => None,
            },
            _ => None,
        }
    }

    /// Adds two expressions. `None` on overflow or beyond the size limits.
    pub fn checked_add(&self, other: &Dim) -> Option<Dim> {
        self.add_scaled(other, 1)
    }

    /// Subtracts an expression. `None` on overflow or beyond the size limits.
    pub fn checked_sub(&self, other: &Dim) -> Option<Dim> {
        self.add_scaled(other, -1)
    }

    fn add_scaled(&self, other: &Dim, scale: i64) -> Option<Dim> {
        if let (Some(left), Some(right)) = (self.as_constant(), other.as_constant()) {
            return left.checked_add(right.checked_mul(scale)?).map(Dim::constant);
        }
        let mut terms: Terms = self.terms().map(|(monomial, value)| (monomial.clone(), value)).collect();
        for (monomial, coefficient) in other.terms() {
            accumulate(&mut terms, monomial.clone(), coefficient.checked_mul(scale)?)?;
        }
        build(terms)
    }

    /// Multiplies two expressions. `None` on overflow or beyond the size limits.
    pub fn checked_mul(&self, other: &Dim) -> Option<Dim> {
        if let (Some(left), Some(right)) = (self.as_constant(), other.as_constant()) {
            return left.checked_mul(right).map(Dim::constant);
        }
        // Bounds the work before like terms merge. A product may merge to fewer terms than it has
        // pairs, hence the factor 16.
        if self.terms().count().saturating_mul(other.terms().count()) > 16 * TERM_LIMIT {
            return None;
        }
        let mut terms = Terms::new();
        for (left, left_coefficient) in self.terms() {
            for (right, right_coefficient) in other.terms() {
                let coefficient = left_coefficient.checked_mul(right_coefficient)?;
                accumulate(&mut terms, left.multiply(right)?, coefficient)?;
            }
        }
        build(terms)
    }

    /// Returns `self / divisor` if the quotient is a polynomial with integer coefficients. Assumes
    /// that the divisor is not 0.
    pub(super) fn exact_quotient(&self, divisor: &Dim) -> Option<Dim> {
        let (lead, lead_coefficient) = divisor.terms().next()?;
        let mut rest = self.clone();
        let mut quotient = Dim::constant(0);
        // Long division by the leading term. Each step cancels the leading term of the remainder
        // and adds a term to the quotient, so TERM_LIMIT bounds the steps.
        for _ in 0..=TERM_LIMIT {
            if rest.as_constant() == Some(0) {
                return Some(quotient);
            }
            let (monomial, coefficient) = rest.terms().next()?;
            if coefficient.checked_rem(lead_coefficient)? != 0 {
                return None;
            }
            let step = Terms::from([(monomial.divide(lead)?, coefficient.checked_div(lead_coefficient)?)]);
            let step = build(step)?;
            rest = rest.checked_sub(&step.checked_mul(divisor)?)?;
            quotient = quotient.checked_add(&step)?;
        }
        None
    }

    /// Divides both expressions by their greatest common single-term divisor, so that equal ratios
    /// have one form.
    pub(super) fn cancel_common(&self, other: &Dim) -> Option<(Dim, Dim)> {
        let mut common: Option<(Monomial, u64)> = None;
        for (monomial, coefficient) in self.terms().chain(other.terms()) {
            let size = coefficient.unsigned_abs();
            common = Some(match common {
                None => (monomial.clone(), size),
                Some((shared, divisor)) => (shared.common(monomial), greatest_common_divisor(divisor, size)),
            });
        }
        let (monomial, divisor) = common?;
        let divisor = build(Terms::from([(monomial, i64::try_from(divisor).ok()?)]))?;
        Some((self.exact_quotient(&divisor)?, other.exact_quotient(&divisor)?))
    }
}

pub(super) fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
