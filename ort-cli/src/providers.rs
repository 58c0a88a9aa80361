//! The execution providers of a command, in order, with their options.

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::ep::Device;
use ort_runtime::{ProviderRequest, SessionBuilder, open_devices};

/// What stands before the name of a provider that can be done without.
const OPTIONAL: &str = "optional:";

/// Which execution providers, and what is said to them.
#[derive(Args, Clone)]
pub(crate) struct ProviderArgs {
    /// An execution provider, by name or as the path of a provider library; the first is preferred
    /// [default: cpu]. optional:NAME does without it, with a warning, where it cannot be used.
    #[arg(long = "ep", value_name = "NAME")]
    providers: Vec<String>,
    /// An option of a provider that --ep names, such as wgpu.limits=minimum; its documentation
    /// lists them.
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
    /// The names as they were given, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        if self.providers.is_empty() { vec!["cpu".to_string()] } else { self.providers.clone() }
    }

    /// The session that is built, on these providers.
    pub(crate) fn request(&self, builder: SessionBuilder) -> Result<SessionBuilder> {
        Ok(self.requests()?.into_iter().fold(builder, SessionBuilder::provider_request))
    }

    /// Their devices, opened; those that can be done without may be missing.
    pub(crate) fn devices(&self) -> Result<Vec<Arc<dyn Device>>> {
        Ok(open_devices(&self.requests()?)?)
    }

    /// The providers as they are asked for; the CPU where none is.
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
            let Some(own) = requests.iter_mut().find(|request| request.name == *provider) else {
                let known: Vec<&str> = requests.iter().map(|request| request.name.as_str()).collect();
                bail!(
                    "--ep-option {provider}.{name} is for none of the providers {}; name it with --ep {provider}",
                    known.join(", ")
                );
            };
            if own.options.insert(name.clone(), value.clone()).is_some() {
                bail!("--ep-option {provider}.{name} is given twice; give it once");
            }
        }
        Ok(requests)
    }
}

fn option(text: &str) -> Result<ProviderOption, String> {
    let parts = text.split_once('=').and_then(|(left, value)| Some((left.rsplit_once('.')?, value)));
    let Some(((provider, name), value)) =
        parts.filter(|((provider, name), _)| !provider.is_empty() && !name.is_empty())
    else {
        return Err(format!("`{text}` is not NAME.OPTION=VALUE"));
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
