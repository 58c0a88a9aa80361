//! The thread mapping of kernels that process rows: the slices of a tensor along some of its axes.

use std::ops::Deref;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::NodeView;
use ort_core::{Result, ensure, error};

use super::MOST_AXES;
use crate::launch::{Launch, THREADS, Walk};

/// Float types that are computed in float32.
pub(super) const SHORT_FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// Whether the rank is known and small enough.
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES)
}

/// Returns an element type's suffix in entry names.
pub(super) fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        _ => return Err(error!(NotImplemented, "elements of {} are not supported", dtype.name())),
    })
}

/// Contiguous rows, as in `cu/rows.cuh`.
pub(super) struct ContiguousRows {
    count: usize,
    len: usize,
    /// The elements of a 16-byte vector, if rows consist of whole vectors.
    vector: Option<usize>,
}

impl ContiguousRows {
    /// The most threads of a block.
    const MOST: usize = 1024;

    /// Creates rows; `parts` are sizes that must be whole vectors as well.
    pub(super) fn new(count: usize, len: usize, dtype: DType, parts: &[usize]) -> ContiguousRows {
        let vector = if dtype == DType::F32 { 4 } else { 8 };
        let are_whole = parts.iter().all(|size| size.is_multiple_of(vector));
        ContiguousRows { count, len, vector: are_whole.then_some(vector) }
    }

    /// Returns the elements a thread holds in an entry with this number of vectors.
    fn held(&self, vectors: usize) -> usize {
        match self.vector {
            Some(vector) => vectors * vector,
            None if vectors < 4 => 4,
            None => 8,
        }
    }

    /// Whether threads with four vectors each, which stall on memory less often, still fill half of
    /// every multiprocessor. A row that one thread holds does not count: its accesses would
    /// coalesce to no more than 16 bytes.
    pub(super) fn are_many(&self, processors: u32) -> bool {
        let threads = self.count.saturating_mul(self.len.div_ceil(self.held(4)));
        self.len > self.held(4) && threads >= ContiguousRows::MOST / 2 * processors as usize
    }

    /// Whether a row exceeds a block whose threads hold one vector each.
    pub(super) fn are_long(&self) -> bool {
        self.len > ContiguousRows::MOST * self.held(1)
    }

    /// Whether a warp needs more than one vector per thread for a row, and at most three.
    pub(super) fn fill_a_warp(&self) -> bool {
        self.vector.is_some() && self.len > WARP * self.held(1) && self.len <= WARP * self.held(3)
    }

    /// Gives each row a team of threads, which holds it in this number of vectors per thread if a
    /// block can.
    pub(super) fn launch(&self, launch: Launch, vectors: usize) -> Result<Launch> {
        /// Threads of a block with several rows: enough to hide latency if rows are many, and few
        /// blocks to start if they are few.
        const OF_SHORT_ROWS: usize = 128;
        // Kernels count elements in 32 bits.
        let fits = self.count.checked_mul(self.len).is_some_and(|all| all <= i32::MAX as usize);
        ensure!(fits, NotImplemented, "{} rows of {}: more than 2^31 - 1 elements", self.count, self.len);
        let threads = self.len.div_ceil(self.held(vectors)).clamp(1, ContiguousRows::MOST);
        let (team, rows) = if threads > WARP {
            (threads.next_multiple_of(WARP), 1)
        } else {
            let team = threads.next_power_of_two();
            let rows = self.count.max(1).next_power_of_two();
            (team, rows.clamp(WARP / team, OF_SHORT_ROWS / team))
        };
        let launch = launch.grid([self.count.div_ceil(rows).max(1), 1, 1])?;
        Ok(launch.block([team, rows, 1].map(|size| size as u32)))
    }
}

/// The rows of a tensor along some of its axes, and the thread team that processes one.
pub(super) struct TeamRows(ort_gpu::StridedRows);

impl Deref for TeamRows {
    type Target = ort_gpu::StridedRows;

    fn deref(&self) -> &ort_gpu::StridedRows {
        &self.0
    }
}

impl TeamRows {
    /// Splits a tensor of `shape` into rows along the axes of the mask.
    pub(super) fn new(shape: &[usize], mask: &[bool]) -> TeamRows {
        TeamRows(ort_gpu::StridedRows::new(shape, mask))
    }

    /// Splits a tensor of `shape` into rows along one axis.
    pub(super) fn along_axis(shape: &[usize], axis: usize) -> TeamRows {
        TeamRows(ort_gpu::StridedRows::along_axis(shape, axis))
    }

    /// Whether adjacent rows are adjacent in memory, and there are enough of them for a warp.
    pub(super) fn in_columns(&self) -> bool {
        let last = |walk: &Walk| walk.steps.first().and_then(|steps| steps.last().copied());
        last(&self.begins) == Some(1) && last(&self.along) != Some(1) && self.count >= WARP
    }

    /// Whether rows are contiguous and follow each other.
    pub(super) fn are_contiguous(&self) -> bool {
        let are = |walk: &Walk, step: usize| match walk.steps.first().map(Vec::as_slice) {
            Some([own]) => *own == i64::try_from(step).unwrap_or(i64::MAX),
            Some([]) => true,
            _ => false,
        };
        are(&self.along, 1) && are(&self.begins, self.len)
    }

