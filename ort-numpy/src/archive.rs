//! `.npz` archives: ZIP files with an array in each entry.

use std::borrow::Cow;
use std::io::{Read, Seek, SeekFrom};

use ort_core::tensor::Tensor;
use ort_core::{Error, NAME_BYTES, Result, ensure, error, shown};
use zip::ZipArchive;
use zip::result::ZipError;

use crate::header::Header;
use crate::read::read_data;

/// What a name of an entry ends in.
const SUFFIX: &str = ".npy";

/// How the directory at the end of an archive begins, and where it is looked for: its comment has
/// at most 65,535 bytes.
const END: &[u8; 4] = b"PK\x05\x06";
const END_BYTES: u64 = 22 + 65_535;

/// More arrays than this no archive has.
const MOST_ARRAYS: usize = 1 << 16;

/// Deflate expands a byte to at most this many bytes.
const MOST_EXPANSION: u64 = 1040;

/// An archive of arrays.
pub struct Archive<R> {
    archive: ZipArchive<R>,
    /// The names of its arrays with their places in the archive.
    names: Vec<(String, usize)>,
    /// The bytes of the file, which no entry can exceed.
    length: u64,
}

impl<R: Read + Seek> Archive<R> {
    /// Reads the directory of an archive.
    ///
    /// # Errors
    ///
    /// It is no ZIP file, or it is damaged.
    pub fn open(mut reader: R) -> Result<Archive<R>> {
        let length = check_ends(&mut reader)?;
        let archive = ZipArchive::new(reader).map_err(|problem| of_archive(&problem))?;
        ensure!(archive.len() <= MOST_ARRAYS, InvalidArgument, "the archive has {} entries", archive.len());
        let mut names = Vec::new();
        for index in 0..archive.len() {
            let name = archive.name_for_index(index).transpose().map_err(|problem| of_archive(&problem))?;
            let name: Cow<'_, str> = name.unwrap_or_default();
            if let Some(name) = name.strip_suffix(SUFFIX) {
                names.push((name.to_string(), index));
            }
        }
        Ok(Archive { archive, names, length })
    }

    /// The names of the arrays, in their order in the archive.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|(name, _)| name.as_str())
    }

    /// What an array is, before its data is read.
    ///
    /// # Errors
    ///
    /// There is no such array, or its header is damaged.
    pub fn header(&mut self, name: &str) -> Result<Header> {
        self.entry(name, |entry, _| Header::read(entry))
    }

    /// Reads an array, which takes at most `most` bytes.
    ///
    /// # Errors
    ///
    /// There is no such array, it is damaged, or it takes more memory.
    pub fn read(&mut self, name: &str, most: usize) -> Result<Tensor> {
        self.entry(name, |mut entry, there| {
            let header = Header::read(&mut entry)?;
            read_data(&header, entry, there.saturating_sub(header.length as u64), most)
        })
    }

    /// Reads all arrays, which together take at most `most` bytes.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
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

    /// Has `read` take an entry, with the most bytes that can be in it.
    fn entry<T>(&mut self, name: &str, read: impl FnOnce(&mut dyn Read, u64) -> Result<T>) -> Result<T> {
        let place = || format!("array '{}'", shown(name, NAME_BYTES));
        let found = self.names.iter().find(|(known, _)| known == name);
        let index = found.map(|(_, index)| *index);
        let index = index.ok_or_else(|| error!(InvalidArgument, "it is missing").within(place()))?;
        let mut entry =
            self.archive.by_index(index).map_err(|problem| of_archive(&problem).within(place()))?;
        // Both sizes are the archive's own word: neither can be more than what the file can hold.
        let packed = entry.compressed_size().min(self.length);
        let there = entry.size().min(packed.saturating_mul(MOST_EXPANSION));
        read(&mut entry, there).map_err(|problem| problem.within(place()))
    }
}

/// Refuses what does not begin and end as an archive does; returns its bytes. Looked for further in
/// front, the directory would be searched in all of a file.
fn check_ends(reader: &mut (impl Read + Seek)) -> Result<u64> {
    let unread = |problem: std::io::Error| error!(Fail, "it cannot be read: {problem}");
    let length = reader.seek(SeekFrom::End(0)).map_err(unread)?;
    reader.seek(SeekFrom::Start(0)).map_err(unread)?;
    let mut start = Vec::new();
    reader.by_ref().take(6).read_to_end(&mut start).map_err(unread)?;
    ensure!(
        !start.starts_with(b"\x93NUMPY"),
        InvalidArgument,
        help = "write the archive with numpy.savez('FILE.npz', NAME=ARRAY)",
        "it is a .npy file of one array, expected a .npz archive of arrays by name"
    );
    ensure!(
        start.starts_with(b"PK\x03\x04") || start.starts_with(END),
        InvalidArgument,
        help = "write it with numpy.savez('FILE.npz', NAME=ARRAY)",
        "it is no .npz archive: it does not begin as a ZIP file"
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
