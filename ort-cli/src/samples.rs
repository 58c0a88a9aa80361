//! Samples for calibration and comparison: a NumPy archive whose first axis counts them, or a
//! folder with an archive for each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ort_runtime::{Tensor, Value, ValueSpec, advise};

use crate::arrays::{Room, open_npz};

/// The samples of a file or folder.
pub(crate) struct Samples {
    kind: Kind,
    /// By input: its name, and the rank that the model declares.
    inputs: Vec<(String, Option<usize>)>,
    /// The most bytes of an array.
    limit: Option<usize>,
}

enum Kind {
    /// All samples, read at once.
    Arrays { arrays: Vec<(String, Tensor)>, count: usize },
    /// The files, each read when it is needed.
    Files(Vec<PathBuf>),
}

impl Samples {
    /// Opens samples. Each has a value for every input of the model that has no default.
    pub(crate) fn open(path: &Path, specs: &[ValueSpec], limit: Option<usize>) -> Result<Samples> {
        let inputs = specs.iter().filter(|spec| !spec.has_default);
        let inputs: Vec<_> =
            inputs.map(|spec| (spec.name.clone(), spec.ty.shape().map(<[_]>::len))).collect();
        let kind = if path.is_dir() {
            let entries = std::fs::read_dir(path).with_context(|| format!("reading {}", path.display()))?;
            let mut files = Vec::new();
            for entry in entries {
                let path = entry?.path();
                if path.extension().is_some_and(|extension| extension == "npz") {
                    files.push(path);
                }
            }
            // The order of a folder is not defined, and ranges by moving averages depend on it.
            files.sort();
            ensure!(!files.is_empty(), "{}: the folder has no .npz file", path.display());
            Kind::Files(files)
        } else {
            let arrays = read_archive(path, &inputs, limit)?;
            let count = samples_of(path, &arrays)?;
            Kind::Arrays { arrays, count }
        };
        Ok(Samples { kind, inputs, limit })
    }

    /// The number of samples.
    pub(crate) fn count(&self) -> usize {
        match &self.kind {
            Kind::Arrays { count, .. } => *count,
            Kind::Files(files) => files.len(),
        }
    }

    /// Reads a sample.
    pub(crate) fn get(&self, index: usize) -> Result<Vec<(String, Value)>> {
        match &self.kind {
            Kind::Arrays { arrays, .. } => {
                let rank = |name: &str| {
                    self.inputs.iter().find(|(input, _)| input == name).and_then(|(_, rank)| *rank)
                };
                let sample = |(name, array): &(String, Tensor)| {
                    Ok((name.clone(), part(array, index, rank(name))?.into()))
                };
                arrays.iter().map(sample).collect()
            }
            Kind::Files(files) => {
                let path = files.get(index).context("there are fewer samples")?;
                let arrays = read_archive(path, &self.inputs, self.limit)?;
                Ok(arrays.into_iter().map(|(name, array)| (name, array.into())).collect())
            }
        }
    }
}

/// Reads the arrays of the model's inputs.
fn read_archive(
    path: &Path,
    inputs: &[(String, Option<usize>)],
    limit: Option<usize>,
) -> Result<Vec<(String, Tensor)>> {
    let mut archive = open_npz(path)?;
    let names: Vec<String> = archive.names().map(str::to_string).collect();
    let found: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    if let Some((missing, _)) = inputs.iter().find(|(name, _)| !found.contains(name.as_str())) {
        let advice = advise("arrays", missing, names.iter().map(String::as_str));
        bail!("{}: there is no array '{missing}' for the input of that name; {advice}", path.display());
    }
    let mut room = Room::new(limit);
    let mut arrays = Vec::new();
    for (name, _) in inputs {
        let array = archive.read(name, room.most()).with_context(|| format!("reading {}", path.display()))?;
        room.take(array.byte_count());
        arrays.push((name.clone(), array));
    }
    Ok(arrays)
}

/// The number of samples, which is the first size of every array.
fn samples_of(path: &Path, arrays: &[(String, Tensor)]) -> Result<usize> {
    let Some((first, array)) = arrays.first() else {
        bail!("{}: the model has no inputs, so that there are no samples of them", path.display());
    };
    let size = |name: &str, array: &Tensor| {
        let size = array.shape().first().copied();
        size.with_context(|| {
            format!("{}: array '{name}' is one number; its first axis must count samples", path.display())
        })
    };
    let count = size(first, array)?;
    for (name, array) in arrays {
        let other = size(name, array)?;
        ensure!(
            other == count,
            "{}: array '{first}' has {count} samples, '{name}' {other}; the first axis counts samples and is the \
             same for all",
            path.display()
        );
    }
    ensure!(count > 0, "{}: there are no samples, the first axis is 0", path.display());
    Ok(count)
}

/// A sample of an array: a batch of one, or without the axis of samples if the input has one axis
/// less.
fn part(array: &Tensor, index: usize, rank: Option<usize>) -> Result<Tensor> {
    let (Some(bytes), Some((_, rest))) = (array.bytes(), array.shape().split_first()) else {
        bail!("texts cannot be samples");
    };
    let elements: usize = rest.iter().product();
    let size = array.dtype().byte_size().context("numbers of less than a byte cannot be samples")?;
    let length = elements * size;
    let start = index * length;
    let batch = [&[1], rest].concat();
    let shape = if rank == Some(rest.len()) { rest } else { &batch };
    Ok(Tensor::from_bytes(array.dtype(), shape, bytes.slice(start..start + length))?)
}
