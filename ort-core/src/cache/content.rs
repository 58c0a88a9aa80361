//! Content hashes of model files, and stamps that save computing them again.
//!
//! Hashing a file takes about as long as reading it. So the cache folder also stores stamps, like
//! the index of a version control system. A stamp maps a file's metadata (device, inode, length,
//! modification and change times) plus a hash of a few sampled pages to the content hash. A file
//! modified less than two seconds before it was opened gets no stamp, because its times would not
//! show a second change. Neither does a file on a file system whose times prove nothing: in-memory,
//! network, FUSE or read-only ones. Read-only images built alike carry equal metadata for different
//! bytes.

use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use blake3::{Hash, Hasher};
use bytes::Bytes;
use ort_alloc::fork::get_or_init;
use ort_alloc::{MappedFile, open_regular};
use parking_lot::Mutex;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::entry::Reading;
use crate::files::unfinished;
use crate::{Result, error};

/// The bytes hashed at a time by one thread.
const PART: usize = 8 << 20;

/// Hashing this many bytes takes half a millisecond.
const FEW: usize = 1 << 20;

/// The content of one file that a model was loaded from.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// The name under which the model refers to the file; empty for the model itself.
    name: String,
    /// `None` if only the hash is left.
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

    /// Returns the content that stands for an edit of a graph.
    pub(crate) fn of_edit(name: &str) -> Content {
        // A null byte, which no location of a data file has: the names of files and of changes
        // differ.
        let identity = Identity::Hash(blake3::hash(name.as_bytes()));
        Content::new(format!("\0edit {name}"), Bytes::new(), None, identity)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes, unless only their hash is left.
    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        self.bytes.as_ref()
    }

    /// Frees bytes in memory that nothing else shares. The hash of a small file is kept, that of a
    /// large one only on request: it would slow down loading, and most sessions have no cache.
    pub(crate) fn forget_unshared(&mut self, keep_hash: bool, reading: Reading) -> Result<()> {
        // A mapping costs no memory of its own, and tensors that slice the bytes keep them alive
        // anyway.
        if self.mapping.is_some() || !self.bytes.as_ref().is_some_and(Bytes::is_unique) {
            return Ok(());
        }
        if keep_hash || self.bytes.as_ref().is_some_and(|bytes| bytes.len() <= FEW) {
            self.hash(None, reading)?;
        }
        self.bytes = None;
        Ok(())
    }

    /// Returns the hash of the bytes. `stamps` is the folder of known hashes.
    pub(crate) fn hash(&self, stamps: Option<&Path>, reading: Reading) -> Result<Hash> {
        if let Some(known) = self.hash.get() {
            return Ok(*known);
        }
        let hash = match (&self.identity, stamps) {
            (Identity::Hash(hash), _) => *hash,
            (Identity::Stamp(stamp), Some(folder)) if stamp.is_witness => {
                let bytes = self.bytes.as_deref().unwrap_or_default();
                match stamp.look_up(folder, bytes) {
                    Some(hash) => hash,
                    None => {
                        let hash = self.compute(reading)?;
                        // A folder that cannot be written costs a computation next time, not the
                        // load.
                        if let Err(problem) = stamp.keep(folder, bytes, hash) {
                            tracing::debug!(%problem, "the hash of the model's file is not kept");
                        }
                        hash
                    }
                }
            }
            _ => self.compute(reading)?,
        };
        Ok(*get_or_init(&self.hash, || hash))
    }

    /// Returns the hash that a compiled model claims for one of its files.
    pub(crate) fn said_hash(&self) -> Option<Hash> {
        match &self.identity {
            Identity::Hash(said) => Some(*said),
            Identity::Stamp(_) | Identity::Unknown => None,
        }
    }

    /// Returns whether the bytes have the claimed hash, if there is one.
    pub(crate) fn is_as_said(&self, reading: Reading) -> Result<bool> {
        self.said_hash().map_or(Ok(true), |said| Ok(self.compute(reading)? == said))
    }

    /// Returns whether the content was read from the file with this metadata.
    pub(crate) fn is_of(&self, metadata: &Metadata) -> bool {
        match (&self.identity, Stamp::of(metadata)) {
            (Identity::Stamp(own), Some(other)) => own.file() == other.file(),
            _ => false,
        }
    }

    fn compute(&self, reading: Reading) -> Result<Hash> {
        let bytes = self.bytes.as_deref().ok_or_else(|| {
            error!(InvalidArgument, "neither the bytes of the model nor their hash are in memory")
                .help("load it from its file, or have the source keep the hash (Source::keep_hash)")
        })?;
        hash_bytes(bytes, self.mapping.as_ref(), reading)
    }
}