    /// Returns the number of threads per row, as in `cu/lines.cuh`.
    pub(super) fn team(&self) -> usize {
        const LONG: usize = 1024;
        const SHORT_COLUMN: usize = 16;
        match self.in_columns() {
            _ if self.len <= 4 => 1,
            true if self.len <= SHORT_COLUMN => 1,
            true => 8,
            false => team_of(self.len, LONG),
        }
    }

    /// Launches the entry for these rows' team; each row is cut into `splits` pieces.
    pub(super) fn launch(&self, family: &'static str, entry: &str, splits: usize) -> Result<Launch> {
        self.launch_by(self.team(), family, entry, splits)
    }

    /// Launches a sequential scan: a warp or a block per contiguous row, or a thread per column.
    pub(super) fn launch_in_order(&self, family: &'static str, entry: &str) -> Result<Launch> {
        let team = self.team();
        self.launch_by(if team == 8 { 1 } else { team }, family, entry, 1)
    }

    pub(super) fn launch_by(
        &self,
        team: usize,
        family: &'static str,
        entry: &str,
        splits: usize,
    ) -> Result<Launch> {
        // Kernels count elements in 32 bits.
        let fits = self.count.checked_mul(self.len).is_some_and(|all| all <= i32::MAX as usize);
        ensure!(fits, NotImplemented, "{} rows of {}: more than 2^31 - 1 elements", self.count, self.len);
        teams(Launch::new(family, format!("{entry}_{team}")), self.count, team, splits)
    }

    /// Appends the structure `Lines` of `cu/lines.cuh`.
    pub(super) fn param(&self, launch: Launch) -> Result<Launch> {
        let number = |number: i64| {
            let number = i32::try_from(number);
            number.map_err(|_| error!(NotImplemented, "a size or stride exceeds 2^31 - 1 elements"))
        };
        let of = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let mut words = vec![number(of(self.count))?, number(of(self.len))?];
        words.push(number(of(self.begins.sizes.len()))?);
        words.push(number(of(self.along.sizes.len()))?);
        for walk in [&self.begins, &self.along] {
            let steps = walk.steps.first().map_or(&[][..], |steps| steps);
            let sizes: Vec<i64> = walk.sizes.iter().copied().map(of).collect();
            for list in [&sizes[..], steps] {
                for axis in 0..MOST_AXES {
                    words.push(number(list.get(axis).copied().unwrap_or(0))?);
                }
            }
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(launch.bytes(&bytes))
    }
}

/// The threads of a warp.
pub(super) const WARP: usize = 32;

/// Sets the grid for a team per row, times the pieces that rows are cut into.
pub(super) fn teams(launch: Launch, count: usize, team: usize, splits: usize) -> Result<Launch> {
    let rows_of_block = THREADS as usize / team.max(1);
    launch.grid([count.div_ceil(rows_of_block.max(1)).max(1), splits, 1])
}

/// Returns a warp for a row of up to `long` elements, and a block for a longer one.
pub(super) fn team_of(len: usize, long: usize) -> usize {
    if len <= long { WARP } else { THREADS as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether 132 multiprocessors count the rows as many, whether they fill a warp, and the block
    /// and grid of a launch with this number of vectors.
    fn blocks(count: usize, len: usize, vectors: usize) -> ([bool; 2], [u32; 3]) {
        let rows = ContiguousRows::new(count, len, DType::F16, &[len]);
        let launch = rows.launch(Launch::new("rows", ""), vectors).unwrap();
        let [team, rows_of_block, _] = launch.block;
        ([rows.are_many(132), rows.fill_a_warp()], [team, rows_of_block, launch.grid[0]])
    }

    #[test]
    fn threads_hold_more_of_rows_that_keep_the_device_busy() {
        assert_eq!(blocks(128, 768, 3), ([false, true], [32, 4, 32]));
        assert_eq!(blocks(1024, 768, 3), ([false, true], [32, 4, 256]));
        assert_eq!(blocks(4096, 768, 4), ([true, true], [32, 4, 1024]));
        assert_eq!(blocks(32_768, 4096, 4), ([true, false], [128, 1, 32_768]));
        assert_eq!(blocks(32, 1000, 1), ([false, false], [128, 1, 32]));
        assert_eq!(blocks(1536, 128, 1), ([false, false], [16, 8, 192]));
        assert_eq!(blocks(1_000_000, 256, 4), ([true, false], [8, 16, 62_500]));
        assert_eq!(blocks(1_000_000, 32, 1), ([false, false], [4, 32, 31_250]));
        assert_eq!(blocks(3, 1, 1), ([false, false], [1, 32, 1]));
    }

    #[test]
    fn long_rows_are_those_that_a_block_does_not_hold_in_a_vector_of_each_thread() {
        let are_long = |len, dtype| ContiguousRows::new(1, len, dtype, &[len]).are_long();
        assert!(!are_long(8192, DType::F16) && are_long(8200, DType::F16));
        assert!(!are_long(4096, DType::F32) && are_long(4100, DType::F32));
        assert!(!are_long(4095, DType::F16) && are_long(4097, DType::F16));
    }
}
