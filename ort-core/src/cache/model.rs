//! Compiled models: a cache entry that also contains the model's own files, so a session needs one
//! file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use blake3::Hash;
use bytes::Bytes;
use ort_alloc::MappedFile;

use super::content::{Content, Identity};
use super::entry::{Entry, EntryWriter, MAGIC, Reading, Refusal};
use super::store::{Role, Store, tag};
use crate::files::Target;
use crate::{Error, Result, ensure, error};

/// The number of hexadecimal digits of a hash.
const DIGITS: usize = 64;

/// A mapped file with a model and its packed weights.
#[derive(Debug)]
pub(crate) struct CompiledModel {
    entry: Arc<Entry>,
    /// The files of the model, its own first.
    files: Vec<Content>,
}

impl CompiledModel {
    /// Opens a compiled model. Returns `None` if the file is not a cache entry.
    pub(crate) fn open(bytes: &Bytes, mapping: Option<&MappedFile>) -> Result<Option<CompiledModel>> {
        if !bytes.starts_with(MAGIC) {
            return Ok(None);
        }
        let mapping = mapping.ok_or_else(|| {
            error!(InvalidArgument, "a compiled model must be mapped, not read")
                .help("do not ask for it to be read into memory")
        })?;
        let damaged =
            |refusal: Refusal| error!(NoModel, "the compiled model is damaged: {refusal}").help(COMPILE);
        let entry = Entry::open(mapping.clone()).map_err(damaged)?;
        let files = files(&entry).map_err(damaged)?;
        if files.is_empty() {
            return Err(error!(NoModel, "the file is an entry of a compiled cache, without the model")
                .help("load the model, with the entry's folder as the cache"));
        }
        Ok(Some(CompiledModel { entry: Arc::new(entry), files }))
    }

    pub(crate) fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    pub(crate) fn files(&self) -> &[Content] {
        &self.files
    }

    /// Verifies the model's own files against the hashes that the compiled model claims for them.
    /// Before that, the claimed hashes only tell whether the packed weights beside them match. They
    /// must not be used to find or write cache entries.
    pub(crate) fn verify_files(&self, reading: Reading) -> Result<()> {
        for file in &self.files {
            ensure!(
                file.is_as_said(reading)?,
                NoModel,
                help = COMPILE,
                "the compiled model is damaged: the hash of the model's file '{}' differs from the recorded one",
                file.name()
            );
        }
        Ok(())
    }
}

const COMPILE: &str = "compile the model again";

/// Returns the model's own files in an entry (a label and the content of each) and verifies their
/// checksums. Packed weights are verified on use. Unpacked weights are read from here, where an
/// unnoticed change would silently produce wrong results.
fn files(entry: &Entry) -> Result<Vec<Content>, Refusal> {
    entry.verify_sources()?;
    let mut files = Vec::new();
    // Files come in pairs: label, then content. An odd number fails at the tag of the last content.
    for index in (0..entry.sources()).step_by(2) {
        let label = entry.blob(index).filter(|(known, _)| *known == tag(Role::Source, &["label"]));
        let content = entry.blob(index + 1).filter(|(known, _)| *known == tag(Role::Source, &["content"]));
        let wrong = || format!("blob {index} is not a model file");
        let ((_, label), (_, content)) = label.zip(content).ok_or_else(wrong)?;
        let (hash, name) = label.split_at_checked(DIGITS).ok_or_else(wrong)?;
        let name = String::from_utf8(name.to_vec()).map_err(|_| wrong())?;
        let hash = Hash::from_hex(hash).map_err(|_| wrong())?;
        files.push(Content::new(name, content, Some(entry.file().clone()), Identity::Hash(hash)));
    }
    Ok(files)
}

/// Starts a compiled model with these files. `finish_at` of the store completes it.
pub(crate) fn begin(target: &Target, key: String, files: &[Content], reading: Reading) -> Result<Store> {
    let (Target::File(path) | Target::Into(path)) = target;
    check_place(path, files)?;
    let mut writer = EntryWriter::at(target, key).map_err(|problem| cannot_write(path, &problem))?;
    for file in files {
        let bytes = file.bytes().ok_or_else(|| {
            error!(InvalidArgument, "the bytes of the model are no longer in memory")
                .help("load it from its file")
        })?;
        // The hash has a fixed length, so the name follows it without a separator.
        let label = format!("{}{}", file.hash(None, reading)?.to_hex(), file.name());
        let added = writer.add(tag(Role::Source, &["label"]), label.as_bytes());
        let added = added.and_then(|()| writer.add(tag(Role::Source, &["content"]), bytes));
        added.map_err(|problem| cannot_write(path, &problem))?;
    }
    writer.end_of_sources();
    Ok(Store::writing(writer))
}

/// Refuses to overwrite a file that the model was loaded from.
pub(crate) fn check_place(path: &Path, files: &[Content]) -> Result<()> {
    const HELP: &str = "give another file to write";
    // Device and inode are compared, not paths, so that links to a file of the model count as well.
    let Ok(found) = path.metadata() else { return Ok(()) };
    let shown = path.display();
    match files.iter().find(|file| file.is_of(&found)).map(Content::name) {
        None => Ok(()),
        Some("") => Err(error!(InvalidArgument, "'{shown}' would replace the model that is read").help(HELP)),
        Some(name) => {
            let what = "the model's external data";
            Err(error!(InvalidArgument, "'{shown}' would replace {what} '{name}'").help(HELP))
        }
    }
}

/// Returns the error for a compiled model that cannot be written.
pub(crate) fn cannot_write(path: &Path, problem: &io::Error) -> Error {
    error!(Fail, "cannot write '{}': {problem}", path.display())
        .help("check that its folder exists, its permissions, and the free disk space")
}
