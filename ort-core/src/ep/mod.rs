//! The execution provider interface: the traits that a backend implements to claim, compile and run
//! nodes.
//!
//! A provider sees canonical nodes with their inferred types and shapes, and never an opset or a
//! model file. The session plans memory, so a kernel finds its outputs and its workspace allocated.
//! Graph rewrites and placement are elsewhere, in `rewrite` and `placement`.

#[allow(unsafe_code, reason = "records of another library are read through their pointers")]
pub mod abi;
mod compile;
#[cfg(feature = "provider-libraries")]
#[allow(unsafe_code, reason = "functions of another library are called")]
mod dylib;
pub(crate) mod dynamic;
pub mod formula;
pub(crate) mod guard;
mod kernel;
mod node;
mod own_kernels;
mod packed;
mod registry;
mod run;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ort_alloc::{Allocator, DeviceId};

pub(crate) use compile::{Account, CompileSettings, Packing};
pub use compile::{CompileCx, Precision};
#[cfg(feature = "provider-libraries")]
pub use dylib::{PROVIDER_PATH, check_library, load_provider, provider_libraries};
pub use kernel::{Claim, Executable, IoShapes, KernelDef, KernelTable, OutputsFrom};
pub use node::NodeView;
pub(crate) use own_kernels::{KernelOwner, OwnKernels, own_kernels};
pub use packed::PackedWeights;
pub(crate) use packed::{Owner, SharedBytes};
pub use registry::{ProviderEntry, provider, providers};
pub(crate) use run::{InputViews, LEAST_TENSOR, OutputSlots};
pub use run::{NestedRun, NewTensor, OutputSlot, RunControl, RunCx, Unary};

pub use crate::cache::{DeviceCache, Fingerprint};
pub use crate::interrupt::{self, CancelToken};
use crate::tensor::{TensorMut, TensorView};
use crate::{Result, advise, error};

/// Device options by name, as the user passes them.
pub type ProviderOptions = std::collections::BTreeMap<String, String>;

/// A backend: enumerates and opens devices. Each provider crate has one static instance.
pub trait ExecutionProvider: Send + Sync {
    /// The short name that users write: `cpu`, `cuda`, `wgpu`.
    fn name(&self) -> &'static str;
    /// Lists the usable devices; the error says why there are none.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// Opens the device at `index` of [`Self::devices`]. An unknown option is an error.
    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>>;
}

/// A human-readable description of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The provider's name.
    pub provider: &'static str,
    /// The device's own name, for example the CPU's instruction set or the GPU model.
    pub name: String,
    /// Bytes of memory, if the device reports them.
    pub memory_bytes: Option<u64>,
    /// Further facts as (name, value) pairs.
    pub facts: Vec<(String, String)>,
}

/// An open device.
pub trait Device: Send + Sync {
    /// Describes the device.
    fn info(&self) -> &DeviceInfo;
    /// The memory its kernels work on: [`DeviceId::HOST`] if they work on host memory.
    fn memory(&self) -> DeviceId;
    /// The allocator of that memory. Every call returns the same one, so its counters are complete.
    fn allocator(&self) -> Arc<dyn Allocator>;
    /// Decides whether the device runs this node, and how; the error text says why not.
    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String>;
    /// Compiles the kernel of a claimed node. Weights are packed here.
    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>>;
    /// What its packed weights depend on besides the node and the precision: the key for a compiled
    /// cache. If it is `None`, a session with a compiled cache fails to build.
    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }
    /// Returns an error once the device can run nothing any more, because it was lost or its
    /// provider library violated the interface. The session asks after claiming and when a build
    /// fails.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Called once every node of a session is compiled, before its first run. Waits for background
    /// compilation that runs will need. Compilation errors surface when the kernel runs.
    fn end_of_build(&self) {}
    /// Called after each successful run. The device submits what it still queues, and may write its
    /// persistent caches.
    fn end_of_run(&self) {}
    /// Waits for all submitted work. A device whose calls are synchronous need not override it.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Copies a tensor between this device's memory and host memory, in either direction, or within
    /// this device's memory.
    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()>;
    /// Whether convolutions and the nodes between them should run in NHWC: as `NhwcConv` and its
    /// relatives, where the device claims those.
    fn prefers_channels_last(&self) -> bool {
        false
    }
    /// The vector width, in bytes, with which GEMM kernels load matrix rows. A GEMM weight whose
    /// rows are not a multiple of it is transposed at build time if its columns are. 1 if the
    /// layout does not matter or weights are packed.
    fn vector_bytes(&self) -> usize {
        1
    }
    /// The byte granularity of copies within this device's memory, for offsets and lengths. A scan
    /// does not concatenate its slices there if a slice could end inside a granule.
    fn copy_alignment(&self) -> usize {
        4
    }
}

/// Rejects options that are not in `known`, and suggests the closest one.
pub fn check_options(provider: &str, options: &ProviderOptions, known: &[&str]) -> Result<()> {
    match options.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(error!(InvalidArgument, "the {provider} provider has no option '{name}'").help(
            match known.is_empty() {
                true => format!("it takes no options: leave '{name}' out"),
                false => advise("options of the provider", name, known.iter().copied()),
            },
        )),
    }
}

/// Returns a device id that is unique in this process, for the memory of a newly opened device.
pub fn new_device_id() -> DeviceId {
    // 0 is `DeviceId::HOST`.
    static NEXT: AtomicU32 = AtomicU32::new(1);
    DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
}
