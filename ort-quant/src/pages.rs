//! Residency of mapped weights: pages go back to the system while a weight is read.
//!
//! A table of tokens is the largest weight of many models. Without this, reading it would keep all
//! of it resident beside its quantized form.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ort_alloc::MappedFile;

/// A fault maps the pages around it, too: those of 64 KiB on Linux.
const WINDOW: usize = 64 << 10;
/// The bytes of a weight that may be resident. A weight of no more stays until it is done.
const MOST: usize = 8 << 20;

/// The pages of a mapped weight that is being read, on any number of threads.
pub(crate) struct WeightPages<'m> {
    mapping: &'m MappedFile,
    range: Range<usize>,
    /// A bit for each window that was entered since the last release.
    entered: Vec<AtomicU64>,
    /// The bytes of these windows.
    bytes: AtomicUsize,
}

impl<'m> WeightPages<'m> {
    /// The pages of these bytes; `None` if they are few, or in none of the mappings.
    pub(crate) fn of(
        bytes: &[u8],
        mut mappings: impl Iterator<Item = &'m MappedFile>,
    ) -> Option<WeightPages<'m>> {
        if bytes.len() <= MOST {
            return None;
        }
        let (mapping, range) = mappings.find_map(|mapping| Some((mapping, mapping.range_of(bytes)?)))?;
        let words = bytes.len().div_ceil(WINDOW).div_ceil(64);
        let entered = (0..words).map(|_| AtomicU64::new(0)).collect();
        Some(WeightPages { mapping, range, entered, bytes: AtomicUsize::new(0) })
    }

    /// Notes that a range of the weight was read. Another thread may read a page that this gives
    /// back: it faults it in again.
    pub(crate) fn note(&self, read: &Range<usize>) {
        let windows = read.start / WINDOW..=read.end.saturating_sub(1) / WINDOW;
        let entered = WINDOW * windows.filter(|window| self.enters(*window)).count();
        if entered > 0 && self.bytes.fetch_add(entered, Ordering::Relaxed) + entered > MOST {
            self.bytes.store(0, Ordering::Relaxed);
            self.entered.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            // A hint, so a failure only costs memory.
            let _ = self.mapping.release(self.range.clone());
        }
    }

    /// Whether a window is the first time read since the last release.
    fn enters(&self, window: usize) -> bool {
        let Some(word) = self.entered.get(window / 64) else { return false };
        let bit = 1 << (window % 64);
        // Read first, because a write takes the cache line from the other threads.
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::elements::{Elements, RawElements};

    #[test]
    fn a_large_weight_is_never_resident_as_a_whole() -> Result<(), Box<dyn std::error::Error>> {
        let bytes: Vec<u8> = (0..4 * MOST).map(|place| (place % 251) as u8).collect();
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(&bytes)?;
        let mapping = MappedFile::open(file.path())?;
        let mapped = mapping.bytes();
        let pages = WeightPages::of(&mapped, std::iter::once(&mapping)).ok_or("no pages")?;
        let plain = RawElements::<f32>::new(&bytes);
        let paged = RawElements::<f32>::new(&mapped).paged(Some(&pages));
        let columns = 1 << 12;
        let rows = plain.count() / columns;
        // By rows, then down the columns.
        for (count, strides) in [(rows, columns), (columns, rows)] {
            let (mut expected, mut found) = (vec![0.0; 64], vec![0.0; 64]);
            for step in 0..count * (columns.min(strides) / 64) {
                let start =
                    if strides == columns { step * 64 } else { step % rows * columns + step / rows * 64 };
                plain.widen(start, &mut expected);
                paged.widen(start, &mut found);
                assert!(expected.iter().zip(&found).all(|(one, other)| one.to_bits() == other.to_bits()));
            }
            assert!(mapping.resident_bytes(0..mapping.len())? <= 2 * MOST);
        }
        assert!(WeightPages::of(&bytes, std::iter::once(&mapping)).is_none(), "not in the mapping");
        assert!(WeightPages::of(mapped.get(..MOST).ok_or("short")?, std::iter::once(&mapping)).is_none());
        Ok(())
    }
}
