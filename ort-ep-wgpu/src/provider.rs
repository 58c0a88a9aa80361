//! Provider registration, options and adapter discovery.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderEntry, ProviderOptions, check_options};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

use crate::device::WgpuDevice;

/// The name of the provider.
const NAME: &str = "wgpu";

/// Advice if there is no adapter.
pub(crate) const NO_ADAPTER: &str =
    "install the GPU's driver, or Mesa's software Vulkan (Debian: mesa-vulkan-drivers and libvulkan1)";

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

/// Returns the adapters that support compute shaders, the fastest kind first.
pub(crate) fn adapters() -> Vec<wgpu::Adapter> {
    static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();
    static GL_DISPLAY: OnceLock<wgpu::Instance> = OnceLock::new();
    let others = wgpu::Backends::all() - wgpu::Backends::GL;
    let mut found = computing(INSTANCE.get_or_init(|| instance(others)), others);
    // GL lists the same GPUs again, so it is the fallback.
    if found.is_empty() {
        // A GL instance has one EGL context for all its adapters and devices, and a context belongs
        // to one thread at a time. Each caller therefore gets adapters of its own instance. The
        // static instance stays alive, because dropping the last one would terminate the display of
        // the whole process.
        GL_DISPLAY.get_or_init(|| instance(wgpu::Backends::GL));
        found = computing(&instance(wgpu::Backends::GL), wgpu::Backends::GL);
    }
    found.sort_by_key(|adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Cpu => 3,
        wgpu::DeviceType::Other => 4,
    });
    found
}

/// Creates a wgpu instance for these backends.
fn instance(backends: wgpu::Backends) -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // wgpu validates already; the driver's validation layers would repeat it.
    descriptor.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(descriptor)
}

/// The adapters of an instance that support compute shaders.
fn computing(instance: &wgpu::Instance, backends: wgpu::Backends) -> Vec<wgpu::Adapter> {
    let mut found = pollster::block_on(instance.enumerate_adapters(backends));
    found.retain(|adapter| {
        let flags = adapter.get_downlevel_capabilities().flags;
        flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
    });
    found
}

/// Describes an adapter to users.
pub(crate) fn describe(adapter: &wgpu::Adapter) -> DeviceInfo {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let facts = [
        ("backend", info.backend.to_string()),
        ("kind", format!("{:?}", info.device_type)),
        ("driver", format!("{} {}", info.driver, info.driver_info).trim().to_owned()),
        ("largest binding", format!("{} MiB", limits.max_storage_buffer_binding_size >> 20)),
        ("largest buffer", format!("{} MiB", limits.max_buffer_size >> 20)),
        ("storage buffers", limits.max_storage_buffers_per_shader_stage.to_string()),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), value)).into();
    DeviceInfo { provider: NAME, name: info.name, memory_bytes: None, facts }
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
