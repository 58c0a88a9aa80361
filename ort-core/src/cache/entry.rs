//! The file format of compile cache entries: a file of blobs, written once and then only mapped.
//!
//! All numbers are 64 bits, little-endian:
//!
//! | part | content |
//! | --- | --- |
//! | header | magic, format, key length, table offset, blobs, source blobs, file length, checksum |
//! | key | what the entry was made for, as text |
//! | blobs | each at a multiple of 64 bytes, large ones at a page boundary |
//! | table | for each blob its offset, length, checksum and tag |
//!
//! The header's checksum covers header, key and table.
//!
//! The file is untrusted: lengths are checked against the file size before use. Checksums detect
//! corruption, not attacks: whoever may write to the cache folder decides what sessions compute.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use ort_alloc::MappedFile;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::Result as CoreResult;
use crate::files::{PendingFile, Target};
use crate::limits::check_deadline;

/// The magic bytes of an entry.
pub(crate) const MAGIC: &[u8; 8] = b"ORTCACHE";

/// The version of this layout.
const FORMAT: u64 = 1;

/// The header size in bytes: the magic and seven numbers.
const HEADER: usize = 64;

/// The size in bytes of one row of the table.
const RECORD: usize = 32;

/// The longest key in bytes. A key has one line per device and provider, and the optimizer
/// settings.
const MOST_KEY: usize = 64 << 10;

/// Blobs of at least this size are aligned to a page.
const PAGE: usize = 4096;

/// One row of the table: a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    start: u64,
    len: u64,
    checksum: u64,
    tag: u64,
}

impl Record {
    fn to_bytes(self) -> [u8; RECORD] {
        join([self.start, self.len, self.checksum, self.tag])
    }

    fn of(bytes: &[u8]) -> Option<Record> {
        let [start, len, checksum, tag] = numbers(bytes)?;
        Some(Record { start, len, checksum, tag })
    }

    fn end(&self) -> Option<u64> {
        self.start.checked_add(self.len)
    }
}

