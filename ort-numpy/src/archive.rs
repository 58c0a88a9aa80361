//! Reading of `.npz` archives: ZIP files with one `.npy` array per entry.
//!
//! Sizes in a ZIP directory are claims of an untrusted file. Here they are bounded by the file's
//! length and by deflate's expansion ratio; `read` checks the rest before it allocates.

use std::borrow::Cow;
use std::io::{Read, Seek, SeekFrom};

use indexmap::IndexMap;
use ort_core::tensor::Tensor;
use ort_core::{Error, NAME_BYTES, Result, ensure, error, shown};
use zip::ZipArchive;
use zip::result::ZipError;

use crate::header::Header;
use crate::read::read_data;

/// The suffix of entry names that are arrays.
const SUFFIX: &str = ".npy";

/// The signature of the end-of-central-directory record, and how far from the end of the file it
/// may start: the record has 22 bytes, and its comment at most 65,535.
const END: &[u8; 4] = b"PK\x05\x06";
const END_BYTES: u64 = 22 + 65_535;

/// The most entries that an archive may have.
const MOST_ARRAYS: usize = 1 << 16;

/// An upper bound on the expansion ratio of deflate.
const MOST_EXPANSION: u64 = 1040;

/// A `.npz` archive, open for reading.
pub struct Archive<R> {
    archive: ZipArchive<R>,
    /// The name of each array, and its index in the ZIP directory.
    names: IndexMap<String, usize>,
    /// The length of the file in bytes. No compressed entry can be longer.
    length: u64,
}

impl<R: Read + Seek> Archive<R> {
    /// Opens an archive and reads its directory.
    ///
    /// # Errors
    ///
    /// The file is not a ZIP file, or it is damaged.
    pub fn open(mut reader: R) -> Result<Archive<R>> {
        let length = check_ends(&mut reader)?;
        let archive = ZipArchive::new(reader).map_err(|problem| of_archive(&problem))?;
        ensure!(archive.len() <= MOST_ARRAYS, InvalidArgument, "the archive has {} entries", archive.len());
        let mut names = IndexMap::new();
        for index in 0..archive.len() {
            let name = archive.name_for_index(index).transpose().map_err(|problem| of_archive(&problem))?;
            let name: Cow<'_, str> = name.unwrap_or_default();
            if let Some(name) = name.strip_suffix(SUFFIX) {
                names.entry(name.to_string()).or_insert(index);
            }
        }
        Ok(Archive { archive, names, length })
    }

    /// Returns the names of the arrays in archive order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Reads the header of an array: its type and shape.
    ///
    /// # Errors
    ///
    /// The archive has no such array, or its header is damaged.
    pub fn header(&mut self, name: &str) -> Result<Header> {
        self.entry(name, |entry, _| Header::read(entry))
    }

    /// Reads an array that needs at most `most` bytes of memory.
    ///
    /// # Errors
    ///
    /// The archive has no such array, it is damaged, or it needs more memory.
    pub fn read(&mut self, name: &str, most: usize) -> Result<Tensor> {
        self.entry(name, |mut entry, there| {
            let header = Header::read(&mut entry)?;
            read_data(&header, entry, there.saturating_sub(header.length as u64), most)
        })
    }

    /// Reads all arrays, which together may take at most `most` bytes.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn read_all(&mut self, most: usize) -> Result<Vec<(String, Tensor)>> {
        let names: Vec<String> = self.names().map(str::to_string).collect();
        let mut left = most;
        let mut tensors = Vec::new();
        for name in names {
            let tensor = self.read(&name, left)?;
            left = left.saturating_sub(tensor.byte_count());
            tensors.push((name, tensor));
        }
        Ok(tensors)
    }

    /// Calls `read` with an entry and an upper bound on its uncompressed bytes.
    fn entry<T>(&mut self, name: &str, read: impl FnOnce(&mut dyn Read, u64) -> Result<T>) -> Result<T> {
        let place = || format!("array '{}'", shown(name, NAME_BYTES));
        let index = self.names.get(name).copied();
        let index = index.ok_or_else(|| error!(InvalidArgument, "it is missing").within(place()))?;
        let mut entry =
            self.archive.by_index(index).map_err(|problem| of_archive(&problem).within(place()))?;
        // Both sizes are only what the archive claims, so the length of the file bounds them.
        let packed = entry.compressed_size().min(self.length);
        let there = entry.size().min(packed.saturating_mul(MOST_EXPANSION));
        read(&mut entry, there).map_err(|problem| problem.within(place()))
    }
}

/// Checks that the file starts and ends like an archive, and returns its length. Without the check
/// at the end, the ZIP reader would search a whole file without a directory for one.
fn check_ends(reader: &mut (impl Read + Seek)) -> Result<u64> {
    let unread = |problem: std::io::Error| error!(Fail, "it cannot be read: {problem}");
    let length = reader.seek(SeekFrom::End(0)).map_err(unread)?;
    reader.seek(SeekFrom::Start(0)).map_err(unread)?;
    let mut start = Vec::new();
    // The longest of the signatures below, NumPy's, has six bytes.
    reader.by_ref().take(6).read_to_end(&mut start).map_err(unread)?;
    // Users confuse the two formats, so a `.npy` file gets an error of its own.
    ensure!(
        !start.starts_with(b"\x93NUMPY"),
        InvalidArgument,
        help = "write the archive with numpy.savez('FILE.npz', NAME=ARRAY)",
        "it is a .npy file of one array, expected a .npz archive of arrays by name"
    );
    // An empty archive starts with the end record.
    ensure!(
        start.starts_with(b"PK\x03\x04") || start.starts_with(END),
        InvalidArgument,
        help = "write it with numpy.savez('FILE.npz', NAME=ARRAY)",
        "it is not an .npz archive: it does not begin like a ZIP file"
    );
    reader.seek(SeekFrom::Start(length.saturating_sub(END_BYTES))).map_err(unread)?;
    let mut tail = Vec::new();
    reader.by_ref().take(END_BYTES).read_to_end(&mut tail).map_err(unread)?;
    ensure!(
        tail.windows(END.len()).any(|bytes| bytes == END),
        InvalidArgument,
        help = "copy the file again",
        "the archive is cut short: it has no directory at its end"
    );
    reader.seek(SeekFrom::Start(0)).map_err(unread)?;
    Ok(length)
}

pub(crate) fn of_archive(problem: &ZipError) -> Error {
    error!(InvalidArgument, "the archive is damaged, or of a form that is not read: {problem}")
        .help("write it with numpy.savez or numpy.savez_compressed")
}
