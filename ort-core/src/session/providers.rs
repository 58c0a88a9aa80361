//! The devices of a session: those that were opened before, then the first ones of providers by
//! name.

use std::sync::Arc;

use crate::ep::{Device, ProviderOptions, guard, provider};
use crate::{Error, Result, Within};

/// A provider as it is asked for: by name, with its options.
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
    /// What is said to it.
    pub options: ProviderOptions,
    /// Whether it is done without, with a warning, where it cannot be used.
    pub is_optional: bool,
}

impl ProviderRequest {
    /// A provider without options that must be there.
    pub fn new(name: &str) -> ProviderRequest {
        ProviderRequest { name: name.to_string(), options: ProviderOptions::new(), is_optional: false }
    }

    /// The same with an option.
    #[must_use]
    pub fn option(mut self, name: &str, value: &str) -> ProviderRequest {
        self.options.insert(name.to_string(), value.to_string());
        self
    }

    /// The same, done without where it cannot be used.
    #[must_use]
    pub fn optional(mut self) -> ProviderRequest {
        self.is_optional = true;
        self
    }
}

/// Opens the first device of each provider, for several sessions that share tensors in the devices'
/// memories; the CPU where no provider is asked for.
///
/// # Errors
///
/// A provider that is not optional is not there, or has no device that can be opened.
pub fn open_devices(requests: &[ProviderRequest]) -> Result<Vec<Arc<dyn Device>>> {
    Ok(Devices::open(&[], requests)?.all)
}

/// Open devices in the session's order.
pub(super) struct Devices {
    pub(super) all: Vec<Arc<dyn Device>>,
    /// By device: whether the session does without it.
    optional: Vec<bool>,
}

impl Devices {
    /// The devices that are open, then the first one of each requested provider; the CPU where
    /// there are none.
    ///
    /// # Errors
    ///
    /// A provider that is not optional is not there, or has no device that can be opened.
    pub(super) fn open(opened: &[Arc<dyn Device>], requested: &[ProviderRequest]) -> Result<Devices> {
        let mut devices = Devices { all: opened.to_vec(), optional: vec![false; opened.len()] };
        for ProviderRequest { name, options, is_optional } in requested {
            let device = provider(name).and_then(|provider| {
                guard::open(provider, options).within(|| format!("provider {name}")).map_err(|problem| {
                    problem
                        .help(format!("to run without it where it cannot be used, ask for 'optional:{name}'"))
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

    fn at_least_the_cpu(&mut self) -> Result<()> {
        if self.all.is_empty() {
            self.all.push(guard::open(provider("cpu")?, &ProviderOptions::new())?);
            self.optional.push(false);
        }
        Ok(())
    }

    /// Does some work with the devices; where it fails and an optional device turns out to be
    /// broken, once more without that.
    pub(super) fn attempt<T>(&mut self, work: impl Fn(&[Arc<dyn Device>]) -> Result<T>) -> Result<T> {
        loop {
            let problem = match work(&self.all) {
                Ok(done) => return Ok(done),
                Err(problem) => problem,
            };
            self.leave_out_broken(problem)?;
        }
    }

    /// Leaves out an optional device that is broken; the problem comes back where there is none.
    fn leave_out_broken(&mut self, problem: Error) -> Result<()> {
        let mut candidates = self.all.iter().zip(&self.optional);
        let broken = candidates.position(|(device, optional)| *optional && guard::check(&**device).is_err());
        let Some(place) = broken else { return Err(problem) };
        self.optional.remove(place);
        let device = self.all.remove(place);
        tracing::warn!("running without provider {}: {problem}", device.info().provider);
        self.at_least_the_cpu()
    }
}
