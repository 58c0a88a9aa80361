//! An opened wgpu device: queue, limits, error reporting and counters.
//!
//! wgpu reports device loss and uncaptured errors through callbacks. [`Gpu`] stores the first of
//! each, and later calls return it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ort_core::{Result, ensure, error};
use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};

/// How long a submission may take before the device counts as lost. A software adapter needs
/// seconds for a large model.
const PATIENCE: Duration = Duration::from_secs(600);
/// The size limit of one dispatch's uniforms, in bytes.
pub(crate) const NUMBERS: u64 = 512;
/// The most storage buffers that a dispatch may bind. Each tensor takes a word of [`NUMBERS`] and
/// few need several bindings, so this suffices. Drivers report up to a million.
const MOST_STORAGE_BUFFERS: u32 = 256;

/// The device limits that bound a dispatch and its bindings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The largest binding, in bytes.
    pub(crate) binding: usize,
    /// The storage buffers that one dispatch may bind.
    pub(crate) storage_buffers: usize,
    /// The workgroups of a dispatch along one dimension.
    pub(crate) workgroups: u32,
    /// The largest buffer, in bytes.
    pub(crate) buffer: usize,
    /// The alignment of a storage binding's offset.
    pub(crate) storage_alignment: usize,
    /// The alignment of a dynamic uniform offset.
    pub(crate) uniform_alignment: usize,
    /// Whether it is a software adapter. A few workgroups keep the host's processor busy.
    pub(crate) is_software: bool,
}

impl Limits {
    fn of(limits: &wgpu::Limits, is_software: bool) -> Limits {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Limits {
            // Rounded down to 256 bytes, so that the offsets of consecutive windows of a tensor
            // stay aligned.
            binding: bytes(limits.max_storage_buffer_binding_size) & !255,
            storage_buffers: limits.max_storage_buffers_per_shader_stage.min(MOST_STORAGE_BUFFERS) as usize,
            workgroups: limits.max_compute_workgroups_per_dimension,
            buffer: bytes(limits.max_buffer_size) & !255,
            storage_alignment: limits.min_storage_buffer_offset_alignment as usize,
            uniform_alignment: limits.min_uniform_buffer_offset_alignment as usize,
            is_software,
        }
    }
}

/// Counts what this process created on the device.
#[derive(Debug, Default)]
pub(crate) struct Made {
    pub(crate) buffers: AtomicUsize,
    pub(crate) bind_groups: AtomicUsize,
    pub(crate) pipelines: AtomicUsize,
    pub(crate) pipelines_ahead: AtomicUsize,
    pub(crate) pipelines_listed: AtomicUsize,
    pub(crate) submissions: AtomicUsize,
    pub(crate) dispatches: AtomicUsize,
}

/// The first device loss, and the first error that no call has reported yet.
#[derive(Debug, Default)]
struct Failure {
    lost: Mutex<Option<String>>,
    other: Mutex<Option<String>>,
}

/// An opened adapter.
pub(crate) struct Gpu {
    pub(crate) adapter: wgpu::AdapterInfo,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: Limits,
    pub(crate) made: Made,
    failure: Arc<Failure>,
    /// Serializes the threads that use a GL device; see [`Gpu::exclusive`].
    turn: Option<ReentrantMutex<()>>,
}

