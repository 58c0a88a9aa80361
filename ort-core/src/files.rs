//! Atomic output files: every output of every command is written completely or not at all.
//!
//! A [`NewFile`] is written under a temporary name in the folder of its target. It is synced to
//! disk and renamed as the last step, so a full disk, a quota or a kill leaves the old file intact.
//! The temporary name is random and created exclusively. So a file left by a killed process never
//! collides with another, even if process ids repeat. The next output in the folder removes it.
//!
//! A symbolic link stays, and the file it points to is replaced. A target that is not a regular
//! file (a device, a pipe, an open descriptor under `/dev/fd`) cannot be replaced: the complete
//! output is copied into it at the end. Output to the null device is discarded without a temporary
//! file.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use ort_alloc::fork::Mutex;
use tempfile::{NamedTempFile, TempPath};

/// Prefix and suffix of the names of files that are being written.
const UNFINISHED: (&str, &str) = (".ort-", ".unfinished");

/// Suffix of the name of an old file that is set aside while its replacement is published. If the
/// process dies in between, it is the only copy left, so it is never cleaned up.
const REPLACED: &str = ".replaced";

/// The age from which an unfinished file without a writer counts as left by a dead process.
pub(crate) const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// When each folder was last scanned for leftovers. One scan per [`LEFT_BEHIND`] is enough: a
/// leftover only stays that much longer, and a scan of a large folder is slow.
static LOOKED_THROUGH: Mutex<BTreeMap<PathBuf, Instant>> = Mutex::new(BTreeMap::new());

/// The device that discards its input.
const NULL_DEVICE: &str = "/dev/null";

/// The most symbolic links followed, as many as operating systems follow.
const MOST_LINKS: usize = 40;

/// The destination of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A regular file, which is replaced or created.
    File(PathBuf),
    /// A device, a pipe or an open descriptor, which is written into.
    Into(PathBuf),
}

impl Target {
    /// Resolves `path`, following symbolic links.
    pub(crate) fn of(path: &Path) -> io::Result<Target> {
        let mut place = path.to_path_buf();
        for _ in 0..MOST_LINKS {
            let name = place.file_name().ok_or_else(|| invalid("the path names no file"))?.to_os_string();
            // Resolved in each round, because `..` in a link starts at the folder that really holds
            // it.
            let folder = folder_of(&place).canonicalize()?;
            place = folder.join(name);
            // Links to open descriptors have no path behind them, and `/proc` holds nothing that
            // could be replaced.
            if ["/proc", "/dev/fd"].iter().any(|system| place.starts_with(system)) {
                return Ok(Target::Into(place));
            }
            match place.symlink_metadata() {
                Err(problem) if problem.kind() == io::ErrorKind::NotFound => return Ok(Target::File(place)),
                Err(problem) => return Err(problem),
                // `join` replaces the folder if the link is absolute.
                Ok(found) if found.is_symlink() => place = folder.join(std::fs::read_link(&place)?),
                Ok(found) if found.is_dir() => {
                    return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
                }
                Ok(found) if found.is_file() => return Ok(Target::File(place)),
                Ok(_) => return Ok(Target::Into(place)),
            }
        }
        Err(invalid("too many levels of symbolic links"))
    }

    /// Starts an output for this target. [`Target::put`] publishes it.
    pub(crate) fn begin(&self) -> io::Result<PendingFile> {
        match self {
            Target::File(path) => PendingFile::in_folder(folder_of(path)),
            Target::Into(path) if path == Path::new(NULL_DEVICE) => {
                Ok(PendingFile::Nothing(Length::default()))
            }
            Target::Into(_) => {
                // The complete output is buffered in a file first, because a device or pipe cannot
                // be rolled back.
                let folder = std::env::temp_dir();
                unfinished(&folder).map(PendingFile::File).map_err(|problem| {
                    let (kind, shown) = (problem.kind(), folder.display());
                    io::Error::new(kind, format!("no temporary file in {shown} (TMPDIR): {problem}"))
                })
            }
        }
    }