/// Returns the hash of all files of a model, or `None` for a graph that was built in memory.
pub(crate) fn hash_of(contents: &[Content], stamps: Option<&Path>, reading: Reading) -> Result<Option<Hash>> {
    let mut hasher = Hasher::new();
    for content in contents {
        // The length separates name from hash: no two lists of files feed the same bytes.
        hasher.update(&(content.name.len() as u64).to_le_bytes());
        hasher.update(content.name.as_bytes());
        hasher.update(content.hash(stamps, reading)?.as_bytes());
    }
    Ok((!contents.is_empty()).then(|| hasher.finalize()))
}

/// Hashes parts on several threads, then hashes the part hashes. Pages of the mapping that were
/// read for it are released.
fn hash_bytes(bytes: &[u8], mapping: Option<&MappedFile>, reading: Reading) -> Result<Hash> {
    let parts: Vec<&[u8]> = bytes.chunks(PART).collect();
    let hashes = Mutex::new(vec![None; parts.len()]);
    let next = AtomicUsize::new(0);
    let work = || loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(part) = parts.get(index).filter(|_| !reading.is_late()) else { break };
        let hash = blake3::hash(part);
        hashes.lock().iter_mut().skip(index).take(1).for_each(|place| *place = Some(hash));
        if let Some((mapping, range)) = mapping.and_then(|mapping| Some((mapping, mapping.range_of(part)?)))
            && let Err(problem) = mapping.release(range)
        {
            tracing::debug!("pages of the model's file stay resident: {problem}");
        }
    };
    reading.on_threads(parts.len(), work);
    reading.check()?;
    let mut hasher = Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    // Only a worker that was late left a hash out, and then `check` has returned: time does not go
    // back.
    for hash in hashes.into_inner().iter().flatten() {
        hasher.update(hash.as_bytes());
    }
    Ok(hasher.finalize())
}

/// What is known about bytes before they are read.
#[derive(Clone, Debug, Default)]
pub(crate) enum Identity {
    #[default]
    Unknown,
    /// They come from the file with this stamp.
    Stamp(Stamp),
    /// They come from a compiled model, which claims this hash.
    Hash(Hash),
}

impl Identity {
    /// Returns the identity of an open file.
    pub(crate) fn of(file: &File) -> Identity {
        let Some(mut stamp) = file.metadata().ok().and_then(|metadata| Stamp::of(&metadata)) else {
            return Identity::Unknown;
        };
        stamp.is_witness &= tells_changes(file);
        Identity::Stamp(stamp)
    }
}

/// A file's identity and last change, as the system reported them when the file was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    numbers: [i128; 6],
    /// Whether a change would show: the file was not modified recently, and its file system
    /// maintains modification times.
    is_witness: bool,
}

impl Stamp {
    /// How long a file must have been unmodified, in nanoseconds.
    #[cfg(unix)]
    const SETTLED: i128 = 2_000_000_000;

    /// Returns `None` on systems without inode numbers.
    #[cfg(unix)]
    fn of(metadata: &Metadata) -> Option<Stamp> {
        use std::os::unix::fs::MetadataExt;
        // The change time counts as well, because programs can set the modification time but not
        // this one.
        let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        let changed = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
        let now = i128::try_from(now.as_nanos()).ok()?;
        let file = [metadata.dev(), metadata.ino(), metadata.len()].map(i128::from);
        let [device, inode, len] = file;
        // The part size is included because the hash depends on it.
        let numbers = [device, inode, len, modified, changed, i128::from(PART as u64)];
        let is_witness = modified.max(changed).saturating_add(Stamp::SETTLED) <= now;
        Some(Stamp { numbers, is_witness })
    }

    #[cfg(not(unix))]
    fn of(_metadata: &Metadata) -> Option<Stamp> {
        None
    }

    /// Returns the device and inode numbers.
    fn file(&self) -> [i128; 2] {
        let [device, inode, ..] = self.numbers;
        [device, inode]
    }

