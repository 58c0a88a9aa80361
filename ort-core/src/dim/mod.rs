//! Symbolic dimensions: integer expressions over named symbols.
//!
//! Expressions are kept in a normal form, so that equal ones compare equal.
//!
//! An expression is an integer polynomial. Its variables are symbols, and the functions floor
//! division, ceiling division, modulo, maximum and minimum. Simplification assumes that symbols are
//! at least 0 (as sizes are) and that divisors are not 0. The operators never fail. If a
//! coefficient overflows, or the expression exceeds a size limit, the result is a fresh unknown
//! symbol. It equals nothing else, so no false equality follows from it.

mod bounds;
mod display;
mod evaluate;
mod function;
mod parse;
mod polynomial;
mod symbol;

use std::collections::BTreeSet;
use std::ops;

pub use evaluate::{EvaluateError, Unified, UnifyError, unify};
pub use polynomial::Dim;
use polynomial::{Atom, Repr};
pub use symbol::{Bindings, Symbol};

impl Dim {
    /// Returns a constant expression.
    pub const fn constant(value: i64) -> Dim {
        Dim(Repr::Constant(value))
    }

    /// Returns the expression that consists of one symbol.
    pub fn symbol(symbol: Symbol) -> Dim {
        // A single symbol is far below the size limits, so the fallback is never used.
        polynomial::from_atom(Atom::Symbol(symbol)).unwrap_or(Dim::constant(0))
    }

    /// Returns the symbol of that name, whatever the text is. Use [`Dim::parse`] for expressions.
    pub fn named(name: &str) -> Dim {
        Dim::symbol(Symbol::named(name))
    }

    /// Returns a fresh data-dependent size; see [`Symbol::unknown`].
    pub fn unknown() -> Dim {
        Dim::symbol(Symbol::unknown())
    }

    /// Returns the value of a constant expression.
    pub fn as_constant(&self) -> Option<i64> {
        match self.0 {
            Repr::Constant(value) => Some(value),
            Repr::Polynomial(_) => None,
        }
    }

    /// Returns the symbol if the expression is a single one.
    pub fn as_symbol(&self) -> Option<&Symbol> {
        match self.only_atom() {
            Some(Atom::Symbol(symbol)) => Some(symbol),
            _ => None,
        }
    }

    /// Returns every symbol in the expression, sorted.
    pub fn symbols(&self) -> BTreeSet<Symbol> {
        let mut symbols = BTreeSet::new();
        self.collect_symbols(&mut symbols);
        symbols
    }

    fn collect_symbols(&self, symbols: &mut BTreeSet<Symbol>) {
        for (atom, _) in self.terms().flat_map(|term| term.0.factors()) {
            if let Atom::Symbol(symbol) = atom.as_ref() {
                symbols.insert(symbol.clone());
            }
            for argument in atom.arguments() {
                argument.collect_symbols(symbols);
            }
        }
    }

    /// Returns whether the expression contains a data-dependent symbol, so that it cannot be
    /// planned.
    pub fn has_unknown(&self) -> bool {
        self.symbols().iter().any(Symbol::is_unknown)
    }
}

impl From<i64> for Dim {
    fn from(value: i64) -> Dim {
        Dim::constant(value)
    }
}

impl From<Symbol> for Dim {
    fn from(symbol: Symbol) -> Dim {
        Dim::symbol(symbol)
    }
}

// Owned and borrowed operands, and `i64` on the right, so that formulas read as arithmetic.
macro_rules! operators {
    ($($operator:ident $method:ident $checked:ident;)*) => {$(
        operators!(@one $operator $method $checked, &Dim, &Dim, self, other => self, other);
        operators!(@one $operator $method $checked, Dim, &Dim, self, other => &self, other);
        operators!(@one $operator $method $checked, &Dim, Dim, self, other => self, &other);
        operators!(@one $operator $method $checked, Dim, Dim, self, other => &self, &other);
        operators!(@one $operator $method $checked, &Dim, i64, self, other => self, &Dim::constant(other));
        operators!(@one $operator $method $checked, Dim, i64, self, other => &self, &Dim::constant(other));
    )*};
    (@one $operator:ident $method:ident $checked:ident, $left:ty, $right:ty,
     $this:ident, $other:ident => $a:expr, $b:expr) => {
        impl ops::$operator<$right> for $left {
            type Output = Dim;

            fn $method($this, $other: $right) -> Dim {
                Dim::$checked($a, $b).unwrap_or_else(Dim::unknown)
            }
        }
    };
}

operators! {
    Add add checked_add;
    Sub sub checked_sub;
    Mul mul checked_mul;
}

impl ops::Neg for &Dim {
    type Output = Dim;

    fn neg(self) -> Dim {
        self * -1
    }
}

impl<'a> std::iter::Sum<&'a Dim> for Dim {
    fn sum<I: Iterator<Item = &'a Dim>>(dims: I) -> Dim {
        dims.fold(Dim::constant(0), |sum, dim| sum + dim)
    }
}

/// The element count of a shape: `shape.iter().product::<Dim>()`.
impl<'a> std::iter::Product<&'a Dim> for Dim {
    fn product<I: Iterator<Item = &'a Dim>>(dims: I) -> Dim {
        dims.fold(Dim::constant(1), |product, dim| product * dim)
    }
}

#[cfg(test)]
mod tests;
