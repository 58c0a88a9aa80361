//! The provider `opaque`: a device with few kernels, whose memory the host cannot access.

mod kernels;
mod memory;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::{Allocator, DeviceId, Stats};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, ExecutionProvider, KernelTable, NodeView,
    ProviderEntry, ProviderOptions, check_options, new_device_id,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};

pub use memory::Transfers;

use kernels::{KERNELS, Kernel};
use memory::Memory;

/// The name of the provider.
const NAME: &str = "opaque";

/// The factory of [`OpaqueDevice`]s. Its one option is `memory_limit`, in bytes.
#[derive(Debug)]
pub struct OpaqueProvider;

ort_core::inventory::submit! { ProviderEntry(&OpaqueProvider) }

impl ExecutionProvider for OpaqueProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![describe(None)])
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        ensure!(
            index == 0,
            InvalidArgument,
            "the {NAME} provider has one device, there is no device {index}"
        );
        check_options(NAME, options, &["memory_limit"])?;
        let mut limit = None;
        // `check_options` refused other names, so each value is that of `memory_limit`.
        for value in options.values() {
            let bytes = value.parse().map_err(|_| {
                error!(InvalidArgument, "option memory_limit is '{value}', expected a number of bytes")
            })?;
            limit = Some(bytes);
        }
        Ok(OpaqueDevice::new(limit))
    }
}

fn describe(limit: Option<usize>) -> DeviceInfo {
    DeviceInfo {
        provider: NAME,
        name: "a table of byte vectors".to_string(),
        memory_bytes: limit.map(|bytes| bytes as u64),
        facts: Vec::new(),
    }
}

/// A device with memory of its own, to test that the core does not assume the CPU.
#[derive(Debug)]
pub struct OpaqueDevice {
    info: DeviceInfo,
    memory: Arc<Memory>,
    table: KernelTable,
    waits: AtomicUsize,
}

impl OpaqueDevice {
    /// Opens a device whose memory holds at most `limit` bytes.
    pub fn new(limit: Option<usize>) -> Arc<OpaqueDevice> {
        let table = KernelTable::new(KERNELS.iter().map(|kernel| &kernel.def));
        let memory = Arc::new(Memory::new(new_device_id(), limit));
        Arc::new(OpaqueDevice { info: describe(limit), memory, table, waits: AtomicUsize::new(0) })
    }

    /// The statistics of its memory.
    pub fn stats(&self) -> Stats {
        self.memory.stats()
    }

    /// The counters of copies in and out.
    pub fn transfers(&self) -> Transfers {
        self.memory.transfers()
    }

    /// How often it was synchronised.
    pub fn waits(&self) -> usize {
        self.waits.load(Ordering::Relaxed)
    }

    /// The operators that it has kernels for, sorted.
    pub fn operators(&self) -> Vec<&'static str> {
        self.table.kernels().into_iter().map(|kernel| kernel.op).collect()
    }
}

impl Device for OpaqueDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.memory.device()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.memory.clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let def = self.table.find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        let kernel = KERNELS.iter().find(|kernel| std::ptr::eq(&kernel.def, def));
        let kernel = kernel.ok_or_else(|| error!(Fail, "operator {} has no kernel", def.op))?;
        Ok(Box::new(Kernel::new(cx.attrs().clone(), kernel, self.memory.clone())))
    }

    fn synchronize(&self) -> Result<()> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.memory.copy(from, to)
    }
}