    /// Returns whether this is the same file with another length or modification time. Mode, owner
    /// and links may change.
    pub(super) fn was_changed_in_place(&self, found: &Metadata) -> bool {
        let Some(found) = Stamp::of(found) else { return false };
        // The change time is left out here: `chmod` and a new hard link alter it, but not the
        // bytes.
        let [_, _, len, modified, ..] = self.numbers;
        let [_, _, found_len, found_modified, ..] = found.numbers;
        self.file() == found.file() && (len, modified) != (found_len, found_modified)
    }

    /// Returns the text that a stamp file starts with.
    fn line(&self, bytes: &[u8]) -> String {
        let numbers: Vec<String> = self.numbers.iter().map(i128::to_string).collect();
        format!("stamp {} {:016x}", numbers.join(" "), sample(bytes))
    }

    /// Returns the path of the stamp file. It is named by device and inode, so each file has one
    /// stamp.
    fn place(&self, folder: &Path) -> PathBuf {
        let [device, inode] = self.file();
        folder.join(format!("{:016x}.stamp", xxh3_64(format!("{device} {inode}").as_bytes())))
    }

    /// Returns the stored hash, if the stamp still matches.
    fn look_up(&self, folder: &Path, bytes: &[u8]) -> Option<Hash> {
        // A stamp is one line with a checksum. A longer file fails the checksum.
        let mut text = String::new();
        open_regular(&self.place(folder)).ok()?.take(1024).read_to_string(&mut text).ok()?;
        let (stamp, checksum) = text.trim_end().rsplit_once(' ')?;
        let hash = stamp.strip_prefix(&self.line(bytes))?.strip_prefix(' ')?;
        // Without the checksum, a stamp cut short by a crash could give a hash of wrong digits.
        (format!("{:016x}", xxh3_64(stamp.as_bytes())) == checksum).then(|| Hash::from_hex(hash).ok())?
    }

    fn keep(&self, folder: &Path, bytes: &[u8], hash: Hash) -> std::io::Result<()> {
        let mut file = unfinished(folder)?;
        let stamp = format!("{} {}", self.line(bytes), hash.to_hex());
        writeln!(file, "{stamp} {:016x}", xxh3_64(stamp.as_bytes()))?;
        file.persist(self.place(folder))?;
        Ok(())
    }
}

/// Hashes a few evenly spaced pages. They tell two models apart even if the file times are wrong.
fn sample(bytes: &[u8]) -> u64 {
    const PAGES: usize = 64;
    const PAGE: usize = 4096;
    let mut hash = Xxh3::new();
    let distance = (bytes.len() / PAGES).max(PAGE);
    bytes.chunks(distance).for_each(|part| hash.update(part.get(..PAGE).unwrap_or(part)));
    hash.digest()
}