/// Concatenates numbers.
fn join<const BYTES: usize, const COUNT: usize>(numbers: [u64; COUNT]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (to, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

/// Reads the first numbers in `bytes`. Returns `None` if there are too few.
fn numbers<const COUNT: usize>(bytes: &[u8]) -> Option<[u64; COUNT]> {
    let mut numbers = [0; COUNT];
    let mut words = bytes.chunks_exact(8);
    for number in &mut numbers {
        *number = u64::from_le_bytes(words.next()?.try_into().ok()?);
    }
    Some(numbers)
}

/// The header without magic and checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    key_len: u64,
    table: u64,
    count: u64,
    sources: u64,
    len: u64,
}

impl Header {
    fn to_bytes(self, key: &[u8], table: &[u8]) -> [u8; HEADER] {
        let Header { key_len, table: start, count, sources, len } = self;
        let checksum = self.checksum(key, table);
        join([u64::from_le_bytes(*MAGIC), FORMAT, key_len, start, count, sources, len, checksum])
    }

    fn checksum(self, key: &[u8], table: &[u8]) -> u64 {
        let Header { key_len, table: start, count, sources, len } = self;
        let mut checksum = Xxh3::new();
        checksum.update(&join::<48, 6>([FORMAT, key_len, start, count, sources, len]));
        checksum.update(key);
        checksum.update(table);
        checksum.digest()
    }
}

/// A mapped entry. Its table is verified on opening, its blobs by [`verify`](Entry::verify).
#[derive(Debug)]
pub(crate) struct Entry {
    file: MappedFile,
    bytes: Bytes,
    key: String,
    records: Vec<Record>,
    sources: usize,
}

/// The reason why a file is not a usable entry.
pub(crate) type Refusal = String;

impl Entry {
    /// Reads and checks the table of a mapped file.
    pub(crate) fn open(file: MappedFile) -> Result<Entry, Refusal> {
        let bytes = file.bytes();
        let EntryTable { key, records, sources } = EntryTable::of(&bytes)?;
        Ok(Entry { file, bytes, key, records, sources })
    }

    /// Returns the key it was made for.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Returns the number of blobs that are the model's own files.
    pub(crate) fn sources(&self) -> usize {
        self.sources
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns a blob and its tag.
    pub(crate) fn blob(&self, index: usize) -> Option<(u64, Bytes)> {
        let record = self.records.get(index)?;
        // In bounds, because `EntryTable::of` checked the records against the file length.
        Some((record.tag, self.bytes.slice(record.start as usize..record.end()? as usize)))
    }

    /// Returns the mapped file.
    pub(crate) fn file(&self) -> &MappedFile {
        &self.file
    }

    /// Returns the offset at which the blobs begin that are not the model's own files.
    pub(crate) fn source_bytes(&self) -> usize {
        // In bounds, because `EntryTable::of` checked the records against the file length.
        self.records.get(self.sources).map_or(self.bytes.len(), |record| record.start as usize)
    }

    /// Returns whether these bytes are part of a blob that is not one of the model's own files.
    pub(crate) fn holds(&self, bytes: &[u8]) -> bool {
        self.file.range_of(bytes).is_some_and(|range| range.start >= self.source_bytes())
    }

    /// Verifies the checksums of the model's own files, one part at a time, so that their pages do
    /// not stay resident.
    pub(crate) fn verify_sources(&self) -> Result<(), Refusal> {
        const PART: usize = 8 << 20;
        for (index, record) in self.records.iter().enumerate().take(self.sources) {
            let Some((_, bytes)) = self.blob(index) else { continue };
            let mut checksum = Xxh3::new();
            for part in bytes.chunks(PART) {
                checksum.update(part);
                if let Some(Err(problem)) = self.file.range_of(part).map(|range| self.file.release(range)) {
                    tracing::debug!("pages of the compiled model stay resident: {problem}");
                }
            }
            if checksum.digest() != record.checksum {
                return Err(damaged(index));
            }
        }
        Ok(())
    }

    /// Verifies the checksums of blobs on several threads. The blobs are resident afterwards.
    pub(crate) fn verify(&self, blobs: Range<usize>, reading: Reading) -> Result<(), Refusal> {
        let next = AtomicUsize::new(blobs.start);
        let first_damaged = AtomicUsize::new(usize::MAX);
        let work = || loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= blobs.end || reading.is_late() {
                break;
            }
            let (Some(record), Some((_, bytes))) = (self.records.get(index), self.blob(index)) else { break };
            if xxh3_64(&bytes) != record.checksum {
                // Keep the lowest index, so that the message does not depend on the threads.
                first_damaged.fetch_min(index, Ordering::Relaxed);
            }
        };
        reading.on_threads(blobs.len(), work);
        match first_damaged.into_inner() {
            usize::MAX if reading.is_late() => {
                Err("the deadline passed while its checksums were compared".to_owned())
            }
            usize::MAX => Ok(()),
            index => Err(damaged(index)),
        }
    }
}

/// The parsed header, key and table of a file.
struct EntryTable {
    key: String,
    records: Vec<Record>,
    sources: usize,
}

impl EntryTable {
    fn of(bytes: &Bytes) -> Result<EntryTable, Refusal> {
        let short = || format!("it has {} bytes, fewer than its header says", bytes.len());
        let [magic, format, key_len, table, count, sources, len, checksum] =
            numbers(bytes).ok_or_else(short)?;
        if magic != u64::from_le_bytes(*MAGIC) || format != FORMAT {
            return Err(format!("it is not a compiled cache entry of format {FORMAT}"));
        }
        // A file that was cut short is refused here, before a mapped page beyond its end is read.
        if len != bytes.len() as u64 {
            return Err(format!("it has {} bytes, expected {len}", bytes.len()));
        }
        let place = |start: u64, len: u64| {
            let (start, end) = (usize::try_from(start).ok()?, usize::try_from(start.checked_add(len)?).ok()?);
            bytes.get(start..end)
        };
        // The checksum covers the key, so the bound also limits the work on a forged header.
        if key_len > MOST_KEY as u64 {
            return Err(format!("its key has {key_len} bytes, at most {MOST_KEY} are expected"));
        }
        let key = place(HEADER as u64, key_len).ok_or_else(short)?;
        // The table ends the file, so the count follows from its offset and cannot ask for more
        // rows.
        let rest = count.checked_mul(RECORD as u64).filter(|rest| table.checked_add(*rest) == Some(len));
        let rows = rest.and_then(|rest| place(table, rest)).ok_or_else(short)?;
        let header = Header { key_len, table, count, sources, len };
        if header.checksum(key, rows) != checksum {
            return Err("the checksum of its header is wrong".to_owned());
        }
        let key = std::str::from_utf8(key).map_err(|_| "its key is not UTF-8".to_owned())?.to_owned();
        let records: Vec<Record> = rows.chunks_exact(RECORD).filter_map(Record::of).collect();
        check(&records, HEADER as u64 + key_len, table)?;
        let sources = usize::try_from(sources).ok().filter(|sources| *sources <= records.len());
        let sources = sources.ok_or("it has fewer blobs than its source")?;
        Ok(EntryTable { key, records, sources })
    }
}

/// Returns the key and the blobs of a file that was read into memory, with all checksums verified.
pub(super) fn blobs_of(bytes: &Bytes) -> Result<(String, Vec<Bytes>), Refusal> {
    let EntryTable { key, records, .. } = EntryTable::of(bytes)?;
    let blob = |(index, record): (usize, &Record)| {
        // In bounds, because `EntryTable::of` checked the records against the file length.
        let blob = bytes.slice(record.start as usize..record.end().unwrap_or(record.start) as usize);
        let is_whole = xxh3_64(&blob) == record.checksum;
        is_whole.then_some(blob).ok_or_else(|| damaged(index))
    };
    let blobs = records.iter().enumerate().map(blob).collect::<Result<_, _>>()?;
    Ok((key, blobs))
}

fn damaged(blob: usize) -> Refusal {
    format!("the checksum of blob {blob} is wrong")
}

/// Checks that the blobs follow each other between `start` and `end`, aligned to 64 bytes for the
/// kernels.
fn check(records: &[Record], start: u64, end: u64) -> Result<(), Refusal> {
    let mut free = start;
    for (index, record) in records.iter().enumerate() {
        // Ascending records cannot overlap, and the end of each is at least its start.
        let fits = record.start >= free && record.start.is_multiple_of(64);
        free = record.end().filter(|stop| fits && *stop <= end).ok_or_else(|| {
            format!("blob {index} of {} bytes at offset {} is out of range", record.len, record.start)
        })?;
    }
    Ok(())
}

/// Writes an entry blob by blob. If dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub(crate) struct EntryWriter {
    file: BufWriter<PendingFile>,
    key: String,
    records: Vec<Record>,
    sources: usize,
    end: u64,
}

