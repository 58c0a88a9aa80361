//! Broadcasting for kernels, block by block.
//!
//! Operands are walked under an output, with adjacent dimensions merged.

#![allow(clippy::indexing_slicing, reason = "strides and sizes are made together, one for each dimension")]

use std::ops::Range;

use ort_core::{Result, ensure};
use smallvec::SmallVec;

use ort_cpu_threads::interrupt::{PIECE, Pace};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_threads::thread_scratch::{ThreadScratch, with_thread_scratch};

/// Sizes or strides, outermost first.
pub type Sizes = SmallVec<[usize; 6]>;

/// Rows at least this long are blocks of their own. Shorter ones are expanded into a buffer.
const LONG_ROW: usize = 512;
/// The fewest elements that are worth another thread.
const LEAST_CHUNK: usize = 16 * 1024;
/// Elements of a block for which every operand of a step should stay in the L1 cache.
pub const BLOCK: usize = 1024;

/// The layout of operands under an output. Dimensions of size 1 are dropped, and adjacent ones are
/// merged if every operand walks them in one stride. The innermost stride of an operand is 0 or 1.
///
/// ```
/// use ort_cpu_kernel::broadcast::{Block, Broadcast};
/// let walk = Broadcast::new(&[2, 2, 3], &[&[2, 2, 3], &[3]])?;
/// assert_eq!(walk.sizes(), [4, 3]);
/// let mut buffer = Vec::new();
/// assert_eq!(walk.block(1, &[7, 8, 9], 4, 5, &mut buffer), Block::Slice(&[8, 9, 7, 8, 9]));
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Broadcast {
    sizes: Sizes,
    strides: SmallVec<[Sizes; 3]>,
    /// For each operand, whether it has the output's elements in the output's order.
    dense: SmallVec<[bool; 3]>,
}

/// One operand over a block of several rows of the output, with one element for each row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Repeated<'a, T> {
    /// An element for each row that the block overlaps.
    pub elements: &'a [T],
    /// How many positions of the block are in the first row.
    pub first: usize,
    /// How many positions each other row has; the last row may end early.
    pub each: usize,
}

impl<T: Copy> Repeated<'_, T> {
    /// Iterates over the rows of a block of `len` positions, each with its range and its element.
    pub fn rows(&self, len: usize) -> impl Iterator<Item = (Range<usize>, T)> {
        let Repeated { elements, first, each } = *self;
        let begin = move |row: usize| if row == 0 { 0 } else { first + (row - 1) * each };
        elements.iter().enumerate().map(move |(row, &element)| (begin(row)..begin(row + 1).min(len), element))
    }

    /// Writes an element for each of `len` positions of the block.
    fn write(&self, len: usize, buffer: &mut Vec<T>) {
        let Some((&first, others)) = self.elements.split_first() else { return };
        buffer.clear();
        buffer.resize(len, first);
        let others = others.iter().zip(buffer[self.first.min(len)..].chunks_mut(self.each));
        others.for_each(|(&element, row)| row.fill(element));
    }
}

/// One operand over a block of the output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Block<'a, T> {
    /// An element for each position.
    Slice(&'a [T]),
    /// One element for all positions.
    Scalar(T),
}

