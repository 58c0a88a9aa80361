//! The resident memory of this process, where the system tells.

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
