//! What a model's files hold, as a hash, and how not to read them each time.
//!
//! Hashing a file takes about as long as reading it. So a folder of the cache also keeps stamps, as the index of a version control system does:
//! for a file of these numbers (device, inode, length, times of the last changes) the hash is this. A file that changed in the two seconds before it
//! was opened gets no stamp, as it may change again without its times telling.

use std::fs::{File, Metadata};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use blake3::{Hash, Hasher};
use bytes::Bytes;
use ort_alloc::MappedFile;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::entry::{UNFINISHED, readable_by_others};

/// Bytes that are hashed at a time.
const PART: usize = 8 << 20;

/// One of the files that a model was loaded from.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// How the model names it; nothing for the model's own file.
    name: String,
    /// None where only the hash is left.
    bytes: Option<Bytes>,
    mapping: Option<MappedFile>,
    stamp: Option<Stamp>,
    hash: Arc<OnceLock<Hash>>,
}

impl Content {
    pub(crate) fn new(name: String, bytes: Bytes, mapping: Option<MappedFile>, stamp: Option<Stamp>) -> Content {
        Content { name, bytes: Some(bytes), mapping, stamp, hash: Arc::default() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The bytes, unless nothing but the hash is left of them.
    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        self.bytes.as_ref()
    }

    /// Lets go of bytes in memory that nothing else holds, for their hash.
    pub(crate) fn forget_unshared(&mut self) {
        if self.mapping.is_none() && self.bytes.as_ref().is_some_and(Bytes::is_unique) {
            self.hash(None);
            self.bytes = None;
        }
    }

    /// The hash of the bytes; `stamps` is the folder where known hashes are kept.
    fn hash(&self, stamps: Option<&Path>) -> Hash {
        *self.hash.get_or_init(|| {
            let place = stamps.zip(self.stamp.as_ref()).map(|(folder, stamp)| (folder, stamp.line()));
            if let Some(known) = place.as_ref().and_then(|(folder, line)| look_up(folder, line)) {
                return known;
            }
            let hash = hash_bytes(self.bytes.as_deref().unwrap_or_default(), self.mapping.as_ref());
            if let Some((folder, line)) = place.filter(|_| self.stamp.as_ref().is_some_and(|stamp| stamp.settled))
                && let Err(problem) = keep(folder, &line, hash)
            {
                tracing::debug!(%problem, "the hash of the model's file is not kept");
            }
            hash
        })
    }
}

/// The hash of all files of a model; none for a graph that was built by hand.
pub(crate) fn hash_of(contents: &[Content], stamps: Option<&Path>) -> Option<Hash> {
    let mut hasher = Hasher::new();
    for content in contents {
        hasher.update(&(content.name.len() as u64).to_le_bytes());
        hasher.update(content.name.as_bytes());
        hasher.update(content.hash(stamps).as_bytes());
    }
    (!contents.is_empty()).then(|| hasher.finalize())
}

/// The hash of the hashes of parts, which several threads take. Pages of a mapping that were read for it go.
fn hash_bytes(bytes: &[u8], mapping: Option<&MappedFile>) -> Hash {
    let parts: Vec<&[u8]> = bytes.chunks(PART).collect();
    let hashes = Mutex::new(vec![None; parts.len()]);
    let next = AtomicUsize::new(0);
    let work = || loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(part) = parts.get(index) else { break };
        let hash = blake3::hash(part);
        hashes.lock().iter_mut().skip(index).take(1).for_each(|place| *place = Some(hash));
        if let Some((mapping, range)) = mapping.and_then(|mapping| Some((mapping, mapping.range_of(part)?)))
            && let Err(problem) = mapping.release(range)
        {
            tracing::debug!("pages of the model's file stay resident: {problem}");
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(parts.len());
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let mut hasher = Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    for hash in hashes.into_inner().iter().flatten() {
        hasher.update(hash.as_bytes());
    }
    hasher.finalize()
}

/// Which file it is and when it was changed last, as the system said when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    numbers: [i128; 6],
    /// Whether it had not changed for a while.
    settled: bool,
}

impl Stamp {
    /// Nanoseconds for which a file must not have changed.
    #[cfg(unix)]
    const SETTLED: i128 = 2_000_000_000;

    /// Of an open file; none where the system does not number its files.
    pub(crate) fn of(file: &File) -> Option<Stamp> {
        Stamp::of_metadata(&file.metadata().ok()?)
    }

    #[cfg(unix)]
    fn of_metadata(metadata: &Metadata) -> Option<Stamp> {
        use std::os::unix::fs::MetadataExt;
        let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        let changed = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
        let now = i128::try_from(now.as_nanos()).ok()?;
        let file = [metadata.dev(), metadata.ino(), metadata.len()].map(i128::from);
        let [device, inode, len] = file;
        let numbers = [device, inode, len, modified, changed, i128::from(PART as u64)];
        Some(Stamp { numbers, settled: modified.max(changed).saturating_add(Stamp::SETTLED) <= now })
    }

    #[cfg(not(unix))]
    fn of_metadata(_metadata: &Metadata) -> Option<Stamp> {
        None
    }