impl Broadcast {
    /// Lays out contiguous operands of these shapes under an output of shape `output`. Returns an
    /// error if an operand's shape does not broadcast to it.
    pub fn new(output: &[usize], operands: &[&[usize]]) -> Result<Broadcast> {
        // The usual case, in which merging would find the same.
        if operands.iter().all(|shape| *shape == output) {
            let len = output.iter().fold(1usize, |len, size| len.saturating_mul(*size));
            if len > 1 {
                return Ok(Broadcast::same(len, operands.len()));
            }
        }
        let mut full: SmallVec<[Sizes; 3]> = SmallVec::new();
        for shape in operands {
            full.push(strides_under(output, shape)?);
        }
        let mut sizes = Sizes::new();
        let mut strides: SmallVec<[Sizes; 3]> = operands.iter().map(|_| Sizes::new()).collect();
        // From the innermost dimension outwards; the lists are reversed at the end.
        for dim in (0..output.len()).rev().filter(|&dim| output[dim] != 1) {
            // Merges if the outer stride of every operand continues its inner run.
            let merges = sizes.last().is_some_and(|&inner| {
                full.iter().zip(&strides).all(|(full, merged)| {
                    merged.last().is_some_and(|&stride| full[dim] == stride.wrapping_mul(inner))
                })
            });
            if let Some(last) = sizes.last_mut().filter(|_| merges) {
                *last = last.saturating_mul(output[dim]);
                continue;
            }
            sizes.push(output[dim]);
            for (full, merged) in full.iter().zip(&mut strides) {
                merged.push(full[dim]);
            }
        }
        if sizes.is_empty() {
            sizes.push(1);
            strides.iter_mut().for_each(|merged| merged.push(0));
        }
        sizes.reverse();
        strides.iter_mut().for_each(|merged| merged.reverse());
        // Row-major without gaps: each stride is the product of the sizes inside of it.
        let is_dense = |strides: &Sizes| {
            let mut whole = 1;
            sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
                let follows = stride == whole;
                whole = size.saturating_mul(whole);
                follows
            })
        };
        let dense = strides.iter().map(is_dense).collect();
        Ok(Broadcast { sizes, strides, dense })
    }

    /// Lays out operands that all have the output's `len` elements.
    pub fn same(len: usize, operands: usize) -> Broadcast {
        let strides = (0..operands).map(|_| std::iter::once(1).collect()).collect();
        let dense = SmallVec::from_elem(true, operands);
        Broadcast { sizes: std::iter::once(len).collect(), strides, dense }
    }

    /// Returns the merged sizes, outermost first; at least one.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Returns the merged strides of an operand in elements; 0 along dimensions that it is
    /// broadcast over.
    pub fn strides(&self, operand: usize) -> &[usize] {
        &self.strides[operand]
    }

    /// Returns whether every operand is one contiguous run, or one element.
    #[inline]
    pub fn is_flat(&self) -> bool {
        self.sizes.len() == 1
    }

    /// Returns whether operands may have to be expanded into a buffer, block by block. If not,
    /// blocks may be of any length.
    #[inline]
    pub fn needs_buffers(&self) -> bool {
        !self.is_flat() && self.inner() < LONG_ROW
    }

    /// Writes the row of an operand that is the same in all short rows of the output, as often as
    /// blocks of [`BLOCK`] elements need. The operand over a block then begins in the buffer at the
    /// [column](Self::column_of) of the block's start. Returns false for other operands.
    pub fn tile<T: Copy>(&self, operand: usize, data: &[T], buffer: &mut Vec<T>) -> bool {
        let [outer @ .., 1] = self.strides[operand].as_slice() else { return false };
        if !self.needs_buffers() || outer.iter().any(|stride| *stride != 0) {
            return false;
        }
        buffer.clear();
        buffer.extend_from_slice(&data[..self.inner()]);
        repeat(buffer, 0, BLOCK + self.inner());
        true
    }

    /// Returns the position of an output element within its row.
    #[inline]
    pub fn column_of(&self, start: usize) -> usize {
        start % self.inner()
    }

    #[inline]
    fn inner(&self) -> usize {
        self.sizes[self.sizes.len() - 1]
    }

    /// Returns the length of the next block, which starts at output element `start`. It is at most
    /// `limit`, and stays within a row if rows are long.
    #[inline]
    pub fn block_len(&self, start: usize, limit: usize) -> usize {
        let inner = self.inner();
        // A block within one row needs no copy: each operand is a slice or a single element there.
        if self.is_flat() || self.needs_buffers() { limit } else { limit.min(inner - start % inner) }
    }

    /// Returns the elements of an operand for output elements `start..start + len`, expanded into
    /// `buffer` if they are not contiguous. `data` is the whole operand.
    pub fn block<'b, T: Copy>(
        &self,
        operand: usize,
        data: &'b [T],
        start: usize,
        len: usize,
        buffer: &'b mut Vec<T>,
    ) -> Block<'b, T> {
        if self.dense[operand] {
            return Block::Slice(&data[start..start + len]);
        }
        let strides = &self.strides[operand];
        let inner = self.inner();
        let stride = strides[strides.len() - 1];
        // A division is slow next to the work of a short block, and most tensors are flat.
        let (row, column) = if self.is_flat() { (0, start) } else { (start / inner, start % inner) };
        if column + len <= inner {
            let offset = self.row_offset(operand, row);
            return match stride {
                0 => Block::Scalar(data[offset]),
                _ => Block::Slice(&data[offset + column..offset + column + len]),
            };
        }
        // One element per row, such as a bias per channel, is written with `fill`, which is faster
        // than copying row by row.
        match self.repeated(operand, data, start, len) {
            Some(rows) => rows.write(len, buffer),
            None => self.expand(operand, data, (row, column, len), buffer),
        }
        Block::Slice(buffer)
    }

    /// Returns whether an operand has the output's elements in the output's order.
    pub fn is_dense(&self, operand: usize) -> bool {
        self.dense[operand]
    }

    /// Returns the operand over a block of several rows, if it has one element for each and these
    /// are contiguous.
    pub fn repeated<'b, T>(
        &self,
        operand: usize,
        data: &'b [T],
        start: usize,
        len: usize,
    ) -> Option<Repeated<'b, T>> {
        let (inner, [.., outer, 0]) = (self.inner(), self.strides[operand].as_slice()) else { return None };
        let (row, column) = (start / inner, start % inner);
        let rows = (column + len).div_ceil(inner);
        let size = self.sizes[self.sizes.len() - 2];
        // The rows' elements must be contiguous and must not wrap around their dimension.
        if *outer != 1 || rows < 2 || row % size + rows > size {
            return None;
        }
        let elements = &data[self.row_offset(operand, row)..][..rows];
        Some(Repeated { elements, first: inner - column, each: inner })
    }

    #[inline]
    fn row_offset(&self, operand: usize, mut row: usize) -> usize {
        let strides = &self.strides[operand];
        let mut offset = 0;
        for dim in (0..self.sizes.len() - 1).rev() {
            offset += row % self.sizes[dim] * strides[dim];
            row /= self.sizes[dim];
        }
        offset
    }

    fn expand<T: Copy>(
        &self,
        operand: usize,
        data: &[T],
        (row, mut column, len): (usize, usize, usize),
        buffer: &mut Vec<T>,
    ) {
        let (inner, outer) = (self.inner(), self.sizes.len() - 1);
        let strides = &self.strides[operand];
        let mut place: Sizes = SmallVec::from_elem(0, outer);
        let mut rest = row;
        for dim in (0..outer).rev() {
            place[dim] = rest % self.sizes[dim];
            rest /= self.sizes[dim];
        }
        let mut offset: usize = place.iter().zip(strides).map(|(at, stride)| at * stride).sum();
        buffer.clear();
        while buffer.len() < len {
            let begin = buffer.len();
            let count = (inner - column).min(len - begin);
            if strides[outer] == 0 {
                buffer.resize(begin + count, data[offset]);
            } else {
                buffer.extend_from_slice(&data[offset + column..offset + column + count]);
            }
            // Rows that repeat a whole one are copied by doubling: a few long copies instead of
            // many short ones.
            if let Some(dim) = outer.checked_sub(1).filter(|&dim| strides[dim] == 0 && count == inner) {
                let rows = self.sizes[dim] - place[dim];
                repeat(buffer, begin, rows.saturating_mul(inner).min(len - begin));
                place[dim] += rows - 1;
            }
            column = 0;
            for dim in (0..outer).rev() {
                // An odometer instead of divisions: the next row usually differs in the last
                // coordinate only.
                place[dim] += 1;
                offset += strides[dim];
                if place[dim] < self.sizes[dim] {
                    break;
                }
                offset -= strides[dim] * self.sizes[dim];
                place[dim] = 0;
            }
        }
    }

    /// Splits `output` into blocks of at most `limit` elements. Calls `task` with scratch that the
    /// blocks of one thread share, the index of the first element, and the block. Large outputs are
    /// split among `threads`.
    pub fn for_each_block<T: Send, S: ThreadScratch>(
        &self,
        threads: usize,
        limit: usize,
        output: &mut [T],
        task: impl Fn(&mut S, usize, &mut [T]) + Sync,
    ) {
        self.run_blocks(threads, limit, output, &task);
    }

    /// As `for_each_block`, compiled once for all tasks on the same types.
    fn run_blocks<T: Send, S: ThreadScratch>(
        &self,
        threads: usize,
        limit: usize,
        output: &mut [T],
        task: &(dyn Fn(&mut S, usize, &mut [T]) + Sync),
    ) {
        // Chunks need not be whole rows: `block` finds the place of any start.
        let chunk = chunk_len(threads, output.len());
        for_each_chunk_mut(threads, output, chunk, |index, piece| {
            with_thread_scratch(|scratch: &mut S| {
                let (mut start, mut rest, pace) = (index * chunk, piece, Pace::default());
                while !rest.is_empty() {
                    // At most a piece, so that work is counted often enough for deadlines.
                    let len = self.block_len(start, limit.min(PIECE)).min(rest.len());
                    pace.step(len);
                    let (block, tail) = std::mem::take(&mut rest).split_at_mut(len);
                    task(scratch, start, block);
                    start += len;
                    rest = tail;
                }
            });
        });
    }
}

