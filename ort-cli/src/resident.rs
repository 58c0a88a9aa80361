//! The resident memory of this process, where the system tells.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes by kind; none where the platform cannot measure them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resident {
    /// Resident now.
    pub(crate) now: Option<u64>,
    /// The most that ever was.
    pub(crate) peak: Option<u64>,
    /// Of those now, memory that belongs to no file.
    pub(crate) anonymous: Option<u64>,
    /// Of those now, pages of files.
    pub(crate) file: Option<u64>,
}

/// Measures this process.
#[cfg(target_os = "linux")]
pub(crate) fn measure() -> Resident {
    let status = procfs::process::Process::myself().and_then(|process| process.status());
    let Ok(status) = status else { return Resident::default() };
    let bytes = |kib: Option<u64>| kib.map(|kib| kib * 1024);
    Resident {
        now: bytes(status.vmrss),
        peak: bytes(status.vmhwm),
        anonymous: bytes(status.rssanon),
        file: bytes(status.rssfile),
    }
}

/// Measures this process.
#[cfg(not(target_os = "linux"))]
pub(crate) fn measure() -> Resident {
    Resident::default()
}

/// Does some work and returns with its result the most memory that belonged to no file meanwhile,
/// in bytes: a look each millisecond, since systems keep a high-water mark only of all that is
/// resident.
pub(crate) fn most_anonymous<T>(work: impl FnOnce() -> T) -> (T, Option<u64>) {
    let most = AtomicU64::new(0);
    let look = || measure().anonymous.map(|bytes| most.fetch_max(bytes, Ordering::Relaxed));
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) && look().is_some() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        done.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let measured = look().is_some();
    (result, measured.then(|| most.into_inner()))
}
