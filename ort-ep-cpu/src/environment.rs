//! Environment variables of the provider.
//!
//! An unknown value is an error when the provider is opened. It is never ignored.

use ort_core::{Result, error};

use crate::simd::isa::Isa;

/// Selects the widest instruction set to use.
pub(crate) const ISA: &str = "ORT_ISA";
/// Selects whether workers keep off the core of the caller that wakes them.
pub(crate) const AFFINITY: &str = "ORT_CPU_AFFINITY";
/// The accepted values of [`AFFINITY`].
pub(crate) const AFFINITIES: [&str; 2] = ["on", "off"];

/// Returns which of `values` the variable is set to, or `None` if it is unset or empty.
pub(crate) fn choice(variable: &str, values: &[&'static str]) -> Result<Option<&'static str>, String> {
    let Some(given) = std::env::var_os(variable).filter(|given| !given.is_empty()) else { return Ok(None) };
    let found = values.iter().find(|value| given == **value);
    found.map(|value| Some(*value)).ok_or_else(|| {
        let given = given.to_string_lossy();
        let values = values.join(", ");
        format!(
            "the environment variable {variable} is '{}', expected one of {values}",
            given.escape_default()
        )
    })
}

/// Fails if any variable has an unknown value.
pub(crate) fn check() -> Result<()> {
    let all = [Isa::allowed().map(drop), choice(AFFINITY, &AFFINITIES).map(drop)];
    all.into_iter().collect::<Result<(), String>>().map_err(|problem| {
        error!(InvalidArgument, "{problem}").help("unset the variable to leave the choice to the provider")
    })
}
