//! Compatibility warnings: deviations of a model file from the standard that do not keep it from
//! running.
//!
//! The loader collects them and merges equal ones into one with a count.
//! [`Model::warnings`](crate::session::Model::warnings) lists them. A strict
//! [`Source`](super::Source) turns the first one into an error.

use std::fmt;

use indexmap::IndexMap;

use crate::dim::Dim;
use crate::ir::ValueType;
use crate::{NAME_BYTES, Result, Within, error, shown};

/// The most distinct warnings kept per model; further ones are only counted.
const MOST_WARNINGS: usize = 100;
/// The most warnings logged per model.
const MOST_LOGGED: usize = 5;

/// The subject of a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WarningKind {
    /// An IR version that is newer than this build.
    IrVersion,
    /// An operator set that is not imported, is imported twice, or is newer than this build.
    OpsetImport,
    /// An operator that the imported operator set does not contain.
    OperatorVersion,
    /// An attribute that the operator or function does not have, or surplus values.
    Attribute,
    /// An initializer that is defined twice, has no name, or whose data is missing although no node
    /// reads it.
    Initializer,
    /// A function shadowed by an operator of the same name.
    Function,
    /// A declared type or shape that differs from the inferred one.
    DeclaredType,
    /// A change of [`LoadOptions`](super::LoadOptions) for a name that the model does not have.
    LoadOption,
}

impl WarningKind {
    /// Returns the name, as `ort check --json` writes it.
    pub fn name(self) -> &'static str {
        match self {
            WarningKind::IrVersion => "ir_version",
            WarningKind::OpsetImport => "opset_import",
            WarningKind::OperatorVersion => "operator_version",
            WarningKind::Attribute => "attribute",
            WarningKind::Initializer => "initializer",
            WarningKind::Function => "function",
            WarningKind::DeclaredType => "declared_type",
            WarningKind::LoadOption => "load_option",
        }
    }
}

/// One warning about a model file. Equal warnings at several places count as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelWarning {
    /// The subject.
    pub kind: WarningKind,
    /// The deviation, and how the loader handles it.
    pub text: String,
    /// The first place where it was found: a node, value or initializer. Empty if it concerns the
    /// whole model.
    pub place: String,
    /// The number of places where it was found.
    pub count: usize,
}

impl fmt::Display for ModelWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        f.write_str(&self.text)?;
        match self.count {
            0 | 1 => Ok(()),
            count => write!(f, " (and {} more like it)", count - 1),
        }
    }
}

/// Collects the warnings about one model while it loads.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    found: IndexMap<(WarningKind, String), ModelWarning>,
    /// The number of warnings beyond [`MOST_WARNINGS`].
    further: usize,
    strict: bool,
}

impl Warnings {
    /// Creates an empty list. If `strict`, the first warning becomes an error.
    pub(crate) fn new(strict: bool) -> Warnings {
        Warnings { strict, ..Warnings::default() }
    }

    /// Adds a warning, or counts it with an equal one. Returns an error if loading is strict.
    pub(crate) fn add(
        &mut self,
        kind: WarningKind,
        place: impl FnOnce() -> String,
        text: impl Into<String>,
    ) -> Result<()> {
        // The text contains names from the file: escape and bound them.
        let text = shown(&text.into(), NAME_BYTES).into_owned();
        // Strict loading stops at the first deviation, so it collects nothing.
        if self.strict {
            let place = place();
            let problem = error!(InvalidGraph, "{text}")
                .help("leave strict loading (--strict) out to only get a warning");
            return Err(problem).within(|| if place.is_empty() { "the model".to_string() } else { place });
        }
        // The place is built only for the first of equal warnings: a large model may have one per
        // node.
        if let Some(known) = self.found.get_mut(&(kind, text.clone())) {
            known.count += 1;
        } else if self.found.len() < MOST_WARNINGS {
            let place = shown(&place(), NAME_BYTES).into_owned();
            let warning = ModelWarning { kind, text: text.clone(), place, count: 1 };
            self.found.insert((kind, text), warning);
        } else {
            self.further += 1;
        }
        Ok(())
    }

    /// Warns if the type that the file declares for a value contradicts the inferred one.
    pub(crate) fn compare(&mut self, name: &str, declared: &ValueType, computed: &ValueType) -> Result<()> {
        if !contradict(declared, computed) {
            return Ok(());
        }
        let place = || format!("value '{name}', declared {declared}, is {computed}");
        let text = match self.strict {
            true => "the declared type or shape differs from the computed one",
            false => "the declared type or shape differs from the computed one, and is ignored",
        };
        self.add(WarningKind::DeclaredType, place, text)
    }

    /// Logs the first few warnings.
    pub(crate) fn log(&self) {
        self.found.values().take(MOST_LOGGED).for_each(|warning| tracing::warn!("{warning}"));
        let more = (self.found.len() + self.further).saturating_sub(MOST_LOGGED);
        if more > 0 {
            tracing::warn!("{more} more warnings about the model; `ort check` lists them");
        }
    }

    /// Returns the warnings in the order in which they were found.
    pub(crate) fn into_list(self) -> Vec<ModelWarning> {
        self.found.into_values().collect()
    }
}

/// Returns whether no value can have both types: element types, ranks or constant dimensions
/// differ.
fn contradict(declared: &ValueType, computed: &ValueType) -> bool {
    let (ValueType::Tensor(declared), ValueType::Tensor(computed)) = (declared, computed) else {
        return false;
    };
    // An open shape agrees with every shape.
    let (Some(said), Some(is)) = (&declared.shape, &computed.shape) else {
        return declared.dtype != computed.dtype;
    };
    let differ =
        |(a, b): (&Dim, &Dim)| matches!((a.as_constant(), b.as_constant()), (Some(a), Some(b)) if a != b);
    declared.dtype != computed.dtype || said.len() != is.len() || said.iter().zip(is).any(differ)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_warnings_are_counted_and_the_list_is_bounded() {
        let mut warnings = Warnings::new(false);
        for index in 0..3 {
            warnings.add(WarningKind::Attribute, || format!("node {index}"), "same").unwrap();
        }
        for index in 0..2 * MOST_WARNINGS {
            warnings
                .add(WarningKind::Attribute, || "x".repeat(1000) + "\u{1b}[31m", format!("{index}"))
                .unwrap();
        }
        assert_eq!(warnings.further, MOST_WARNINGS + 1);
        let list = warnings.into_list();
        assert_eq!(list.len(), MOST_WARNINGS);
        assert_eq!(list[0].to_string(), "node 0: same (and 2 more like it)");
        assert!(list.iter().all(|warning| warning.place.len() < 2 * NAME_BYTES));
        assert!(list.iter().all(|warning| !warning.to_string().chars().any(crate::steers)));
    }

    #[test]
    fn strict_loading_refuses_the_first() {
        let problem = Warnings::new(true).add(WarningKind::Function, || "node 'a'".into(), "it is off");
        let problem = problem.unwrap_err().to_string();
        assert!(problem.contains("node 'a': it is off") && problem.contains("strict"), "{problem}");
    }
}
