//! Reading and writing of NumPy files, within memory limits.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use ort_numpy::Archive;
use ort_runtime::{DType, Tensor, Value, host_memory_bytes, open_regular};

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

    /// Returns what helps if the next array is larger than [`most`](Self::most).
    pub(crate) fn advice(&self) -> &'static str {
        if self.each < self.left {
            "raise --memory-limit, or use smaller dimensions"
        } else {
            "use smaller dimensions"
        }
    }

    /// Subtracts an array that has been read or generated.
    pub(crate) fn take(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Reads a tensor of at most `most` bytes from a `.npy` file.
pub(crate) fn read_npy(path: &Path, most: usize) -> Result<Tensor> {
    let read = || -> Result<Tensor> {
        let file = open_file(path)?;
        let length = file.metadata()?.len();
        // The reader checks the size in the header against this length before it allocates.
        Ok(ort_numpy::read_npy(BufReader::new(file), length, most)?)
    };
    read().with_context(|| format!("reading {}", path.display()))
}

/// Opens a `.npz` archive.
pub(crate) fn open_npz(path: &Path) -> Result<Archive<BufReader<File>>> {
    let open = || -> Result<_> { Ok(Archive::open(BufReader::new(open_file(path)?))?) };
    open().with_context(|| format!("opening {}", path.display()))
}

fn open_file(path: &Path) -> Result<File> {
    open_regular(path).map_err(|problem| match problem.kind() {
        std::io::ErrorKind::NotFound => anyhow!("there is no such file; check the path"),
        std::io::ErrorKind::PermissionDenied => {
            anyhow!("no permission to read the file; check its owner and mode")
        }
        _ => problem.into(),
    })
}

/// Returns advice on how to convert an array to this type. `None` if NumPy does not have the type.
pub(crate) fn conversion(name: &str, to: DType) -> Option<String> {
    let numpy = match to {
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::Bool => "bool",
        DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U16
        | DType::U32
        | DType::U64 => to.name(),
        _ => return None,
    };
    Some(format!("convert it in NumPy: {name}.astype(\"{numpy}\")"))
}

/// Writes values to a `.npz` archive atomically.
pub(crate) fn write_npz(path: &Path, values: &[(String, Value)]) -> Result<()> {
    write_file(path, |file| Ok(ort_numpy::write_npz(file, values)?))
}
