//! The device: what it claims, compiles and copies.

use std::sync::Arc;

use ort_alloc::{Allocator, Arena, DeviceId, Stats};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, KernelTable, NodeView, ProviderOptions,
    new_device_id,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

use crate::driver::{Context, Driver, Limits, NO_DEVICE};
use crate::kernels::{self, CudaKernel};
use crate::memory::{address, arena};
use crate::modules::{Modules, OLDEST, too_old};
use crate::node::Node;
use crate::provider::{Options, describe};

/// What a device and its nodes share.
pub(crate) struct Parts {
    pub(crate) id: DeviceId,
    pub(crate) limits: Limits,
    // Fields drop in this order: modules and memory before the context that they are of.
    pub(crate) modules: Modules,
    pub(crate) context: Arc<Context>,
}

/// An opened GPU as a device of ort-runtime.
pub struct CudaDevice {
    info: DeviceInfo,
    arena: Arena,
    parts: Arc<Parts>,
    table: KernelTable,
}

impl CudaDevice {
    /// Opens the device at `index` of [`CudaProvider::devices`](crate::CudaProvider), or that of the option `device_id`.
    ///
    /// # Errors
    ///
    /// There is no driver, one that is too old, no such device, or an option is unknown or its value not one.
    pub fn open(index: usize, options: &ProviderOptions) -> Result<Arc<CudaDevice>> {
        let options = Options::parse(index, options)?;
        let driver = Driver::get()?;
        let (index, count) = (options.device_id, driver.count()?);
        if index >= count {
            return Err(
                error!(EpFail, "there is no device {index}: the NVIDIA driver shows {count}").help(NO_DEVICE)
            );
        }
        let physical = driver.device(index)?;
        let (info, limits) = (describe(driver, physical)?, physical.limits()?);
        if limits.capability < OLDEST {
            return Err(too_old(limits.capability));
        }
        let (id, context) = (new_device_id(), Context::open(physical)?);
        let arena = arena(id, &context, options.arena);
        let modules = Modules::new(context.clone(), limits.capability);
        let parts = Arc::new(Parts { id, limits, modules, context });
        Ok(Arc::new(CudaDevice { info, arena, parts, table: kernel_table() }))
    }

    /// Allocated and peak bytes, and how the arena grew, by ONNX Runtime's names.
    pub fn stats(&self) -> Stats {
        self.arena.stats()
    }

    /// How many modules the driver has compiled: a run like one before adds none.
    pub fn modules(&self) -> usize {
        self.parts.modules.count()
    }
}

/// The kernels of the provider, to claim with where there is no device.
pub fn kernel_table() -> KernelTable {
    KernelTable::new(kernels::all().map(|kernel| &kernel.def))
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.parts.id
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        Arc::new(self.arena.clone())
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let def = self.table.find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        let kernel: &'static CudaKernel = kernels::all()
            .find(|kernel| std::ptr::eq(&kernel.def, def))
            .ok_or_else(|| error!(Fail, "operator {} has no kernel", def.op))?;
        let node = cx.node.node;
        Ok(Box::new(Node {
            kernel,
            op: node.spec.name,
            attrs: node.attrs.clone(),
            input_types: (0..node.inputs.len()).map(|index| cx.node.dtype(index)).collect(),
            output_types: (0..node.outputs.len()).map(|index| cx.node.output_dtype(index)).collect(),
            parts: self.parts.clone(),
            kept: Mutex::default(),
        }))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        // It packs nothing; which nodes are left to others follows from its code.
        Some(Fingerprint { code: env!("ORT_CODE_HASH").to_owned(), hardware: String::new() })
    }

    fn check(&self) -> Result<()> {
        self.parts.context.check_present()
    }

    fn synchronize(&self) -> Result<()> {
        self.parts.context.synchronize()
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let same = from.dtype() == to.dtype() && from.shape() == to.shape();
        ensure!(same, Fail, "a copy between tensors of two types or shapes");
        let (context, id) = (&self.parts.context, self.parts.id);
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => {
                let bytes = from.bytes()?;
                ensure!(bytes.len() == range.len, Fail, "a copy of {} bytes into {}", bytes.len(), range.len);
                address(id, range)?.map_or(Ok(()), |to| context.upload(bytes, to))
            }
            (Some(range), None) => {
                let bytes = to.bytes_mut()?;
                ensure!(bytes.len() == range.len, Fail, "a copy of {} bytes into {}", range.len, bytes.len());
                address(id, range)?.map_or(Ok(()), |from| context.download(from, bytes))
            }
            (Some(source), Some(target)) => {
                ensure!(source.len == target.len, Fail, "a copy of {} bytes into {}", source.len, target.len);
                match (address(id, source)?, address(id, target)?) {
                    (Some(from), Some(to)) => context.copy(from, to, source.len),
                    _ => Ok(()),
                }
            }
            (None, None) => Err(error!(Fail, "neither side of a copy is in the device's memory")),
        }
    }
}
