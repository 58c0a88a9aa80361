//! External data: weights in files beside the model, and the sandbox that keeps them there.
//!
//! A model names its data files, and a model may come from anyone. So a location must be a relative
//! path that does not leave the folder through `..`. With every symbolic link resolved, the file
//! must be inside the model's folder. If the model itself is a symbolic link, its data may also be
//! links into the folder of the file that it points to, or below. So caches work, such as Hugging
//! Face's, where `snapshots/<revision>/model.onnx` and its data are links into the `blobs` folder
//! of the repository.
//!
//! Hard links cannot be followed. So a data file with several is accepted only if all of them are
//! inside the model's folder, or if the caller allows others (see [`FileAccess::hard_links`]).
//! Otherwise the file could be any file of the disk that the model's author wants read.

use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use indexmap::IndexMap;
use ort_alloc::MappedFile;

use super::files::{FileAccess, FileBytes, cannot_open, check_kind, read_opened};
use super::proto::StringStringEntryProto;
use crate::cache::{CompiledModel, Content, FileWatch, Identity};
use crate::{ErrorKind, Result, Within, ensure, error};

/// The data files of one model, each opened once and shared by its tensors.
#[derive(Debug)]
pub struct ExternalData {
    folder: Option<Folder>,
    /// By resolved path; files whose content is in memory by location.
    files: HashMap<PathBuf, FileBytes>,
    /// The resolved path of each file, by the location under which the model names it.
    names: IndexMap<PathBuf, PathBuf>,
    /// Whether `files` is complete and keyed by location. True for a compiled model.
    is_closed: bool,
    access: FileAccess,
}

/// The folders that may contain data files.
#[derive(Debug)]
struct Folder {
    /// The model's folder, with links resolved.
    root: PathBuf,
    /// The folder of the file that the model is a link to, if it is another one.
    linked: Option<PathBuf>,
    /// Whether that is the `blobs` folder of a Hugging Face repository, whose files may have
    /// further hard links.
    is_cache: bool,
}

/// A byte range of a data file, as a tensor's `external_data` entries describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The file, relative to the model's folder.
    pub path: PathBuf,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes, if given.
    pub length: Option<u64>,
}

impl Location {
    /// Parses the entries `location`, `offset` and `length`. `checksum` and unknown keys are
    /// ignored.
    ///
    /// Errors: no location, a location that is absolute or leaves the folder through `..`, an
    /// invalid number, a duplicate key.
    pub fn parse(entries: &[StringStringEntryProto]) -> Result<Location> {
        let find = |key: &str| {
            entries.iter().find(|entry| entry.key() == key).map(|entry| entry.value().to_string())
        };
        let number = |key: &str| {
            let parse = |text: String| {
                text.trim().parse::<u64>().map_err(|_| {
                    error!(Fail, "external data has {key} '{}', expected a number of bytes", clip(&text))
                        .help("write it in decimal digits, 0 or more")
                })
            };
            find(key).filter(|text| !text.is_empty()).map(parse).transpose()
        };
        let mut keys = HashSet::new();
        for entry in entries {
            // A reader that uses the first entry and one that uses the last would open different
            // files.
            ensure!(
                keys.insert(entry.key()),
                Fail,
                help = "each key may be given once: location, offset, length, checksum",
                "external data has the key '{}' twice",
                clip(entry.key())
            );
            if !["location", "offset", "length"].contains(&entry.key()) {
                tracing::debug!(key = entry.key(), "external data entry is not read");
            }
        }
        let path = find("location").filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| {
            error!(Fail, "External data location cannot be empty: the external data has no location")
                .help("name the data file, relative to the model's folder")
        })?;
        let path = without_parents(&path).unwrap_or(path);
        check_path(&path)?;
        Ok(Location {
            path: PathBuf::from(path),
            offset: number("offset")?.unwrap_or(0),
            length: number("length")?,
        })
    }
}

