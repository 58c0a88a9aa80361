//! Which operators there are two ways to run.

use std::collections::BTreeSet;

use ort_core::Result;
use ort_core::spec::{OpSpec, Registry};
use ort_ep_cpu::{CpuKernel, DerivedKernels, inventory};

/// Operators whose decomposition is no second way, with the reason.
const NO_SECOND_WAY: &[(&str, &str)] =
    &[("Attention", "it is made of casts and itself, for types that its kernel does not take")];

/// The operators of the registry that the CPU has kernels for and that can be decomposed.
pub(crate) fn operators() -> Result<Vec<&'static OpSpec>> {
    let named = inventory::iter::<CpuKernel>.into_iter().map(|kernel| &kernel.0);
    let derived = inventory::iter::<DerivedKernels>.into_iter().flat_map(|kernels| (kernels.0)());
    let kernels: BTreeSet<(&str, &str)> =
        named.chain(derived).map(|kernel| (kernel.domain, kernel.op)).collect();
    let records = Registry::global()?.records().iter().copied();
    let both = records.filter(|spec| spec.lower.is_some() && kernels.contains(&(spec.domain, spec.name)));
    Ok(both.filter(|spec| !NO_SECOND_WAY.iter().any(|(name, _)| *name == spec.name)).collect())
}
