//! Panic isolation for calls into providers: every claim, compilation, run, allocation and wait
//! goes through here, and a panic becomes an error that names the provider.
//!
//! A panic in a provider is a bug, and a server that runs other models must survive it. A kernel
//! that unwinds because its run is over ([`Interrupted`]) did not panic: its error is that of the
//! run's own check.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use smallvec::smallvec;

use super::compile::{Account, CompileSettings, Packing};
use super::interrupt::{Interrupted, current};
use super::own_kernels::own_kernels;
use super::run::DeviceCopies;
use super::{
    Claim, CompileCx, Device, Executable, ExecutionProvider, Fingerprint, IoShapes, NodeView,
    ProviderOptions, RunCx,
};
use crate::error::DEFECT;
use crate::tensor::{TensorMut, TensorView};
use crate::{Error, ErrorKind, Result, error};

/// Calls into a provider; `place` names the call if it panics.
pub(crate) fn call<T>(place: impl FnOnce() -> String, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(raised(&*payload, place)))
}

/// Converts what unwound from a provider to an error.
fn raised(payload: &(dyn Any + Send), place: impl FnOnce() -> String) -> Error {
    if Interrupted::is(payload) {
        // The watch of this thread tells a deadline from a cancellation.
        let over = current().and_then(|watch| watch.check().err());
        return over.unwrap_or_else(|| error!(Cancelled, "the run was cancelled"));
    }
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(RuntimeException, "{} panicked: {text}", place()).help(DEFECT)
}

fn at_node(device: &dyn Device, what: &str, node: &NodeView<'_>) -> String {
    let (provider, op) = (device.info().provider, node.node.spec.name);
    format!("provider {provider}, {what} node '{}' ({op}),", node.node.name)
}

/// Opens the first device of a provider.
pub(crate) fn open(provider: &dyn ExecutionProvider, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
    call(|| format!("provider {}: opening a device", provider.name()), || provider.open(0, options))
}

/// [`Device::claim`], or the claim of the node's own kernels. A device that panics does not claim
/// the node.
pub(crate) fn claim(device: &dyn Device, node: &NodeView<'_>) -> Result<Claim, String> {
    let place = || at_node(device, "claiming", node);
    let claimed = call(place, || {
        Ok(match own_kernels(&node.node.attrs) {
            Some(own) => own.claim(device, node),
            None => device.claim(node),
        })
    });
    claimed.unwrap_or_else(|problem| Err(problem.to_string()))
}

impl<'a> CompileCx<'a> {
    /// Creates the context for a node's kernel on a device.
    pub(crate) fn new(
        node: NodeView<'a>,
        device: &dyn Device,
        settings: CompileSettings,
        account: Account<'a>,
        packing: Packing<'a>,
    ) -> Result<CompileCx<'a>> {
        let packing = match packing {
            // The cache maps into host memory only, so other devices pack at every build.
            Packing::Cached(_) if device.memory() != DeviceId::HOST => Packing::Now,
            packing => packing,
        };
        let (allocator, consumed) = (allocator(device)?, smallvec![false; node.node.inputs.len()]);
        Ok(CompileCx {
            node,
            threads: settings.threads,
            precision: settings.precision,
            account,
            allocator,
            consumed,
            packing,
            cache_dir: None,
            release: &|_| (),
            packed_bytes: 0,
            cached_bytes: 0,
        })
    }
}

/// [`Device::compile`], or the node's own kernel. The kernel's calls are guarded as well.
pub(crate) fn compile(device: &dyn Device, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let node = cx.node;
    let kernel = call(
        || at_node(device, "compiling", &node),
        || match own_kernels(&node.node.attrs) {
            Some(own) => own.kernel(device, &node),
            None => device.compile(cx),
        },
    )?;
    Ok(Box::new(Guarded { provider: device.info().provider, kernel }))
}

/// A provider's kernel behind `catch_unwind`.
struct Guarded {
    provider: &'static str,
    kernel: Box<dyn Executable>,
}

impl Executable for Guarded {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let place = || format!("provider {}: a kernel's workspace", self.provider);
        call(place, || self.kernel.workspace(shapes))
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let place = || format!("provider {}: a kernel's heap", self.provider);
        call(place, || self.kernel.heap(shapes))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        call(|| format!("provider {}: a kernel", self.provider), || self.kernel.run(cx))
    }

    fn kernels(&self) -> Option<String> {
        let place = || format!("provider {}: naming kernels", self.provider);
        call(place, || Ok(self.kernel.kernels())).unwrap_or_default()
    }
}

/// [`Device::copy`].
pub(crate) fn copy(device: &dyn Device, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
    call(|| of(device, "a copy"), || device.copy(from, to))
}

impl DeviceCopies for &[Arc<dyn Device>] {
    fn copy(&self, memory: DeviceId, from: TensorView<'_>, to: TensorMut<'_>) -> Option<Result<()>> {
        let device = self.iter().find(|device| device.memory() == memory)?;
        Some(copy(&**device, from, to))
    }
}

/// The guarded allocators of the devices' memories, each memory once. Devices that work on host
/// memory add none.
pub(crate) fn device_allocators(devices: &[Arc<dyn Device>]) -> Result<Vec<Arc<dyn Allocator>>> {
    let mut allocators: Vec<Arc<dyn Allocator>> = Vec::new();
    for device in devices {
        let id = device.memory();
        if id != DeviceId::HOST && allocators.iter().all(|allocator| allocator.device() != id) {
            allocators.push(self::allocator(&**device)?);
        }
    }
    Ok(allocators)
}