/// Normalizes `a/../b` to `b` without looking at `a`, so no link is followed on the way. Returns
/// `None` if nothing changes or the path leaves the folder.
fn without_parents(path: &str) -> Option<String> {
    // `check_path` refuses absolute paths and backslashes, so they are left as they are.
    if path.starts_with('/') || path.contains('\\') || !path.split('/').any(|part| part == "..") {
        return None;
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()?),
            "" | "." => {}
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Returns a location in the form that [`Location::parse`] gives it.
fn normalized(location: &str) -> PathBuf {
    PathBuf::from(without_parents(location).unwrap_or_else(|| location.to_string()))
}

/// The advice for a location outside the model's folder.
const BESIDE: &str = "put the data file into the model's folder and name it relative to that";

/// Shortens a text from the file for a message.
fn clip(text: &str) -> std::borrow::Cow<'_, str> {
    crate::shown(text, 128)
}

/// The marker of weights that are in the memory of the process that wrote the model.
const MEMORY_MARKER: &str = "_ORT_MEM_ADDR_";

fn check_path(text: &str) -> Result<()> {
    let shown = clip(text);
    ensure!(
        !text.contains(MEMORY_MARKER),
        Fail,
        help = "save the model with its weights, in the file or beside it",
        "external data location '{shown}' is an address in the memory of the process that wrote the model"
    );
    let windows_root = text.starts_with('\\') || text.as_bytes().get(1) == Some(&b':');
    ensure!(
        !windows_root && !text.contains('\0'),
        Fail,
        help = BESIDE,
        "Absolute path not allowed for external data location: '{shown}' is not relative"
    );
    // A backslash separates paths on some systems only. Reject it everywhere, so that a model is
    // accepted or refused alike on all of them.
    ensure!(
        !text.split(['/', '\\']).any(|part| part == ".."),
        Fail,
        help = BESIDE,
        "External data path escapes model directory: location '{shown}' leads out of the model's folder"
    );
    let plain = |part| matches!(part, Component::Normal(_) | Component::CurDir);
    ensure!(
        Path::new(text).components().all(plain),
        Fail,
        help = BESIDE,
        "Absolute path not allowed for external data location: '{shown}' is not relative to the model's folder"
    );
    Ok(())
}

/// The kinds in which a model's own file is refused.
const OF_MODEL_FILES: [ErrorKind; 3] =
    [ErrorKind::NoSuchFile, ErrorKind::InvalidProtobuf, ErrorKind::InvalidArgument];

impl ExternalData {
    /// Creates the data files of a model without a folder: any external data is an error.
    pub fn unavailable() -> ExternalData {
        ExternalData {
            folder: None,
            files: HashMap::new(),
            names: IndexMap::new(),
            is_closed: false,
            access: FileAccess::default(),
        }
    }

    /// Returns the data files inside a compiled model.
    pub(super) fn within(compiled: &CompiledModel) -> ExternalData {
        let file = |content: &Content| {
            let (bytes, mapping) = (content.bytes()?.clone(), Some(compiled.entry().file().clone()));
            let identity = Identity::Hash(content.said_hash()?);
            Some((PathBuf::from(content.name()), FileBytes { bytes, mapping, identity }))
        };
        // The first file is the model itself.
        let files = compiled.files().iter().skip(1).filter_map(file).collect();
        ExternalData { files, is_closed: true, ..ExternalData::unavailable() }
    }

    /// Adds a file whose content is in memory. It takes the place of a file of that location.
    pub(super) fn give(&mut self, name: &str, bytes: Bytes) {
        let file = FileBytes { bytes, mapping: None, identity: Identity::Unknown };
        self.files.insert(normalized(name), file);
    }

    /// Returns whether the file of that location was read from.
    pub(super) fn was_read(&self, name: &str) -> bool {
        self.names.contains_key(&normalized(name))
    }

    /// Returns access to the data files in `folder`. `model` is the model's own path, if it has
    /// one.
    pub fn in_folder(folder: &Path, model: Option<&Path>, access: FileAccess) -> Result<ExternalData> {
        let root = folder.canonicalize().map_err(|problem| {
            error!(Fail, "cannot open the model's folder '{}': {problem}", folder.display())
        })?;
        let model = model.filter(|model| model.is_symlink()).and_then(|model| model.canonicalize().ok());
        let is_cache = model.as_ref().is_some_and(|model| is_cache_blob(model, &root));
        let linked = model.as_ref().and_then(|model| model.parent()).filter(|parent| *parent != root);
        let linked = linked.map(Path::to_path_buf);
        let folder = Some(Folder { root, linked, is_cache });
        Ok(ExternalData { folder, files: HashMap::new(), names: IndexMap::new(), is_closed: false, access })
    }

