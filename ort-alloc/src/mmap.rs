//! Files mapped read-only, handed out as owned slices of their own pages.
//!
//! A mapping shows the file as it is, not as it was. Whoever writes to the file changes the bytes
//! under every slice, and whoever truncates it takes the pages beyond the new end away: reading one
//! of those then ends the process with `SIGBUS`. Model files must therefore be replaced (written
//! elsewhere, then renamed over the old name, which leaves existing mappings intact) and never be
//! rewritten in place while they are in use.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use thiserror::Error;

use crate::host::page_bytes;

/// Why a file could not be mapped, or a range of it not be used.
#[derive(Debug, Error)]
pub enum MapError {
    /// The file could not be opened or mapped.
    #[error("cannot map {file}: {source}")]
    Open {
        /// The file's path, or what is known of it.
        file: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file is larger than the address space.
    #[error("cannot map {bytes} bytes: more than this machine can address")]
    TooLarge {
        /// Length of the file.
        bytes: u64,
    },
    /// A range is not inside the file.
    #[error("bytes {} to {} are not inside a file of {len} bytes", range.start, range.end)]
    OutOfBounds {
        /// The range.
        range: Range<usize>,
        /// Length of the file in bytes.
        len: usize,
    },
    /// The operating system refused a hint or a question about pages.
    #[error("cannot {action} mapped pages: {source}")]
    Pages {
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
}

/// Opens a regular file for reading. A pipe, a socket, a device and a folder are errors: opening a
/// pipe would wait for a writer, and a device may never end.
///
/// # Errors
///
/// There is no such file, it may not be read, or it is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Before, because opening a device can have effects of its own; and after, because what the
    // path leads to can change in between.
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

/// How a range of a mapped file will be used. Hints only: contents never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Soon: start reading it in.
    WillNeed,
    /// Once, from front to back: read ahead far.
    Sequential,
    /// Here and there: do not read ahead.
    Random,
    /// Often: use huge pages, where the file system has them.
    HugePage,
}

/// A file mapped read-only. Clones and slices share the mapping, which ends with the last of them.
#[derive(Clone, Debug)]
pub struct MappedFile {
    mapping: Arc<Mapping>,
    bytes: Bytes,
}

/// The mapping itself; a file of no bytes has none.
#[derive(Debug)]
struct Mapping {
    map: Option<Mmap>,
}

impl Mapping {
    fn as_slice(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

/// The owner behind every slice.
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
    /// [`MapError::Open`] where the file cannot be opened or mapped (a directory, say).
    pub fn open(path: &Path) -> Result<Self, MapError> {
        let name = || path.display().to_string();
        let file = open_regular(path).map_err(|source| MapError::Open { file: name(), source })?;
        Self::map(&file, name)
    }

    /// Maps an open file, whole. The file may be closed afterwards.
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
            // SAFETY: the mapping is read-only and outlives every slice of it. That nobody writes
            // to or truncates the file meanwhile is the caller's part, as the head of this module
            // says: no program can enforce it.
            _ => Some(unsafe { MmapOptions::new().len(len).map(file) }.map_err(open_error)?),
        };
        let mapping = Arc::new(Mapping { map });
        let bytes = Bytes::from_owner(Owner(Arc::clone(&mapping)));
        Ok(Self { mapping, bytes })
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The whole file. No bytes are copied; the result keeps the mapping alive.
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// A part of the file. No bytes are copied; the result keeps the mapping alive.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`] where the range is not inside the file.
    pub fn slice(&self, range: Range<usize>) -> Result<Bytes, MapError> {
        self.check(&range)?;
        Ok(self.bytes.slice(range))
    }

    /// Whether `slice` lies in this mapping, so that reading it costs no memory but the file's
    /// pages.
    pub fn contains(&self, slice: &[u8]) -> bool {
        self.range_of(slice).is_some()
    }

    /// Where in the file `slice` lies, if it is a part of this mapping.
    pub fn range_of(&self, slice: &[u8]) -> Option<Range<usize>> {
        let start = slice.as_ptr().addr().checked_sub(self.bytes.as_ptr().addr())?;
        let end = start.checked_add(slice.len())?;
        (!self.is_empty() && end <= self.len()).then_some(start..end)
    }

    /// Tells the operating system how `range` will be used.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] where the system knows no such advice: it
    /// may be ignored.
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), MapError> {
        self.check(&range)?;
        let Some(map) = self.mapping.map.as_ref().filter(|_| !range.is_empty()) else {
            return Ok(());
        };
        advise(map, range, advice).map_err(|source| MapError::Pages { action: "advise on", source })
    }

    /// Lets go of the whole pages inside `range`: they stop counting as this process's memory.
    /// Reading them again is right and reads them anew. Weights that have been packed do not stay
    /// resident twice this way.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] where the system refuses.
    pub fn release(&self, range: Range<usize>) -> Result<(), MapError> {
        self.check(&range)?;
        let pages = self.whole_pages(&range);
        let Some(map) = self.mapping.map.as_ref().filter(|_| !pages.is_empty()) else {
            return Ok(());
        };
        release(map, pages).map_err(|source| MapError::Pages { action: "release", source })
    }

    /// How many bytes of `range` are resident in this process, by pages: a page that `range` only
    /// touches counts for the bytes in `range`. Where the system hides a process's own pages this
    /// is what the page cache holds.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfBounds`], or [`MapError::Pages`] where the system cannot tell.
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

    /// The part of `range` made of whole pages. The file's last page counts as whole from its start
    /// on, as nothing else can be in it.
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

/// `pages` starts at a page, as the mapping does.
#[cfg(unix)]
fn release(map: &Mmap, pages: Range<usize>) -> io::Result<()> {
    // SAFETY: dropping pages of a read-only mapping of a file loses nothing: the next read brings
    // the same bytes back from the file. The range was checked to be inside the mapping.
    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, pages.start, pages.len()) }
}

#[cfg(not(unix))]
fn release(_map: &Mmap, _pages: Range<usize>) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether each of the mapping's pages numbered `pages` is resident.
#[cfg(target_os = "linux")]
fn resident_pages(map: &Mmap, pages: Range<usize>) -> io::Result<Vec<bool>> {
    // What is wanted is this process's share, and mincore tells of the page cache, which keeps
    // released pages.
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
        // The entries are in native byte order; the top bit is in the last byte of a little-endian
        // one.
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
    // SAFETY: the pages are inside the mapping, and mincore writes one byte for each into a vector
    // of that length.
    match unsafe { libc::mincore(start.cast(), bytes, present.as_mut_ptr()) } {
        0 => Ok(present.into_iter().map(|state| state & 1 == 1).collect()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn resident_pages(_map: &Mmap, _pages: Range<usize>) -> io::Result<Vec<bool>> {
    Err(io::ErrorKind::Unsupported.into())
}