/// Returns whether the file's metadata reliably shows a change. That holds on writable file systems
/// of local disks. Images built alike have equal metadata for different bytes, but are mounted
/// read-only.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn tells_changes(file: &File) -> bool {
    // From `linux/magic.h`: ext2 to ext4, XFS, Btrfs, F2FS, bcachefs and overlayfs.
    const KNOWN: [u32; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x794c_7630];
    let is_known = rustix::fs::fstatfs(file).is_ok_and(|system| KNOWN.contains(&(system.f_type as u32)));
    let flags = rustix::fs::fstatvfs(file).map(|system| system.f_flag);
    is_known && flags.is_ok_and(|flags| !flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

/// Same for APFS and HFS+.
#[cfg(target_os = "macos")]
fn tells_changes(file: &File) -> bool {
    let is_known = rustix::fs::fstatfs(file).is_ok_and(|system| {
        let name = system.f_fstypename.iter().take_while(|letter| **letter != 0);
        let name: Vec<u8> = name.map(|letter| *letter as u8).collect();
        name == b"apfs" || name == b"hfs"
    });
    let flags = rustix::fs::fstatvfs(file).map(|system| system.f_flag);
    is_known && flags.is_ok_and(|flags| !flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos")))]
fn tells_changes(_file: &File) -> bool {
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TWO: Reading = Reading { threads: 2, until: None };

    fn content(folder: &Path, is_witness: bool) -> Content {
        let file = File::open(folder.join("model")).unwrap();
        let stamp = Stamp { is_witness, ..Stamp::of(&file.metadata().unwrap()).unwrap() };
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
        let mut bytes = vec![7; 3 * PART / 2];
        std::fs::write(folder.join("model"), &bytes).unwrap();
        let hash = content(folder, false).hash(Some(folder), TWO).unwrap();
        assert!(stamps(folder).is_empty(), "the file may still change");
        assert_eq!(content(folder, true).hash(Some(folder), TWO).unwrap(), hash);
        let [stamp] = <[_; 1]>::try_from(stamps(folder)).unwrap();
        // A stamp with a wrong hash shows that the stamp is used.
        let of_file = Stamp::of(&std::fs::metadata(folder.join("model")).unwrap()).unwrap();
        let other = blake3::hash(b"other");
        of_file.keep(folder, &bytes, other).unwrap();
        assert_eq!(content(folder, true).hash(Some(folder), TWO).unwrap(), other);
        // A damaged stamp is ignored, whether a byte is flipped or the file truncated.
        let text = std::fs::read(&stamp).unwrap();
        for index in 0..text.len() - 1 {
            let mut damaged = text.clone();
            damaged[index] ^= 1;
            std::fs::write(&stamp, &damaged).unwrap();
            assert_ne!(of_file.look_up(folder, &bytes), Some(other), "byte {index}");
            std::fs::write(&stamp, &text[..index]).unwrap();
            assert_eq!(of_file.look_up(folder, &bytes), None, "{index} bytes");
        }
        // Another file of this name, other times, or other bytes under the same metadata need a new
        // stamp.
        std::fs::write(&stamp, &text).unwrap();
        assert_eq!(of_file.look_up(folder, &bytes), Some(other));
        assert_eq!(
            content(folder, false).hash(Some(folder), TWO).unwrap(),
            hash,
            "no stamp is taken where times are no witness"
        );
        bytes[PART / 2 / 4096 * 4096..][..PART / 2].fill(8);
        assert_eq!(of_file.look_up(folder, &bytes), None);
        std::fs::write(folder.join("model"), vec![8; 3 * PART / 2]).unwrap();
        assert_ne!(content(folder, true).hash(Some(folder), TWO).unwrap(), other);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn files_in_memory_and_of_the_system_are_no_witnesses() {
        let Ok(in_memory) = tempfile::tempfile_in("/dev/shm") else { return };
        for file in [in_memory, File::open("/proc/self/status").unwrap()] {
            let Identity::Stamp(stamp) = Identity::of(&file) else { continue };
            assert!(!stamp.is_witness && !tells_changes(&file), "{file:?}");
        }
    }

    #[test]
    fn every_byte_length_and_name_counts() {
        let of = |files: &[(&str, Vec<u8>)]| {
            let contents = files.iter().map(|(name, bytes)| {
                Content::new((*name).to_owned(), bytes.clone().into(), None, Identity::Unknown)
            });
            hash_of(&contents.collect::<Vec<_>>(), None, TWO).unwrap()
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
    fn a_deadline_ends_the_hashing() {
        let late = Reading { threads: 2, until: Some(std::time::Instant::now()) };
        let content = Content::new(String::new(), vec![1; 3].into(), None, Identity::Unknown);
        let problem = content.hash(None, late).unwrap_err();
        assert_eq!(problem.kind(), crate::ErrorKind::Cancelled);
        assert_eq!(content.hash(None, TWO).unwrap(), content.hash(None, late).unwrap(), "known now");
    }

    #[test]
    fn bytes_that_nothing_else_holds_go() {
        let bytes = Bytes::from(vec![1, 2, 3]);
        let mut shared = Content::new(String::new(), bytes.clone(), None, Identity::Unknown);
        shared.forget_unshared(false, TWO).unwrap();
        assert!(shared.bytes().is_some());
        let expected = hash_of(&[shared], None, TWO).unwrap();
        let mut alone = Content::new(String::new(), bytes, None, Identity::Unknown);
        alone.forget_unshared(false, TWO).unwrap();
        assert!(alone.bytes().is_none());
        assert_eq!(hash_of(&[alone], None, TWO).unwrap(), expected);
        for keep_hash in [true, false] {
            let mut many = Content::new(String::new(), vec![1; FEW + 1].into(), None, Identity::Unknown);
            many.forget_unshared(keep_hash, TWO).unwrap();
            assert_eq!((many.bytes().is_none(), many.hash(None, TWO).is_ok()), (true, keep_hash));
        }
    }
}