    /// Returns the `expected` bytes at `location`, which share the file's mapping.
    ///
    /// Errors: the file is missing or outside the folder, the range exceeds it, or the length
    /// differs.
    pub fn read(&mut self, location: &Location, expected: usize) -> Result<Bytes> {
        self.read_range(location, expected)
            // Whatever is wrong with the file, it is not the file that the caller named.
            .map_err(|problem| problem.reclassified(&OF_MODEL_FILES, ErrorKind::Fail))
            .within(|| format!("external data '{}'", clip(&location.path.to_string_lossy())))
    }

    fn read_range(&mut self, location: &Location, expected: usize) -> Result<Bytes> {
        if let Some(length) = location.length {
            ensure!(
                length == expected as u64,
                Fail,
                help = "length must be what type and shape take",
                "the tensor takes {expected} bytes, its external data has {length}"
            );
        }
        // Locations are relative and resolved paths absolute, so only a file in memory has its
        // location as the key.
        let is_in_memory = self.is_closed || self.files.contains_key(&location.path);
        let path = if is_in_memory { location.path.clone() } else { self.resolve(&location.path)? };
        // An empty tensor needs no bytes, but its location must be allowed all the same.
        if expected == 0 {
            return Ok(Bytes::new());
        }
        if !self.names.contains_key(&location.path) {
            self.names.insert(location.path.clone(), path.clone());
        }
        let file = match self.files.get(&path) {
            Some(file) => file,
            None if self.is_closed => {
                return Err(
                    error!(Fail, "the compiled model does not hold the file").help("compile it again")
                );
            }
            None => {
                // Keyed by the resolved path, so that two locations of one file share its mapping.
                let file = self.read_opened(&path)?;
                self.files.entry(path).or_insert(file)
            }
        };
        let file = &file.bytes;
        let start = usize::try_from(location.offset).ok();
        // Offset and length come from the file, so their sum may overflow.
        let range = start.and_then(|start| Some(start..start.checked_add(expected)?));
        match range {
            Some(range) if range.end <= file.len() => Ok(file.slice(range)),
            _ => Err(error!(
                Fail,
                "offset: {} size to read: {expected} given file_length: {} are out of bounds or can not be read in full",
                location.offset,
                file.len()
            )
            .help("download or copy the data file again")),
        }
    }

    /// Opens a file that [`resolve`](Self::resolve) found. The path may have changed since
    /// (TOCTOU). So it is opened without following links, and the hard links are checked again on
    /// the open file.
    fn read_opened(&self, path: &Path) -> Result<FileBytes> {
        let folder = self.folder.as_ref().ok_or_else(|| error!(Fail, "the model has no folder"))?;
        let (root, is_cache) = folder.root_of(path).unwrap_or((&folder.root, false));
        check_kind(&std::fs::symlink_metadata(path).map_err(|problem| cannot_open(&problem))?)?;
        let opened = DataFile::beneath(root, path)?;
        if !is_cache && !self.access.hard_links {
            opened.check_hard_links(root)?;
        }
        read_opened(opened.file, self.access.map, "the file is empty")
    }

    /// Iterates over the mappings of the files opened so far.
    pub fn mappings(&self) -> impl Iterator<Item = &MappedFile> {
        self.files.values().filter_map(|file| file.mapping.as_ref())
    }

    /// Adds the mapped files among those opened so far to a watch.
    pub(super) fn watch(&self, watch: &mut FileWatch) {
        for (path, file) in self.files.iter().filter(|(_, file)| file.mapping.is_some()) {
            watch.add(path, &file.identity);
        }
    }

