//! An opened adapter: the device, its queue, its limits, and what went wrong on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ort_core::{Result, ensure, error};
use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};

/// How long a submission may take before the device counts as lost. A software adapter needs
/// seconds for a large model.
const PATIENCE: Duration = Duration::from_secs(600);
/// The bytes of the numbers of one dispatch at most.
pub(crate) const NUMBERS: u64 = 512;
/// The storage buffers of one dispatch at most: each tensor has a word of [`NUMBERS`], and few need
/// several bindings. Drivers name up to a million.
const MOST_STORAGE_BUFFERS: u32 = 256;

/// What bounds a dispatch and its bindings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of one binding.
    pub(crate) binding: usize,
    /// Storage buffers of one dispatch.
    pub(crate) storage_buffers: usize,
    /// Workgroups along one dimension.
    pub(crate) workgroups: u32,
    /// Bytes of one buffer.
    pub(crate) buffer: usize,
    /// Bindings begin at multiples of it.
    pub(crate) storage_alignment: usize,
    /// Numbers of dispatches begin at multiples of it.
    pub(crate) uniform_alignment: usize,
    /// Whether the host's processor computes: a few workgroups then keep it busy.
    pub(crate) is_software: bool,
}

impl Limits {
    fn of(limits: &wgpu::Limits, is_software: bool) -> Limits {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Limits {
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

/// What this process made on the device so far.
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

/// The first thing that went wrong and was nobody's in particular.
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
    /// One thread at a time: see [`Gpu::exclusive`].
    turn: Option<ReentrantMutex<()>>,
}

impl Gpu {
    /// Opens a device on an adapter, with its own limits or with those that every implementation of
    /// WebGPU has.
    pub(crate) fn open(adapter: &wgpu::Adapter, minimum: bool) -> Result<Gpu> {
        let own = adapter.limits();
        let required_limits = match minimum {
            // Alignments are lower where they are better.
            true => wgpu::Limits::defaults().or_worse_values_from(&own),
            false => own,
        };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("ort-runtime"),
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
        device.on_uncaptured_error(Arc::new(move |problem: wgpu::Error| {
            of_error.other.lock().get_or_insert(problem.to_string());
        }));
        let adapter = adapter.get_info();
        let is_software = adapter.device_type == wgpu::DeviceType::Cpu;
        let limits = Limits::of(&required_limits, is_software);
        let turn = (adapter.backend == wgpu::Backend::Gl).then(ReentrantMutex::default);
        Ok(Gpu { adapter, device, queue, limits, made: Made::default(), failure, turn })
    }

    /// What a thread holds while it uses a device of GL; nothing on other backends.
    ///
    /// Such a device has one context. wgpu-hal takes it for each command, and panics if it has to
    /// wait some seconds for it: a thread that submits work to a software adapter, or waits for it,
    /// holds it for longer than that. So threads take turns here, where waiting has no limit. Every
    /// way from outside into the device takes its turn first, and no other lock before it.
    pub(crate) fn exclusive(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        self.turn.as_ref().map(ReentrantMutex::lock)
    }

    /// An error once the device is lost, or after a command that was refused.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_present()?;
        match self.failure.other.lock().take() {
            Some(problem) => Err(error!(EpFail, "the device refused a command: {problem}")),
            None => Ok(()),
        }
    }

    /// An error once the device is lost.
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

    /// A buffer, or why there is none.
    pub(crate) fn buffer(&self, bytes: usize, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        ensure!(
            bytes <= self.limits.buffer,
            OutOfMemory,
            help = "run a smaller batch, or leave the largest values to another provider",
            "a buffer of {bytes} bytes is asked for, the device has none larger than {}",
            self.limits.buffer
        );
        self.check()?;
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

    /// Submits commands.
    pub(crate) fn submit(&self, commands: wgpu::CommandBuffer) -> wgpu::SubmissionIndex {
        self.made.submissions.fetch_add(1, Ordering::Relaxed);
        self.queue.submit([commands])
    }

    /// Waits until everything that was submitted is done.
    pub(crate) fn wait(&self) -> Result<()> {
        let (start, wait) =
            (Instant::now(), wgpu::PollType::Wait { submission_index: None, timeout: Some(PATIENCE) });
        loop {
            match self.device.poll(wait.clone()) {
                // On GL wgpu-hal gives up after two seconds, however long it may wait.
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

    /// Calls what waits for things that are done.
    pub(crate) fn poll(&self) {
        // Nothing is waited for; an error shows at the next command.
        let _ = self.device.poll(wgpu::PollType::Poll);
    }

    /// What `make` makes, or what the device says against it.
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
        // (what the driver names, what is used of it)
        for (named, used) in [(8, 8), (256, 256), (524_288, 256), (u32::MAX, 256)] {
            let limits =
                wgpu::Limits { max_storage_buffers_per_shader_stage: named, ..wgpu::Limits::defaults() };
            assert_eq!(Limits::of(&limits, false).storage_buffers, used);
        }
    }
}
