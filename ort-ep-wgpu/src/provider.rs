//! Provider registration, and the devices that sessions share.

use std::sync::{Arc, Weak};

use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderEntry, ProviderOptions};
use ort_core::{Result, ensure};
use parking_lot::Mutex;

use crate::adapters::{NO_ADAPTER, adapters, describe};
use crate::device::WgpuDevice;
use crate::options::{NAME, Options};

/// The factory of [`WgpuDevice`]s, one for each adapter.
///
/// | option | value |
/// | --- | --- |
/// | `limits` | `adapter` (the default), or `minimum`: what every WebGPU implementation has |
/// | `memory_limit` | the most bytes of buffers, including idle ones |
/// | `pipeline_cache` | a folder for later processes, if a session has no compiled cache |
#[derive(Debug)]
pub struct WgpuProvider;

inventory::submit! { ProviderEntry(&WgpuProvider) }

impl ExecutionProvider for WgpuProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let found = adapters();
        ensure!(
            !found.is_empty(),
            EpFail,
            help = NO_ADAPTER,
            "neither Vulkan nor Metal, D3D12 or GL shows an adapter"
        );
        Ok(found.iter().map(describe).collect())
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        // Sessions share a device, to share its pipelines and idle buffers.
        static OPEN: Mutex<Vec<(usize, Options, Weak<WgpuDevice>)>> = Mutex::new(Vec::new());
        let parsed = Options::parse(options)?;
        // The lock is held while a device opens, so that two sessions do not open the same one
        // twice.
        let mut open = OPEN.lock();
        // A lost device is useless, so the next session opens a new one.
        open.retain(|(.., device)| device.upgrade().is_some_and(|device| !device.is_lost()));
        let same = open.iter().find(|(other, options, _)| *other == index && *options == parsed);
        if let Some(device) = same.and_then(|(.., device)| device.upgrade()) {
            return Ok(device);
        }
        let device = WgpuDevice::open(index, options)?;
        open.push((index, parsed, Arc::downgrade(&device)));
        Ok(device)
    }
}
