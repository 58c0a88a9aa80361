//! Symbols of dimension expressions, and their bindings in one run.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A name for an integer that is known only at run time.
///
/// Two named symbols are equal if their names are. A fresh symbol from [`Symbol::unknown`] equals
/// only its own clones: it stands for a data-dependent size, which cannot be planned.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbol(Kind);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Named(Arc<str>),
    Unknown { number: u64, is_size: bool },
}

// Process-wide, so that unknown symbols of different graphs never compare equal.
static NEXT_UNKNOWN: AtomicU64 = AtomicU64::new(0);

impl Symbol {
    /// Returns the symbol of that name: a `dim_param` of the model.
    pub fn named(name: impl Into<Arc<str>>) -> Symbol {
        Symbol(Kind::Named(name.into()))
    }

    /// Returns a fresh symbol for a data-dependent size, which is at least 0.
    pub fn unknown() -> Symbol {
        Symbol(Kind::Unknown { number: NEXT_UNKNOWN.fetch_add(1, Ordering::Relaxed), is_size: true })
    }

    /// Returns a fresh symbol for a data-dependent integer (an axis, an index) that may be
    /// negative.
    pub fn unknown_value() -> Symbol {
        Symbol(Kind::Unknown { number: NEXT_UNKNOWN.fetch_add(1, Ordering::Relaxed), is_size: false })
    }

    /// Returns whether the value depends on data, so that input dimensions do not determine it.
    pub fn is_unknown(&self) -> bool {
        matches!(self.0, Kind::Unknown { .. })
    }

    /// Returns whether the value is known to be at least 0: true except for
    /// [`Symbol::unknown_value`].
    pub fn is_size(&self) -> bool {
        !matches!(self.0, Kind::Unknown { is_size: false, .. })
    }

    /// Returns the name, if the symbol has one.
    pub fn name(&self) -> Option<&str> {
        match &self.0 {
            Kind::Named(name) => Some(name),
            Kind::Unknown { .. } => None,
        }
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Named(name) => f.write_str(name),
            Kind::Unknown { number, is_size: true } => write!(f, "unk__{number}"),
            Kind::Unknown { number, is_size: false } => write!(f, "value__{number}"),
        }
    }
}

impl fmt::Debug for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The values of symbols in one run. Sorted, so that equal bindings are equal cache keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bindings(Vec<(Symbol, i64)>);

impl Bindings {
    /// Returns bindings without symbols.
    pub fn new() -> Bindings {
        Bindings::default()
    }

    /// Returns the value bound to a symbol.
    pub fn get(&self, symbol: &Symbol) -> Option<i64> {
        let index = self.position(symbol).ok()?;
        self.0.get(index).map(|entry| entry.1)
    }

    /// Binds a symbol and returns its previous value.
    pub fn insert(&mut self, symbol: Symbol, value: i64) -> Option<i64> {
        match self.position(&symbol) {
            Ok(index) => self.0.get_mut(index).map(|entry| std::mem::replace(&mut entry.1, value)),
            Err(index) => {
                self.0.insert(index, (symbol, value));
                None
            }
        }
    }

    fn position(&self, symbol: &Symbol) -> Result<usize, usize> {
        // `insert` keeps the list sorted, and few symbols make a list faster than a map.
        self.0.binary_search_by(|entry| entry.0.cmp(symbol))
    }

    /// Returns the symbols and their values, sorted by symbol.
    pub fn iter(&self) -> impl Iterator<Item = (&Symbol, i64)> {
        self.0.iter().map(|(symbol, value)| (symbol, *value))
    }

    /// Returns the number of bound symbols.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no symbol is bound.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(Symbol, i64)> for Bindings {
    fn from_iter<I: IntoIterator<Item = (Symbol, i64)>>(entries: I) -> Bindings {
        let mut bindings = Bindings::new();
        for (symbol, value) in entries {
            bindings.insert(symbol, value);
        }
        bindings
    }
}

impl fmt::Display for Bindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (symbol, value)) in self.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            write!(f, "{symbol}={value}")?;
        }
        Ok(())
    }
}
