//! Whether the files that a model is mapped from are still what they were.
//!
//! A mapping shows the file as it is: a write in place changes the weights of every session on it,
//! and a truncation ends the process at the first missing page. No program can forbid that, so each
//! run first compares the length and the modification time, and ends in an error instead of other
//! numbers. A file that was replaced (written elsewhere and renamed over the old one) is another
//! file, and the mapped one stays.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::content::{Identity, Stamp};
use crate::{Result, error};

/// Least time between two looks at the files.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// Most time between two looks: one that took long because the machine was busy must not end them.
const MOST_PAUSE: Duration = Duration::from_millis(250);

/// The pause is this many times as long as the look before it, so that looking costs 0.1 %.
const PAUSE_PER_LOOK: u32 = 1000;

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
        let took = Duration::from_nanos(end.saturating_sub(now));
        let pause = took.saturating_mul(PAUSE_PER_LOOK).clamp(LEAST_PAUSE, MOST_PAUSE);
        self.next.store(end.saturating_add(pause.as_nanos() as u64), Ordering::Relaxed);
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
