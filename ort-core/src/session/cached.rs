//! Sessions that take their packed weights from the compiled cache, and put them there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, MappedFile};

use super::builder::{Built, SessionBuilder};
use crate::cache::{Entry, Folder, Key, Store};
use crate::ep::{Device, Packing};
use crate::{ErrorKind, Result, error};

/// What compiling takes besides the settings.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) threads: usize,
    pub(super) devices: &'a [Arc<dyn Device>],
    pub(super) budget: &'a Arc<Budget>,
}

/// What a session was compiled with, and the mapped file that its packed weights lie in.
pub(super) type FromCache = (Built, MappedFile);

impl SessionBuilder {
    /// The program with its packed weights mapped from the folder, where they are put first if they are not there. None where that cannot be: then they are
    /// packed into memory.
    pub(super) fn cached(&self, path: &Path, setting: Setting<'_>) -> Result<Option<FromCache>> {
        let folder = Folder::open(path)?;
        let key = self.key(Some(folder.path()), setting)?;
        match folder.find(&key, setting.threads) {
            Ok(Some(entry)) => match self.from_entry(entry, setting)? {
                Ok(built) => return Ok(Some(built)),
                Err(refusal) => tracing::info!("an entry of the compiled cache is written anew: {refusal}"),
            },
            Ok(None) => {}
            Err(refusal) => tracing::info!("an entry of the compiled cache is written anew: {refusal}"),
        }
        let written = self.write_entry(&folder, &key, setting)?;
        let refusal = match written.and_then(|file| Entry::open(MappedFile::open_file(file).map_err(text)?)) {
            Ok(entry) => match self.from_entry(entry, setting)? {
                Ok(built) => return Ok(Some(built)),
                Err(refusal) => refusal,
            },
            Err(refusal) => refusal,
        };
        let place: PathBuf = folder.place(&key);
        tracing::warn!(
            "packed weights stay in memory, as the compiled cache cannot keep them in '{}': {refusal}",
            place.display()
        );
        Ok(None)
    }

    /// The program with what an entry holds; the inner error says why the entry does not fit.
    fn from_entry(&self, entry: Entry, setting: Setting<'_>) -> Result<Result<FromCache, String>> {
        let (file, entry) = (entry.file().clone(), Arc::new(entry));
        let store = Store::reading(entry);
        let built = self.program(setting, Packing::Cached(&store));
        match (store.problem(), built) {
            (Some(refusal), _) => Ok(Err(refusal)),
            (None, Err(problem)) => Err(problem),
            (None, Ok(built)) => Ok(Ok((built, file))),
        }
    }

    /// Packs everything into an entry; nothing of it stays in memory. The inner error says why it could not be written.
    fn write_entry(
        &self,
        folder: &Folder,
        key: &Key,
        setting: Setting<'_>,
    ) -> Result<Result<std::fs::File, String>> {
        let start = Instant::now();
        let store = match folder.begin(key) {
            Ok(writer) => Store::writing(writer),
            Err(problem) => return Ok(Err(problem.to_string())),
        };
        let built = self.program(setting, Packing::Cached(&store)).map(drop);
        match (store.problem(), built) {
            (Some(refusal), _) => return Ok(Err(refusal)),
            // Streaming may need less.
            (None, Err(problem)) if problem.kind() == ErrorKind::OutOfMemory => return Ok(Err(problem.to_string())),
            (None, Err(problem)) => return Err(problem),
            (None, Ok(())) => {}
        }
        let file = store.finish(&folder.place(key)).map_err(text);
        let milliseconds = start.elapsed().as_millis() as u64;
        tracing::info!(milliseconds, "packed into the compiled cache");
        Ok(file)
    }

    /// What the entry for this session is named by and has to be made for.
    fn key(&self, stamps: Option<&Path>, setting: Setting<'_>) -> Result<Key> {
        let content = self.model.content_hash(stamps).ok_or_else(|| {
            error!(InvalidArgument, "a graph that was built by hand has no place in the compiled cache")
                .help("save the graph and load the file, or leave the cache out")
        })?;
        let mut lasting = format!(
            "content {content}\ntarget {} {} {}\nthreads {}\nprecision {:?}\noptimizer {:?}\n",
            std::env::consts::ARCH,
            usize::BITS,
            if cfg!(target_endian = "little") { "little" } else { "big" },
            setting.threads,
            self.precision,
            self.optimizer,
        );
        let mut code = format!("code {}\n", env!("ORT_CODE_HASH"));
        for device in setting.devices {
            let info = device.info();
            let fingerprint = device.fingerprint().ok_or_else(|| {
                error!(InvalidArgument, "the provider {} says not what its packed weights depend on", info.provider)
                    .help("leave the compiled cache out, or let the device have a fingerprint")
            })?;
            lasting.push_str(&format!("device {} {:?}\n", info.provider, info.name));
            code.push_str(&format!("device {fingerprint}\n"));
        }
        for (name, options) in &self.providers {
            lasting.push_str(&format!("provider {name} {options:?}\n"));
        }
        Ok(Key { lasting, code })
    }
}

fn text(problem: impl ToString) -> String {
    problem.to_string()
}