impl EntryWriter {
    /// Starts an entry in a folder, after removing what dead processes left there.
    pub(crate) fn new(folder: &Path, key: String) -> io::Result<EntryWriter> {
        EntryWriter::begin(key, || PendingFile::in_folder(folder))
    }

    /// Starts an entry that is published at `target`.
    pub(crate) fn at(target: &Target, key: String) -> io::Result<EntryWriter> {
        EntryWriter::begin(key, || target.begin())
    }

    fn begin(key: String, draft: impl FnOnce() -> io::Result<PendingFile>) -> io::Result<EntryWriter> {
        if key.len() > MOST_KEY {
            let problem = format!("the settings take {} bytes, at most {MOST_KEY} are allowed", key.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let mut file = BufWriter::with_capacity(1 << 16, draft()?);
        // The header is written last, when the table is known.
        file.write_all(&[0; HEADER])?;
        file.write_all(key.as_bytes())?;
        let end = (HEADER + key.len()) as u64;
        Ok(EntryWriter { file, key, records: Vec::new(), sources: 0, end })
    }

    /// Appends a blob.
    pub(crate) fn add(&mut self, tag: u64, bytes: &[u8]) -> io::Result<()> {
        let alignment = if bytes.len() >= PAGE { PAGE as u64 } else { 64 };
        self.pad(alignment)?;
        self.file.write_all(bytes)?;
        let (start, len) = (self.end, bytes.len() as u64);
        self.end += len;
        self.records.push(Record { start, len, checksum: xxh3_64(bytes), tag });
        Ok(())
    }

    /// Marks the blobs so far as the model's own files.
    pub(crate) fn end_of_sources(&mut self) {
        self.sources = self.records.len();
    }

    /// Publishes the entry atomically under its name. Processes that have mapped an old one keep
    /// that.
    pub(crate) fn finish(self, path: &Path) -> io::Result<File> {
        self.finish_at(&Target::File(path.to_path_buf()))
    }

    /// Same for a target that may be a link, a device or a pipe.
    pub(crate) fn finish_at(mut self, target: &Target) -> io::Result<File> {
        self.pad(64)?;
        let table: Vec<u8> = self.records.iter().flat_map(|record| record.to_bytes()).collect();
        self.file.write_all(&table)?;
        let header = Header {
            key_len: self.key.len() as u64,
            table: self.end,
            count: self.records.len() as u64,
            sources: self.sources as u64,
            len: self.end + table.len() as u64,
        };
        // Until this write the file has no magic, so a draft is never taken for an entry.
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header.to_bytes(self.key.as_bytes(), &table))?;
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        let file = target.put(file)?;
        // Unlock only after the rename, because an unlocked file under a temporary name counts as
        // left behind.
        if let Err(problem) = file.unlock() {
            tracing::debug!(%problem, "the entry stays locked while it is open");
        }
        Ok(file)
    }

    fn pad(&mut self, alignment: u64) -> io::Result<()> {
        let padding = self.end.next_multiple_of(alignment) - self.end;
        self.end += padding;
        io::copy(&mut io::Read::take(io::repeat(0), padding), &mut self.file).map(drop)
    }
}

/// How files are read: the number of threads and the deadline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) threads: usize,
    pub(crate) until: Option<Instant>,
}