    /// Publishes a complete output. A regular file appears atomically under its name, with the mode
    /// of the file it replaces.
    pub(crate) fn put(&self, draft: PendingFile) -> io::Result<File> {
        match (self, draft) {
            (Target::File(path), PendingFile::File(file)) => {
                // The content must be on disk before the name points to it.
                file.as_file().sync_all()?;
                // Before the rename, so that the name never shows the file with another mode.
                if let Some(mode) = path.symlink_metadata().ok().filter(Metadata::is_file) {
                    keep_mode(file.as_file(), &mode)?;
                }
                file.persist(path).map_err(|problem| problem.error)
            }
            (Target::File(path) | Target::Into(path), PendingFile::Nothing(_)) => open_sink(path),
            (Target::Into(path), PendingFile::File(mut file)) => {
                let mut sink = open_sink(path)?;
                file.as_file_mut().seek(SeekFrom::Start(0))?;
                io::copy(file.as_file_mut(), &mut sink)?;
                sink.flush()?;
                Ok(sink)
            }
        }
    }
}

/// An output that is not published yet.
#[derive(Debug)]
pub(crate) enum PendingFile {
    /// A file under a temporary name.
    File(NamedTempFile),
    /// A discarded output. Length and position are tracked, because writers seek.
    Nothing(Length),
}

/// The length of a discarded output, and the position of its next byte.
#[derive(Debug, Default)]
pub(crate) struct Length {
    bytes: u64,
    place: u64,
}

impl PendingFile {
    /// Creates a draft in a folder, after removing what dead processes left there.
    pub(crate) fn in_folder(folder: &Path) -> io::Result<PendingFile> {
        forget_unfinished(folder);
        unfinished(folder).map(PendingFile::File)
    }

    fn path(&self) -> &Path {
        match self {
            PendingFile::File(file) => file.path(),
            PendingFile::Nothing(_) => Path::new(NULL_DEVICE),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            PendingFile::File(file) => file.as_file().sync_all(),
            PendingFile::Nothing(_) => Ok(()),
        }
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            PendingFile::File(file) => file.write(bytes),
            PendingFile::Nothing(length) => {
                length.place += bytes.len() as u64;
                // A write after a seek back does not extend the output.
                length.bytes = length.bytes.max(length.place);
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            PendingFile::File(file) => file.flush(),
            PendingFile::Nothing(_) => Ok(()),
        }
    }
}

impl Seek for PendingFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let length = match self {
            PendingFile::File(file) => return file.seek(to),
            PendingFile::Nothing(length) => length,
        };
        let place = match to {
            SeekFrom::Start(place) => Some(place),
            SeekFrom::End(more) => length.bytes.checked_add_signed(more),
            SeekFrom::Current(more) => length.place.checked_add_signed(more),
        };
        length.place = place.ok_or_else(|| invalid("a seek to before the first byte"))?;
        Ok(length.place)
    }
}

/// An output being written. If it is dropped before [`publish`](Complete::publish), nothing is
/// left.
///
/// ```
/// use std::io::Write;
/// use ort_core::files::NewFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("answers");
/// let mut file = NewFile::create(&path)?;
/// file.write_all(b"42")?;
/// assert!(!path.exists());
/// file.complete()?.publish()?;
/// assert_eq!(std::fs::read(&path)?, b"42");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct NewFile {
    file: BufWriter<PendingFile>,
    target: Target,
}

impl NewFile {
    /// Starts the file that `path` names, following symbolic links.
    ///
    /// # Errors
    ///
    /// The folder is missing or not writable, or `path` is a folder.
    pub fn create(path: &Path) -> io::Result<NewFile> {
        NewFile::at(Target::of(path)?)
    }

    /// Starts a file in `folder`. A symbolic link of that name is replaced, not followed, so
    /// nothing is written outside the folder.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create), or `name` is not a plain file name.
    pub fn create_in(folder: &Path, name: &str) -> io::Result<NewFile> {
        if !is_plain_name(name) {
            return Err(invalid("it is not a plain file name"));
        }
        NewFile::at(Target::File(folder.join(name)))
    }

    fn at(target: Target) -> io::Result<NewFile> {
        Ok(NewFile { file: BufWriter::with_capacity(1 << 16, target.begin()?), target })
    }

    /// Returns the path of the unfinished file, for writers that take a path. Nothing may have been
    /// written through `self` before.
    pub fn unfinished_path(&self) -> &Path {
        self.file.get_ref().path()
    }

