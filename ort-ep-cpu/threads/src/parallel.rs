//! Data parallelism: safe ways to split slices over the threads of the [`Pool`].
//!
//! The loops take their task as `dyn Fn`. A generic loop is compiled again for each of some
//! thousand closures, and each closure twice: for one thread and for several. A chunk is long
//! enough to hide an indirect call.

use std::marker::PhantomData;
use std::ops::Range;

use crate::interrupt::{TASK_UNITS, spend, spending};
pub use crate::pool::{Pool, Shares};

/// Elements whose copying is worth a thread: starting a parallel region costs a few microseconds.
pub const WORTH_A_THREAD: usize = 8 << 10;

/// Chunks per thread on average, enough to balance threads of unequal speed.
const CHUNKS_PER_THREAD: usize = 4;

/// Calls `task` on consecutive ranges that cover `0..len`. Every range but the last is at least
/// `min_chunk` long. The split depends on `threads`, so results must not depend on the split.
pub fn for_each_chunk(threads: usize, len: usize, min_chunk: usize, task: impl Fn(Range<usize>) + Sync) {
    run_chunks(threads, len, min_chunk, &task);
}

fn run_chunks(threads: usize, len: usize, min_chunk: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
    let (chunk, chunks) = chunking(threads, len, min_chunk);
    let block = block_of(chunk, min_chunk, 1);
    let blocks = |range: Range<usize>| {
        for start in range.clone().step_by(block) {
            spend(units_of_block(block, chunk));
            task(start..start.saturating_add(block).min(range.end));
        }
    };
    // A single chunk runs here, without a region.
    if chunks <= 1 {
        return blocks(0..len);
    }
    Pool::global().run(threads, chunks, &|index| {
        let start = index * chunk;
        blocks(start..(start + chunk).min(len));
    });
}

/// Returns how much of a chunk runs between two deadline checks. A block is short enough for a
/// kernel that takes seconds, or that works on many rows of `row_len` elements, to stop within
/// milliseconds. It is long enough to hide the cost of a check.
fn block_of(chunk: usize, min_chunk: usize, row_len: usize) -> usize {
    const BLOCKS: usize = 256;
    const LEAST_CHUNKS: usize = 8;
    const ELEMENTS: usize = 1 << 17;
    let most = chunk.div_ceil(BLOCKS).min(ELEMENTS / row_len.max(1));
    most.max(min_chunk.saturating_mul(LEAST_CHUNKS)).clamp(1, chunk.max(1))
}

/// Returns the work units that a block counts for. If a chunk has several blocks, each is long
/// enough to be worth its own deadline check.
fn units_of_block(block: usize, chunk: usize) -> usize {
    if block < chunk { 32 * TASK_UNITS } else { TASK_UNITS }
}

/// Cuts `values` into pieces of `chunk` elements, of which the last may be shorter. Calls `task`
/// with the index of each piece and the piece.
pub fn for_each_chunk_mut<T: Send>(
    threads: usize,
    values: &mut [T],
    chunk: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    run_chunks_mut(threads, values, chunk, &task);
}

fn run_chunks_mut<T: Send>(
    threads: usize,
    values: &mut [T],
    chunk: usize,
    task: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    let chunk = chunk.max(1);
    if threads <= 1 {
        for (index, piece) in values.chunks_mut(chunk).enumerate() {
            spend(TASK_UNITS.max(piece.len()));
            task(index, piece);
        }
        return;
    }
    let chunks = values.len().div_ceil(chunk);
    let pieces = Pieces::new(values);
    Pool::global().run(threads, chunks, &|index| {
        // SAFETY: `Pool::run` calls each index once, and pieces of different indices do not
        // overlap.
        let piece = unsafe { pieces.range(index * chunk, chunk) };
        spend(piece.len());
        task(index, piece);
    });
}

/// Treats `values` as rows of `row_len` elements. Calls `task` with the index of a first row and a
/// run of rows from there on. Every run but the last has at least `min_rows` rows. A tail shorter
/// than a row is not touched.
pub fn for_each_row_chunk_mut<T: Send>(
    threads: usize,
    values: &mut [T],
    row_len: usize,
    min_rows: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    run_row_chunks_mut(threads, values, row_len, min_rows, &task);
}

fn run_row_chunks_mut<T: Send>(
    threads: usize,
    values: &mut [T],
    row_len: usize,
    min_rows: usize,
    task: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    if row_len == 0 {
        return;
    }
    let rows = values.len() / row_len;
    let (chunk, _) = chunking(threads, rows, min_rows);
    let block = block_of(chunk, min_rows, row_len);
    let whole = values.split_at_mut(rows * row_len).0;
    run_chunks_mut(threads, whole, chunk * row_len, &|index, piece| {
        for (at, rows) in piece.chunks_mut(block * row_len).enumerate() {
            spend(units_of_block(block, chunk));
            task(index * chunk + at * block, rows);
        }
    });
}

