//! Recording and replay of compilation results in a cache entry.
//!
//! Compilation is deterministic: for one graph it packs the same weights and folds the same
//! constants in the same order. So blobs are found by position, and the tag and length of each
//! confirm the match. The first mismatch ends the use of the entry.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use xxhash_rust::xxh3::Xxh3;

use super::entry::{Entry, EntryWriter};
use crate::dtype::DType;
use crate::files::Target;
use crate::ir::Graph;
use crate::tensor::{Tensor, byte_count};
use crate::{Error, ErrorKind, Result, ensure, error};

/// The role of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Weights packed by a kernel.
    Packed,
    /// A folded constant.
    Folded,
    /// An empty blob: folding failed here.
    Unfolded,
    /// A copy of a constant that is unaligned in the model's file, aligned for the kernels.
    Aligned,
    /// A file of the model.
    Source,
}

/// Returns the tag of a blob: a hash of its role and of what else identifies it.
pub(crate) fn tag(role: Role, parts: &[&str]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&[role as u8]);
    for part in parts {
        // With their lengths, so that `["ab", "c"]` and `["a", "bc"]` differ.
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.digest()
}

/// The cache entry that a session is compiled with.
pub(crate) struct Store {
    state: Mutex<State>,
}

struct State {
    mode: Mode,
    /// The problem that ended the use of the entry.
    problem: Option<String>,
}

enum Mode {
    Write(EntryWriter),
    Read { entry: Arc<Entry>, next: usize },
}

impl Store {
    pub(crate) fn writing(writer: EntryWriter) -> Store {
        Store { state: Mutex::new(State { mode: Mode::Write(writer), problem: None }) }
    }

    pub(crate) fn reading(entry: Arc<Entry>) -> Store {
        let next = entry.sources();
        Store { state: Mutex::new(State { mode: Mode::Read { entry, next }, problem: None }) }
    }

    /// Returns the next blob. Returns `None` while the entry is being written; then the caller must
    /// [`put`](Self::put) it.
    pub(crate) fn take(&self, tag: u64, len: usize) -> Result<Option<Bytes>> {
        let state = &mut *self.state.lock();
        let Mode::Read { entry, next } = &mut state.mode else { return Ok(None) };
        let found = entry.blob(*next).filter(|(known, bytes)| *known == tag && bytes.len() == len);
        // After a mismatch positions mean nothing, so even a blob with the right tag is refused.
        match found.filter(|_| state.problem.is_none()) {
            Some((_, bytes)) => {
                *next += 1;
                Ok(Some(bytes))
            }
            None => {
                let problem = format!("its blob {next} does not have the expected {len} bytes");
                Err(ended(state.problem.get_or_insert(problem)))
            }
        }
    }

    /// Appends a blob to the entry being written.
    pub(crate) fn put(&self, tag: u64, bytes: &[u8]) -> Result<()> {
        let state = &mut *self.state.lock();
        let Mode::Write(writer) = &mut state.mode else {
            return Err(error!(Fail, "an entry of the cache is complete"));
        };
        if state.problem.is_none()
            && let Err(problem) = writer.add(tag, bytes)
        {
            state.problem = Some(problem.to_string());
        }
        state.problem.as_ref().map_or(Ok(()), |problem| Err(ended(problem)))
    }

    /// Abandons the entry.
    fn end(&self, problem: &Error) {
        self.state.lock().problem.get_or_insert_with(|| problem.to_string());
    }

    /// Returns what ended the use of the entry, or that it has blobs no one asked for.
    pub(crate) fn problem(&self) -> Option<String> {
        let state = self.state.lock();
        let left = match &state.mode {
            Mode::Read { entry, next } => entry.len() - next,
            Mode::Write(_) => 0,
        };
        state.problem.clone().or_else(|| (left > 0).then(|| format!("{left} of its blobs are unused")))
    }

    /// Completes the entry being written and publishes it under its name.
    pub(crate) fn finish(self, path: &Path) -> io::Result<std::fs::File> {
        self.finish_at(&Target::File(path.to_path_buf()))
    }

    /// Same for a target that may be a link, a device or a pipe.
    pub(crate) fn finish_at(self, target: &Target) -> io::Result<std::fs::File> {
        match self.state.into_inner() {
            State { problem: Some(problem), .. } => Err(io::Error::other(problem)),
            State { mode: Mode::Write(writer), .. } => writer.finish_at(target),
            State { mode: Mode::Read { .. }, .. } => {
                Err(io::Error::other("an entry of the cache is complete"))
            }
        }
    }