    /// Ends the writing. On success the whole output is on the disk.
    ///
    /// # Errors
    ///
    /// The buffered bytes cannot be written: the disk is full, or a quota or a limit is exceeded.
    pub fn complete(self) -> io::Result<Complete> {
        let draft = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        draft.sync()?;
        Ok(Complete { draft, target: self.target })
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for NewFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// An output that is complete but not yet under its name. If it is dropped, nothing is left.
#[derive(Debug)]
pub struct Complete {
    draft: PendingFile,
    target: Target,
}

impl Complete {
    /// Publishes the output under its name.
    ///
    /// # Errors
    ///
    /// The target cannot be replaced or written into. A regular file then is unchanged.
    pub fn publish(self) -> io::Result<()> {
        self.target.put(self.draft).map(drop)
    }
}

/// Publishes two files of which `main` refers to `data`.
///
/// The old data file is set aside first, and restored if `main` cannot be published. If the process
/// is killed between the renames, or publishing `data` fails, a main file without its data is left,
/// which is an error on loading. A main file with the data of another is never left.
///
/// # Errors
///
/// As [`Complete::publish`], or one of the targets is not a regular file.
pub fn publish_pair(main: Complete, data: Complete) -> io::Result<()> {
    let (Target::File(_), Target::File(place)) = (&main.target, &data.target) else {
        return Err(invalid("it is not a regular file, so it cannot have a data file beside it"));
    };
    let place = place.clone();
    let aside = set_aside(&place)?;
    match main.publish() {
        Ok(()) => data.publish(),
        Err(problem) => {
            aside.map_or(Ok(()), |old| old.persist(&place).map_err(|problem| problem.error))?;
            Err(problem)
        }
    }
}

/// Renames a file to a temporary name. The returned path deletes it when dropped.
fn set_aside(place: &Path) -> io::Result<Option<TempPath>> {
    if !place.is_file() {
        return Ok(None);
    }
    let aside = named(folder_of(place), REPLACED)?.into_temp_path();
    // The temporary file has reserved the name; the rename replaces it.
    std::fs::rename(place, &aside)?;
    Ok(Some(aside))
}

/// Writes the file that `path` names atomically.
///
/// # Errors
///
/// `fill` fails, or the file cannot be created, written or published.
pub fn write_whole<E: From<io::Error>>(
    path: &Path,
    fill: impl FnOnce(&mut NewFile) -> Result<(), E>,
) -> Result<(), E> {
    let mut file = NewFile::create(path)?;
    fill(&mut file)?;
    Ok(file.complete()?.publish()?)
}

/// Reads a regular file of at most `most` bytes. The allocation is bounded by the file's actual
/// size, and failing to allocate is an error, not an abort.
///
/// # Errors
///
/// The file does not exist, is a pipe, device or folder, or is larger.
pub fn read_bounded(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let file = ort_alloc::open_regular(path)?;
    let length = file.metadata()?.len();
    let too_large = |length: u64| {
        io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("the file has {length} bytes, expected at most {most}"),
        )
    };
    if length > most as u64 {
        return Err(too_large(length));
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // Read one byte beyond the limit to notice a file that grew since its length was read.
    let read = file.take((most as u64).saturating_add(1)).read_to_end(&mut bytes)?;
    if read > most { Err(too_large(read as u64)) } else { Ok(bytes) }
}

/// Reads a text file of at most `most` bytes; see [`read_bounded`].
///
/// # Errors
///
/// As [`read_bounded`], or the text is not UTF-8.
pub fn read_text(path: &Path, most: usize) -> io::Result<String> {
    String::from_utf8(read_bounded(path, most)?)
        .map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem.utf8_error()))
}

/// Returns whether `name` names a file in a folder and is not a path that leads elsewhere.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let first = parts.next();
    matches!(first, Some(std::path::Component::Normal(part)) if part == name)
        && parts.next().is_none()
        && !name.contains(['/', '\\', '\0'])
}

/// Creates a file under a temporary name and locks it. The lock shows other processes that it has a
/// writer.
pub(crate) fn unfinished(folder: &Path) -> io::Result<NamedTempFile> {
    let file = named(folder, UNFINISHED.1)?;
    // Not all file systems support locks, so a failure is not an error.
    if let Err(problem) = file.as_file().try_lock() {
        tracing::debug!(%problem, "an unfinished file is not locked");
    }
    Ok(file)
}

