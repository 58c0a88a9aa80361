//! On-disk pipeline cache: which programs each node used, and the driver's own cache.
//!
//! The programs of a node depend on its shapes, which only runs know. Each run records its programs
//! by node, and a later process compiles those of its nodes before its first run. The key of a node
//! is what it computes, not its model or name, so equal layers share an entry, even across models.
//! A file that is damaged or was written by other code is ignored and rewritten.
//!
//! The file's first blob is a list of little-endian 64-bit numbers. For each node it has the hash,
//! the number of programs, and their indices among the other blobs. Each of those is a program: the
//! number of bindings in 32 bits, then the WGSL text. A text from the file is only ever compiled. A
//! run uses the pipeline only if a kernel generates the same text.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ort_core::Result;
use ort_core::ep::{DeviceCache, Fingerprint};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::driver_cache::DriverCache;
use crate::gpu::Gpu;
use crate::program::Program;

/// The kind of its files in a [`DeviceCache`].
const KIND: &str = "programs";
/// The most programs per node, which are those of several shapes.
const MOST_OF_A_NODE: usize = 64;
/// The most nodes in a file. Beyond that only this process's nodes are kept.
const MOST_NODES: usize = 1 << 14;

/// The programs of each node, by the hash of what the node computes.
type ProgramLists = BTreeMap<u64, Vec<Program>>;

/// The cache of one device in one folder.
pub(crate) struct PipelineCache {
    files: DeviceCache,
    made_for: Fingerprint,
    driver: Option<DriverCache>,
    /// The lists of the file, and those of this process's runs.
    lists: Mutex<(ProgramLists, ProgramLists)>,
    /// Whether runs used programs that the file lacks.
    is_new: AtomicBool,
    /// Whether the driver compiles listed programs that its own file lacks.
    driver_is_new: AtomicBool,
}

impl PipelineCache {
    /// Opens a folder, and creates it if it does not exist.
    pub(crate) fn open(gpu: &Gpu, folder: &Path) -> Result<PipelineCache> {
        let files = DeviceCache::open(folder)?;
        let made_for = made_for(gpu);
        let found = read(&files, &made_for).unwrap_or_else(|refusal| {
            tracing::info!("writing the list of pipelines again: {refusal}");
            ProgramLists::new()
        });
        let driver = DriverCache::open(gpu, &files);
        // A new driver's cache is empty. Save it once the listed programs are compiled.
        let learns = driver.as_ref().is_some_and(|driver| !driver.is_loaded()) && !found.is_empty();
        Ok(PipelineCache {
            files,
            made_for,
            driver,
            lists: Mutex::new((found, ProgramLists::new())),
            is_new: AtomicBool::new(false),
            driver_is_new: AtomicBool::new(learns),
        })
    }

    /// Returns the folder.
    pub(crate) fn folder(&self) -> &Path {
        self.files.path()
    }

    /// Returns the driver's cache, to create pipelines with.
    pub(crate) fn driver(&self) -> Option<&wgpu::PipelineCache> {
        self.driver.as_ref().map(DriverCache::cache)
    }

    /// Returns the programs that nodes with this hash used.
    pub(crate) fn programs(&self, node: u64) -> Vec<Program> {
        let lists = self.lists.lock();
        // This process's programs first, because `add` stops at the limit.
        let mut programs = lists.1.get(&node).cloned().unwrap_or_default();
        add(&mut programs, lists.0.get(&node).into_iter().flatten());
        programs
    }

