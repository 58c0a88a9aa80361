//! What an entry is made for, and the folder where it is found by that.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ort_alloc::MappedFile;

use super::entry::{Entry, EntryWriter, Refusal, UNFINISHED};
use crate::{Result, error};

/// Files without a writer that were changed longer ago than this are what a process left that was ended.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// All that packed weights and folded constants depend on, as lines of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// What gives an entry its name.
    pub(crate) lasting: String,
    /// The versions of the code: a new one takes the place of the entry of another.
    pub(crate) code: String,
}

impl Key {
    /// The whole key as an entry has it.
    pub(crate) fn text(&self) -> String {
        format!("{}{}", self.lasting, self.code)
    }

    /// The name of its entry.
    fn file_name(&self) -> String {
        let hash = blake3::hash(self.lasting.as_bytes()).to_hex();
        format!("{}.compiled", hash.as_str().get(..32).unwrap_or_default())
    }
}

/// A folder of entries.
#[derive(Clone, Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Opens a folder, which is made where there is none.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        const HELP: &str = "name a folder that exists, or one that can be made";
        let made = std::fs::create_dir_all(path);
        if path.is_dir() {
            return Ok(Folder(path.to_path_buf()));
        }
        let shown = path.display();
        let problem = match made {
            Err(problem) if !path.exists() => {
                error!(NoSuchFile, "the folder '{shown}' of the compiled cache cannot be made: {problem}")
            }
            _ => error!(InvalidArgument, "the compiled cache '{shown}' is a file, expected a folder"),
        };
        Err(problem.help(HELP))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Where the entry of a key is.
    pub(crate) fn place(&self, key: &Key) -> PathBuf {
        self.0.join(key.file_name())
    }

    /// The entry of a key, whole and undamaged; none where there is no file.
    pub(crate) fn find(&self, key: &Key, threads: usize) -> Result<Option<Entry>, Refusal> {
        let file = match File::open(self.place(key)) {
            Ok(file) => file,
            Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(problem) => return Err(problem.to_string()),
        };
        let entry = Entry::open(MappedFile::open_file(file).map_err(|problem| problem.to_string())?)?;
        if entry.key() != key.text() {
            return Err("it was made by other code".to_owned());
        }
        entry.verify(entry.sources(), threads)?;
        Ok(Some(entry))
    }

    /// Begins the entry of a key; what ended processes have left goes.
    pub(crate) fn begin(&self, key: &Key) -> std::io::Result<EntryWriter> {
        self.forget_unfinished();
        EntryWriter::new(&self.0, key.text())
    }

    fn forget_unfinished(&self) {
        let now = SystemTime::now();
        for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let path = entry.path();
            let age = || now.duration_since(entry.metadata().ok()?.modified().ok()?).ok();
            if !path.to_string_lossy().ends_with(UNFINISHED) || age().is_none_or(|age| age < LEFT_BEHIND) {
                continue;
            }
            // A writer holds the lock.
            let is_left = File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
            if is_left && let Err(problem) = std::fs::remove_file(&path) {
                tracing::debug!(%problem, path = %path.display(), "an unfinished entry stays");
            }
        }
    }
}
