//! The processor time of this process.

use std::time::Duration;

/// What all its threads, finished ones too, have spent so far; none where the platform cannot tell.
#[cfg(target_os = "linux")]
pub(crate) fn time() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

/// What all its threads, finished ones too, have spent so far; none where the platform cannot tell.
#[cfg(not(target_os = "linux"))]
pub(crate) fn time() -> Option<Duration> {
    None
}