/// Returns the length of a chunk and the number of chunks.
fn chunking(threads: usize, len: usize, min_chunk: usize) -> (usize, usize) {
    if threads <= 1 || len == 0 {
        return (len.max(1), 1);
    }
    // Threads that the pool lacks would only make the chunks smaller.
    let wanted = len.div_ceil(threads.min(Pool::global().capacity()) * CHUNKS_PER_THREAD);
    let chunk = wanted.max(min_chunk).max(1);
    (chunk, len.div_ceil(chunk))
}

/// Rows of `len` elements at regular strides along three axes, such as the rows of all heads of a
/// batch. No two overlap.
#[derive(Debug)]
pub struct StridedRows<'a, T> {
    values: &'a mut [T],
    extents: [usize; 3],
    strides: [usize; 3],
    len: usize,
}

#[allow(clippy::indexing_slicing, reason = "axes are counted, and scratch is cut to its own length")]
impl<'a, T: Send> StridedRows<'a, T> {
    /// Creates the rows that start at `i * strides[0] + j * strides[1] + k * strides[2]`, for `i`,
    /// `j` and `k` below the extents. Returns `None` if rows overlap or one reaches beyond
    /// `values`.
    pub fn new(values: &'a mut [T], extents: [usize; 3], strides: [usize; 3], len: usize) -> Option<Self> {
        // In order of stride, each axis must step over everything that the smaller axes reach. Axes
        // of extent 1 never step, so their stride does not matter.
        let mut axes = [0, 1, 2].map(|axis| (strides[axis], extents[axis]));
        axes.sort_unstable();
        let mut reach = len;
        if !extents.contains(&0) {
            for (stride, extent) in axes.into_iter().filter(|(_, extent)| *extent > 1) {
                if stride < reach {
                    return None;
                }
                reach = stride.checked_mul(extent - 1)?.checked_add(reach)?;
            }
            if reach > values.len() {
                return None;
            }
        }
        Some(StridedRows { values, extents, strides, len })
    }

    /// Returns how many blocks [`StridedRows::for_each_block`] makes.
    pub fn block_count(extents: [usize; 3], block: [usize; 2]) -> usize {
        extents[0] * extents[1].div_ceil(block[0].max(1)) * extents[2].div_ceil(block[1].max(1))
    }

    /// Splits the rows into blocks and calls `task` with each block and the scratch of its thread.
    /// A block covers one index of the first axis and at most `block` indices of the other two.
    /// Each thread has `scratch_len` elements of scratch.
    pub fn for_each_block<S: Send>(
        self,
        threads: usize,
        block: [usize; 2],
        (scratch, scratch_len): (&mut [S], usize),
        task: impl Fn(RowBlock<'_, T>, &mut [S]) + Sync,
    ) {
        let none: StridedRows<'_, ()> =
            StridedRows { values: &mut [], extents: self.extents, strides: [0; 3], len: 0 };
        let scratch = (scratch, scratch_len);
        self.for_each_block_of_two(none, threads, block, scratch, |block, _, scratch| task(block, scratch));
    }

    /// Like [`StridedRows::for_each_block`], with the same block of a second set of rows.
    ///
    /// # Panics
    /// If the extents differ.
    pub fn for_each_block_of_two<U: Send, S: Send>(
        self,
        other: StridedRows<'_, U>,
        threads: usize,
        block: [usize; 2],
        (scratch, scratch_len): (&mut [S], usize),
        task: impl Fn(RowBlock<'_, T>, RowBlock<'_, U>, &mut [S]) + Sync,
    ) {
        assert_eq!(self.extents, other.extents, "a block has the same rows of both");
        let extents = self.extents;
        let block = block.map(|size| size.max(1));
        let parts = [extents[1].div_ceil(block[0]), extents[2].div_ceil(block[1])];
        let count = Self::block_count(extents, block);
        let (pieces, others) = (Pieces::new(self.values), Pieces::new(other.values));
        let shares = Shares::new(threads, count);
        // The scratch is cut into one piece per taker, so each task of the region below is a taker
        // with its own scratch.
        let used = (scratch_len * threads.max(1)).min(scratch.len());
        for_each_chunk_mut(threads, &mut scratch[..used], scratch_len, |taker, scratch| {
            for index in spending(TASK_UNITS, shares.of(taker)) {
                let (outer, rest) = (index / (parts[0] * parts[1]), index % (parts[0] * parts[1]));
                let starts = [rest / parts[1] * block[0], rest % parts[1] * block[1]];
                let ranges =
                    [0, 1].map(|axis| starts[axis]..(starts[axis] + block[axis]).min(extents[axis + 1]));
                let (strides, len) = (other.strides, other.len);
                let other = RowBlock { pieces: &others, outer, ranges: ranges.clone(), strides, len };
                let (strides, len) = (self.strides, self.len);
                task(RowBlock { pieces: &pieces, outer, ranges, strides, len }, other, scratch);
            }
        });
    }
}

/// A block of [`StridedRows`] that one task has to itself.
pub struct RowBlock<'a, T> {
    pieces: &'a Pieces<'a, T>,
    /// Index along the first axis.
    pub outer: usize,
    /// Index ranges along the other two axes.
    pub ranges: [Range<usize>; 2],
    strides: [usize; 3],
    len: usize,
}

