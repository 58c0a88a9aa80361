//! Whether the files that a model is mapped from are still what they were.
//!
//! A mapping shows the file as it is: whoever writes to it in place changes the weights of every session on it, and whoever cuts it ends the process once a
//! missing page is read. No program can forbid that, but one can look: before a run the length and the time of the last change are compared, so that a run
//! ends in an error instead of other numbers. A file that was replaced (written elsewhere and renamed, as it should be) is another one, and what is mapped stays.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::content::{Identity, Stamp};
use crate::{Result, error};

/// Runs within so long of a look do not look again.
const EVERY: Duration = Duration::from_millis(1);

/// Between two looks there is so many times what one takes: of many files as of one it costs nothing that can be measured.
const SHARE: u32 = 1000;

/// The mapped files of a model.
#[derive(Debug)]
pub(crate) struct FileWatch {
    files: Vec<(PathBuf, Stamp)>,
    start: Instant,
    /// When to look next, in nanoseconds from the start.
    next: AtomicU64,
    /// The first that was found changed.
    changed: OnceLock<PathBuf>,
}

impl Default for FileWatch {
    fn default() -> FileWatch {
        FileWatch {
            files: Vec::new(),
            start: Instant::now(),
            next: AtomicU64::new(0),
            changed: OnceLock::new(),
        }
    }
}

impl FileWatch {
    /// Watches a file that is mapped, as it was when it was opened.
    pub(crate) fn add(&mut self, path: &Path, identity: &Identity) {
        if let Identity::Stamp(stamp) = identity {
            self.files.push((path.to_path_buf(), stamp.clone()));
        }
    }

    /// An error if a file was changed in place. Most calls find that it is too soon to look again.
    pub(crate) fn check(&self) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let now = self.now();
        if self.changed.get().is_none() && now < self.next.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.look()?;
        let end = self.now();
        let pause = (EVERY.as_nanos() as u64).max(end.saturating_sub(now).saturating_mul(u64::from(SHARE)));
        self.next.store(end.saturating_add(pause), Ordering::Relaxed);
        Ok(())
    }

    /// The same, however soon.
    pub(crate) fn look(&self) -> Result<()> {
        let is_changed = |(path, stamp): &&(PathBuf, Stamp)| {
            // A file that is gone or replaced is still the one that is mapped.
            path.metadata().is_ok_and(|found| stamp.was_changed_in_place(&found))
        };
        if self.changed.get().is_none() {
            match self.files.iter().find(is_changed) {
                None => return Ok(()),
                Some((path, _)) => {
                    self.changed.get_or_init(|| path.clone());
                }
            }
        }
        let path = self.changed.get().map(|path| path.display().to_string()).unwrap_or_default();
        Err(error!(Fail, "the model's file '{path}' was changed in place while it is in use").help(
            "load the model again; replace files by renaming new ones over them, or load without mapping (--no-mmap, FileAccess::map)",
        ))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
