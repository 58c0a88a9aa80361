//! The factory of devices, its options, and the GPUs that it finds.

use std::sync::{Arc, Weak};

use ort_alloc::{ArenaConfig, ExtendStrategy};
use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderEntry, ProviderOptions, check_options};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

use crate::device::CudaDevice;
use crate::driver::{Driver, NO_DEVICE, PhysicalDevice};

/// The name of the provider.
const NAME: &str = "cuda";

/// The factory of [`CudaDevice`]s: one for each GPU that the NVIDIA driver shows.
///
/// Options, under ONNX Runtime's names:
///
/// | option | value |
/// | --- | --- |
/// | `device_id` | the device's number, as `nvidia-smi` counts; without it the one that is opened |
/// | `gpu_mem_limit` | bytes of device memory that the arena holds at most; none without it |
/// | `arena_extend_strategy` | `kNextPowerOfTwo` (the default) or `kSameAsRequested` |
#[derive(Debug)]
pub struct CudaProvider;

inventory::submit! { ProviderEntry(&CudaProvider) }

impl ExecutionProvider for CudaProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let driver = Driver::get()?;
        let count = driver.count()?;
        ensure!(count > 0, EpFail, help = NO_DEVICE, "the NVIDIA driver shows no device");
        (0..count).map(|index| describe(driver, driver.device(index)?)).collect()
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        // Sessions share a device, so that they share its modules and the memory that waits to be used again.
        static OPEN: Mutex<Vec<(Options, Weak<CudaDevice>)>> = Mutex::new(Vec::new());
        let parsed = Options::parse(index, options)?;
        let mut open = OPEN.lock();
        open.retain(|(_, device)| device.upgrade().is_some_and(|device| device.check().is_ok()));
        let same = open.iter().find(|(options, _)| *options == parsed);
        if let Some(device) = same.and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let device = CudaDevice::open(index, options)?;
        open.push((parsed, Arc::downgrade(&device)));
        Ok(device)
    }
}

/// The options, as they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) device_id: usize,
    pub(crate) arena: ArenaConfig,
}

impl Options {
    pub(crate) fn parse(index: usize, options: &ProviderOptions) -> Result<Options> {
        check_options(NAME, options, &["device_id", "gpu_mem_limit", "arena_extend_strategy"])?;
        // What no request fits is given back before there is more: shapes that grow from run to run hold what the last one takes.
        let arena = ArenaConfig { replace_free_regions: true, ..ArenaConfig::default() };
        let mut parsed = Options { device_id: index, arena };
        for (name, value) in options {
            let wrong = |expected| {
                error!(
                    InvalidArgument,
                    "option {name} of the {NAME} provider is '{value}', expected {expected}"
                )
            };
            match name.as_str() {
                "device_id" => {
                    parsed.device_id = value.parse().map_err(|_| wrong("the number of a device"))?
                }
                "gpu_mem_limit" => {
                    parsed.arena.limit = Some(value.parse().map_err(|_| wrong("a number of bytes"))?);
                }
                _ => {
                    parsed.arena.extend = match value.as_str() {
                        "kNextPowerOfTwo" => ExtendStrategy::PowerOfTwo,
                        "kSameAsRequested" => ExtendStrategy::SameAsRequested,
                        _ => return Err(wrong("'kNextPowerOfTwo' or 'kSameAsRequested'")),
                    }
                }
            }
        }
        Ok(parsed)
    }
}

/// What is told of a device.
pub(crate) fn describe(driver: &Driver, device: PhysicalDevice) -> Result<DeviceInfo> {
    let limits = device.limits()?;
    let facts = [
        ("compute capability", format!("{}.{}", limits.capability / 10, limits.capability % 10)),
        ("multiprocessors", limits.processors.to_string()),
        ("driver for CUDA", driver.version()),
    ];
    Ok(DeviceInfo {
        provider: NAME,
        name: device.name()?,
        memory_bytes: Some(device.memory()? as u64),
        facts: facts.map(|(name, value)| (name.to_owned(), value)).to_vec(),
    })
}