    /// Returns the files in the form that the compile cache uses, once for each location that names
    /// them.
    pub(super) fn contents(&self) -> Vec<Content> {
        let content = |(name, path): (&PathBuf, &PathBuf)| {
            let FileBytes { bytes, mapping, identity } = self.files.get(path)?.clone();
            Some(Content::new(name.to_string_lossy().into_owned(), bytes, mapping, identity))
        };
        self.names.iter().filter_map(content).collect()
    }

    /// Resolves a location to a file, following all links, if the sandbox rules allow it.
    fn resolve(&self, location: &Path) -> Result<PathBuf> {
        let folder = self.folder.as_ref().ok_or_else(|| {
            error!(Fail, "the model was loaded from memory, so its data files cannot be found")
                .help("load the model from its path, or give the folder")
        })?;
        // An absolute location would replace the root here. The resolved path is what is checked.
        let path = folder.root.join(location);
        let real = path.canonicalize().map_err(|problem| match problem.kind() {
            std::io::ErrorKind::NotFound => {
                let shown = crate::shown(&path.to_string_lossy(), 512).into_owned();
                error!(Fail, "External data path does not exist: \"{shown}\"")
                    .help("put the data file beside the model")
            }
            _ => error!(Fail, "cannot open the file: {problem}").help("check the path"),
        })?;
        let Some((root, is_cache)) = folder.root_of(&real) else {
            return Err(error!(
                Fail,
                "External data path escapes model directory: a symbolic link leads out of the model's folder, to '{}'",
                real.display()
            )
            .help("replace the link by the file itself"));
        };
        if !is_cache && !self.access.hard_links {
            let metadata = real.metadata().map_err(|problem| error!(Fail, "{problem}"))?;
            check_hard_links(&metadata, root)?;
        }
        Ok(real)
    }
}

impl Folder {
    /// Returns the folder that a resolved path is in, and whether it is a cache; `None` if it is in
    /// none. Whole components are compared: `/models-2` is not in `/models`.
    fn root_of(&self, real: &Path) -> Option<(&PathBuf, bool)> {
        if real.starts_with(&self.root) {
            return Some((&self.root, false));
        }
        let linked = self.linked.as_ref().filter(|linked| real.starts_with(linked))?;
        Some((linked, self.is_cache && real.parent() == Some(linked.as_path())))
    }
}

/// Whether `model` is in the `blobs` folder of a Hugging Face repository, and `root` in its
/// `snapshots`.
fn is_cache_blob(model: &Path, root: &Path) -> bool {
    let Some(blobs) = model.parent() else { return false };
    let Some(repository) = blobs.parent() else { return false };
    blobs.ends_with("blobs") && root.starts_with(repository.join("snapshots"))
}

/// An open data file, with the folder and name it was opened by.
struct DataFile {
    file: File,
    #[cfg(unix)]
    folder: std::os::fd::OwnedFd,
    #[cfg(unix)]
    name: std::ffi::OsString,
}

#[cfg(unix)]
impl DataFile {
    /// Opens `path` below `root` folder by folder without following links. Both paths are resolved,
    /// so a link on the way was put there since.
    fn beneath(root: &Path, path: &Path) -> Result<DataFile> {
        use rustix::fs::{CWD, Mode, OFlags, openat};
        // `O_PATH` suffices to traverse a folder and needs no permission to list it.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        const FOLDER: OFlags = OFlags::PATH;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        const FOLDER: OFlags = OFlags::RDONLY;
        let swapped = |problem: rustix::io::Errno| match problem {
            rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => {
                error!(Fail, "the file was replaced by a link while it was opened")
                    .help("load the model from a folder that no one else writes to")
            }
            problem => cannot_open(&problem.into()),
        };
        let rest = path
            .strip_prefix(root)
            .map_err(|_| error!(Fail, "the file is not in the model's folder").help(BESIDE))?;
        let folder = FOLDER | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut here = openat(CWD, root, folder, Mode::empty()).map_err(swapped)?;
        for part in rest.parent().into_iter().flat_map(Path::iter) {
            here = openat(&here, part, folder, Mode::empty()).map_err(swapped)?;
        }
        let name = rest.file_name().unwrap_or_default().to_os_string();
        // `NONBLOCK`, because the file may have been swapped for a pipe, whose open would block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(&here, &name, flags, Mode::empty()).map_err(swapped)?;
        Ok(DataFile { file: file.into(), folder: here, name })
    }

