//! Text form of dimension expressions, which [`Dim::parse`] reads back.

use std::fmt;

use super::Dim;
use super::polynomial::{Atom, Monomial};

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (monomial, coefficient)) in self.terms().enumerate() {
            f.write_str(match (index, coefficient < 0) {
                (0, false) => "",
                (0, true) => "-",
                (_, false) => " + ",
                (_, true) => " - ",
            })?;
            // `unsigned_abs` also holds for the smallest `i64`, whose negative does not fit.
            let size = coefficient.unsigned_abs();
            // A factor of 1 is left out, as in `n` for `1*n`.
            match (size, monomial.is_unit()) {
                (_, true) => write!(f, "{size}")?,
                (1, false) => write!(f, "{monomial}")?,
                (_, false) => write!(f, "{size}*{monomial}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Monomial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (atom, exponent)) in self.factors().iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "*" })?;
            write!(f, "{atom}")?;
            if *exponent > 1 {
                write!(f, "**{exponent}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Atom::Symbol(symbol) => write!(f, "{symbol}"),
            Atom::FloorDiv(a, b) => write!(f, "floor({}/{})", Operand(a), Operand(b)),
            Atom::CeilDiv(a, b) => write!(f, "ceil({}/{})", Operand(a), Operand(b)),
            Atom::Modulo(a, b) => write!(f, "mod({a}, {b})"),
            Atom::Max(list) => write_call(f, "max", list),
            Atom::Min(list) => write_call(f, "min", list),
        }
    }
}

/// One side of a fraction, in parentheses unless it is a nonnegative constant or a single atom.
struct Operand<'a>(&'a Dim);

impl fmt::Display for Operand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_simple = self.0.only_atom().is_some() || self.0.as_constant().is_some_and(|value| value >= 0);
        if is_simple { write!(f, "{}", self.0) } else { write!(f, "({})", self.0) }
    }
}

fn write_call(f: &mut fmt::Formatter<'_>, name: &str, list: &[Dim]) -> fmt::Result {
    write!(f, "{name}(")?;
    for (index, argument) in list.iter().enumerate() {
        f.write_str(if index == 0 { "" } else { ", " })?;
        write!(f, "{argument}")?;
    }
    f.write_str(")")
}
