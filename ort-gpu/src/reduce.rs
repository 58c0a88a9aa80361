//! Kernel definitions of the `Reduce` operators and `SumTo`.

use ort_core::dtype::TypeSet;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::reduce::problem::Reduction;

/// The types that a provider reduces, as [`KernelDef::types`].
#[derive(Clone, Copy)]
pub struct ReductionTypes {
    /// Those of sums and products.
    pub numbers: &'static [(&'static str, TypeSet)],
    /// Those of extremes.
    pub ordered: &'static [(&'static str, TypeSet)],
    /// Those of means, norms, logarithms and the gradients of broadcasts.
    pub floats: &'static [(&'static str, TypeSet)],
}

/// Returns a definition for each reducing operator. The axes are a host input. `when` says whether
/// the provider covers a node.
pub fn reduction_kernels(
    types: ReductionTypes,
    when: fn(&NodeView<'_>) -> bool,
) -> impl Iterator<Item = KernelDef> {
    Reduction::OPERATORS.into_iter().map(move |(domain, op, reduction)| {
        let types = match reduction {
            // `SumTo` is in no model: the gradient of a broadcast float emits it.
            Reduction::Sum if !domain.is_empty() => types.floats,
            Reduction::Max | Reduction::Min => types.ordered,
            Reduction::Sum | Reduction::Prod | Reduction::L1 | Reduction::SumSquare => types.numbers,
            Reduction::Mean | Reduction::L2 | Reduction::LogSum | Reduction::LogSumExp => types.floats,
        };
        KernelDef { domain, op, types, host_inputs: &[1], when, ..KernelDef::BASE }
    })
}
