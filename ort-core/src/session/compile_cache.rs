//! Sessions that take their packed weights from the compiled cache, and put them there.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ort_alloc::MappedFile;

use super::SessionBuilder;
use super::pipeline::{Built, Setting};
use super::providers::ProviderRequest;
use crate::cache::{Entry, Folder, Key, Reading, Store, begin, cannot_write};
use crate::ep::{Fingerprint, Packing, guard};
use crate::files::Target;
use crate::{ErrorKind, Result, error};

/// A compiled program, and the entry that its packed weights lie in.
pub(super) type FromCache = (Built, Arc<Entry>);

impl SessionBuilder {
    /// The program with its packed weights mapped: from the compiled model, or from the folder,
    /// where they are put first if they are not there. None where that cannot be: then they are
    /// packed into memory.
    pub(super) fn cached(&self, setting: Setting<'_>) -> Result<Option<FromCache>> {
        if let Some(compiled) = self.model.compiled_model() {
            match self.with_compiled(compiled.entry(), setting)? {
                Ok(built) => return Ok(Some(built)),
                Err(refusal) => {
                    compiled.verify_files(setting.reading())?;
                    tracing::warn!(
                        "the compiled model is packed again, as what it holds does not fit: {refusal}; `ort compile` makes one that does"
                    );
                }
            }
        }
        self.cache_dir.as_deref().map_or(Ok(None), |folder| self.in_folder(folder, setting))
    }

    fn in_folder(&self, path: &Path, setting: Setting<'_>) -> Result<Option<FromCache>> {
        let folder = Folder::open(path)?;
        let key = self.key(Some(folder.path()), setting)?;
        let found = match folder.find(&key, setting.reading()) {
            Ok(None) => None,
            Ok(Some(entry)) => Some(self.with_entry(&Arc::new(entry), setting)?),
            Err(refusal) => Some(Err(refusal)),
        };
        match found {
            Some(Ok(built)) => return Ok(Some(built)),
            Some(Err(refusal)) => {
                setting.reading().check()?;
                tracing::info!("an entry of the compiled cache is written anew: {refusal}");
            }
            None => {}
        }
        let written = self.write_entry(&folder, &key, setting)?;
        let entry = written.and_then(|file| Entry::open(MappedFile::open_file(file).map_err(text)?));
        let built = match entry {
            Ok(entry) => self.with_entry(&Arc::new(entry), setting)?,
            Err(refusal) => Err(refusal),
        };
        let warn = |refusal: &String| {
            tracing::warn!(
                "packed weights stay in memory, as the compiled cache cannot keep them in '{}': {refusal}",
                folder.place(&key).display()
            );
        };
        Ok(built.inspect_err(warn).ok())
    }

    /// The program with what a compiled model holds.
    fn with_compiled(&self, entry: &Arc<Entry>, setting: Setting<'_>) -> Result<Result<FromCache, String>> {
        let fits = self.key(None, setting)?.check(entry);
        match fits.and_then(|()| entry.verify(entry.sources()..entry.len(), setting.reading())) {
            Ok(()) => self.with_entry(entry, setting),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// The program with what an entry holds; the inner error says why the entry does not fit.
    fn with_entry(&self, entry: &Arc<Entry>, setting: Setting<'_>) -> Result<Result<FromCache, String>> {
        let store = Store::reading(entry.clone());
        let built = self.program(setting, Packing::Cached(&store));
        match (store.problem(), built) {
            (Some(refusal), _) => Ok(Err(refusal)),
            (None, Err(problem)) => Err(problem),
            (None, Ok(built)) => Ok(Ok((built, entry.clone()))),
        }
    }

    /// Packs everything into a compiled model.
    pub(super) fn write_compiled(&self, path: &Path, setting: Setting<'_>) -> Result<()> {
        self.verify_files(setting.reading())?;
        let key = self.key(None, setting)?;
        let target = Target::of(path).map_err(|problem| cannot_write(path, &problem))?;
        let store = begin(&target, key.text(), self.model.contents(), setting.reading())?;
        let built = self.program(setting, Packing::Cached(&store)).map(drop);
        self.model.release_all();
        if let Some(refusal) = store.problem() {
            return Err(cannot_write(path, &std::io::Error::other(refusal)));
        }
        built?;
        store.finish_at(&target).map(drop).map_err(|problem| cannot_write(path, &problem))
    }

    /// Packs everything into an entry; nothing of it stays in memory. The inner error says why it
    /// could not be written.
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
            (None, Err(problem)) if problem.kind() == ErrorKind::OutOfMemory => {
                return Ok(Err(problem.to_string()));
            }
            (None, Err(problem)) => return Err(problem),
            (None, Ok(())) => {}
        }
        let file = store.finish(&folder.place(key)).map_err(text);
        let milliseconds = start.elapsed().as_millis() as u64;
        tracing::info!(milliseconds, "packed into the compiled cache");
        Ok(file)
    }

    /// Holds the files inside a compiled model against the hashes that it says they have.
    pub(super) fn verify_files(&self, reading: Reading) -> Result<()> {
        self.model.compiled_model().map_or(Ok(()), |compiled| compiled.verify_files(reading))
    }

    /// What the entry for this session is named by and has to be made for.
    fn key(&self, stamps: Option<&Path>, setting: Setting<'_>) -> Result<Key> {
        let content = self.model.content_hash(stamps, setting.reading())?.ok_or_else(|| {
            error!(InvalidArgument, "a graph that was built by hand has no place in the compiled cache")
                .help("save the graph and load the file, or leave the cache out")
        })?;
        let mut lasting = format!(
            "content {content}\ntarget {} {} {}\nprecision {:?}\noptimizer {:?}\n",
            std::env::consts::ARCH,
            usize::BITS,
            if cfg!(target_endian = "little") { "little" } else { "big" },
            self.precision,
            self.optimizer,
        );
        let mut code = format!("code {}\n", env!("ORT_CODE_HASH"));
        for device in setting.devices {
            let info = device.info();
            let fingerprint = guard::fingerprint(&**device)?.ok_or_else(|| {
                error!(
                    InvalidArgument,
                    "the provider {} says not what its packed weights depend on", info.provider
                )
                .help("leave the compiled cache out, or let the device have a fingerprint")
            })?;
            let Fingerprint { code: version, hardware } = fingerprint;
            // Quoted, so that no name makes a line of its own.
            lasting.push_str(&format!("device {:?} {:?} {hardware:?}\n", info.provider, info.name));
            code.push_str(&format!("device {version:?}\n"));
        }
        for ProviderRequest { name, options, .. } in &self.providers {
            lasting.push_str(&format!("provider {name:?} {options:?}\n"));
        }
        Ok(Key { lasting, code })
    }
}

fn text(problem: impl ToString) -> String {
    problem.to_string()
}
