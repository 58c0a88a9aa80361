//! Provider registry: the providers of this build, and those in libraries.

use super::ExecutionProvider;
#[cfg(feature = "provider-libraries")]
use super::dylib::{PROVIDER_PATH, find, provider_libraries};
use crate::{Error, Result, error, nearest};

/// A provider as its crate registers it.
pub struct ProviderEntry(pub &'static dyn ExecutionProvider);

inventory::collect!(ProviderEntry);

/// Returns the providers linked into this process, sorted by name.
pub fn providers() -> Vec<&'static dyn ExecutionProvider> {
    let mut providers: Vec<_> = inventory::iter::<ProviderEntry>.into_iter().map(|entry| entry.0).collect();
    providers.sort_by_key(|provider| provider.name());
    providers
}

/// Finds a provider by name. It looks at those of this build first. With the feature
/// `provider-libraries` it then searches the folders of `ORT_PROVIDER_PATH`. The path of a library
/// is a name, too: any name with a separator or the platform's library suffix.
///
/// # Errors
///
/// There is no provider of this name, or its library cannot be loaded.
pub fn provider(name: &str) -> Result<&'static dyn ExecutionProvider> {
    let known = providers();
    if let Some(provider) = known.iter().find(|provider| provider.name() == name) {
        return Ok(*provider);
    }
    #[cfg(feature = "provider-libraries")]
    if let Some(found) = find(name) {
        return found;
    }
    Err(unknown_provider(name, &known))
}

/// The providers that a cargo feature of the same name links, with ONNX Runtime's name of each.
const OF_FEATURES: [(&str, &str); 3] =
    [("cpu", "CPUExecutionProvider"), ("cuda", "CUDAExecutionProvider"), ("wgpu", "WebGpuExecutionProvider")];

/// Returns the error for a provider that this build does not have. It suggests the name that is
/// meant, and says how to get that provider.
fn unknown_provider(name: &str, linked: &[&'static dyn ExecutionProvider]) -> Error {
    let linked: Vec<&str> = linked.iter().map(|provider| provider.name()).collect();
    let of_onnx_runtime = OF_FEATURES.iter().find(|(_, theirs)| theirs.eq_ignore_ascii_case(name));
    let known = || OF_FEATURES.iter().map(|(own, _)| *own).chain(linked.iter().copied());
    let is_known = known().any(|own| own == name);
    let meant = match of_onnx_runtime {
        Some((own, _)) => Some(*own),
        None if is_known => Some(name),
        None => nearest(name, known()),
    };
    let problem = match is_known {
        true => error!(InvalidArgument, "there is no execution provider '{name}' in this build"),
        false => error!(InvalidArgument, "there is no execution provider '{name}'"),
    };
    let mut advice = String::new();
    if let Some(meant) = meant {
        if !is_known {
            advice.push_str(&format!("did you mean '{meant}'? "));
        }
        if !linked.contains(&meant) {
            advice.push_str(&format!("build with the cargo feature `{meant}` to have it; "));
        }
    }
    advice.push_str(&match linked.is_empty() {
        true => "this build has no providers".to_string(),
        false => format!(
            "the providers of this build are {}, see `ort providers`; for a library give its path with a slash, \
             such as ./libmine.so",
            linked.join(", ")
        ),
    });
    #[cfg(not(feature = "provider-libraries"))]
    advice.push_str("; to load libraries, build with the cargo feature `provider-libraries`");
    // A library that failed to load is a likely reason why the name is missing, so list each with
    // its error.
    #[cfg(feature = "provider-libraries")]
    for (path, provider) in provider_libraries() {
        let what = provider.map_or_else(|problem| problem.to_string(), |provider| provider.name().to_owned());
        advice.push_str(&format!("; {} of {PROVIDER_PATH}: {what}", path.display()));
    }
    problem.help(advice)
}
