//! What a model's files hold, as a hash, and how not to read them each time.
//!
//! Hashing a file takes about as long as reading it. So a folder of the cache also keeps stamps, as the index of a version control system does:
//! for a file of these numbers (device, inode, length, times of the last changes) the hash is this. A file that changed in the two seconds before it
//! was opened gets no stamp, as it may change again without its times telling.

use std::fs::{File, Metadata};
use std::io::Write;
use std::path::{Path, PathBuf};
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
    identity: Identity,
    hash: Arc<OnceLock<Hash>>,
}

impl Content {
    pub(crate) fn new(
        name: String,
        bytes: Bytes,
        mapping: Option<MappedFile>,
        identity: Identity,
    ) -> Content {
        Content { name, bytes: Some(bytes), mapping, identity, hash: Arc::default() }
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
    pub(crate) fn hash(&self, stamps: Option<&Path>) -> Hash {
        *self.hash.get_or_init(|| {
            let compute = || hash_bytes(self.bytes.as_deref().unwrap_or_default(), self.mapping.as_ref());
            match (&self.identity, stamps) {
                (Identity::Hash(hash), _) => *hash,
                (Identity::Stamp(stamp), Some(folder)) => stamp.look_up(folder).unwrap_or_else(|| {
                    let hash = compute();
                    if stamp.settled
                        && let Err(problem) = stamp.keep(folder, hash)
                    {
                        tracing::debug!(%problem, "the hash of the model's file is not kept");
                    }
                    hash
                }),
                _ => compute(),
            }
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

/// What is known of bytes before they are read.
#[derive(Clone, Debug, Default)]
pub(crate) enum Identity {
    #[default]
    Unknown,
    /// They are those of this file.
    Stamp(Stamp),
    /// Their hash, from a file that says it of a part of itself.
    Hash(Hash),
}

impl Identity {
    /// Of an open file.
    pub(crate) fn of(file: &File) -> Identity {
        let stamp = file.metadata().ok().and_then(|metadata| Stamp::of(&metadata));
        stamp.map_or(Identity::Unknown, Identity::Stamp)
    }
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

    /// None where the system does not number its files.
    #[cfg(unix)]
    fn of(metadata: &Metadata) -> Option<Stamp> {
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
    fn of(_metadata: &Metadata) -> Option<Stamp> {
        None
    }

    /// What its file begins with.
    fn line(&self) -> String {
        let numbers: Vec<String> = self.numbers.iter().map(i128::to_string).collect();
        format!("stamp {}", numbers.join(" "))
    }

    /// Its file: named by device and inode, so that each file has one.
    fn place(&self, folder: &Path) -> PathBuf {
        let [device, inode, ..] = self.numbers;
        folder.join(format!("{:016x}.stamp", xxh3_64(format!("{device} {inode}").as_bytes())))
    }

    /// The hash that is kept for it.
    fn look_up(&self, folder: &Path) -> Option<Hash> {
        let path = self.place(folder);
        // One line and a checksum: what is longer is none.
        let text = std::fs::metadata(&path).ok().filter(|found| found.len() < 1024);
        let text = text.and_then(|_| std::fs::read_to_string(&path).ok())?;
        let (stamp, checksum) = text.trim_end().rsplit_once(' ')?;
        let hash = stamp.strip_prefix(&self.line())?.strip_prefix(' ')?;
        (format!("{:016x}", xxh3_64(stamp.as_bytes())) == checksum).then(|| Hash::from_hex(hash).ok())?
    }

    fn keep(&self, folder: &Path, hash: Hash) -> std::io::Result<()> {
        let mut file = readable_by_others(tempfile::Builder::new().suffix(UNFINISHED)).tempfile_in(folder)?;
        let stamp = format!("{} {}", self.line(), hash.to_hex());
        writeln!(file, "{stamp} {:016x}", xxh3_64(stamp.as_bytes()))?;
        file.persist(self.place(folder))?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn content(folder: &Path, settled: bool) -> Content {
        let file = File::open(folder.join("model")).unwrap();
        let stamp = Stamp { settled, ..Stamp::of(&file.metadata().unwrap()).unwrap() };
        let mapping = MappedFile::open_file(file).unwrap();
        Content::new(String::new(), mapping.bytes(), Some(mapping), Identity::Stamp(stamp))
    }

    fn stamps(folder: &Path) -> Vec<PathBuf> {
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
        let of_file = Stamp::of(&std::fs::metadata(folder.join("model")).unwrap()).unwrap();
        let other = blake3::hash(b"other");
        of_file.keep(folder, other).unwrap();
        assert_eq!(content(folder, true).hash(Some(folder)), other);
        // Damaged stamps are not: any byte flipped, cut anywhere.
        let text = std::fs::read(&stamp).unwrap();
        for index in 0..text.len() - 1 {
            let mut damaged = text.clone();
            damaged[index] ^= 1;
            std::fs::write(&stamp, &damaged).unwrap();
            assert_ne!(of_file.look_up(folder), Some(other), "byte {index}");
            std::fs::write(&stamp, &text[..index]).unwrap();
            assert_eq!(of_file.look_up(folder), None, "{index} bytes");
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
                Content::new((*name).to_owned(), bytes.clone().into(), None, Identity::Unknown)
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
        let mut shared = Content::new(String::new(), bytes.clone(), None, Identity::Unknown);
        shared.forget_unshared();
        assert!(shared.bytes().is_some());
        let expected = hash_of(&[shared], None);
        let mut alone = Content::new(String::new(), bytes, None, Identity::Unknown);
        alone.forget_unshared();
        assert!(alone.bytes().is_none());
        assert_eq!(hash_of(&[alone], None), expected);
    }
}
