//! Sorting of rows, for `TopK` and `Unique`. Short rows are sorted by rank counting, longer ones
//! as blocks that are merged.

use std::ops::Deref;

use ort_core::dtype::DType;
use ort_core::ops::reduce::problem::RankedRows;
use ort_core::{Result, error};

use super::elements::element_bytes;
use crate::launch::{Launch, OpCx, Operand};

/// The longest row sorted by rank counting.
const SHORT: usize = 64;
/// Elements that a block sorts, as in `cu/sort.cu`.
const BLOCK: usize = 2048;
/// Parts that are merged at once, as in `cu/sort.cu`.
const WAYS: usize = 8;
/// The most threads of a sorting block.
const THREADS: usize = 256;

/// Returns a type's number in `cu/keys.cuh`, and the entry suffix for its key width.
pub(super) fn kind_of(dtype: DType) -> Result<(usize, &'static str)> {
    Ok(match dtype {
        DType::F32 => (0, "narrow"),
        DType::F16 => (1, "narrow"),
        DType::BF16 => (2, "narrow"),
        DType::F64 => (3, "wide"),
        DType::I8 => (4, "narrow"),
        DType::I16 => (5, "narrow"),
        DType::I32 => (6, "narrow"),
        DType::I64 => (7, "wide"),
        DType::U8 | DType::Bool => (8, "narrow"),
        DType::U16 => (9, "narrow"),
        DType::U32 => (10, "narrow"),
        DType::U64 => (11, "wide"),
        other => return Err(error!(NotImplemented, "sorting elements of {} is not supported", other.name())),
    })
}

/// The rows of a tensor along an axis, and how their elements sort.
pub(super) struct SortRows {
    ranked: RankedRows,
    kind: usize,
    suffix: &'static str,
    bytes: usize,
}

impl Deref for SortRows {
    type Target = RankedRows;

    fn deref(&self) -> &RankedRows {
        &self.ranked
    }
}

/// The sorted tensor, and the outputs for elements and their positions along the axis.
pub(super) struct SortTensors<'a> {
    pub(super) x: &'a Operand,
    pub(super) values: Option<&'a Operand>,
    pub(super) places: Option<&'a Operand>,
    /// Whether the largest come first.
    pub(super) descending: bool,
}

impl SortRows {
    /// Creates the rows of tensor `x`.
    pub(super) fn new(x: &Operand, ranked: RankedRows) -> Result<SortRows> {
        let (kind, suffix) = kind_of(x.dtype)?;
        Ok(SortRows { ranked, kind, suffix, bytes: element_bytes(x.dtype)? })
    }

    /// Returns how many sorted parts of this size a row has, and how many entries of each are
    /// kept.
    fn parts(&self, size: usize) -> [usize; 2] {
        [self.len.div_ceil(size), self.kept.min(size)]
    }

    /// Returns the part size of each merge pass, until one part is the whole row.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let whole = self.len;
        std::iter::successors(Some(BLOCK), |size| size.checked_mul(WAYS))
            .take_while(move |size| *size < whole)
    }

    /// Reserves two buffers for double buffering between passes; they are empty if a block sorts a
    /// whole row.
    pub(super) fn buffers(&self, cx: &OpCx<'_>, taken: &mut usize) -> [Operand; 2] {
        let of_line = self.sizes().map(|size| self.parts(size).into_iter().fold(1, usize::saturating_mul));
        // An entry is a key with its position: one word for keys of 32 bits, two for 64.
        let words = if self.suffix == "wide" { 2 } else { 1 };
        let shape = [self.count, of_line.max().unwrap_or(0), words];
        [(); 2].map(|()| cx.workspace(taken, DType::U64, &shape))
    }

    /// Returns a launch with the input, the requested outputs, further buffers, and the structure
    /// `Lines`.
    fn launch(&self, entry: &str, tensors: &SortTensors<'_>, entries: &[Option<&Operand>]) -> Result<Launch> {
        let launch = Launch::new("sort", format!("{entry}_{}", self.suffix)).tensor(tensors.x);
        let launch = launch.find_tensor(tensors.values).find_tensor(tensors.places);
        let launch = entries.iter().fold(launch, |launch, entries| launch.find_tensor(*entries));
        let descending = usize::from(tensors.descending);
        launch.uints::<7>(&[self.count, self.len, self.inner, self.kept, self.kind, self.bytes, descending])
    }

    /// Returns the launches that sort, with these [buffers](Self::buffers). The sort is stable.
    pub(super) fn sort(
        &self,
        tensors: &SortTensors<'_>,
        [mut from, mut to]: [Operand; 2],
    ) -> Result<Vec<Launch>> {
        if self.count == 0 {
            return Ok(Vec::new());
        }
        if self.len <= SHORT {
            let count = self.count.saturating_mul(self.len);
            return Ok(vec![self.launch("count_ranks", tensors, &[])?.threads(count)?.uint(count)?]);
        }
        // The sorting network needs a power of two.
        let size = self.len.min(BLOCK).next_power_of_two();
        let [parts, capacity] = self.parts(size);
        // A row that a block sorts whole goes straight to the outputs.
        let entries = Some(&from).filter(|_| self.len > BLOCK);
        let sort = self.launch("sort_part", tensors, &[entries])?;
        let sort = sort.grid([self.count.saturating_mul(parts), 1, 1])?;
        let sort = sort.block([(size / 2).min(THREADS) as u32, 1, 1]);
        let mut launches = vec![sort.uint(parts)?.uint(capacity)?.uint(size)?];
        for size in self.sizes() {
            let [parts, capacity] = self.parts(size);
            let merged_size = size.saturating_mul(WAYS);
            let [merged_parts, merged] = self.parts(merged_size);
            // The last merge writes the outputs.
            let target = Some(&to).filter(|_| merged_parts > 1);
            let count = self.count.saturating_mul(parts).saturating_mul(capacity);
            let launch = self.launch("merge_parts", tensors, &[Some(&from), target])?.threads(count)?;
            let launch = launch.uints::<3>(&[parts, capacity, size])?;
            // The last merged size can exceed `int` although rows do not.
            let sizes = [merged_parts, merged, merged_size.min(i32::MAX as usize)];
            launches.push(launch.uints::<3>(&sizes)?.uint(count)?);
            std::mem::swap(&mut from, &mut to);
        }
        Ok(launches)
    }
}
