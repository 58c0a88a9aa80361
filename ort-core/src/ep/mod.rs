//! The contract with execution providers: what they claim, compile and run.
//!
//! A provider sees canonical nodes with their types and shapes; never an opset, never a file.
//! Memory is planned by the session: a kernel finds its outputs and its workspace ready.

#[allow(unsafe_code, reason = "records of another library are read through their pointers")]
pub mod abi;
mod compile;
#[cfg(feature = "provider-libraries")]
#[allow(unsafe_code, reason = "functions of another library are called")]
mod dylib;
pub(crate) mod dynamic;
pub(crate) mod guard;
mod kernel;
mod node;
pub mod operand;
mod packed;
mod run;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ort_alloc::{Allocator, DeviceId};

pub(crate) use compile::{Account, Packing};
pub use compile::{CompileCx, Precision};
#[cfg(feature = "provider-libraries")]
pub use dylib::{PROVIDER_PATH, check_library, load_provider, provider_libraries};
pub use kernel::{Claim, Executable, IoShapes, KernelDef, KernelTable, OutputsFrom};
pub use node::NodeView;
pub use packed::PackedWeights;
pub(crate) use packed::{Owner, SharedBytes};
pub(crate) use run::LEAST_TENSOR;
pub use run::{NestedRun, NewTensor, OutputSlot, RunControl, RunCx, Unary};

pub use crate::cache::{DeviceCache, Fingerprint};
pub use crate::interrupt::{self, CancelToken};
use crate::tensor::{TensorMut, TensorView};
use crate::{Result, advise, error};

/// Settings for opening a device, by name.
pub type ProviderOptions = std::collections::BTreeMap<String, String>;

/// A factory of devices: one static per provider crate.
pub trait ExecutionProvider: Send + Sync {
    /// The short name users write: `cpu`, `cuda`, `wgpu`.
    fn name(&self) -> &'static str;
    /// The devices that work here; the error says why there are none.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// Opens the device at `index` of [`Self::devices`]. Unknown options are errors.
    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>>;
}

/// What a device is, for people.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The provider's name.
    pub provider: &'static str,
    /// The device's own name, for example the CPU's instruction set or the GPU's model.
    pub name: String,
    /// Bytes of memory, where the device tells.
    pub memory_bytes: Option<u64>,
    /// Further facts as (name, value).
    pub facts: Vec<(String, String)>,
}

/// An opened device.
pub trait Device: Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
    /// The memory its kernels work on; [`DeviceId::HOST`] where that is the host's.
    fn memory(&self) -> DeviceId;
    /// The allocator of that memory: the same one at each call, so that its counters are complete.
    fn allocator(&self) -> Arc<dyn Allocator>;
    /// Whether it runs this node, and how; the error text says why not.
    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String>;
    /// Makes the kernel of a claimed node; weights are packed here.
    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>>;
    /// What the weights that its kernels pack depend on beside the node and the precision. Where
    /// there is none, sessions with a compiled cache are refused.
    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }
    /// An error once it can run nothing any more, because it was lost, or is of a library that said
    /// what cannot be. Asked after claims, and by whoever wants to know.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Called by a session that has compiled all of its nodes, before its first run: returns once
    /// what the device compiles in the background, and knows to be needed, is done. What went wrong
    /// shows when it runs.
    fn end_of_build(&self) {}
    /// Called by a session after each run that ended well: what the device keeps for later
    /// processes may be written now.
    fn end_of_run(&self) {}
    /// Waits until what it was given to do is done. A device that is done when its calls return has
    /// nothing to wait for.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Copies a tensor between this device's memory and the host's, in either direction, or within
    /// this device's memory.
    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()>;
    /// Whether convolutions and what stands between them are to be of images with the channels
    /// last: `NhwcConv` and the like, where it claims these.
    fn prefers_channels_last(&self) -> bool {
        false
    }
    /// The bytes of the vectors in which it reads matrices: a weight of products whose rows are no
    /// multiple of that is transposed while a session is built, if its columns are. 1 where weights
    /// are read as they are, or packed.
    fn vector_bytes(&self) -> usize {
        1
    }
    /// Copies within this device's memory begin and end at multiples of so many bytes. Slices of
    /// element types that such a copy would cut are not put together there.
    fn copy_alignment(&self) -> usize {
        4
    }
}

/// A provider as its crate submits it.
pub struct ProviderEntry(pub &'static dyn ExecutionProvider);

inventory::collect!(ProviderEntry);

/// The providers of this process, by name.
pub fn providers() -> Vec<&'static dyn ExecutionProvider> {
    let mut providers: Vec<_> = inventory::iter::<ProviderEntry>.into_iter().map(|entry| entry.0).collect();
    providers.sort_by_key(|provider| provider.name());
    providers
}

/// The provider called `name`: one of this build, else, with the feature `provider-libraries`, one
/// of the libraries in the folders of the variable `ORT_PROVIDER_PATH`. The path of a library (with
/// a separator, or the ending that libraries have here) is a name, too.
///
/// # Errors
///
/// There is none of this name, or the library cannot be used.
pub fn provider(name: &str) -> Result<&'static dyn ExecutionProvider> {
    let known = providers();
    if let Some(provider) = known.iter().find(|provider| provider.name() == name) {
        return Ok(*provider);
    }
    #[cfg(feature = "provider-libraries")]
    if let Some(found) = dylib::find(name) {
        return found;
    }
    let names: Vec<&str> = known.iter().map(|provider| provider.name()).collect();
    let mut advice = advise("providers of this build", name, names);
    #[cfg(not(feature = "provider-libraries"))]
    advice.push_str("; it loads no libraries, which takes the feature provider-libraries");
    #[cfg(feature = "provider-libraries")]
    for (path, provider) in provider_libraries() {
        let what = provider.map_or_else(|problem| problem.to_string(), |provider| provider.name().to_owned());
        advice.push_str(&format!("; {} of {PROVIDER_PATH}: {what}", path.display()));
    }
    Err(error!(InvalidArgument, "there is no execution provider '{name}'").help(advice))
}

/// Refuses options that a provider does not know, with the nearest of those that it does: `known`.
pub fn check_options(provider: &str, options: &ProviderOptions, known: &[&str]) -> Result<()> {
    match options.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(error!(InvalidArgument, "the {provider} provider has no option '{name}'")
            .help(advise("options of the provider", name, known.iter().copied()))),
    }
}

/// An id for the memory of a newly opened device, different from every other in this process.
pub fn new_device_id() -> DeviceId {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
}
