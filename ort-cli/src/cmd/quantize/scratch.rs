//! A folder for models that are read or scored and not kept.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Prefix and suffix of the names of these folders.
const NAME: (&str, &str) = (".ort-", ".scratch");

/// The age from which a folder without an owner counts as left by a process that ended.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// A folder beside the output, on its disk, which goes with what is in it. If the process is killed
/// before, the next one with the same parent removes it.
pub(super) struct Scratch {
    folder: TempDir,
    /// Locked, which shows other processes that the folder is in use.
    _lock: Option<File>,
}

impl Scratch {
    /// Makes a folder beside this output.
    pub(super) fn beside(output: &Path) -> Result<Scratch> {
        let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        forget_left(parent);
        let folder = tempfile::Builder::new().prefix(NAME.0).suffix(NAME.1).tempdir_in(parent);
        let folder = folder.with_context(|| format!("cannot write a folder in {}", parent.display()))?;
        let lock = locked(folder.path());
        Ok(Scratch { folder, _lock: lock })
    }

    /// The path of a file in it.
    pub(super) fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Opens and locks a folder; `None` if another process has, or the system cannot.
fn locked(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    file.try_lock().ok()?;
    Some(file)
}

/// Removes the folders of processes that ended.
fn forget_left(parent: &Path) {
    let now = SystemTime::now();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let is_own = name.starts_with(NAME.0) && name.ends_with(NAME.1);
        // A link is not followed, and a time in the future counts as young.
        let is_folder = || entry.file_type().is_ok_and(|kind| kind.is_dir());
        let age = || now.duration_since(entry.metadata().ok()?.modified().ok()?).ok();
        if !is_own || !is_folder() || age().is_none_or(|age| age < LEFT_BEHIND) {
            continue;
        }
        if locked(&path).is_some()
            && let Err(problem) = std::fs::remove_dir_all(&path)
        {
            tracing::debug!(%problem, path = %path.display(), "a folder of an ended process stays");
        }
    }
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]
mod tests {
    use super::*;

    #[test]
    fn folders_of_ended_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let output = parent.path().join("model.onnx");
        let old = SystemTime::now() - 2 * LEFT_BEHIND;
        let names = [".ort-left.scratch", ".ort-used.scratch", ".ort-young.scratch", "mine.scratch"];
        for name in names {
            let folder = parent.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("model.onnx"), "x").unwrap();
            if !name.contains("young") {
                File::open(&folder).unwrap().set_modified(old).unwrap();
            }
        }
        std::os::unix::fs::symlink("mine.scratch", parent.path().join(".ort-link.scratch")).unwrap();
        let used = locked(&parent.path().join(names[1])).unwrap();
        let scratch = Scratch::beside(&output).unwrap();
        std::fs::write(scratch.file("model.onnx"), "x").unwrap();
        for (name, stays) in names.into_iter().zip([false, true, true, true]) {
            assert_eq!(parent.path().join(name).join("model.onnx").exists(), stays, "{name}");
        }
        drop((used, scratch));
        // The four that stay: one was locked, one young, one of another name, and the link.
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 4);
    }
}