    /// Records that a node used these programs.
    pub(crate) fn took<'a>(&self, node: u64, programs: impl Iterator<Item = &'a Program>) {
        let mut lists = self.lists.lock();
        let (found, taken) = &mut *lists;
        let known = found.get(&node);
        let own = taken.entry(node).or_default();
        for program in programs {
            if own.len() >= MOST_OF_A_NODE || own.contains(program) {
                continue;
            }
            own.push(program.clone());
            if !known.is_some_and(|known| known.contains(program)) {
                self.is_new.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Writes the files if they are out of date. If a write fails, the next process compiles again.
    pub(crate) fn save(&self) {
        // Reset before the write: programs recorded meanwhile set the flag again.
        let is_new = self.is_new.swap(false, Ordering::Relaxed);
        let driver_is_new = self.driver_is_new.swap(false, Ordering::Relaxed) || is_new;
        let lists = if is_new { self.write_lists() } else { Ok(()) };
        let driver = self.driver.as_ref().filter(|_| driver_is_new);
        let written = lists.and_then(|()| driver.map_or(Ok(()), |driver| driver.save(&self.files)));
        if let Err(problem) = written {
            let folder = self.folder().display();
            tracing::warn!("pipelines will be compiled again, as '{folder}' cannot keep them: {problem}");
        }
    }

    /// Writes the lists, merged with what other processes have written meanwhile.
    fn write_lists(&self) -> std::io::Result<()> {
        let mut lists = self.lists.lock();
        let (found, taken) = &mut *lists;
        let mut all = taken.clone();
        // If two processes write at the same time, one file wins. The other's programs are compiled
        // and recorded again.
        let others = read(&self.files, &self.made_for).unwrap_or_default();
        for (node, programs) in found.iter().chain(&others) {
            if all.len() < MOST_NODES || all.contains_key(node) {
                add(all.entry(*node).or_default(), programs);
            }
        }
        let blobs = to_blobs(&all);
        let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        self.files.write(KIND, &self.made_for, &blobs)?;
        *found = all;
        Ok(())
    }
}

/// Appends the programs that are missing, up to [`MOST_OF_A_NODE`].
fn add<'a>(to: &mut Vec<Program>, programs: impl IntoIterator<Item = &'a Program>) {
    for program in programs {
        if to.len() < MOST_OF_A_NODE && !to.contains(program) {
            to.push(program.clone());
        }
    }
}

/// What programs depend on besides the node: the code that generates them, and the device's limits.
fn made_for(gpu: &Gpu) -> Fingerprint {
    let wgpu::AdapterInfo { name, backend, .. } = &gpu.adapter;
    Fingerprint {
        code: env!("ORT_CODE_HASH").to_owned(),
        hardware: format!("{backend} {name} {:?}", gpu.limits),
    }
}

/// Reads the lists of a file; empty if there is no file.
fn read(files: &DeviceCache, made_for: &Fingerprint) -> Result<ProgramLists, String> {
    let Some(blobs) = files.read(KIND, made_for)? else { return Ok(ProgramLists::new()) };
    of_blobs(&blobs).ok_or_else(|| "its lists are not about its programs".to_owned())
}

/// Parses the blobs of a file; `None` if they are inconsistent.
fn of_blobs(blobs: &[impl AsRef<[u8]>]) -> Option<ProgramLists> {
    let (index, programs) = blobs.split_first()?;
    let program = |blob: &[u8]| {
        let (bindings, text) = blob.split_first_chunk()?;
        Some(Program {
            text: std::str::from_utf8(text).ok()?.into(),
            bindings: u32::from_le_bytes(*bindings) as usize,
        })
    };
    let programs: Vec<Program> = programs.iter().map(|blob| program(blob.as_ref())).collect::<Option<_>>()?;
    let (words, rest) = index.as_ref().as_chunks();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let mut lists = ProgramLists::new();
    while let Some(node) = words.next() {
        // The file may be damaged, so its count must not decide how much is allocated.
        let count = words.next().filter(|count| *count <= MOST_OF_A_NODE as u64)?;
        let place = |_| programs.get(usize::try_from(words.next()?).ok()?).cloned();
        lists.insert(node, (0..count).map(place).collect::<Option<_>>()?);
    }
    rest.is_empty().then_some(lists)
}

/// Serializes lists to the blobs of a file. Equal programs are stored once.
fn to_blobs(lists: &ProgramLists) -> Vec<Vec<u8>> {
    // The index is complete only at the end, so a placeholder holds its place.
    let (mut index, mut blobs) = (Vec::new(), vec![Vec::new()]);
    let mut places = FxHashMap::<&Program, u64>::default();
    for (node, programs) in lists {
        index.extend([*node, programs.len() as u64]);
        for program in programs {
            let place = *places.entry(program).or_insert_with(|| {
                let bindings = u32::try_from(program.bindings).unwrap_or(u32::MAX).to_le_bytes();
                blobs.push([&bindings[..], program.text.as_bytes()].concat());
                // Indices count from the blob after the index.
                blobs.len() as u64 - 2
            });
            index.push(place);
        }
    }
    let index = index.into_iter().flat_map(u64::to_le_bytes).collect();
    blobs.splice(..1, [index]);
    blobs
}

/// The open folders of one device.
#[derive(Default)]
pub(crate) struct CacheFolders(Mutex<Vec<Arc<PipelineCache>>>);

impl CacheFolders {
    /// Returns the cache of a folder, and opens it on first use.
    pub(crate) fn get(&self, gpu: &Gpu, folder: &Path) -> Result<Arc<PipelineCache>> {
        let mut open = self.0.lock();
        if let Some(cache) = open.iter().find(|cache| cache.folder() == folder) {
            return Ok(cache.clone());
        }
        let cache = Arc::new(PipelineCache::open(gpu, folder)?);
        open.push(cache.clone());
        Ok(cache)
    }

    /// Writes the files that are out of date.
    pub(crate) fn save(&self) {
        self.0.lock().iter().for_each(|cache| cache.save());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(text: &str, bindings: usize) -> Program {
        Program { text: text.into(), bindings }
    }

    #[test]
    fn lists_come_back_and_share_programs() {
        let (one, two) = (program("one", 1), program("two", 3));
        let lists =
            ProgramLists::from([(7, vec![one.clone(), two.clone()]), (9, vec![two]), (1, Vec::new())]);
        let blobs = to_blobs(&lists);
        assert_eq!((blobs.len(), of_blobs(&blobs)), (3, Some(lists)));
        assert_eq!(of_blobs(&to_blobs(&ProgramLists::new())), Some(ProgramLists::new()));
    }

    #[test]
    fn lists_that_are_not_about_the_programs_are_refused() {
        let words = |words: &[u64]| words.iter().copied().flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        let text = [&[1, 0, 0, 0][..], b"text"].concat();
        assert_eq!(of_blobs(&[words(&[5, 1, 0]), text.clone()]).map(|lists| lists.len()), Some(1));
        let most = MOST_OF_A_NODE as u64 + 1;
        let wrong_lists: [&[u64]; 5] = [&[5], &[5, 1], &[5, 1, 1], &[5, u64::MAX, 0], &[5, most]];
        for list in wrong_lists {
            assert_eq!(of_blobs(&[words(list), text.clone()]), None, "{list:?}");
        }
        assert_eq!(of_blobs(&[vec![0; 7], text]), None, "half a number");
        for blob in [vec![1, 0, 0], vec![1, 0, 0, 0, 0xff]] {
            assert_eq!(of_blobs(&[words(&[5, 1, 0]), blob]), None);
        }
        assert_eq!(of_blobs(&[] as &[Vec<u8>]), None);
    }
}
