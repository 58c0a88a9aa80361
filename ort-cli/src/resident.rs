//! Resident memory of this process (RSS), from `/proc` on Linux.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Resident bytes by kind; `None` if the platform does not report them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resident {
    /// The resident set size now.
    pub(crate) now: Option<u64>,
    /// The high-water mark of the process.
    pub(crate) peak: Option<u64>,
    /// The part of `now` that is anonymous memory.
    pub(crate) anonymous: Option<u64>,
    /// The part of `now` that is file-backed pages.
    pub(crate) file: Option<u64>,
}

/// Measures this process.
#[cfg(target_os = "linux")]
pub(crate) fn measure() -> Resident {
    let status = procfs::process::Process::myself().and_then(|process| process.status());
    let Ok(status) = status else { return Resident::default() };
    // `/proc/self/status` reports KiB.
    let bytes = |kib: Option<u64>| kib.map(|kib| kib * 1024);
    Resident {
        now: bytes(status.vmrss),
        peak: bytes(status.vmhwm),
        anonymous: bytes(status.rssanon),
        file: bytes(status.rssfile),
    }
}

/// Measures nothing: this platform is not supported.
#[cfg(not(target_os = "linux"))]
pub(crate) fn measure() -> Resident {
    Resident::default()
}

/// Runs `work` and returns its result with the peak of anonymous memory meanwhile, in bytes. A
/// thread samples every millisecond, because the system keeps a high-water mark only of the whole
/// RSS.
pub(crate) fn most_anonymous<T>(work: impl FnOnce() -> T) -> (T, Option<u64>) {
    let most = AtomicU64::new(0);
    // The counters order no other memory access, so relaxed ordering suffices.
    let look = || measure().anonymous.map(|bytes| most.fetch_max(bytes, Ordering::Relaxed));
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) && look().is_some() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // The scope joins the sampling thread even if `work` panics, so `done` must be set in any
        // case.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        done.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    // Sample once more: `work` may be shorter than the sampling interval.
    let measured = look().is_some();
    (result, measured.then(|| most.into_inner()))
}
