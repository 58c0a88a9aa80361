//! The flags `--ep` and `--ep-option`.

use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use ort_runtime::ep::Device;
use ort_runtime::{ProviderRequest, SessionBuilder, open_devices};

use crate::usage::wrong_usage;

/// The prefix that marks a provider as optional.
const OPTIONAL: &str = "optional:";

/// The execution providers and their options.
#[derive(Args, Clone, Default)]
pub(crate) struct ProviderArgs {
    /// Execution provider, by name or library path; the first is preferred [default: cpu].
    /// optional:NAME is skipped, with a warning, if it cannot be used.
    #[arg(long = "ep", value_name = "NAME", value_parser = provider)]
    providers: Vec<String>,
    /// Option of a provider named with --ep, such as wgpu.limits=minimum; see the provider's
    /// documentation.
    #[arg(long = "ep-option", value_name = "NAME.OPTION=VALUE", value_parser = option)]
    options: Vec<ProviderOption>,
}

/// An option of one provider.
#[derive(Clone, Debug, PartialEq)]
struct ProviderOption {
    provider: String,
    name: String,
    value: String,
}

impl ProviderArgs {
    /// Returns the names as given, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        if self.providers.is_empty() { vec!["cpu".to_string()] } else { self.providers.clone() }
    }

    /// Adds these providers to a session builder.
    pub(crate) fn request(&self, builder: SessionBuilder) -> Result<SessionBuilder> {
        Ok(self.requests()?.into_iter().fold(builder, SessionBuilder::provider_request))
    }

    /// Opens the devices of these providers. Optional providers may be missing.
    pub(crate) fn devices(&self) -> Result<Vec<Arc<dyn Device>>> {
        Ok(open_devices(&self.requests()?)?)
    }

    /// Returns the requested providers with their options, or the CPU if none is named.
    pub(crate) fn requests(&self) -> Result<Vec<ProviderRequest>> {
        let mut requests: Vec<ProviderRequest> = self
            .names()
            .iter()
            .map(|given| match given.strip_prefix(OPTIONAL) {
                Some(name) => ProviderRequest::new(name).optional(),
                None => ProviderRequest::new(given),
            })
            .collect();
        for ProviderOption { provider, name, value } in &self.options {
            // An option that reaches no provider would have no effect.
            let Some(own) = requests.iter_mut().find(|request| request.name == *provider) else {
                let known: Vec<&str> = requests.iter().map(|request| request.name.as_str()).collect();
                wrong_usage!(
                    "--ep-option {provider}.{name} is for a provider that is not used (the providers are {}); add --ep {provider}",
                    known.join(", ")
                );
            };
            if provider == "cpu" && name.contains("threads") {
                wrong_usage!("the cpu provider has no option '{name}'; use --threads {value}");
            }
            if own.options.insert(name.clone(), value.clone()).is_some() {
                wrong_usage!("--ep-option {provider}.{name} is given twice; give it once");
            }
        }
        Ok(requests)
    }
}

fn provider(text: &str) -> Result<String, String> {
    let name = text.strip_prefix(OPTIONAL).unwrap_or(text);
    let is_named = !name.trim().is_empty();
    is_named.then(|| text.to_string()).ok_or_else(|| {
        "the name is empty: `ort providers` lists the names; for a library give its path".to_string()
    })
}

fn option(text: &str) -> Result<ProviderOption, String> {
    // Split at the first `=` and then at the last `.` before it: a provider may be a path such as
    // `./libnpu.so`, and a value may contain both.
    let parts = text.split_once('=').and_then(|(left, value)| Some((left.rsplit_once('.')?, value)));
    let Some(((provider, name), value)) =
        parts.filter(|((provider, name), _)| !provider.is_empty() && !name.is_empty())
    else {
        return Err(format!("`{text}` is not NAME.OPTION=VALUE, such as wgpu.limits=minimum"));
    };
    Ok(ProviderOption { provider: provider.to_string(), name: name.to_string(), value: value.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_a_provider_a_name_and_a_value() {
        let cases = [
            ("wgpu.limits=minimum", Some(("wgpu", "limits", "minimum"))),
            ("./libnpu.so.cache=a.b=c", Some(("./libnpu.so", "cache", "a.b=c"))),
            ("wgpu.limits=", Some(("wgpu", "limits", ""))),
            ("limits=minimum", None),
            ("wgpu.limits", None),
            (".limits=minimum", None),
            ("wgpu.=minimum", None),
        ];
        for (text, expected) in cases {
            let parsed = option(text).ok();
            let parsed =
                parsed.as_ref().map(|own| (own.provider.as_str(), own.name.as_str(), own.value.as_str()));
            assert_eq!(parsed, expected, "{text}");
        }
    }
}