impl<T> RowBlock<'_, T> {
    /// Returns the row at these indices of the last two axes, or an empty slice if they are not in
    /// the block.
    pub fn row(&mut self, places: [usize; 2]) -> &mut [T] {
        // A row outside the block may belong to another thread.
        let is_inside = self.ranges.iter().zip(places).all(|(range, place)| range.contains(&place));
        let [first, second, third] = self.strides;
        let start = self.outer * first + places[0] * second + places[1] * third;
        // SAFETY: `StridedRows::new` checked that rows do not overlap, no two blocks share a row,
        // and `&mut self` borrows the block.
        unsafe { self.pieces.range(start, if is_inside { self.len } else { 0 }) }
    }

    /// Returns the whole block as one slice, in the order of its axes, if its rows are contiguous.
    pub fn adjacent(&mut self) -> Option<&mut [T]> {
        let [first, second, third] = self.strides;
        let [rows, columns] = [self.ranges[0].len(), self.ranges[1].len()];
        let is_one = (columns == 1 || third == self.len) && (rows == 1 || second == columns * self.len);
        let start = self.outer * first + self.ranges[0].start * second + self.ranges[1].start * third;
        // SAFETY: as in `row`. The rows are contiguous, so the slice covers nothing else.
        is_one.then(|| unsafe { self.pieces.range(start, rows * columns * self.len) })
    }

    /// Returns the whole block as one slice, in the order of the last axis first, if its rows are
    /// contiguous in that order.
    pub fn adjacent_planes(&mut self) -> Option<&mut [T]> {
        let [first, second, third] = self.strides;
        let [rows, columns] = [self.ranges[0].len(), self.ranges[1].len()];
        let is_one = (rows == 1 || second == self.len) && (columns == 1 || third == rows * self.len);
        let start = self.outer * first + self.ranges[0].start * second + self.ranges[1].start * third;
        // SAFETY: as in `row`. The rows are contiguous, so the slice covers nothing else.
        is_one.then(|| unsafe { self.pieces.range(start, rows * columns * self.len) })
    }

    /// Returns all rows of the block at one index of the last axis as one slice. The slice is empty
    /// if the rows are not contiguous or the index is not in the block.
    pub fn adjacent_rows(&mut self, place: usize) -> &mut [T] {
        let [first, second, third] = self.strides;
        let rows = self.ranges[0].clone();
        let is_one = self.ranges[1].contains(&place) && (second == self.len || rows.len() == 1);
        let start = self.outer * first + rows.start * second + place * third;
        // SAFETY: as in `row`. The rows are contiguous, so the slice covers nothing else.
        unsafe { self.pieces.range(start, if is_one { rows.len() * self.len } else { 0 }) }
    }
}

/// A mutable slice that several threads cut disjoint pieces from.
struct Pieces<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts go to different threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}

impl<'a, T> Pieces<'a, T> {
    fn new(values: &'a mut [T]) -> Self {
        Pieces { start: values.as_mut_ptr(), len: values.len(), borrow: PhantomData }
    }

