//! The devices of a session: first those that the caller opened, then the first device of each
//! requested provider.
//!
//! An optional provider that cannot be opened, or whose device breaks during the build, is left out
//! with a warning.

use std::sync::Arc;

use crate::ep::{Device, ProviderOptions, guard, provider};
use crate::{Error, Result, Within};

/// A request for a provider: its name and options.
///
/// ```
/// use ort_core::session::ProviderRequest;
///
/// let gpu = ProviderRequest::new("cuda").option("gpu_mem_limit", "2147483648").optional();
/// assert!(gpu.is_optional);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderRequest {
    /// The provider's name, or the path of a provider library.
    pub name: String,
    /// The options that are passed to it.
    pub options: ProviderOptions,
    /// Whether the session runs without the provider, with a warning, if it cannot be used.
    pub is_optional: bool,
}

impl ProviderRequest {
    /// A required provider without options.
    pub fn new(name: &str) -> ProviderRequest {
        ProviderRequest { name: name.to_string(), options: ProviderOptions::new(), is_optional: false }
    }

    /// Adds an option.
    #[must_use]
    pub fn option(mut self, name: &str, value: &str) -> ProviderRequest {
        self.options.insert(name.to_string(), value.to_string());
        self
    }

    /// Makes the provider optional.
    #[must_use]
    pub fn optional(mut self) -> ProviderRequest {
        self.is_optional = true;
        self
    }
}

/// Opens the first device of each provider, or the CPU if no provider is requested. This is for
/// several sessions that share tensors in the memories of these devices.
///
/// # Errors
///
/// A required provider does not exist, or has no device that can be opened.
pub fn open_devices(requests: &[ProviderRequest]) -> Result<Vec<Arc<dyn Device>>> {
    Ok(Devices::open(&[], requests)?.all)
}

/// Open devices, in the session's order.
pub(super) struct Devices {
    pub(super) all: Vec<Arc<dyn Device>>,
    /// By device, whether the session can run without it.
    optional: Vec<bool>,
}

impl Devices {
    /// Opens the first device of each requested provider, after the devices already open. Opens the
    /// CPU if no device is left.
    ///
    /// # Errors
    ///
    /// A required provider does not exist, or has no device that can be opened.
    pub(super) fn open(opened: &[Arc<dyn Device>], requested: &[ProviderRequest]) -> Result<Devices> {
        let mut devices = Devices { all: opened.to_vec(), optional: vec![false; opened.len()] };
        for ProviderRequest { name, options, is_optional } in requested {
            let device = provider(name).and_then(|provider| {
                guard::open(provider, options).within(|| format!("provider {name}")).map_err(|problem| {
                    problem.help(format!("to run without it if it cannot be used, ask for 'optional:{name}'"))
                })
            });
            match device {
                Ok(device) => {
                    devices.all.push(device);
                    devices.optional.push(*is_optional);
                }
                Err(problem) if *is_optional => tracing::warn!("running without provider {name}: {problem}"),
                Err(problem) => return Err(problem),
            }
        }
        devices.at_least_the_cpu()?;
        Ok(devices)
    }

    /// Opens the CPU if no device is left.
    fn at_least_the_cpu(&mut self) -> Result<()> {
        if self.all.is_empty() {
            self.all.push(guard::open(provider("cpu")?, &ProviderOptions::new())?);
            self.optional.push(false);
        }
        Ok(())
    }

    /// Runs `work` on the devices. If it fails and an optional device turns out to be broken, runs
    /// it again without that device.
    pub(super) fn attempt<T>(&mut self, work: impl Fn(&[Arc<dyn Device>]) -> Result<T>) -> Result<T> {
        // Each round leaves out one optional device, so the loop ends.
        loop {
            let problem = match work(&self.all) {
                Ok(done) => return Ok(done),
                Err(problem) => problem,
            };
            self.leave_out_broken(problem)?;
        }
    }

    /// Leaves out one broken optional device, or returns `problem` if there is none.
    fn leave_out_broken(&mut self, problem: Error) -> Result<()> {
        let mut candidates = self.all.iter().zip(&self.optional);
        // The error may not name its device, so ask each one.
        let broken = candidates.position(|(device, optional)| *optional && guard::check(&**device).is_err());
        let Some(place) = broken else { return Err(problem) };
        self.optional.remove(place);
        let device = self.all.remove(place);
        tracing::warn!("running without provider {}: {problem}", device.info().provider);
        self.at_least_the_cpu()
    }
}