    /// Refuses the file if it has, or briefly had, hard links outside `root`.
    ///
    /// Every change of a file's links updates its ctime. So if the ctime is the same before and
    /// after, the links did not change while we counted them. File systems take ctime from a clock
    /// that ticks every few milliseconds, and two changes within one tick look like one. So a
    /// recent ctime must settle first.
    fn check_hard_links(&self, root: &Path) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let look = || self.file.metadata().map_err(|problem| cannot_open(&problem));
        let facts = |found: &Metadata| (found.nlink(), found.ctime(), found.ctime_nsec());
        let mut before = look()?;
        if !is_settled(&before) {
            std::thread::sleep(CLOCK_TICK);
            before = look()?;
        }
        check_hard_links(&before, root)?;
        let named = rustix::fs::statat(&self.folder, &self.name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
        // The types of these fields differ between systems.
        let is_named = named.is_ok_and(|named| named.st_dev == before.dev() && named.st_ino == before.ino());
        ensure!(
            is_named && is_settled(&before) && facts(&before) == facts(&look()?),
            Fail,
            help = "load the model again, from a folder that no one else writes to",
            "the file was replaced or linked while it was opened"
        );
        Ok(())
    }
}

/// Longer than a tick of the file system clock, which is at most 10 ms on Linux.
#[cfg(unix)]
const CLOCK_TICK: std::time::Duration = std::time::Duration::from_millis(20);

/// Returns whether the last change is more than a tick ago, so that another one would change the
/// ctime.
#[cfg(unix)]
fn is_settled(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let nanoseconds = |seconds: i128, rest: i128| seconds * 1_000_000_000 + rest;
    let changed = nanoseconds(metadata.ctime().into(), metadata.ctime_nsec().into());
    let now = nanoseconds(now.as_secs().into(), now.subsec_nanos().into());
    // Use the absolute difference, because the clock of a file server may be ahead of ours.
    (now - changed).unsigned_abs() >= CLOCK_TICK.as_nanos() / 2
}

#[cfg(not(unix))]
impl DataFile {
    fn beneath(_root: &Path, path: &Path) -> Result<DataFile> {
        Ok(DataFile { file: ort_alloc::open_regular(path).map_err(|problem| cannot_open(&problem))? })
    }

    fn check_hard_links(&self, _root: &Path) -> Result<()> {
        Ok(())
    }
}

/// Refuses a file that has hard links outside `root`.
#[cfg(unix)]
fn check_hard_links(metadata: &Metadata, root: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let same = |other: &std::fs::Metadata| (other.dev(), other.ino()) == (metadata.dev(), metadata.ino());
    // The one name of a file without further links is the one it was opened by.
    if metadata.nlink() < 2 || metadata.is_dir() {
        return Ok(());
    }
    let mut inside = 0;
    let mut folders = vec![root.to_path_buf()];
    // Bound the search, so that a model in the root folder does not walk the whole disk.
    let mut entries_left = 10_000;
    while let Some(folder) = folders.pop() {
        // Unreadable folders and entries count as outside, so the check errs towards refusing.
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            entries_left -= 1;
            if entries_left == 0 {
                folders.clear();
                break;
            }
            // `DirEntry::metadata` does not follow symbolic links.
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) if same(&found) => inside += 1,
                _ => {}
            }
        }
    }
    ensure_inside(inside, metadata.nlink())
}

#[cfg(unix)]
fn ensure_inside(inside: u64, links: u64) -> Result<()> {
    if inside >= links {
        return Ok(());
    }
    Err(error!(Fail, "the file has {links} hard links, of which {inside} lie in the model's folder")
        .help("replace it by a copy, or allow hard links where the model is trusted"))
}

/// Other systems only report the number of hard links of an open file.
#[cfg(not(unix))]
fn check_hard_links(_metadata: &Metadata, _root: &Path) -> Result<()> {
    Ok(())
}
