//! The provider's options.

use std::path::PathBuf;

use ort_core::ep::{ProviderOptions, check_options};
use ort_core::{Result, error};

/// The name of the provider.
pub(crate) const NAME: &str = "wgpu";

/// The parsed options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) minimum_limits: bool,
    pub(crate) memory_limit: Option<usize>,
    pub(crate) pipeline_cache: Option<PathBuf>,
}

impl Options {
    pub(crate) fn parse(options: &ProviderOptions) -> Result<Options> {
        check_options(NAME, options, &["limits", "memory_limit", "pipeline_cache"])?;
        let mut parsed = Options::default();
        for (name, value) in options {
            let wrong = |expected| {
                error!(
                    InvalidArgument,
                    "option {name} of the {NAME} provider is '{value}', expected {expected}"
                )
            };
            match name.as_str() {
                "limits" => {
                    parsed.minimum_limits = match value.as_str() {
                        "minimum" => true,
                        "adapter" => false,
                        _ => return Err(wrong("'adapter' or 'minimum'")),
                    }
                }
                "pipeline_cache" => match value.is_empty() {
                    true => return Err(wrong("a folder")),
                    false => parsed.pipeline_cache = Some(value.into()),
                },
                _ => parsed.memory_limit = Some(value.parse().map_err(|_| wrong("a number of bytes"))?),
            }
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_others_are_refused() {
        let options = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| (name.to_string(), value.to_string()));
            Options::parse(&pairs.collect())
        };
        let all = [("limits", "minimum"), ("memory_limit", "1024"), ("pipeline_cache", "folder")];
        let read =
            Options { minimum_limits: true, memory_limit: Some(1024), pipeline_cache: Some("folder".into()) };
        assert_eq!(options(&all).unwrap(), read);
        assert!(options(&[("pipeline_cache", "")]).unwrap_err().to_string().contains("a folder"));
        assert_eq!(options(&[]).unwrap(), Options::default());
        for (wrong, said) in [("limits", "'adapter' or 'minimum'"), ("memory_limit", "a number of bytes")] {
            assert!(options(&[(wrong, "x")]).unwrap_err().to_string().contains(said));
        }
        assert!(options(&[("limit", "minimum")]).unwrap_err().to_string().contains("limits"));
    }
}
