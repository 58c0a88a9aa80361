//! Access to the files of a model: mapped or read whole.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use bytes::Bytes;
use ort_alloc::{MappedFile, open_regular};

use crate::cache::Identity;
use crate::{Error, Result, ensure, error};

/// The message for a file without a graph, in ONNX Runtime's words.
pub(super) const NO_GRAPH: &str = "No graph was found in the protobuf";

/// The message for a model's file without any byte.
pub(super) const EMPTY_MODEL: &str = "No graph was found in the protobuf: the file is empty";

/// The advice for an empty file.
pub(super) const EMPTY: &str = "download or copy it again";

/// How model files are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileAccess {
    /// Map files instead of reading them. Weights then stay in the page cache, shared between
    /// processes. A mapped file must not be modified or truncated while the model is in use; to
    /// replace it, rename a new file over it. A run detects modification in place and returns an
    /// error. Truncation may kill the process before that (SIGBUS). A file that is read is a
    /// private copy.
    pub map: bool,
    /// Accept external data files that have hard links outside the model's folder. Off by default,
    /// because such a link can expose any file of the same disk to a program. Package managers that
    /// hard-link files from their cache need it.
    pub hard_links: bool,
}

impl Default for FileAccess {
    fn default() -> FileAccess {
        FileAccess { map: true, hard_links: false }
    }
}

/// A file's bytes, and the mapping that they are a slice of.
#[derive(Clone, Debug)]
pub(super) struct FileBytes {
    pub(super) bytes: Bytes,
    pub(super) mapping: Option<MappedFile>,
    pub(super) identity: Identity,
}

/// Maps or reads the file of a model, which must be a regular one. An empty file is an error.
pub(super) fn read_file(path: &Path, map: bool) -> Result<FileBytes> {
    // Check before opening, because opening a pipe would block. `read_opened` checks the open file
    // again.
    check_kind(&std::fs::metadata(path).map_err(|problem| cannot_open(&problem))?)?;
    read_opened(open_regular(path).map_err(|problem| cannot_open(&problem))?, map, EMPTY_MODEL)
}

/// Maps or reads an open file, which must be a regular one. `empty` is the message for a file
/// without any byte.
pub(super) fn read_opened(mut file: File, map: bool, empty: &str) -> Result<FileBytes> {
    let metadata = file.metadata().map_err(|problem| cannot_open(&problem))?;
    check_kind(&metadata)?;
    ensure!(metadata.len() > 0, InvalidArgument, help = EMPTY, "{empty}");
    // Taken before the bytes, so that a change during the reading shows.
    let identity = Identity::of(&file);
    if map {
        let mapping = MappedFile::open_file(file)
            .map_err(|problem| error!(Fail, "{problem}").help("try without mapping"))?;
        return Ok(FileBytes { bytes: mapping.bytes(), mapping: Some(mapping), identity });
    }
    let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    // A file larger than memory is an error here; growing the vector would abort the process.
    bytes.try_reserve_exact(length).map_err(|_| error!(OutOfMemory, "{length} bytes for the file"))?;
    file.read_to_end(&mut bytes).map_err(|problem| error!(Fail, "cannot read the file: {problem}"))?;
    Ok(FileBytes { bytes: bytes.into(), mapping: None, identity })
}

/// Refuses anything but a regular file.
pub(super) fn check_kind(metadata: &std::fs::Metadata) -> Result<()> {
    ensure!(
        !metadata.is_dir(),
        InvalidProtobuf,
        help = "name the file in it",
        "this is a folder, expected a file"
    );
    // Opening a pipe blocks until it has a writer, and reading a device may never end.
    ensure!(
        metadata.is_file(),
        Fail,
        help = "copy it into a file, or read it with Source::from_reader",
        "this is a pipe, socket or device, expected a regular file"
    );
    Ok(())
}

pub(super) fn cannot_open(problem: &std::io::Error) -> Error {
    match problem.kind() {
        std::io::ErrorKind::NotFound => error!(NoSuchFile, "it does not exist").help("check the path"),
        std::io::ErrorKind::PermissionDenied => {
            error!(Fail, "no permission to read the file").help("check its owner and mode")
        }
        _ => error!(Fail, "cannot open the file: {problem}").help("check the path"),
    }
}