    /// Returns the constants that `graph` computes: from the entry, or by `evaluate`, which are
    /// then stored.
    pub(crate) fn folded(
        &self,
        graph: Graph,
        evaluate: impl FnOnce(Graph) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        // Recording and replay skip the same graphs, because this follows from the graph alone.
        let Some(outputs) = outputs_of(&graph) else { return evaluate(graph) };
        let failed = tag(Role::Unfolded, &[]);
        if self.is_next(failed) {
            self.take(failed, 0)?;
            return Err(error!(Fail, "these constants could not be folded when the entry was written"));
        }
        let mut known = Vec::with_capacity(outputs.len());
        for output in &outputs {
            // `None` means that the entry is being written, so no output is known.
            let Some(bytes) = self.take(output.tag(), output.len)? else { break };
            known.push(output.tensor(bytes).inspect_err(|problem| self.end(problem))?);
        }
        if known.len() == outputs.len() {
            return Ok(known);
        }
        let tensors = evaluate(graph).inspect_err(|problem| self.failed(problem, failed))?;
        for (output, tensor) in outputs.iter().zip(&tensors) {
            // Replay expects the inferred type and shape, so an entry with others would be useless.
            let bytes = tensor.bytes().filter(|bytes| bytes.len() == output.len && output.is(tensor));
            let bytes = bytes.ok_or_else(|| error!(Fail, "a folded constant has another shape"));
            let bytes = bytes.inspect_err(|problem| self.end(problem))?;
            self.put(output.tag(), bytes)?;
        }
        Ok(tensors)
    }

    /// Records that folding failed. It would fail again next time, unless memory or time ran out.
    fn failed(&self, problem: &Error, tag: u64) {
        if matches!(problem.kind(), ErrorKind::OutOfMemory | ErrorKind::Cancelled) {
            self.end(problem);
        } else if let Err(problem) = self.put(tag, &[]) {
            tracing::debug!(%problem, "the entry of the cache is given up");
        }
    }

    /// Returns whether the next blob has this tag.
    fn is_next(&self, tag: u64) -> bool {
        match &self.state.lock().mode {
            Mode::Read { entry, next } => entry.blob(*next).is_some_and(|(known, _)| known == tag),
            Mode::Write(_) => false,
        }
    }
}

fn ended(problem: &str) -> Error {
    error!(Fail, "an entry of the cache cannot be used: {problem}")
}

/// A constant that folding produces.
struct Output {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    len: usize,
}

impl Output {
    fn tag(&self) -> u64 {
        tag(Role::Folded, &[&self.name, self.dtype.name(), &format!("{:?}", self.shape)])
    }

    /// Creates the constant from these bytes. A Rust `bool` must be 0 or 1 in memory, and the file
    /// is untrusted.
    fn tensor(&self, bytes: Bytes) -> Result<Tensor> {
        let is_sound = self.dtype != DType::Bool || bytes.iter().all(|byte| *byte <= 1);
        ensure!(
            is_sound,
            Fail,
            "the folded constant '{}' has bytes other than 0 and 1, expected booleans",
            self.name
        );
        Tensor::from_bytes(self.dtype, &self.shape, bytes)
    }

    fn is(&self, tensor: &Tensor) -> bool {
        (tensor.dtype(), tensor.shape()) == (self.dtype, &self.shape)
    }
}

/// Returns the outputs of a constant graph, or `None` if one is a string or its shape is not
/// constant.
fn outputs_of(graph: &Graph) -> Option<Vec<Output>> {
    let output = |id: &crate::ir::ValueId| {
        let value = graph.value(*id);
        let ty = value.ty.as_tensor()?;
        let sizes = ty.shape.as_ref()?.iter();
        let shape: Option<Vec<usize>> = sizes.map(|size| usize::try_from(size.as_constant()?).ok()).collect();
        let shape = shape?;
        let len = byte_count(ty.dtype, &shape).ok()?;
        let is_numbers = ty.dtype != DType::String;
        is_numbers.then(|| Output { name: value.name.to_string(), dtype: ty.dtype, shape, len })
    };
    graph.outputs.iter().map(output).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ort_alloc::MappedFile;

    use super::*;
    use crate::dim::Dim;
    use crate::ir::ValueType;

    /// Folds with an entry that contains one constant of two booleans.
    fn folded(bytes: &[u8]) -> (Result<Vec<Tensor>>, Option<String>) {
        let mut graph = Graph::new("constants");
        let shape = [Dim::from(2)].into_iter().collect();
        let value = graph.add_value("flags", ValueType::tensor(DType::Bool, Some(shape)));
        graph.outputs.push(value);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        let store = Store::writing(EntryWriter::new(folder.path(), "key".to_owned()).unwrap());
        let tag = outputs_of(&graph).unwrap().first().unwrap().tag();
        store.put(tag, bytes).unwrap();
        let file = store.finish(&path).unwrap();
        let entry = Entry::open(MappedFile::open_file(file).unwrap()).unwrap();
        let store = Store::reading(Arc::new(entry));
        let result = store.folded(graph, |_| Err(error!(Fail, "nothing is computed")));
        (result, store.problem())
    }

    #[test]
    fn bytes_that_are_no_booleans_end_the_use_of_an_entry() {
        let (tensors, problem) = folded(&[0, 1]);
        assert_eq!(
            (tensors.unwrap().first().unwrap().bytes().unwrap().as_ref(), problem),
            (&[0, 1][..], None)
        );
        for bytes in [[2, 0], [1, 255]] {
            let (tensors, problem) = folded(&bytes);
            let text = tensors.unwrap_err().to_string();
            assert!(text.contains("'flags' has bytes other than 0 and 1, expected booleans"), "{text}");
            assert!(problem.unwrap().contains("expected booleans"));
        }
    }
}
