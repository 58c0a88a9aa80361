//! Host-device copies staged through page-locked memory. The host waits only for a staging buffer
//! to become free, or for the data it reads.

use std::sync::Arc;

use ort_core::{Result, Within, error};
use parking_lot::Mutex;

use crate::driver::{Context, Staged, Stream};

/// Bytes per staging buffer; longer copies go in parts.
const PIECE: usize = 4 << 20;
/// The number of buffers in the upload ring.
const UPLOADS: usize = 4;
/// The most idle download buffers kept; further ones are freed.
const DOWNLOADS: usize = 2;
/// The least remaining room that a longer upload fills with a part. A smaller remainder serves only
/// uploads that fit into it whole.
const LEAST_PART: usize = 64 << 10;

/// The page-locked memory of one device, allocated on first use.
pub(crate) struct Staging {
    context: Arc<Context>,
    ring: Mutex<Ring>,
    downloads: Mutex<Vec<Staged>>,
}

/// The upload buffers, in the order in which they are filled.
#[derive(Default)]
struct Ring {
    pieces: Vec<Staged>,
    /// The buffer being filled.
    current: usize,
}

impl Staging {
    pub(crate) fn new(context: Arc<Context>) -> Staging {
        Staging { context, ring: Mutex::default(), downloads: Mutex::default() }
    }

    /// Enqueues a copy to the device. The caller may overwrite the bytes when it returns.
    pub(crate) fn upload(&self, bytes: &[u8], to: u64, stream: &Stream) -> Result<()> {
        let (mut rest, mut to) = (bytes, to);
        // The lock covers all parts, so that two threads never fill the same buffer.
        let mut ring = self.ring.lock();
        while !rest.is_empty() {
            let piece = ring.piece_for(rest.len(), &self.context)?;
            let (part, later) = rest.split_at(rest.len().min(piece.room()));
            piece.send(part, to, stream)?;
            to += part.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Copies from the device once the earlier work of the stream is done. While the host reads one
    /// part, the next is transferred.
    pub(crate) fn download(&self, from: u64, to: &mut [u8], stream: &Stream) -> Result<()> {
        let mut coming: Option<(Staged, &mut [u8])> = None;
        let mut from = from;
        for part in to.chunks_mut(PIECE) {
            let mut piece = self.free_piece()?;
            piece.receive(from, part.len(), stream)?;
            from += part.len() as u64;
            if let Some((piece, part)) = coming.replace((piece, part)) {
                self.read(piece, part)?;
            }
        }
        coming.map_or(Ok(()), |(piece, part)| self.read(piece, part))
    }

    fn free_piece(&self) -> Result<Staged> {
        let waiting = self.downloads.lock().pop();
        waiting.map_or_else(|| pinned(&self.context), Ok)
    }

    fn read(&self, mut piece: Staged, to: &mut [u8]) -> Result<()> {
        piece.take(to)?;
        let mut downloads = self.downloads.lock();
        if downloads.len() < DOWNLOADS {
            downloads.push(piece);
        }
        Ok(())
    }
}

impl Ring {
    /// Returns a buffer with room for at least part of an upload. If all are full, it waits for the
    /// device to read the oldest one.
    fn piece_for(&mut self, bytes: usize, context: &Arc<Context>) -> Result<&mut Staged> {
        let fits = |piece: &Staged| piece.room() >= bytes.min(LEAST_PART);
        if !self.pieces.get(self.current).is_some_and(fits) {
            self.advance(context)?;
        }
        self.pieces.get_mut(self.current).ok_or_else(|| error!(Fail, "there is no pinned memory"))
    }

    fn advance(&mut self, context: &Arc<Context>) -> Result<()> {
        if self.pieces.len() < UPLOADS {
            match pinned(context) {
                Ok(piece) => {
                    self.pieces.push(piece);
                    self.current = self.pieces.len() - 1;
                    return Ok(());
                }
                // Fewer buffers work too; the host only waits for them earlier.
                Err(problem) if self.pieces.is_empty() => return Err(problem),
                Err(problem) => tracing::debug!("{problem}"),
            }
        }
        // The next buffer is the one that was filled first.
        self.current = (self.current + 1) % self.pieces.len().max(1);
        self.pieces.get_mut(self.current).map_or(Ok(()), Staged::clear)
    }
}

fn pinned(context: &Arc<Context>) -> Result<Staged> {
    Staged::new(context, PIECE).within(|| format!("{PIECE} bytes of pinned memory"))
}
