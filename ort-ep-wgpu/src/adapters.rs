//! Adapter discovery, and adapter descriptions.

use std::sync::OnceLock;

use ort_core::ep::DeviceInfo;

use crate::options::NAME;

/// Advice if there is no adapter.
pub(crate) const NO_ADAPTER: &str =
    "install the GPU's driver, or Mesa's software Vulkan (Debian: mesa-vulkan-drivers and libvulkan1)";

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
    // Enumeration is asynchronous only in browsers, so this does not wait.
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
