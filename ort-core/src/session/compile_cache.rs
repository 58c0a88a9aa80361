//! Compilation with the compiled cache: packed weights are mapped from an entry, which is written
//! first if necessary.
//!
//! An entry is a file in the cache folder, or part of a compiled model. Finding, reading and
//! writing entries is in `crate::cache`.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ort_alloc::MappedFile;

use super::SessionBuilder;
use super::pipeline::{Built, CompileContext};
use super::providers::ProviderRequest;
use crate::cache::{Entry, Folder, Key, Reading, Store, begin, cannot_write};
use crate::ep::{Fingerprint, Packing, guard};
use crate::files::Target;
use crate::{ErrorKind, Result, ensure, error};

/// A compiled program, and the entry that holds its packed weights.
pub(super) type FromCache = (Built, Arc<Entry>);

impl SessionBuilder {
    /// Compiles the program with mapped packed weights, from the compiled model or from an entry in
    /// the cache folder. Writes the entry first if necessary. `None` if neither works: the caller
    /// then packs into memory.
    pub(super) fn cached(&self, setting: CompileContext<'_>) -> Result<Option<FromCache>> {
        if let Some(compiled) = self.model.compiled_model() {
            match self.with_compiled(compiled.entry(), setting)? {
                Ok(built) => return Ok(Some(built)),
                Err(refusal) => {
                    // From here on the code relies on the recorded hashes of the files, which
                    // nothing has checked yet.
                    compiled.verify_files(setting.reading())?;
                    tracing::warn!(
                        "packing the weights again, because the compiled model does not match: {refusal}; compile the model \
                         again with `ort compile` and the options of this session"
                    );
                }
            }
        }
        self.cache_dir.as_deref().map_or(Ok(None), |folder| self.in_folder(folder, setting))
    }

    /// Compiles the program with the folder's entry. Writes the entry if it is missing or does not
    /// fit.
    fn in_folder(&self, path: &Path, setting: CompileContext<'_>) -> Result<Option<FromCache>> {
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
                // A passed deadline also refuses the entry, which does not mean that it is damaged.
                setting.reading().check()?;
                tracing::info!("writing an entry of the compiled cache again: {refusal}");
            }
            None => {}
        }
        let written = self.write_entry(&folder, &key, setting)?;
        // Maps the file just written, because another process may have replaced the file at its
        // path.
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

    /// Compiles the program with the entry inside a compiled model; the inner error says why it
    /// does not fit.
    fn with_compiled(
        &self,
        entry: &Arc<Entry>,
        setting: CompileContext<'_>,
    ) -> Result<Result<FromCache, String>> {
        let fits = self.key(None, setting)?.check(entry);
        match fits.and_then(|()| entry.verify(entry.sources()..entry.len(), setting.reading())) {
            Ok(()) => self.with_entry(entry, setting),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Compiles the program with an entry; the inner error says why the entry does not fit.
    fn with_entry(
        &self,
        entry: &Arc<Entry>,
        setting: CompileContext<'_>,
    ) -> Result<Result<FromCache, String>> {
        let store = Store::reading(entry.clone());
        let built = self.program(setting, Packing::Cached(&store));
        match (store.problem(), built) {
            // A mismatch in the entry also fails the build, so `problem` is tested first.
            (Some(refusal), _) => Ok(Err(refusal)),
            (None, Err(problem)) => Err(problem),
            (None, Ok(built)) => Ok(Ok((built, entry.clone()))),
        }
    }

    /// Writes the model and everything that compiling packs and folds into a compiled model.
    pub(super) fn write_compiled(&self, path: &Path, setting: CompileContext<'_>) -> Result<()> {
        // The new file contains the model's files, which do not contain the changes.
        ensure!(
            !self.model.was_changed(),
            InvalidArgument,
            help = "write the changed model with `save_optimized` and compile that",
            "a model that was changed while it was loaded cannot be compiled into a file"
        );
        // The new file records these hashes, so they must be right.
        self.verify_files(setting.reading())?;
        let key = self.key(None, setting)?;
        let target = Target::of(path).map_err(|problem| cannot_write(path, &problem))?;
        let store = begin(&target, key.text(), self.model.contents(), setting.reading())?;
        let built = self.program(setting, Packing::Cached(&store)).map(drop);
        // Compiling has read the mapped weights, and no session will run with them here.
        self.model.release_all();
        if let Some(refusal) = store.problem() {
            return Err(cannot_write(path, &std::io::Error::other(refusal)));
        }
        built?;
        store.finish_at(&target).map(drop).map_err(|problem| cannot_write(path, &problem))
    }

    /// Packs everything into a new entry, and keeps nothing in memory. The inner error says why the
    /// entry could not be written.
    fn write_entry(
        &self,
        folder: &Folder,
        key: &Key,
        setting: CompileContext<'_>,
    ) -> Result<Result<std::fs::File, String>> {
        let start = Instant::now();
        let store = match folder.begin(key) {
            Ok(writer) => Store::writing(writer),
            Err(problem) => return Ok(Err(problem.to_string())),
        };
        let built = self.program(setting, Packing::Cached(&store)).map(drop);
        match (store.problem(), built) {
            (Some(refusal), _) => return Ok(Err(refusal)),
            // Not a failure of the build: packing into memory may stream weights, which needs less.
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

    /// Checks the files inside a compiled model against the hashes that it records for them.
    pub(super) fn verify_files(&self, reading: Reading) -> Result<()> {
        self.model.compiled_model().map_or(Ok(()), |compiled| compiled.verify_files(reading))
    }

    /// The key of this session's entry: the part that names its file, and the code versions that
    /// must match.
    fn key(&self, stamps: Option<&Path>, setting: CompileContext<'_>) -> Result<Key> {
        let content = self.model.content_hash(stamps, setting.reading())?.ok_or_else(|| {
            error!(
                InvalidArgument,
                "a graph that was built by hand cannot be cached, because it has no model file"
            )
            .help("save the graph and load the file, or leave the cache out")
        })?;
        // CPU features are in the CPU provider's fingerprint, below.
        let mut lasting = format!(
            "content {content}\ntarget {} {} {}\nprecision {:?}\n{}\n",
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
                    "provider {} does not declare what its packed weights depend on", info.provider
                )
                .help("leave the compiled cache out, or let the device have a fingerprint")
            })?;
            let Fingerprint { code: version, hardware } = fingerprint;
            // Quoted, so that a name with a line break cannot forge a line of the key.
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
