//! Reading and writing of NumPy files, within memory limits.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result};
use ort_numpy::Archive;
use ort_runtime::{Tensor, Value, host_memory_bytes, open_regular};

use crate::output::write_file;

/// The memory that input arrays may still take.
pub(crate) struct Room {
    /// Bytes left for all arrays together. It starts as the machine's memory.
    left: usize,
    /// The most bytes of a single array: the `--memory-limit`, if there is one.
    each: usize,
}

impl Room {
    pub(crate) fn new(limit: Option<usize>) -> Room {
        // An unknown machine has the bound of any single allocation.
        let left = host_memory_bytes().unwrap_or(isize::MAX as usize);
        Room { left, each: limit.unwrap_or(usize::MAX) }
    }

    /// Returns the most bytes that the next array may take.
    pub(crate) fn most(&self) -> usize {
        self.left.min(self.each)
    }

    /// Subtracts an array that has been read or generated.
    pub(crate) fn take(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Reads a tensor of at most `most` bytes from a `.npy` file.
pub(crate) fn read_npy(path: &Path, most: usize) -> Result<Tensor> {
    let read = || -> Result<Tensor> {
        let file = open_regular(path)?;
        let length = file.metadata()?.len();
        // The reader checks the size in the header against this length before it allocates.
        Ok(ort_numpy::read_npy(BufReader::new(file), length, most)?)
    };
    read().with_context(|| format!("reading {}", path.display()))
}

/// Opens a `.npz` archive.
pub(crate) fn open_npz(path: &Path) -> Result<Archive<BufReader<File>>> {
    let open = || -> Result<_> { Ok(Archive::open(BufReader::new(open_regular(path)?))?) };
    open().with_context(|| format!("opening {}", path.display()))
}

/// Writes values to a `.npz` archive atomically.
pub(crate) fn write_npz(path: &Path, values: &[(String, Value)]) -> Result<()> {
    write_file(path, |file| Ok(ort_numpy::write_npz(file, values)?))
}
