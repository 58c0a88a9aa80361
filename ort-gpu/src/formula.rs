//! Kernel definitions of elementwise operators, derived from the formulas of their records.

use ort_core::dtype::TypeSet;
use ort_core::ep::formula::{self, Arithmetic};
use ort_core::ep::{KernelDef, NodeView};

/// The input types that a provider has for each kind of arithmetic, as [`KernelDef::types`].
#[derive(Clone, Copy)]
pub struct FormulaTypes {
    /// Those that it compares and selects.
    pub selection: &'static [(&'static str, TypeSet)],
    /// Those with integer arithmetic.
    pub integer: &'static [(&'static str, TypeSet)],
    /// Those with float arithmetic.
    pub float: &'static [(&'static str, TypeSet)],
}

/// Returns a definition for each record with a formula. `when` says whether the provider covers a
/// node.
pub fn formula_kernels(
    types: FormulaTypes,
    when: fn(&NodeView<'_>) -> bool,
) -> impl Iterator<Item = KernelDef> {
    formula::records().map(move |spec| {
        let types = match formula::arithmetic(spec) {
            Arithmetic::Selection => types.selection,
            Arithmetic::Integer => types.integer,
            Arithmetic::Float => types.float,
        };
        KernelDef { types, when, ..formula::kernel(spec) }
    })
}
