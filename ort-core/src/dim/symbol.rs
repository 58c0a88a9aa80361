//! Symbols of dimension expressions, and the numbers bound to them for one run.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A name that stands for an integer which is known only when a model runs.
///
/// Two named symbols are the same where their names are. A fresh symbol from [`Symbol::unknown`]
/// equals only its own clones: it stands for a size that depends on data and cannot be planned.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbol(Kind);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Named(Arc<str>),
    Unknown { number: u64, is_size: bool },
}

static NEXT_UNKNOWN: AtomicU64 = AtomicU64::new(0);

impl Symbol {
    /// The symbol of that name: a model's `dim_param`.
    pub fn named(name: impl Into<Arc<str>>) -> Symbol {
        Symbol(Kind::Named(name.into()))
    }

    /// A fresh symbol for a size that depends on data; it is at least 0.
    pub fn unknown() -> Symbol {
        Symbol(Kind::Unknown { number: NEXT_UNKNOWN.fetch_add(1, Ordering::Relaxed), is_size: true })
    }

    /// A fresh symbol for an integer value (an axis, an index) that depends on data and may be
    /// negative.
    pub fn unknown_value() -> Symbol {
        Symbol(Kind::Unknown { number: NEXT_UNKNOWN.fetch_add(1, Ordering::Relaxed), is_size: false })
    }

    /// Whether the number depends on data, so that no binding of the inputs' dimensions gives it.
    pub fn is_unknown(&self) -> bool {
        matches!(self.0, Kind::Unknown { .. })
    }

    /// Whether the number is known to be at least 0: all but [`Symbol::unknown_value`].
    pub fn is_size(&self) -> bool {
        !matches!(self.0, Kind::Unknown { is_size: false, .. })
    }

    /// The name, for symbols that have one.
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

/// Symbols and the numbers they stand for in one run, sorted, so that equal bindings are equal
/// cache keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bindings(Vec<(Symbol, i64)>);

impl Bindings {
    /// No symbol bound.
    pub fn new() -> Bindings {
        Bindings::default()
    }

    /// The number bound to a symbol.
    pub fn get(&self, symbol: &Symbol) -> Option<i64> {
        let index = self.position(symbol).ok()?;
        self.0.get(index).map(|entry| entry.1)
    }

    /// Binds a symbol and returns the number that was bound to it before.
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
        self.0.binary_search_by(|entry| entry.0.cmp(symbol))
    }

    /// The symbols and their numbers, sorted by symbol.
    pub fn iter(&self) -> impl Iterator<Item = (&Symbol, i64)> {
        self.0.iter().map(|(symbol, value)| (symbol, *value))
    }

    /// How many symbols are bound.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no symbol is bound.
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
