//! The execution providers of a command, in order, with their options.

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::SessionBuilder;
use ort_runtime::ep::{Device, ProviderOptions, provider};

/// What stands before the name of a provider that can be done without.
const OPTIONAL: &str = "optional:";

/// Which execution providers, and what is said to them.
#[derive(Args, Clone)]
pub(crate) struct ProviderArgs {
    /// An execution provider, by name or as the path of a provider library; the first is preferred [default: cpu]. optional:NAME
    /// does without it, with a warning, where it cannot be used.
    #[arg(long = "ep", value_name = "NAME")]
    providers: Vec<String>,
    /// An option of a provider that --ep names, such as wgpu.limits=minimum; its documentation lists them.
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

/// A provider as it is asked for.
struct Requested<'a> {
    name: &'a str,
    is_optional: bool,
    options: ProviderOptions,
}

impl ProviderArgs {
    /// The names as they were given, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        if self.providers.is_empty() { vec!["cpu".to_string()] } else { self.providers.clone() }
    }

    /// The session that is built, on these providers.
    pub(crate) fn request(&self, mut builder: SessionBuilder) -> Result<SessionBuilder> {
        for Requested { name, is_optional, options } in self.requested()? {
            builder = match is_optional {
                true => builder.optional_provider(name, options),
                false => builder.provider_with(name, options),
            };
        }
        Ok(builder)
    }

    /// Their devices, opened; those that can be done without may be missing.
    pub(crate) fn devices(&self) -> Result<Vec<Arc<dyn Device>>> {
        let mut devices = Vec::new();
        for Requested { name, is_optional, options } in self.requested()? {
            match provider(name).and_then(|provider| provider.open(0, &options)) {
                Ok(device) => devices.push(device),
                Err(problem) if is_optional => tracing::warn!("without provider {name}: {problem}"),
                Err(problem) => return Err(problem.into()),
            }
        }
        Ok(devices)
    }

    fn requested(&self) -> Result<Vec<Requested<'_>>> {
        let default = self.providers.is_empty().then_some("cpu");
        let names = default.into_iter().chain(self.providers.iter().map(String::as_str));
        let mut requested: Vec<Requested<'_>> = names
            .map(|given| {
                let name = given.strip_prefix(OPTIONAL).unwrap_or(given);
                Requested { name, is_optional: name != given, options: ProviderOptions::new() }
            })
            .collect();
        for ProviderOption { provider, name, value } in &self.options {
            let Some(own) = requested.iter_mut().find(|requested| requested.name == provider) else {
                let known: Vec<&str> = requested.iter().map(|requested| requested.name).collect();
                bail!(
                    "--ep-option {provider}.{name} is for none of the providers {}; name it with --ep {provider}",
                    known.join(", ")
                );
            };
            if own.options.insert(name.clone(), value.clone()).is_some() {
                bail!("--ep-option {provider}.{name} is given twice; give it once");
            }
        }
        Ok(requested)
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