/// Creates a file under a temporary name, with the usual mode of new files.
fn named(folder: &Path, suffix: &str) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED.0).suffix(suffix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Temporary files are private by default. The process's umask still applies.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Returns whether a folder is due for a scan. If so, the scan counts as done now.
fn is_due(folder: &Path) -> bool {
    let now = Instant::now();
    let mut looked_through = LOOKED_THROUGH.lock();
    // Old entries are dropped, so that the table does not grow with each folder ever written to.
    looked_through.retain(|_, last| now.duration_since(*last) < LEFT_BEHIND);
    let is_due = !looked_through.contains_key(folder);
    if is_due {
        looked_through.insert(folder.to_path_buf(), now);
    }
    is_due
}

/// Removes what dead processes left in a folder.
fn forget_unfinished(folder: &Path) {
    if !is_due(folder) {
        return;
    }
    let now = SystemTime::now();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let age = || now.duration_since(entry.metadata().ok()?.modified().ok()?).ok();
        let is_own = name.starts_with(UNFINISHED.0) && name.ends_with(UNFINISHED.1);
        // Without an age (a time in the future) the file counts as young and stays.
        if !is_own || age().is_none_or(|age| age < LEFT_BEHIND) {
            continue;
        }
        // A live writer holds the lock, so a file that can be locked has none.
        let is_left = ort_alloc::open_regular(&path).is_ok_and(|file| file.try_lock().is_ok());
        if is_left && let Err(problem) = std::fs::remove_file(&path) {
            tracing::debug!(%problem, path = %path.display(), "an unfinished file stays");
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// Copies the mode of the replaced file to the new one.
#[cfg(unix)]
fn keep_mode(file: &File, replaced: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    // Not the set-user-ID bits: new content must not run with the rights of the old.
    let mode = replaced.permissions().mode() & 0o777;
    file.set_permissions(std::fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
fn keep_mode(_file: &File, _replaced: &Metadata) -> io::Result<()> {
    Ok(())
}

/// Opens a file that is written into. The process's own streams are duplicated, not reopened: a
/// reopened redirected stream would start at the beginning of its file.
#[cfg(unix)]
fn open_sink(path: &Path) -> io::Result<File> {
    use std::os::fd::AsFd;
    let own = |number: u32| {
        let place = format!("/proc/{}/fd/{number}", std::process::id());
        path == Path::new(&place) || path == Path::new(&format!("/dev/fd/{number}"))
    };
    if own(1) {
        return Ok(io::stdout().as_fd().try_clone_to_owned()?.into());
    }
    if own(2) {
        return Ok(io::stderr().as_fd().try_clone_to_owned()?.into());
    }
    OpenOptions::new().append(true).open(path)
}

#[cfg(not(unix))]
fn open_sink(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).open(path)
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn write(path: &Path, text: &str) -> io::Result<()> {
        write_whole(path, |file| file.write_all(text.as_bytes()))
    }

    fn read(path: impl AsRef<Path>) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn links_stay_and_what_they_lead_to_is_replaced() {
        let top = tempfile::tempdir().unwrap();
        let place = |name: &str| top.path().join(name);
        std::fs::create_dir(place("sub")).unwrap();
        std::fs::write(place("sub/old"), "old").unwrap();
        std::fs::set_permissions(place("sub/old"), std::fs::Permissions::from_mode(0o640)).unwrap();
        for (link, leads_to, file) in [
            ("relative", "sub/old", "sub/old"),
            ("twice", "relative", "sub/old"),
            ("dangling", "sub/new", "sub/new"),
        ] {
            symlink(leads_to, place(link)).unwrap();
            write(&place(link), link).unwrap();
            assert!(place(link).is_symlink(), "{link}");
            assert_eq!(read(place(file)), link);
        }
        assert_eq!(place("sub/old").metadata().unwrap().permissions().mode() & 0o777, 0o640);
        symlink("circle", place("circle")).unwrap();
        for name in ["circle", "sub", "nowhere/file", ".."] {
            assert!(write(&place(name), "x").is_err(), "{name}");
        }
        // A failed write leaves nothing behind.
        let left: Vec<_> =
            walk(top.path()).into_iter().filter(|name| name.ends_with(".unfinished")).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    fn walk(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .flat_map(|path| match path.is_dir() {
                true => walk(&path),
                false => vec![path.display().to_string()],
            })
            .collect()
    }

    #[test]
    fn devices_and_pipes_are_written_into() {
        write(Path::new("/dev/null"), "x").unwrap();
        assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
        assert_eq!(write(Path::new("/dev/full"), "x").unwrap_err().kind(), io::ErrorKind::StorageFull);
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || read(pipe)
        });
        write(&pipe, "through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
    }

    #[test]
    fn a_file_in_a_folder_never_leads_out_of_it() {
        let top = tempfile::tempdir().unwrap();
        let (folder, outside) = (top.path().join("folder"), top.path().join("outside"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&outside, "kept").unwrap();
        symlink("../outside", folder.join("link")).unwrap();
        let mut file = NewFile::create_in(&folder, "link").unwrap();
        file.write_all(b"new").unwrap();
        file.complete().unwrap().publish().unwrap();
        assert_eq!((read(&outside), read(folder.join("link"))), ("kept".into(), "new".into()));
        for name in ["../outside", "/etc/hosts", "", ".", "..", "a/b", "a/", "a\\b"] {
            assert!(NewFile::create_in(&folder, name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_next_output_removes_what_ended_processes_left_in_its_folder() {
        let top = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - 2 * LEFT_BEHIND;
        let names =
            [".ort-left.unfinished", ".ort-written.unfinished", ".ort-aside.replaced", "mine.unfinished"];
        let files = names.map(|name| File::create(top.path().join(name)).unwrap());
        files.iter().for_each(|file| file.set_modified(old).unwrap());
        files[1].lock().unwrap();
        write(&top.path().join("new"), "x").unwrap();
        for (name, stays) in names.into_iter().zip([false, true, true, true]) {
            assert_eq!(top.path().join(name).exists(), stays, "{name}");
        }
    }

    /// A scan of a folder with 200,000 files takes more than 100 ms.
    #[test]
    fn a_folder_is_not_looked_through_for_each_output() {
        let top = tempfile::tempdir().unwrap();
        write(&top.path().join("one"), "x").unwrap();
        let left = top.path().join(".ort-left.unfinished");
        File::create(&left).unwrap().set_modified(SystemTime::now() - 2 * LEFT_BEHIND).unwrap();
        write(&top.path().join("other"), "x").unwrap();
        assert!(left.exists(), "it was looked for again");
    }

    #[test]
    fn places_in_what_is_not_kept_are_those_of_a_file() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let mut drafts =
            [PendingFile::in_folder(folder.path())?, Target::of(Path::new("/dev/null"))?.begin()?];
        assert!(matches!(drafts[1], PendingFile::Nothing(_)));
        let mut places = Vec::new();
        for draft in &mut drafts {
            draft.write_all(b"0123456789")?;
            let seeks = [SeekFrom::Start(3), SeekFrom::Current(-1), SeekFrom::End(-4), SeekFrom::Current(9)];
            let mut found = seeks.into_iter().map(|to| draft.seek(to)).collect::<io::Result<Vec<_>>>()?;
            draft.write_all(b"x")?;
            found.push(draft.seek(SeekFrom::End(0))?);
            assert!(draft.seek(SeekFrom::Current(-100)).is_err());
            found.push(draft.stream_position()?);
            places.push(found);
        }
        assert_eq!(places[0], [3, 2, 6, 15, 16, 16]);
        assert_eq!(places[0], places[1]);
        Ok(())
    }

    #[test]
    fn a_pair_is_replaced_as_a_whole() {
        let top = tempfile::tempdir().unwrap();
        let (main, data) = (top.path().join("main"), top.path().join("data"));
        let write = |path: &Path, text: &str| {
            let mut file = NewFile::create(path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file.complete().unwrap()
        };
        publish_pair(write(&main, "a"), write(&data, "b")).unwrap();
        publish_pair(write(&main, "c"), write(&data, "d")).unwrap();
        assert_eq!((read(&main), read(&data)), ("c".into(), "d".into()));
        // A folder that has taken the place of the file cannot be replaced.
        let (new_main, new_data) = (write(&main, "e"), write(&data, "f"));
        std::fs::remove_file(&main).unwrap();
        std::fs::create_dir(&main).unwrap();
        assert!(publish_pair(new_main, new_data).is_err());
        assert_eq!(read(&data), "d");
        let device = NewFile::create(Path::new("/dev/null")).unwrap().complete().unwrap();
        assert!(publish_pair(device, write(&data, "g")).is_err());
        assert_eq!(read(&data), "d");
        assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn what_has_no_end_is_not_read() {
        for path in ["/dev/zero", "/dev", "/proc/self/fd"] {
            assert!(read_bounded(Path::new(path), 1 << 20).is_err(), "{path}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read_bounded(&path, 1 << 20).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