impl Gpu {
    /// Opens a device on an adapter. `minimum` requests only the limits that every WebGPU
    /// implementation guarantees, instead of the adapter's own.
    pub(crate) fn open(adapter: &wgpu::Adapter, minimum: bool) -> Result<Gpu> {
        let own = adapter.limits();
        let required_limits = match minimum {
            // `or_worse_values_from` keeps the adapter's alignments if those are larger than the
            // defaults.
            true => wgpu::Limits::defaults().or_worse_values_from(&own),
            false => own,
        };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("ort-runtime"),
            // Optional: without it only the driver's cache is missing.
            required_features: adapter.features() & wgpu::Features::PIPELINE_CACHE,
            required_limits: required_limits.clone(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).map_err(|problem| {
            error!(EpFail, "the adapter '{}' gives no device: {problem}", adapter.get_info().name)
                .help("another program may hold it; `ort providers` lists the adapters")
        })?;
        let failure = Arc::new(Failure::default());
        let of_loss = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            of_loss.lost.lock().get_or_insert(format!("{reason:?}: {message}"));
        });
        let of_error = failure.clone();
        // Without a handler wgpu panics on an uncaptured error.
        device.on_uncaptured_error(Arc::new(move |problem: wgpu::Error| {
            of_error.other.lock().get_or_insert(problem.to_string());
        }));
        let adapter = adapter.get_info();
        let is_software = adapter.device_type == wgpu::DeviceType::Cpu;
        let limits = Limits::of(&required_limits, is_software);
        let turn = (adapter.backend == wgpu::Backend::Gl).then(ReentrantMutex::default);
        Ok(Gpu { adapter, device, queue, limits, made: Made::default(), failure, turn })
    }

    /// Locks a GL device for the calling thread; returns `None` on other backends.
    ///
    /// A GL device has a single context. wgpu-hal locks it for each command, and panics if it waits
    /// some seconds for the lock. A thread that submits work to a software adapter, or waits for
    /// such work, holds the context for longer. Threads therefore queue here, without a timeout.
    /// Every entry point into the device takes this lock first, and no other lock before it.
    pub(crate) fn exclusive(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        self.turn.as_ref().map(ReentrantMutex::lock)
    }

    /// Returns an error if the device is lost, or if it rejected an earlier command.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_present()?;
        match self.failure.other.lock().take() {
            Some(problem) => Err(error!(EpFail, "the device refused a command: {problem}")),
            None => Ok(()),
        }
    }

    /// Returns an error if the device is lost.
    pub(crate) fn check_present(&self) -> Result<()> {
        match &*self.failure.lost.lock() {
            None => Ok(()),
            Some(reason) => Err(error!(EpFail, "the device is lost: {reason}")
                .help("build the session anew; the driver may have reset the device, or its memory ran out")),
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.failure.lost.lock().is_some()
    }

    /// Creates a buffer.
    pub(crate) fn buffer(&self, bytes: usize, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        ensure!(
            bytes <= self.limits.buffer,
            OutOfMemory,
            help = "run a smaller batch, or leave the largest values to another provider",
            "a value needs a buffer of {bytes} bytes, the device allows at most {}",
            self.limits.buffer
        );
        self.check()?;
        // The error goes to this scope. Without it, no one could tell which buffer did not fit.
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let descriptor =
            wgpu::BufferDescriptor { label: None, size: bytes as u64, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        if pollster::block_on(scope.pop()).is_some() {
            return Err(error!(OutOfMemory, "the device has no memory for a buffer of {bytes} bytes"));
        }
        self.made.buffers.fetch_add(1, Ordering::Relaxed);
        Ok(buffer)
    }

    /// Submits a command buffer.
    pub(crate) fn submit(&self, commands: wgpu::CommandBuffer) -> wgpu::SubmissionIndex {
        self.made.submissions.fetch_add(1, Ordering::Relaxed);
        self.queue.submit([commands])
    }

    /// Waits until all submitted work is done.
    pub(crate) fn wait(&self) -> Result<()> {
        let (start, wait) =
            (Instant::now(), wgpu::PollType::Wait { submission_index: None, timeout: Some(PATIENCE) });
        loop {
            match self.device.poll(wait.clone()) {
                // wgpu-hal gives up after two seconds on GL, whatever the timeout.
                Err(wgpu::PollError::Timeout) if start.elapsed() < PATIENCE => {}
                Err(problem) => {
                    self.failure.lost.lock().get_or_insert(format!("it does not answer: {problem}"));
                    break;
                }
                Ok(_) => break,
            }
        }
        self.check()
    }

    /// Runs the callbacks of finished work, without blocking.
    pub(crate) fn poll(&self) {
        // Nothing is awaited here, so an error surfaces at the next command.
        let _ = self.device.poll(wgpu::PollType::Poll);
    }

    /// Runs `make`, and turns a validation error of the device into an error.
    pub(crate) fn validated<T>(&self, make: impl FnOnce() -> T) -> Result<T> {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let made = make();
        match pollster::block_on(scope.pop()) {
            Some(problem) => Err(error!(EpFail, "the device refuses a program: {problem}")),
            None => Ok(made),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_buffers_are_bounded_where_a_driver_names_no_bound() {
        // (the driver's limit, the limit that we use)
        for (named, used) in [(8, 8), (256, 256), (524_288, 256), (u32::MAX, 256)] {
            let limits =
                wgpu::Limits { max_storage_buffers_per_shader_stage: named, ..wgpu::Limits::defaults() };
            assert_eq!(Limits::of(&limits, false).storage_buffers, used);
        }
    }
}
