//! Read-only memory-mapped files, handed out as owned zero-copy slices.
//!
//! A mapping shows the current file. Writing to the file changes the bytes of every slice.
//! Truncating it removes the pages beyond the new end, and reading one of those kills the process
//! with `SIGBUS`. So replace model files (write elsewhere, then rename over the old name, which
//! leaves existing mappings intact); never rewrite them in place while they are in use.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use thiserror::Error;

use crate::region::page_bytes;

/// The reason why a file could not be mapped or a range not used.
#[derive(Debug, Error)]
pub enum MapError {
    /// The file could not be opened or mapped.
    #[error("cannot map {file}: {source}")]
    Open {
        /// The file's path, or a description of it.
        file: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file exceeds the address space.
    #[error("cannot map {bytes} bytes: more than this machine can address")]
    TooLarge {
        /// The length of the file.
        bytes: u64,
    },
    /// The range exceeds the file.
    #[error("bytes {} to {} are out of range for a file of {len} bytes", range.start, range.end)]
    OutOfBounds {
        /// The range.
        range: Range<usize>,
        /// The length of the file in bytes.
        len: usize,
    },
    /// The operating system refused advice or a query about pages.
    #[error("cannot {action} mapped pages: {source}")]
    Pages {
        /// The attempted action.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

/// Opens a regular file for reading. Pipes, sockets, devices and folders are errors, because
/// opening a pipe blocks until it has a writer, and reading a device may never end.
///
/// # Errors
///
/// The file does not exist, is not readable, or is not a regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Check before opening, because opening a device can have side effects, and again afterwards,
    // because the path may have changed in between.
    check_regular(&std::fs::metadata(path)?)?;
    let mut options = std::fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

fn check_regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "this is a folder, expected a file"));
    }
    if !metadata.is_file() {
        let problem = "this is a pipe, socket or device, expected a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    Ok(())
}

/// The expected access to a range of a mapped file. Only a hint: it never changes contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Access soon: start reading it in.
    WillNeed,
    /// One pass from front to back: read far ahead.
    Sequential,
    /// Random access: do not read ahead.
    Random,
    /// Frequent access: use huge pages, if the file system supports them.
    HugePage,
}

/// A read-only mapped file. Clones and slices share the mapping, which is unmapped with the last of
/// them.
#[derive(Clone, Debug)]
pub struct MappedFile {
    mapping: Arc<Mapping>,
    bytes: Bytes,
}

/// The mapping. `None` for an empty file, which cannot be mapped.
#[derive(Debug)]
struct Mapping {
    map: Option<Mmap>,
}

