//! The CPU time of this process.

use std::time::Duration;

/// Returns the CPU time of all threads so far, including finished ones.
#[cfg(target_os = "linux")]
pub(crate) fn time() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

/// Returns `None`: this platform is not supported.
#[cfg(not(target_os = "linux"))]
pub(crate) fn time() -> Option<Duration> {
    None
}
