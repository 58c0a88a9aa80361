//! Cache keys: what an entry depends on, and the folder in which the key finds it.

use std::path::{Path, PathBuf};

use ort_alloc::{MappedFile, open_regular};

use super::entry::{Entry, EntryWriter, Reading, Refusal};
use crate::{Result, error};

/// Everything that packed weights and folded constants depend on, as lines of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// The part that names the entry's file.
    pub(crate) lasting: String,
    /// The code versions. An entry of another version is overwritten.
    pub(crate) code: String,
}

impl Key {
    /// Returns the complete key, as stored in an entry.
    pub(crate) fn text(&self) -> String {
        format!("{}{}", self.lasting, self.code)
    }

    /// Refuses an entry that was made for another key; the message names the difference.
    pub(crate) fn check(&self, entry: &Entry) -> Result<(), Refusal> {
        self.check_text(entry.key())
    }

    /// Refuses another key; the message names the first line that differs.
    pub(super) fn check_text(&self, other: &str) -> Result<(), Refusal> {
        let own = self.text();
        if other == own {
            return Ok(());
        }
        let mut lines = own.lines().zip(other.lines());
        Err(match lines.find(|(own, other)| own != other) {
            Some((own, other)) => {
                format!("it was compiled for '{}', expected '{}'", shown(other), shown(own))
            }
            None => "it was compiled with other settings".to_owned(),
        })
    }

    /// Returns the name of the key's file of a kind.
    pub(super) fn file_name(&self, kind: &str) -> String {
        // 128 bits of the hash suffice as a name, because the entry contains the whole key.
        let hash = blake3::hash(self.lasting.as_bytes()).to_hex();
        format!("{}.{kind}", hash.as_str().get(..32).unwrap_or_default())
    }
}

/// Shortens and escapes a line of a key for a message.
fn shown(line: &str) -> String {
    const MOST: usize = 200;
    let escaped = line.chars().take(MOST).flat_map(char::escape_debug);
    escaped.chain(line.chars().nth(MOST).map(|_| '…')).collect()
}

/// A folder of cache entries.
#[derive(Clone, Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Opens a folder, creating it if it is missing.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        const HELP: &str = "give a folder that exists or can be created";
        let made = std::fs::create_dir_all(path);
        if path.is_dir() {
            return Ok(Folder(path.to_path_buf()));
        }
        let shown = path.display();
        let problem = match made.err().map_or("it has no name".to_owned(), |problem| problem.to_string()) {
            _ if path.exists() => {
                error!(InvalidArgument, "the compiled cache '{shown}' is a file, expected a folder")
            }
            why => error!(NoSuchFile, "the folder '{shown}' of the compiled cache cannot be created: {why}"),
        };
        Err(problem.help(HELP))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a key's entry.
    pub(crate) fn place(&self, key: &Key) -> PathBuf {
        self.0.join(key.file_name("compiled"))
    }

    /// Returns the verified entry of a key, or `None` if there is no file.
    pub(crate) fn find(&self, key: &Key, reading: Reading) -> Result<Option<Entry>, Refusal> {
        let file = match open_regular(&self.place(key)) {
            Ok(file) => file,
            Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(problem) => return Err(problem.to_string()),
        };
        let entry = Entry::open(MappedFile::open_file(file).map_err(|problem| problem.to_string())?)?;
        // The key is compared first, because `verify` reads every page of the blobs.
        key.check(&entry)?;
        entry.verify(entry.sources()..entry.len(), reading)?;
        Ok(Some(entry))
    }

    /// Starts the entry of a key, after removing what dead processes left in the folder.
    pub(crate) fn begin(&self, key: &Key) -> std::io::Result<EntryWriter> {
        EntryWriter::new(&self.0, key.text())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::*;
    use crate::files::LEFT_BEHIND;

    const ONE: Reading = Reading { threads: 1, until: None };

    fn key(lasting: &str, code: &str) -> Key {
        Key { lasting: format!("{lasting}\n"), code: format!("{code}\n") }
    }

    #[test]
    fn an_entry_of_other_code_is_refused_and_replaced() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::open(&place.path().join("a/b")).unwrap();
        let (old, new) = (key("model", "code 1"), key("model", "code 2"));
        assert!(folder.find(&old, ONE).unwrap().is_none());
        let write = |key: &Key| folder.begin(key).unwrap().finish(&folder.place(key)).map(drop).unwrap();
        write(&old);
        assert!(folder.find(&old, ONE).unwrap().is_some());
        assert_eq!(folder.find(&new, ONE).unwrap_err(), "it was compiled for 'code 1', expected 'code 2'");
        write(&new);
        assert!(folder.find(&new, ONE).unwrap().is_some() && folder.find(&old, ONE).is_err());
        assert!(folder.find(&key("other model", "code 2"), ONE).unwrap().is_none());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_line_of_another_key_is_shown_short_and_without_control_characters() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::open(place.path()).unwrap();
        let other = key("model", &format!("code \u{1b}[2J{}", "x".repeat(1000)));
        folder.begin(&other).unwrap().finish(&folder.place(&other)).unwrap();
        let refusal = folder.find(&key("model", "code 1"), ONE).unwrap_err();
        assert!(
            refusal.contains("'code \\u{1b}[2Jxxx") && refusal.contains("…', expected 'code 1'"),
            "{refusal}"
        );
        assert!(refusal.chars().count() < 300 && !refusal.contains('\u{1b}'));
    }

    #[test]
    fn what_ended_processes_left_goes_and_what_others_write_stays() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::open(place.path()).unwrap();
        let old = SystemTime::now() - 2 * LEFT_BEHIND;
        let made = |name: &str| {
            let file = File::create(place.path().join(name)).unwrap();
            file.set_modified(old).unwrap();
            file
        };
        drop(made(".ort-left.unfinished"));
        drop(made("something.else"));
        drop(made("another.unfinished"));
        drop(made(".ort-something"));
        let written = made(".ort-written.unfinished");
        written.lock().unwrap();
        drop(File::create(place.path().join(".ort-young.unfinished")).unwrap());
        drop(folder.begin(&key("model", "code")).unwrap());
        let mut names: Vec<_> =
            std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let stay = [".ort-something", ".ort-written.unfinished", ".ort-young.unfinished"];
        assert_eq!(names, [&stay[..], &["another.unfinished", "something.else"]].concat());
    }
}