/// [`Device::allocator`]. The allocator's own calls are guarded as well.
pub(crate) fn allocator(device: &dyn Device) -> Result<Arc<dyn Allocator>> {
    let open = || {
        let allocator = device.allocator();
        Ok((allocator.device(), allocator))
    };
    // The id is read here once, so that `GuardedAllocator::device` cannot panic.
    let (id, allocator) = call(|| of(device, "the allocator"), open)?;
    Ok(Arc::new(GuardedAllocator { provider: device.info().provider, id, allocator }))
}

/// The counters of [`Device::allocator`], including its memory limit. A panic is an error here:
/// with a fallback, the device would seem to have no limit.
pub(crate) fn memory_stats(device: &dyn Device) -> Result<Stats> {
    call(|| of(device, "the counters of its memory"), || Ok(device.allocator().stats()))
}

/// A provider's allocator behind `catch_unwind`.
struct GuardedAllocator {
    provider: &'static str,
    id: DeviceId,
    allocator: Arc<dyn Allocator>,
}

impl GuardedAllocator {
    fn place(&self, what: &str) -> String {
        format!("provider {}: {what}", self.provider)
    }
}

impl Allocator for GuardedAllocator {
    fn device(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let allocate = || Ok(self.allocator.allocate(bytes, alignment));
        let allocated = call(|| self.place("an allocation"), allocate);
        allocated.unwrap_or_else(|problem| {
            let reason = problem.message().to_owned();
            Err(match problem.kind() {
                // A run that is over is no failure of the provider.
                ErrorKind::Cancelled => AllocError::Interrupted { reason },
                _ => AllocError::Failed { reason },
            })
        })
    }

    fn stats(&self) -> Stats {
        let counted = call(|| self.place("the counters of its memory"), || Ok(self.allocator.stats()));
        counted.unwrap_or_else(|problem| {
            tracing::warn!("{problem}");
            Stats::default()
        })
    }

    fn trim(&self) -> usize {
        let trimmed = call(|| self.place("giving memory back"), || Ok(self.allocator.trim()));
        trimmed.unwrap_or_else(|problem| {
            tracing::warn!("{problem}");
            0
        })
    }
}

/// [`Device::check`].
pub(crate) fn check(device: &dyn Device) -> Result<()> {
    call(|| of(device, "the check"), || device.check())
}

/// [`Device::fingerprint`].
pub(crate) fn fingerprint(device: &dyn Device) -> Result<Option<Fingerprint>> {
    call(|| of(device, "the fingerprint"), || Ok(device.fingerprint()))
}

/// [`Device::prefers_channels_last`].
pub(crate) fn prefers_channels_last(device: &dyn Device) -> Result<bool> {
    call(|| of(device, "the layout"), || Ok(device.prefers_channels_last()))
}

/// [`Device::vector_bytes`].
pub(crate) fn vector_bytes(device: &dyn Device) -> Result<usize> {
    call(|| of(device, "the length of vectors"), || Ok(device.vector_bytes()))
}

/// [`Device::synchronize`].
pub(crate) fn synchronize(device: &dyn Device) -> Result<()> {
    call(|| of(device, "waiting"), || device.synchronize())
}

/// [`Device::end_of_build`].
pub(crate) fn end_of_build(device: &dyn Device) -> Result<()> {
    call(
        || of(device, "the end of the build"),
        || {
            device.end_of_build();
            Ok(())
        },
    )
}

/// [`Device::end_of_run`]. The run has succeeded by then, so a panic is only a warning.
pub(crate) fn end_of_run(device: &dyn Device) {
    let done = call(
        || of(device, "the end of a run"),
        || {
            device.end_of_run();
            Ok(())
        },
    );
    if let Err(problem) = done {
        tracing::warn!("{problem}");
    }
}

fn of(device: &dyn Device, what: &str) -> String {
    format!("provider {}: {what}", device.info().provider)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::CancelToken;
    use crate::ep::interrupt::{Watch, enter, look};

    /// An allocator with an interruption point in the middle of an allocation.
    struct SlowMemory;

    impl Allocator for SlowMemory {
        fn device(&self) -> DeviceId {
            DeviceId::HOST
        }

        fn allocate(&self, _: usize, _: usize) -> Result<Buffer, AllocError> {
            look();
            Ok(Buffer::empty(DeviceId::HOST))
        }

        fn stats(&self) -> Stats {
            Stats::default()
        }

        fn trim(&self) -> usize {
            0
        }
    }

    #[test]
    fn an_allocation_of_a_cancelled_run_is_no_failure_of_the_provider() {
        let guarded =
            GuardedAllocator { provider: "slow", id: DeviceId::HOST, allocator: Arc::new(SlowMemory) };
        let cancel = CancelToken::new();
        let _entered = enter(Watch { what: "the run", cancel: cancel.clone(), deadline: None });
        assert!(guarded.allocate(8, 8).is_ok());
        cancel.cancel();
        let refused = guarded.allocate(8, 8).expect_err("the run is over");
        assert!(matches!(refused, AllocError::Interrupted { .. }), "{refused}");
        let problem = Error::from(refused);
        assert_eq!(problem.kind(), ErrorKind::Cancelled, "{problem}");
        assert!(!problem.to_string().contains("defect"), "{problem}");
    }
}