impl Reading {
    /// Returns an error once the deadline has passed.
    pub(crate) fn check(self) -> CoreResult<()> {
        check_deadline(self.until, "reading the files of")
    }

    pub(super) fn is_late(self) -> bool {
        self.check().is_err()
    }

    /// Runs `work` on up to `parts` threads including this one, but no more than may run in
    /// parallel. The closures share a queue of parts, so if the system refuses a thread the others
    /// do its work.
    pub(super) fn on_threads(self, parts: usize, work: impl Fn() + Sync) {
        let threads =
            self.threads.min(parts).min(std::thread::available_parallelism().map_or(1, usize::from));
        std::thread::scope(|scope| {
            // This thread is one of them.
            for _ in 1..threads {
                if let Err(problem) = std::thread::Builder::new().spawn_scoped(scope, &work) {
                    tracing::debug!(%problem, "fewer threads read the files of the cache");
                    break;
                }
            }
            work();
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    const KEY: &str = "a key";
    const TWO: Reading = Reading { threads: 2, until: None };

    /// Blobs of distinct size classes: empty, less than a cache line, more than a page.
    fn blobs() -> Vec<Vec<u8>> {
        [0usize, 5, 64, 5000, 1, 8192]
            .iter()
            .map(|len| (0..*len).map(|index| (index * 7 + len) as u8).collect())
            .collect()
    }

    /// Returns the bytes of an entry.
    fn written() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        let mut writer = EntryWriter::new(folder.path(), KEY.to_owned()).unwrap();
        for (tag, blob) in blobs().iter().enumerate() {
            if tag == 2 {
                writer.end_of_sources();
            }
            writer.add(tag as u64, blob).unwrap();
        }
        writer.finish(&path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
        std::fs::read(path).unwrap()
    }

    /// Opens and verifies a file of these bytes.
    fn opened(bytes: &[u8]) -> Result<Entry, Refusal> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let entry = Entry::open(MappedFile::open_file(file).unwrap())?;
        entry.verify(0..entry.len(), TWO).map(|()| entry)
    }

    #[test]
    fn what_was_written_is_found_where_kernels_can_read_it() {
        let entry = opened(&written()).unwrap();
        assert_eq!((entry.key(), entry.len(), entry.sources()), (KEY, blobs().len(), 2));
        for (index, blob) in blobs().iter().enumerate() {
            let (tag, bytes) = entry.blob(index).unwrap();
            assert_eq!((tag, &bytes[..]), (index as u64, &blob[..]));
            let alignment = if blob.len() >= PAGE { PAGE } else { 64 };
            assert!(blob.is_empty() || bytes.as_ptr().addr().is_multiple_of(alignment), "blob {index}");
            assert_eq!(entry.holds(&bytes), index >= 2, "blob {index}");
        }
        assert!(entry.blob(blobs().len()).is_none() && !entry.holds(&[1]));
    }

    /// Every flipped bit is detected, except in the unused padding between blobs.
    #[test]
    fn damage_is_found() {
        let bytes = written();
        let entry = opened(&bytes).unwrap();
        let table = bytes.len() - RECORD * entry.len();
        let is_read = |place: usize| {
            let in_blob =
                |record: &Record| (record.start as usize..record.end().unwrap() as usize).contains(&place);
            place < HEADER + KEY.len() || place >= table || entry.records.iter().any(in_blob)
        };
        // Tests each byte of header, key and table, and a sample of each blob.
        let small = |place: &usize| *place < 1000 || *place >= table || place.is_multiple_of(97);
        for place in (0..bytes.len()).filter(small).filter(|place| is_read(*place)) {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << (place % 8);
            assert!(opened(&damaged).is_err(), "byte {place}");
        }
        for len in (0..bytes.len()).step_by(61).chain([bytes.len() - 1]) {
            assert!(opened(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(opened(&[&bytes[..], &[0]].concat()).is_err(), "a byte more");
    }

    /// Headers and tables that contradict themselves or the file, with a valid checksum.
    #[test]
    fn hostile_tables_are_refused() {
        let refused = |header: Header, records: &[Record], fill: usize| {
            let table: Vec<u8> = records.iter().flat_map(|record| record.to_bytes()).collect();
            let body = [KEY.as_bytes(), &vec![0; fill]].concat();
            opened(&[&header.to_bytes(KEY.as_bytes(), &table)[..], &body, &table].concat()).is_err()
        };
        let fill = 256 - HEADER - KEY.len();
        let blob = |start: u64, len: u64| Record {
            start,
            len,
            checksum: xxh3_64(&vec![0; len.min(256) as usize]),
            tag: 0,
        };
        let right = Header { key_len: 5, table: 256, count: 1, sources: 0, len: 256 + 32 };
        assert!(!refused(right, &[blob(128, 64)], fill), "the table begins from what is right");
        let headers = [
            Header { key_len: u64::MAX, ..right },
            Header { key_len: 1 << 40, ..right },
            Header { table: u64::MAX - 31, ..right },
            Header { table: 0, ..right },
            Header { count: u64::MAX / 32 + 2, ..right },
            Header { count: u64::MAX, ..right },
            Header { count: 0, ..right },
            Header { sources: 2, ..right },
            Header { sources: u64::MAX, ..right },
            Header { len: u64::MAX, ..right },
        ];
        for header in headers {
            assert!(refused(header, &[blob(128, 64)], fill), "{header:?}");
        }
        let blobs = [
            (0, 64),
            (64, 64),
            (100, 64),
            (192, 65),
            (256, 1),
            (192, u64::MAX),
            (u64::MAX - 63, 64),
            (1 << 62, 64),
        ];
        for (start, len) in blobs {
            assert!(refused(right, &[blob(start, len)], fill), "a blob of {len} bytes from {start} on");
        }
        let two = Header { count: 2, len: 256 + 64, ..right };
        assert!(!refused(two, &[blob(128, 64), blob(192, 64)], fill));
        for overlapping in [[blob(128, 65), blob(192, 64)], [blob(192, 64), blob(128, 64)]] {
            assert!(refused(two, &overlapping, fill), "{overlapping:?}");
        }
    }

    /// Keys of excessive length are neither read nor written.
    #[test]
    fn long_keys_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        for (len, fits) in [(MOST_KEY, true), (MOST_KEY + 1, false)] {
            let key = "k".repeat(len);
            let written =
                EntryWriter::new(folder.path(), key.clone()).and_then(|writer| writer.finish(&path));
            assert_eq!(written.is_ok(), fits, "{len} bytes");
            let header = Header {
                key_len: len as u64,
                table: (HEADER + len) as u64,
                count: 0,
                sources: 0,
                len: (HEADER + len) as u64,
            };
            let entry = opened(&[&header.to_bytes(key.as_bytes(), &[])[..], key.as_bytes()].concat());
            assert_eq!(entry.is_ok(), fits, "{len} bytes");
        }
    }

    #[test]
    fn a_deadline_ends_the_comparison() {
        let entry = opened(&written()).unwrap();
        let late = Reading { threads: 1, until: Some(Instant::now()) };
        assert!(entry.verify(0..entry.len(), late).unwrap_err().contains("the deadline passed"));
    }

    /// The umask decides who may read an entry, as with any new file.
    #[test]
    #[cfg(unix)]
    fn an_entry_has_the_mode_of_other_files() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [entry, other] = ["entry", "other"].map(|name| folder.path().join(name));
        File::create(&other).unwrap();
        EntryWriter::new(folder.path(), KEY.to_owned()).unwrap().finish(&entry).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
        assert_eq!(mode(&entry), mode(&other));
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EntryWriter::new(folder.path(), KEY.to_owned()).unwrap();
        writer.add(0, &[1; 10_000]).unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