impl Mapping {
    fn as_slice(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

/// The owner of every slice.
struct Owner(Arc<Mapping>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    ///
    /// [`MapError::Open`] if the file cannot be opened or mapped, for example a folder.
    pub fn open(path: &Path) -> Result<Self, MapError> {
        let name = || path.display().to_string();
        let file = open_regular(path).map_err(|source| MapError::Open { file: name(), source })?;
        Self::map(&file, name)
    }

    /// Maps an open file completely. The mapping keeps no open file.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_file(file: File) -> Result<Self, MapError> {
        Self::map(&file, || "the open file".to_owned())
    }

    fn map(file: &File, name: impl Fn() -> String) -> Result<Self, MapError> {
        let open_error = |source| MapError::Open { file: name(), source };
        let metadata = file.metadata().map_err(open_error)?;
        check_regular(&metadata).map_err(open_error)?;
        let len = usize::try_from(metadata.len())
            .ok()
            .filter(|&len| isize::try_from(len).is_ok())
            .ok_or(MapError::TooLarge { bytes: metadata.len() })?;
        let map = match len {
            0 => None,
            // SAFETY: the mapping is read-only and outlives every slice of it. Callers must ensure
            // that no one writes to or truncates the file meanwhile, as the module documentation
            // says: no program can enforce it.
            _ => Some(unsafe { MmapOptions::new().len(len).map(file) }.map_err(open_error)?),
        };
        let mapping = Arc::new(Mapping { map });
        let bytes = Bytes::from_owner(Owner(Arc::clone(&mapping)));
        Ok(Self { mapping, bytes })
    }

    /// Returns the length of the file in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the whole file, zero-copy. The result keeps the mapping alive.
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Returns a part of the file, zero-copy. The result keeps the mapping alive.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`] if the range exceeds the file.
    pub fn slice(&self, range: Range<usize>) -> Result<Bytes, MapError> {
        self.check(&range)?;
        Ok(self.bytes.slice(range))
    }

    /// Returns whether `slice` is part of this mapping, so that it takes no memory but the file's
    /// pages.
    pub fn contains(&self, slice: &[u8]) -> bool {
        self.range_of(slice).is_some()
    }

    /// Returns the range of the file that `slice` covers, if it is part of this mapping.
    pub fn range_of(&self, slice: &[u8]) -> Option<Range<usize>> {
        let start = slice.as_ptr().addr().checked_sub(self.bytes.as_ptr().addr())?;
        let end = start.checked_add(slice.len())?;
        (!self.is_empty() && end <= self.len()).then_some(start..end)
    }

    /// Advises the operating system on the expected access to `range`.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] if the system does not support the advice.
    /// The latter may be ignored.
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), MapError> {
        self.check(&range)?;
        let Some(map) = self.mapping.map.as_ref().filter(|_| !range.is_empty()) else {
            return Ok(());
        };
        advise(map, range, advice).map_err(|source| MapError::Pages { action: "advise on", source })
    }

    /// Drops the resident pages that are completely inside `range`, so that they no longer count as
    /// this process's memory. Reading them again faults them in from the file. This keeps weights
    /// from being resident twice once they are packed.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] if the system refuses.
    pub fn release(&self, range: Range<usize>) -> Result<(), MapError> {
        self.check(&range)?;
        let pages = self.whole_pages(&range);
        let Some(map) = self.mapping.map.as_ref().filter(|_| !pages.is_empty()) else {
            return Ok(());
        };
        release(map, pages).map_err(|source| MapError::Pages { action: "release", source })
    }

    /// Returns how many bytes of `range` are resident in this process. A page partly inside `range`
    /// counts with the bytes inside. If the system hides a process's page table, this counts the
    /// pages in the page cache instead.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] if the system cannot tell.
    pub fn resident_bytes(&self, range: Range<usize>) -> Result<usize, MapError> {
        self.check(&range)?;
        let Some(map) = self.mapping.map.as_ref().filter(|_| !range.is_empty()) else {
            return Ok(0);
        };
        let page = page_bytes();
        let first = range.start / page;
        let present = resident_pages(map, first..range.end.div_ceil(page))
            .map_err(|source| MapError::Pages { action: "count", source })?;
        let resident = present.iter().enumerate().filter(|&(_, &present)| present).map(|(index, _)| {
            let start = (first + index) * page;
            range.end.min(start + page) - range.start.max(start)
        });
        Ok(resident.sum())
    }

    fn check(&self, range: &Range<usize>) -> Result<(), MapError> {
        if range.start > range.end || range.end > self.len() {
            return Err(MapError::OutOfBounds { range: range.clone(), len: self.len() });
        }
        Ok(())
    }

    /// Returns the whole pages inside `range`. The file's last page counts as whole if `range`
    /// covers it to the end of the file, because nothing else can be in it.
    fn whole_pages(&self, range: &Range<usize>) -> Range<usize> {
        let page = page_bytes();
        let start = range.start.div_ceil(page) * page;
        let end = if range.end == self.len() { range.end } else { range.end / page * page };
        start..end.max(start)
    }
}

#[cfg(unix)]
fn advise(map: &Mmap, range: Range<usize>, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::WillNeed => memmap2::Advice::WillNeed,
        Advice::Sequential => memmap2::Advice::Sequential,
        Advice::Random => memmap2::Advice::Random,
        #[cfg(target_os = "linux")]
        Advice::HugePage => memmap2::Advice::HugePage,
        #[cfg(not(target_os = "linux"))]
        Advice::HugePage => return Err(io::ErrorKind::Unsupported.into()),
    };
    map.advise_range(advice, range.start, range.len())
}

#[cfg(not(unix))]
fn advise(_map: &Mmap, _range: Range<usize>, _advice: Advice) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Drops resident pages. `pages` must start at a page boundary.
#[cfg(unix)]
fn release(map: &Mmap, pages: Range<usize>) -> io::Result<()> {
    // SAFETY: dropping pages of a read-only file mapping loses nothing, because the next read
    // faults the same bytes in from the file. `MappedFile::release` checked that the range is
    // inside the mapping.
    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, pages.start, pages.len()) }
}

#[cfg(not(unix))]
fn release(_map: &Mmap, _pages: Range<usize>) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns for each page in `pages` whether it is resident.
#[cfg(target_os = "linux")]
fn resident_pages(map: &Mmap, pages: Range<usize>) -> io::Result<Vec<bool>> {
    // Prefer the page table: we want this process's share, but mincore reports the page cache,
    // which keeps released pages.
    page_table(map, &pages).or_else(|_| page_cache(map, &pages))
}

/// Reads this process's page table: 8 bytes per page, whose top bit says that the page is present.
#[cfg(target_os = "linux")]
fn page_table(map: &Mmap, pages: &Range<usize>) -> io::Result<Vec<bool>> {
    use std::os::unix::fs::FileExt;

    let mut present = Vec::with_capacity(pages.len());
    let table = File::open("/proc/self/pagemap")?;
    let first = (map.as_ptr().addr() / page_bytes() + pages.start) as u64 * 8;
    let mut entries = [0u8; 8 * 512];
    while present.len() < pages.len() {
        let count = (pages.len() - present.len()).min(512);
        let part = entries.split_at_mut(count * 8).0;
        table.read_exact_at(part, first + present.len() as u64 * 8)?;
        // Entries are in native byte order; the top bit is in the last byte on little-endian
        // machines.
        let top = if cfg!(target_endian = "little") { 7 } else { 0 };
        present.extend(part.chunks_exact(8).map(|entry| entry.get(top).is_some_and(|byte| byte & 0x80 != 0)));
    }
    Ok(present)
}

#[cfg(target_os = "linux")]
fn page_cache(map: &Mmap, pages: &Range<usize>) -> io::Result<Vec<bool>> {
    let mut present = vec![0u8; pages.len()];
    let start = map.as_ptr().wrapping_add(pages.start * page_bytes()).cast_mut();
    let bytes = pages.len() * page_bytes();
    // SAFETY: `resident_bytes` checked that the pages are inside the mapping. mincore writes one
    // byte per page, and `present` has that length.
    match unsafe { libc::mincore(start.cast(), bytes, present.as_mut_ptr()) } {
        0 => Ok(present.into_iter().map(|state| state & 1 == 1).collect()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn resident_pages(_map: &Mmap, _pages: Range<usize>) -> io::Result<Vec<bool>> {
    Err(io::ErrorKind::Unsupported.into())
}
