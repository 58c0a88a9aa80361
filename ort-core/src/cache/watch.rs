//! Detection of in-place changes to mapped model files.
//!
//! A mapping shows the current file. A write in place changes the weights of every session on it,
//! and a truncation kills the process at the first missing page. A program cannot prevent that. So
//! runs compare the length and modification time before they start, and fail if these have changed.
//! Two comparisons are 1 to 250 ms apart, so that they cost 0.1 % of the time. A run that starts in
//! between, or is under way when the file changes, may compute with changed weights. A file that
//! was replaced (written elsewhere and renamed over the old one) is a different file; the mapped
//! one stays intact.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ort_alloc::fork::get_or_init;

use super::content::{Identity, Stamp};
use crate::interrupt::uptime;
use crate::{Result, error};

/// The shortest pause between two checks of the files.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// The longest pause between two checks. Caps the pause after a check that a busy machine made
/// slow.
const MOST_PAUSE: Duration = Duration::from_millis(250);

/// The pause in multiples of the last check's duration: checking costs 0.1 % of the time.
const PAUSE_PER_LOOK: u32 = 1000;

/// The mapped files of a model.
#[derive(Debug, Default)]
pub(crate) struct FileWatch {
    files: Vec<(PathBuf, Stamp)>,
    /// The [`uptime`] of the next check, in nanoseconds.
    next: AtomicU64,
    /// The first file found changed.
    changed: OnceLock<PathBuf>,
}

impl FileWatch {
    /// Adds a mapped file, with its state when it was opened.
    pub(crate) fn add(&mut self, path: &Path, identity: &Identity) {
        if let Identity::Stamp(stamp) = identity {
            self.files.push((path.to_path_buf(), stamp.clone()));
        }
    }

    /// Returns an error if a file was changed in place. Usually returns at once, because the last
    /// check is recent.
    pub(crate) fn check(&self) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        // A change that was seen stays an error, even if the times look right again.
        if self.changed.get().is_none() && now() < self.next.load(Ordering::Relaxed) {
            return Ok(());
        }
        let start = Instant::now();
        self.look()?;
        let pause = start.elapsed().saturating_mul(PAUSE_PER_LOOK).clamp(LEAST_PAUSE, MOST_PAUSE);
        // Relaxed is enough: two threads may both check, which only costs time.
        self.next.store(now().saturating_add(pause.as_nanos() as u64), Ordering::Relaxed);
        Ok(())
    }

    /// Checks the files now, however recent the last check is.
    pub(crate) fn look(&self) -> Result<()> {
        let is_changed = |(path, stamp): &&(PathBuf, Stamp)| {
            // A deleted or replaced file is no change: the mapping keeps the old one alive.
            path.metadata().is_ok_and(|found| stamp.was_changed_in_place(&found))
        };
        if self.changed.get().is_none() {
            match self.files.iter().find(is_changed) {
                None => return Ok(()),
                Some((path, _)) => {
                    get_or_init(&self.changed, || path.clone());
                }
            }
        }
        let path = self.changed.get().map(|path| path.display().to_string()).unwrap_or_default();
        Err(error!(Fail, "the model's file '{path}' was changed in place while it is in use").help(
            "load the model again; replace files by renaming new ones over them, or load without mapping (--no-mmap, FileAccess::map)",
        ))
    }
}

/// The [`uptime`] in nanoseconds.
fn now() -> u64 {
    u64::try_from(uptime().as_nanos()).unwrap_or(u64::MAX)
}
