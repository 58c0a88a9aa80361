//! Command recorder: queues dispatches and copies in order, and submits them in batches.
//!
//! A batch is submitted when a caller waits for its results, or when it is full.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ort_core::Result;
use parking_lot::Mutex;

use crate::gpu::{Gpu, NUMBERS};
use crate::staging::{LONGEST, Staging};

/// The size of the uniform buffer, in bytes. It holds the uniforms of all dispatches of a
/// submission.
pub(crate) const ALL_NUMBERS: usize = 256 << 10;
/// The most commands in a submission: a software adapter is busy with them for a while.
const MOST_COMMANDS: usize = 4096;
/// The most bytes of staging buffers that a submission holds.
const MOST_STAGED: usize = 4 * LONGEST;

/// An offset into a wgpu buffer.
pub(crate) struct At<'a> {
    pub(crate) buffer: &'a wgpu::Buffer,
    pub(crate) offset: usize,
}

enum Command {
    Dispatch { pipeline: wgpu::ComputePipeline, group: wgpu::BindGroup, numbers: u32, workgroups: [u32; 3] },
    Copy { from: wgpu::Buffer, from_offset: u64, to: wgpu::Buffer, to_offset: u64, len: u64 },
}

/// The commands since the last submission.
#[derive(Default)]
struct Recording {
    commands: Vec<Command>,
    numbers: Vec<u8>,
    /// The staging buffers that the commands copy from.
    staged: Vec<wgpu::Buffer>,
}

/// The command recorder of one device.
pub(crate) struct Recorder {
    gpu: Arc<Gpu>,
    staging: Arc<Staging>,
    /// The uniform buffer.
    numbers: wgpu::Buffer,
    recording: Mutex<Recording>,
}

impl Recorder {
    pub(crate) fn new(gpu: Arc<Gpu>, staging: Arc<Staging>, numbers: wgpu::Buffer) -> Recorder {
        Recorder { gpu, staging, numbers, recording: Mutex::default() }
    }

    /// Records a dispatch. Its uniforms take at most [`NUMBERS`] bytes.
    pub(crate) fn dispatch(
        &self,
        pipeline: wgpu::ComputePipeline,
        group: wgpu::BindGroup,
        numbers: &[u32],
        workgroups: [u32; 3],
    ) -> Result<()> {
        self.gpu.made.dispatches.fetch_add(1, Ordering::Relaxed);
        let mut recording = self.recording.lock();
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        // wgpu requires dynamic offsets to be multiples of the device's uniform alignment.
        let mut start = recording.numbers.len().next_multiple_of(self.gpu.limits.uniform_alignment);
        // Every bind group binds the full `NUMBERS` bytes, so that range must fit, even for fewer
        // uniforms.
        if start + NUMBERS as usize > ALL_NUMBERS || recording.commands.len() >= MOST_COMMANDS {
            self.submit(&mut recording)?;
            start = 0;
        }
        recording.numbers.resize(start, 0);
        recording.numbers.extend_from_slice(bytes);
        recording.commands.push(Command::Dispatch { pipeline, group, numbers: start as u32, workgroups });
        Ok(())
    }

    /// Records a copy of whole words.
    pub(crate) fn copy(&self, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        self.recording.lock().commands.push(Command::Copy {
            from: from.buffer.clone(),
            from_offset: from.offset as u64,
            to: to.buffer.clone(),
            to_offset: to.offset as u64,
            len: bytes as u64,
        });
        Ok(())
    }

    /// Records a write of whole words from the host, through staging buffers.
    pub(crate) fn write(&self, bytes: &[u8], to: At<'_>) -> Result<()> {
        for (index, part) in bytes.chunks(LONGEST).enumerate() {
            let staged = self.staging.filled(part)?;
            let from = At { buffer: &staged, offset: 0 };
            self.copy(from, At { offset: to.offset + index * LONGEST, ..to }, part.len())?;
            let mut recording = self.recording.lock();
            recording.staged.push(staged);
            // Submit and wait: this bounds the staging memory of a long upload, and returns its
            // buffers to the pool.
            let held: u64 = recording.staged.iter().map(wgpu::Buffer::size).sum();
            if held as usize >= MOST_STAGED {
                self.submit(&mut recording)?;
                drop(recording);
                self.gpu.wait()?;
            }
        }
        Ok(())
    }

    /// Reads whole words back, after all recorded commands.
    pub(crate) fn read(&self, from: At<'_>, bytes: &mut [u8]) -> Result<()> {
        for (index, part) in bytes.chunks_mut(LONGEST).enumerate() {
            // Each part is waited for, so one staging buffer serves a download of any length.
            let staged = self.staging.empty(part.len())?;
            let to = At { buffer: &staged, offset: 0 };
            self.copy(At { offset: from.offset + index * LONGEST, ..from }, to, part.len())?;
            self.flush()?;
            self.staging.read(staged, part)?;
        }
        Ok(())
    }

    /// Submits the recorded commands.
    pub(crate) fn flush(&self) -> Result<()> {
        self.submit(&mut self.recording.lock())
    }

    fn submit(&self, recording: &mut Recording) -> Result<()> {
        if recording.commands.is_empty() {
            // An earlier error is still reported if there is nothing to submit.
            return self.gpu.check();
        }
        let mut recorded = std::mem::take(recording);
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        if !recorded.numbers.is_empty() {
            // wgpu copies buffers in whole words.
            let words = recorded.numbers.len().next_multiple_of(4);
            recorded.numbers.resize(words, 0);
            let staged = self.staging.filled(&recorded.numbers)?;
            // Queue order makes one uniform buffer enough: this copy runs after all earlier
            // submissions.
            encoder.copy_buffer_to_buffer(&staged, 0, &self.numbers, 0, words as u64);
            recorded.staged.push(staged);
        }
        encode(&mut encoder, &recorded.commands);
        self.gpu.submit(encoder.finish());
        self.staging.reuse(std::mem::take(&mut recorded.staged));
        // Keep the capacity for the next submission.
        recorded.commands.clear();
        recorded.numbers.clear();
        *recording = recorded;
        // Lets finished staging buffers return to the pool.
        self.gpu.poll();
        self.gpu.check()
    }
}

/// Encodes commands; consecutive dispatches share a compute pass.
fn encode(encoder: &mut wgpu::CommandEncoder, commands: &[Command]) {
    let is_dispatch = |command: &Command| matches!(command, Command::Dispatch { .. });
    for same in commands.chunk_by(|a, b| is_dispatch(a) && is_dispatch(b)) {
        if let [Command::Copy { from, from_offset, to, to_offset, len }] = same {
            // wgpu allows copies only outside of compute passes.
            encoder.copy_buffer_to_buffer(from, *from_offset, to, *to_offset, *len);
            continue;
        }
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for command in same {
            if let Command::Dispatch { pipeline, group, numbers, workgroups: [x, y, z] } = command {
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, group, &[*numbers]);
                pass.dispatch_workgroups(*x, *y, *z);
            }
        }
    }
}