    /// What the file of a stamp begins with.
    fn line(&self) -> String {
        let numbers: Vec<String> = self.numbers.iter().map(i128::to_string).collect();
        format!("stamp {}", numbers.join(" "))
    }
}

/// The file that has the stamp of a file: named by device and inode, so that there is one for each.
fn stamp_file(folder: &Path, line: &str) -> std::path::PathBuf {
    let file: Vec<&str> = line.split(' ').take(3).collect();
    folder.join(format!("{:016x}.stamp", xxh3_64(file.join(" ").as_bytes())))
}

fn look_up(folder: &Path, line: &str) -> Option<Hash> {
    let path = stamp_file(folder, line);
    // One line and a checksum: what is longer is none.
    let text = std::fs::metadata(&path).ok().filter(|found| found.len() < 1024);
    let text = text.and_then(|_| std::fs::read_to_string(&path).ok())?;
    let (stamp, checksum) = text.trim_end().rsplit_once(' ')?;
    let hash = stamp.strip_prefix(line)?.strip_prefix(' ')?;
    (format!("{:016x}", xxh3_64(stamp.as_bytes())) == checksum).then(|| Hash::from_hex(hash).ok())?
}

fn keep(folder: &Path, line: &str, hash: Hash) -> std::io::Result<()> {
    let mut file = readable_by_others(tempfile::Builder::new().suffix(UNFINISHED)).tempfile_in(folder)?;
    let stamp = format!("{line} {}", hash.to_hex());
    writeln!(file, "{stamp} {:016x}", xxh3_64(stamp.as_bytes()))?;
    file.persist(stamp_file(folder, line))?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn content(folder: &Path, settled: bool) -> Content {
        let file = File::open(folder.join("model")).unwrap();
        let stamp = Stamp { settled, ..Stamp::of(&file).unwrap() };
        let mapping = MappedFile::open_file(file).unwrap();
        Content::new(String::new(), mapping.bytes(), Some(mapping), Some(stamp))
    }

    fn stamps(folder: &Path) -> Vec<std::path::PathBuf> {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|ending| ending == "stamp")).collect()
    }

    #[test]
    #[cfg(unix)]
    fn stamps_spare_the_hash_and_are_only_taken_for_files_at_rest() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::write(folder.join("model"), vec![7; 3 * PART / 2]).unwrap();
        let hash = content(folder, false).hash(Some(folder));
        assert!(stamps(folder).is_empty(), "the file may still change");
        assert_eq!(content(folder, true).hash(Some(folder)), hash);
        let [stamp] = <[_; 1]>::try_from(stamps(folder)).unwrap();
        // A stamp of another hash shows that it is taken.
        let line = content(folder, true).stamp.unwrap().line();
        let other = blake3::hash(b"other");
        keep(folder, &line, other).unwrap();
        assert_eq!(content(folder, true).hash(Some(folder)), other);
        // Damaged stamps are not: any byte flipped, cut anywhere.
        let text = std::fs::read(&stamp).unwrap();
        for index in 0..text.len() - 1 {
            let mut damaged = text.clone();
            damaged[index] ^= 1;
            std::fs::write(&stamp, &damaged).unwrap();
            assert_ne!(look_up(folder, &line), Some(other), "byte {index}");
            std::fs::write(&stamp, &text[..index]).unwrap();
            assert_eq!(look_up(folder, &line), None, "{index} bytes");
        }
        // Another file under the name, or other times, ask for another stamp.
        std::fs::write(&stamp, &text).unwrap();
        std::fs::write(folder.join("model"), vec![8; 3 * PART / 2]).unwrap();
        assert_ne!(content(folder, true).hash(Some(folder)), other);
    }

    #[test]
    fn every_byte_length_and_name_counts() {
        let of = |files: &[(&str, Vec<u8>)]| {
            let contents = files.iter().map(|(name, bytes)| {
                Content::new((*name).to_owned(), bytes.clone().into(), None, None)
            });
            hash_of(&contents.collect::<Vec<_>>(), None)
        };
        let mut all = vec![
            of(&[("", vec![0; PART])]),
            of(&[("", vec![0; PART + 1])]),
            of(&[("", vec![0; PART]), ("a", vec![1])]),
            of(&[("", vec![0; PART]), ("b", vec![1])]),
            of(&[("", vec![0; PART]), ("a", vec![2])]),
            of(&[("", vec![])]),
        ];
        let mut last = vec![0; PART + 1];
        last[PART] = 1;
        all.push(of(&[("", last)]));
        let count = all.len();
        assert!(all.iter().all(Option::is_some) && of(&[]).is_none());
        all.sort_by_key(|hash| hash.map(|hash| *hash.as_bytes()));
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn bytes_that_nothing_else_holds_go() {
        let bytes = Bytes::from(vec![1, 2, 3]);
        let mut shared = Content::new(String::new(), bytes.clone(), None, None);
        shared.forget_unshared();
        assert!(shared.bytes().is_some());
        let expected = hash_of(&[shared], None);
        let mut alone = Content::new(String::new(), bytes, None, None);
        alone.forget_unshared();
        assert!(alone.bytes().is_none());
        assert_eq!(hash_of(&[alone], None), expected);
    }
}