    /// Returns up to `len` elements from `start` on.
    ///
    /// # Safety
    ///
    /// No two ranges in use at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        let start = start.min(self.len);
        let len = len.min(self.len - start);
        // SAFETY: `start` and `len` were clamped to the slice above, and the caller keeps ranges
        // disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_index_runs_once() {
        for threads in [1, 2, 5] {
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                Pool::global().run(threads, tasks, &|index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn chunks_cover_the_slice() {
        for threads in [1, 2, 3] {
            for len in [0_usize, 1, 5, 64, 1001] {
                let mut values = vec![0_usize; len];
                for_each_chunk_mut(threads, &mut values, 7, |index, piece| {
                    piece.iter_mut().enumerate().for_each(|(at, value)| *value += index * 7 + at);
                });
                assert!(values.iter().enumerate().all(|(index, value)| index == *value));
                let sum = AtomicUsize::new(0);
                for_each_chunk(threads, len, 3, |range| {
                    sum.fetch_add(range.sum::<usize>(), Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), len * len.saturating_sub(1) / 2);
            }
        }
    }

    #[test]
    fn rows_stay_whole() {
        let mut values = vec![0_usize; 37 * 5];
        for_each_row_chunk_mut(2, &mut values, 5, 2, |row, rows| {
            assert_eq!(rows.len() % 5, 0);
            rows.chunks_mut(5).enumerate().for_each(|(at, values)| values.fill(row + at));
        });
        assert!(values.iter().enumerate().all(|(index, value)| index / 5 == *value));
    }

    #[test]
    fn blocks_of_rows_cover_all_rows_once() {
        // Extents, strides, row length, and whether the rows are valid.
        let cases: [([usize; 3], [usize; 3], usize, bool); 7] = [
            ([2, 3, 5], [75, 5, 15], 5, true),
            ([2, 3, 5], [75, 25, 5], 5, true),
            ([2, 3, 5], [80, 25, 5], 4, true),
            ([1, 3, 5], [0, 25, 5], 5, true),
            ([2, 3, 5], [75, 25, 4], 5, false),
            ([2, 3, 5], [74, 25, 5], 5, false),
            ([3, 3, 5], [75, 25, 5], 5, false),
        ];
        for (extents, strides, len, fits) in cases {
            for (threads, block) in [(1, [1, 2]), (2, [2, 2]), (3, [3, 5])] {
                let mut values = vec![0_usize; 155];
                let rows = StridedRows::new(&mut values, extents, strides, len);
                assert_eq!(rows.is_some(), fits, "{extents:?} {strides:?} {len}");
                let Some(rows) = rows else { continue };
                rows.for_each_block(threads, block, (&mut vec![0_u8; threads], 1), |mut block, _| {
                    assert!(block.row([extents[1], 0]).is_empty());
                    let [seconds, thirds] = block.ranges.clone();
                    for k in thirds.clone() {
                        let together = if strides[1] == len { seconds.len() * len } else { 0 };
                        let together = if seconds.len() == 1 { len } else { together };
                        assert_eq!(block.adjacent_rows(k).len(), together);
                        let first = block.row([seconds.start, k]).as_ptr();
                        assert!(together == 0 || block.adjacent_rows(k).as_ptr() == first);
                    }
                    assert!(block.adjacent_rows(extents[2]).is_empty());
                    let planes = block.adjacent_planes().map(|planes| (planes.as_ptr(), planes.len()));
                    let places = thirds.clone().flat_map(|k| seconds.clone().map(move |j| (j, k)));
                    let starts: Vec<_> = places.map(|(j, k)| block.row([j, k]).as_ptr()).collect();
                    let is_one = starts.windows(2).all(|pair| pair[0].wrapping_add(len) == pair[1]);
                    assert_eq!(planes, is_one.then_some((starts[0], starts.len() * len)));
                    let whole = block.adjacent().map(|whole| (whole.as_ptr(), whole.len()));
                    let places = seconds.clone().flat_map(|j| thirds.clone().map(move |k| (j, k)));
                    let starts: Vec<_> = places.map(|(j, k)| block.row([j, k]).as_ptr()).collect();
                    let is_one = starts.windows(2).all(|pair| pair[0].wrapping_add(len) == pair[1]);
                    assert_eq!(whole, is_one.then_some((starts[0], starts.len() * len)));
                    for (j, k) in seconds.flat_map(|j| thirds.clone().map(move |k| (j, k))) {
                        let name = 1 + (block.outer * extents[1] + j) * extents[2] + k;
                        block.row([j, k]).iter_mut().for_each(|value| *value += name);
                    }
                });
                for (i, j, k) in (0..extents[0])
                    .flat_map(|i| (0..extents[1]).flat_map(move |j| (0..extents[2]).map(move |k| (i, j, k))))
                {
                    let line = &values[i * strides[0] + j * strides[1] + k * strides[2]..][..len];
                    assert!(line.iter().all(|value| *value == 1 + (i * extents[1] + j) * extents[2] + k));
                }
                let touched = values.iter().filter(|value| **value != 0).count();
                assert_eq!(touched, extents.iter().product::<usize>() * len);
            }
        }
    }

    #[test]
    fn a_nested_region_runs_inline() {
        let total = AtomicUsize::new(0);
        Pool::global().run(2, 8, &|_| {
            let thread = std::thread::current().id();
            Pool::global().run(2, 8, &|_| {
                assert_eq!(std::thread::current().id(), thread);
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 64);
    }

    #[test]
    fn a_panic_arrives_after_all_tasks() {
        let ran = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            Pool::global().run(2, 100, &|index| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert_ne!(index, 3, "three is refused");
            });
        }));
        assert!(result.is_err());
        assert_eq!(ran.into_inner(), 100);
        every_index_runs_once();
    }

    #[test]
    fn many_callers_share_the_pool() {
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for round in 0..500 {
                        let sum = AtomicUsize::new(0);
                        Pool::global().run(2, 10, &|index| {
                            sum.fetch_add(index + round, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 45 + 10 * round);
                    }
                });
            }
        });
    }
}
