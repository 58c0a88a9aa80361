//! Pool of staging buffers: host-mapped buffers for uploads and downloads.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use ort_core::{Result, error};
use parking_lot::Mutex;

use crate::gpu::Gpu;

/// The largest staging buffer, in bytes. Longer transfers are split.
pub(crate) const LONGEST: usize = 4 << 20;
/// The smallest staging buffer, in bytes.
const SHORTEST: usize = 16 << 10;
/// The most idle buffers per direction; more are dropped.
const MOST_WAITING: usize = 8;
/// How long to wait for another thread to run a callback before polling again, and in total.
const CALLBACK: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(10);

/// The staging buffers of one device, for both directions.
pub(crate) struct Staging {
    gpu: Arc<Gpu>,
    /// Idle upload buffers, mapped for writing.
    uploads: Arc<Mutex<Vec<wgpu::Buffer>>>,
    /// Idle download buffers, not mapped.
    downloads: Mutex<Vec<wgpu::Buffer>>,
}

impl Staging {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Staging {
        Staging { gpu, uploads: Arc::default(), downloads: Mutex::default() }
    }

    /// Returns an unmapped buffer that starts with these bytes, at most [`LONGEST`].
    pub(crate) fn filled(&self, bytes: &[u8]) -> Result<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
        // Not in the `match`, which would hold the lock: `map` polls, and the callback of `reuse`
        // locks it.
        let waiting = take(&mut self.uploads.lock(), bytes.len());
        let buffer = match waiting {
            Some(buffer) => buffer,
            None => {
                let buffer = self.gpu.buffer(size_for(bytes.len()), usage)?;
                self.map(&buffer, wgpu::MapMode::Write)?;
                buffer
            }
        };
        {
            let mut mapped = buffer
                .get_mapped_range_mut(..)
                .map_err(|problem| error!(EpFail, "a staging buffer is not mapped: {problem}"))?;
            mapped.slice(..bytes.len()).copy_from_slice(bytes);
        }
        buffer.unmap();
        Ok(buffer)
    }

    /// Recycles buffers of [`Self::filled`] once all work submitted so far is done.
    pub(crate) fn reuse(&self, buffers: Vec<wgpu::Buffer>) {
        for buffer in buffers {
            let (uploads, mapped) = (Arc::clone(&self.uploads), buffer.clone());
            buffer.map_async(wgpu::MapMode::Write, .., move |done| {
                let mut uploads = uploads.lock();
                // A buffer beyond the bound is dropped with this closure, its only owner.
                if done.is_ok() && uploads.len() < MOST_WAITING {
                    uploads.push(mapped);
                }
            });
        }
    }

    /// Returns a buffer for a download of at most [`LONGEST`] bytes.
    pub(crate) fn empty(&self, bytes: usize) -> Result<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let waiting = take(&mut self.downloads.lock(), bytes);
        waiting.map_or_else(|| self.gpu.buffer(size_for(bytes), usage), Ok)
    }

    /// Waits for a buffer of [`Self::empty`], and copies its first bytes to `to`.
    pub(crate) fn read(&self, buffer: wgpu::Buffer, to: &mut [u8]) -> Result<()> {
        self.map(&buffer, wgpu::MapMode::Read)?;
        {
            let mapped = buffer
                .get_mapped_range(..)
                .map_err(|problem| error!(EpFail, "a staging buffer is not mapped: {problem}"))?;
            let from = mapped.get(..to.len());
            to.copy_from_slice(from.ok_or_else(|| error!(Fail, "a staging buffer is too short"))?);
        }
        buffer.unmap();
        let mut downloads = self.downloads.lock();
        if downloads.len() < MOST_WAITING {
            downloads.push(buffer);
        }
        Ok(())
    }

    /// Maps a buffer and waits until it is accessible.
    fn map(&self, buffer: &wgpu::Buffer, mode: wgpu::MapMode) -> Result<()> {
        let (sender, receiver) = std::sync::mpsc::channel();
        buffer.map_async(mode, .., move |done| {
            // The receiver is gone only if waiting failed.
            let _ = sender.send(done);
        });
        self.gpu.wait()?;
        // Another thread's poll may have taken the callback and not run it yet.
        let start = Instant::now();
        loop {
            match receiver.recv_timeout(CALLBACK) {
                Ok(Ok(())) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if start.elapsed() < PATIENCE => self.gpu.poll(),
                _ => return Err(error!(EpFail, "the device gives no access to a staging buffer")),
            }
        }
    }
}

/// The size of a new buffer. Powers of two make buffers reusable for other lengths.
fn size_for(bytes: usize) -> usize {
    bytes.max(SHORTEST).next_power_of_two()
}

/// Takes the best fitting buffer.
fn take(buffers: &mut Vec<wgpu::Buffer>, bytes: usize) -> Option<wgpu::Buffer> {
    let fitting = buffers.iter().enumerate().filter(|(_, buffer)| buffer.size() >= bytes as u64);
    let best = fitting.min_by_key(|(_, buffer)| buffer.size())?.0;
    Some(buffers.swap_remove(best))
}