/// Repeats what `buffer` holds from `begin` on until that part has `len` elements.
fn repeat<T: Copy>(buffer: &mut Vec<T>, begin: usize, len: usize) {
    while buffer.len() - begin < len {
        let held = buffer.len() - begin;
        buffer.extend_from_within(begin..begin + held.min(len - held));
    }
}

/// Returns how many of `len` elements one task of a simple kernel takes.
pub fn chunk_len(threads: usize, len: usize) -> usize {
    // Four chunks per thread balance threads of unequal speed.
    if threads <= 1 { len.max(1) } else { len.div_ceil(threads * 4).max(LEAST_CHUNK) }
}

fn strides_under(output: &[usize], shape: &[usize]) -> Result<Sizes> {
    let mut strides: Sizes = SmallVec::from_elem(0, output.len());
    ensure!(shape.len() <= output.len(), Fail, "shape {shape:?} does not broadcast to {output:?}");
    let start = output.len() - shape.len();
    let mut stride = 1;
    for dim in (0..shape.len()).rev() {
        let (size, wanted) = (shape[dim], output[start + dim]);
        ensure!(size == wanted || size == 1, Fail, "shape {shape:?} does not broadcast to {output:?}");
        if size != 1 {
            strides[start + dim] = stride;
            stride = size.saturating_mul(stride);
        }
    }
    Ok(strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: the index of the operand's element at an output position, by coordinates.
    fn reference(output: &[usize], shape: &[usize], at: usize) -> usize {
        let (mut rest, mut offset, mut stride) = (at, 0, 1);
        for dim in (0..output.len()).rev() {
            let place = rest % output[dim];
            rest /= output[dim];
            if let Some(inner) = (dim + shape.len()).checked_sub(output.len()) {
                offset += if shape[inner] == 1 { 0 } else { place * stride };
                stride *= shape[inner];
            }
        }
        offset
    }

    #[test]
    fn blocks_agree_with_coordinates() -> Result<()> {
        let cases: [(&[usize], &[usize]); 13] = [
            (&[3, 4, 5], &[3, 4, 5]),
            (&[3, 4, 5], &[5]),
            (&[3, 4, 5], &[4, 1]),
            (&[3, 4, 5], &[3, 1, 5]),
            (&[3, 4, 5], &[3, 1, 1]),
            (&[3, 4, 5], &[]),
            (&[2, 100], &[2, 1]),
            (&[2, 3, 1, 70], &[3, 1, 70]),
            (&[40, 7], &[7]),
            (&[5, 40, 3], &[5, 1, 3]),
            (&[3, 600], &[600]),
            (&[3, 600], &[3, 1]),
            (&[], &[]),
        ];
        let rows_seen = std::sync::Mutex::new(0);
        for (output, shape) in cases {
            let walk = Broadcast::new(output, &[shape])?;
            let data: Vec<usize> = (0..shape.iter().product()).collect();
            let total: usize = output.iter().product();
            for limit in [1, 7, 33, 1000] {
                let mut result = vec![usize::MAX; total];
                walk.for_each_block(
                    1,
                    limit,
                    &mut result,
                    |buffer: &mut Vec<usize>, start, block| match walk.block(
                        0,
                        &data,
                        start,
                        block.len(),
                        buffer,
                    ) {
                        Block::Slice(slice) => block.copy_from_slice(slice),
                        Block::Scalar(value) => block.fill(value),
                    },
                );
                let expected: Vec<usize> = (0..total).map(|at| reference(output, shape, at)).collect();
                let mut by_rows = expected.clone();
                walk.for_each_block(1, limit, &mut by_rows, |_: &mut (), start, block| {
                    if let Some(repeated) = walk.repeated(0, &data, start, block.len()) {
                        block.fill(usize::MAX);
                        repeated.rows(block.len()).for_each(|(row, value)| block[row].fill(value));
                        *rows_seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += 1;
                    }
                });
                assert_eq!(by_rows, expected, "rows of {shape:?} under {output:?} by {limit}");
                assert_eq!(result, expected, "{shape:?} under {output:?} by {limit}");
                let mut row = Vec::new();
                if walk.tile(0, &data, &mut row) {
                    for start in [0, 1, total / 2, total - 1] {
                        let len = BLOCK.min(total - start);
                        let tile = &row[walk.column_of(start)..][..len];
                        assert_eq!(tile, &expected[start..][..len], "tiles of {shape:?} under {output:?}");
                    }
                }
            }
        }
        assert!(rows_seen.into_inner().is_ok_and(|count| count > 5), "blocks of several rows were seen");
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_broadcast_are_refused() {
        assert!(Broadcast::new(&[2, 3], &[&[2]]).is_err());
        assert!(Broadcast::new(&[3], &[&[1, 3]]).is_err());
    }
}
