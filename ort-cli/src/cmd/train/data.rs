//! Data set: arrays whose first axis counts samples, and their batches.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use half::f16;
use ort_runtime::{DType, Tensor, TensorBuffer, Value};
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;

use crate::arrays::{Room, open_npz};

/// The arrays that the loss compares with.
const TARGETS: [&str; 2] = ["target", "labels"];

/// A data set, read from an archive.
pub(super) struct DataSet {
    pub(super) path: PathBuf,
    /// The number of samples in each array.
    pub(super) rows: usize,
    pub(super) arrays: Vec<(String, Tensor)>,
}

impl DataSet {
    /// Reads an archive. Its arrays must have the same number of samples, at least one.
    pub(super) fn open(path: &Path) -> Result<DataSet> {
        let mut archive = open_npz(path)?;
        let names: Vec<String> = archive.names().map(str::to_string).collect();
        // Check the headers first: a wrong archive is rejected before any large array is read.
        let counts = names.iter().map(|name| {
            let header = archive.header(name).with_context(|| format!("reading {}", path.display()))?;
            let rows = header.shape().first().copied();
            let rows = rows.with_context(|| {
                format!("{}: array '{name}' is one number; its first axis must count samples: leave it out, or repeat it for each sample", path.display())
            })?;
            Ok((name, rows))
        });
        let counts = counts.collect::<Result<Vec<(&String, usize)>>>()?;
        let Some(&(first, rows)) = counts.first() else {
            bail!("{} holds no arrays; give one for each input, and the labels or targets", path.display())
        };
        if let Some((name, other)) = counts.iter().find(|(_, count)| *count != rows) {
            bail!(
                "{}: array '{first}' has {rows} samples, array '{name}' has {other}; give all arrays the same first axis, which counts samples",
                path.display()
            );
        }
        ensure!(rows > 0, "{}: there are no samples, the first axis is 0; give at least one", path.display());
        let arrays = archive.read_all(Room::new(None).most());
        let arrays = arrays.with_context(|| format!("reading {}", path.display()))?;
        Ok(DataSet { path: path.to_path_buf(), rows, arrays })
    }

    /// Returns the array with this name.
    pub(super) fn array(&self, name: &str) -> Option<&Tensor> {
        self.arrays.iter().find(|(known, _)| known == name).map(|(_, array)| array)
    }

    /// Returns a batch of the samples at these indices.
    pub(super) fn batch(&self, rows: &[usize]) -> Result<Vec<(&str, Value)>> {
        let gather = |(name, array): &'_ (String, Tensor)| -> Result<Value> {
            let shape: Vec<usize> =
                std::iter::once(rows.len()).chain(array.shape().iter().skip(1).copied()).collect();
            let mut buffer = TensorBuffer::new(array.dtype(), &shape)?;
            let bytes = array.view().bytes()?;
            // This is the size of one sample; it is 0 if another axis is 0.
            let size = bytes.len() / self.rows.max(1);
            if size > 0 {
                for (&row, to) in rows.iter().zip(buffer.bytes_mut()?.chunks_exact_mut(size)) {
                    let from = bytes.get(row * size..(row + 1) * size);
                    to.copy_from_slice(from.with_context(|| format!("array '{name}' has no row {row}"))?);
                }
            }
            Ok(buffer.tensor()?.into())
        };
        self.arrays.iter().map(|array| Ok((array.0.as_str(), gather(array)?))).collect()
    }

    /// Rejects arrays with NaN or infinity. Inputs may contain negative infinity, because attention
    /// masks use it. Targets may not.
    pub(super) fn check_numbers(&self) -> Result<()> {
        for (name, _) in &self.arrays {
            let right: fn(f64) -> bool = match TARGETS.contains(&name.as_str()) {
                true => f64::is_finite,
                false => |number| number < f64::INFINITY,
            };
            self.check_each(name, right, "remove that sample")?;
        }
        Ok(())
    }

    /// Rejects an array of floats if a number is not `right`. `advice` says what to do about it.
    pub(super) fn check_each(&self, name: &str, right: fn(f64) -> bool, advice: &str) -> Result<()> {
        let Some(array) = self.array(name) else { return Ok(()) };
        if let Some((place, number)) = first_wrong(array, right)? {
            // The index counts elements in row-major order, so the quotient is the sample.
            let row = place / (array.element_count() / self.rows).max(1);
            bail!("{}: array '{name}' has {number} in row {row}; {advice}", self.path.display());
        }
        Ok(())
    }
}

/// Returns the first number of an array of floats that is not `right`, and its index.
pub(super) fn first_wrong(array: &Tensor, right: fn(f64) -> bool) -> Result<Option<(usize, f64)>> {
    let wrong = |number: f64| (!right(number)).then_some(number);
    let view = array.view();
    Ok(match array.dtype() {
        DType::F16 => first(view.as_slice::<f16>()?.iter().map(|&number| wrong(number.into()))),
        DType::F32 => first(view.as_slice::<f32>()?.iter().map(|&number| wrong(number.into()))),
        DType::F64 => first(view.as_slice::<f64>()?.iter().map(|&number| wrong(number))),
        // Other types are integers, because `.npy` has no bfloat16 or 8-bit floats.
        _ => None,
    })
}

/// Returns the first number found, and its index.
fn first(found: impl Iterator<Item = Option<f64>>) -> Option<(usize, f64)> {
    found.enumerate().find_map(|(place, found)| Some((place, found?)))
}

/// How samples are grouped into batches, and batches into updates.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// The number of samples.
    pub(super) rows: usize,
    /// The batch size.
    pub(super) batch: usize,
    /// Whether every batch must be full, because the model fixes the batch size.
    pub(super) is_fixed: bool,
    /// The batches per update.
    pub(super) accumulate: usize,
    pub(super) epochs: u64,
}

impl Pace {
    /// Returns the batches per epoch. A last, smaller batch counts unless the model fixes the size.
    pub(super) fn batches(&self) -> usize {
        if self.is_fixed { self.rows / self.batch } else { self.rows.div_ceil(self.batch) }
    }

    /// Returns the samples of an epoch that are in no batch.
    pub(super) fn left_out(&self) -> usize {
        if self.is_fixed { self.rows % self.batch } else { 0 }
    }

    /// Returns the updates of the whole training run. The last update of an epoch may have fewer
    /// batches.
    pub(super) fn updates(&self) -> u64 {
        self.epochs.saturating_mul(self.batches().div_ceil(self.accumulate) as u64)
    }
}

/// Returns the sample order of an epoch. It depends only on the seed and the epoch, so a resumed
/// training run sees the same order.
pub(super) fn order(rows: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows).collect();
    // The epoch selects the stream of the generator.
    order.shuffle(&mut Pcg64::new(u128::from(seed), u128::from(epoch)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_has_an_order_of_its_own() {
        let first = order(100, 7, 0);
        assert_eq!(first, order(100, 7, 0));
        assert!(first != order(100, 7, 1) && first != order(100, 8, 0));
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn batches_and_updates_are_counted() {
        let pace = |rows, batch, is_fixed, accumulate| Pace { rows, batch, is_fixed, accumulate, epochs: 3 };
        for (pace, batches, left_out, updates) in [
            (pace(10, 4, false, 1), 3, 0, 9),
            (pace(10, 4, true, 1), 2, 2, 6),
            (pace(8, 4, true, 1), 2, 0, 6),
            (pace(10, 2, false, 4), 5, 0, 6),
        ] {
            assert_eq!((pace.batches(), pace.left_out(), pace.updates()), (batches, left_out, updates));
        }
    }
}
