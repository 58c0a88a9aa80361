//! Environment variables of the provider.
//!
//! An unknown value is an error when the provider is opened. It is never ignored.

/// Selects the widest instruction set to use.
pub const ISA: &str = "ORT_ISA";
/// Selects whether workers keep off the core of the caller that wakes them.
pub const AFFINITY: &str = "ORT_CPU_AFFINITY";
/// The accepted values of [`AFFINITY`].
pub const AFFINITIES: [&str; 2] = ["on", "off"];

/// Returns which of `values` the variable is set to, or `None` if it is unset or empty.
pub fn choice(variable: &str, values: &[&'static str]) -> Result<Option<&'static str>, String> {
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
