//! Strided copies: `Transpose`, `Slice`, `Expand` and `Tile`.

use std::ops::Range;

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::{SliceArguments, Strided, permutation};
use ort_core::{Result, ensure};
use smallvec::SmallVec;

use ort_cpu_threads::interrupt::{self, PIECE, pieces_mut};
use ort_cpu_threads::parallel::{for_each_chunk_mut, for_each_row_chunk_mut};

use super::{Cell, Io, Movement, movement, only};

movement!["Expand", |_: &mut CompileCx<'_>| Ok(Expand), unaligned: &[0]];
movement!["Slice", |_: &mut CompileCx<'_>| Ok(Slice), unaligned: &[0]];
movement!["Tile", |_: &mut CompileCx<'_>| Ok(Tile), unaligned: &[0]];
movement!["Transpose", |cx: &mut CompileCx<'_>| Ok(Transpose(cx.attrs().clone())), unaligned: &[0]];

/// Minimum output bytes per task of a parallel copy.
const GRAIN: usize = 64 << 10;
/// The side of the square tiles of a transpose. A tile fits the L1 cache.
const TILE: usize = 16;

struct Expand;
struct Slice;
struct Tile;
struct Transpose(ort_core::ir::Attributes);

impl Movement for Expand {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        copy_strided(&Strided::expand(io.shape(0)?, io.output_shape(0))?, from[0], only(to)?, io.threads)
    }
}

impl Movement for Slice {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let list = |index: usize| io.input(index)?.collect_ints::<SmallVec<[i64; 6]>>();
        let (starts, ends) = (list(1)?, list(2)?);
        let (axes, steps) = (io.ints(3)?, io.ints(4)?);
        let arguments =
            SliceArguments { starts: &starts, ends: &ends, axes: axes.as_deref(), steps: steps.as_deref() };
        let shape = io.shape(0)?;
        copy_strided(&Strided::slice(shape, &arguments.resolve(shape)?), from[0], only(to)?, io.threads)
    }
}

impl Movement for Tile {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let repeats = io.input(1)?.to_ints()?;
        let shape = io.shape(0)?;
        ensure!(
            repeats.len() == shape.len(),
            InvalidArgument,
            "repeats {repeats:?} do not have one value for each axis of shape {shape:?}"
        );
        let repeats: Vec<usize> =
            repeats.iter().map(|&repeat| usize::try_from(repeat).unwrap_or(0)).collect();
        copy_strided(&Strided::tile(shape, &repeats), from[0], only(to)?, io.threads)
    }
}

impl Movement for Transpose {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let order = permutation(&self.0, shape.len())?;
        copy_strided(&Strided::transpose(shape, &order), from[0], only(to)?, io.threads)
    }
}

/// Copies a slice in parallel.
pub(super) fn copy_all<T: Cell>(from: &[T], to: &mut [T], threads: usize) -> Result<()> {
    ensure!(from.len() == to.len(), Fail, "{} elements copied to {}", from.len(), to.len());
    let chunk = (GRAIN / size_of::<T>()).max(1);
    // A small copy is not worth a dispatch to threads.
    if to.len() <= 4 * chunk {
        to.copy_from_slice(from);
        return Ok(());
    }
    for_each_chunk_mut(threads, to, chunk, |index, part| {
        let start = index * chunk;
        part.copy_from_slice(&from[start..start + part.len()]);
    });
    Ok(())
}

/// Copies the elements of `from` that `order` addresses to `to`, in parallel.
pub(super) fn copy_strided<T: Cell>(order: &Strided, from: &[T], to: &mut [T], threads: usize) -> Result<()> {
    ensure!(order.count() == to.len(), Fail, "{} elements moved to {}", order.count(), to.len());
    // All indices below stay in the source; the cast of a place to `usize` relies on it.
    ensure!(order.fits(from.len()), Fail, "an index is out of range for {} elements", from.len());
    if to.is_empty() {
        return Ok(());
    }
    // Merging dimensions finds the longest rows.
    let order = order.simplify();
    let rank = order.sizes.len();
    // A scalar has no dimensions but one element.
    let (Some(&row), Some(&step)) = (order.sizes.last(), order.strides.last()) else {
        to.copy_from_slice(&from[order.offset..order.offset + 1]);
        return Ok(());
    };
    if rank == 1 && step == 1 {
        return copy_all(&from[order.offset..order.offset + row], to, threads);
    }
    // A transpose: the source is contiguous across the rows of the output.
    let is_plane = rank > 1 && step != 1 && order.strides[rank - 2] == 1;
    let between = if rank > 1 { order.strides[rank - 2] } else { 0 };
    let least_rows = (GRAIN / (row * size_of::<T>()).max(1)).max(if is_plane { TILE } else { 1 });
    for_each_row_chunk_mut(threads, to, row, least_rows, |first, rows| {
        let mut odometer = Odometer::new(&order, first);
        let mut rest = rows;
        while !rest.is_empty() {
            let count = odometer.rows_in_plane().min(rest.len() / row);
            let (plane, after) = rest.split_at_mut(count * row);
            match is_plane {
                true => transpose_plane(from, odometer.place, step, plane, row),
                false => {
                    for (at, row) in plane.chunks_exact_mut(row).enumerate() {
                        copy_row(from, odometer.place + at as isize * between, step, row);
                    }
                }
            }
            odometer.advance(count);
            rest = after;
        }
    });
    Ok(())
}

/// Copies one row, whose elements are `step` apart in the source.
fn copy_row<T: Cell>(from: &[T], place: isize, step: isize, row: &mut [T]) {
    let start = place as usize;
    match step {
        1 => interrupt::copy(&from[start..start + row.len()], row),
        0 => interrupt::fill(row, from[start]),
        _ if step > 0 => {
            for (piece, row) in pieces_mut(row).enumerate() {
                let source = from[start + piece * PIECE * step as usize..].iter().step_by(step as usize);
                row.iter_mut().zip(source).for_each(|(to, from)| *to = *from);
            }
        }
        _ => {
            let step = step.unsigned_abs();
            for (piece, row) in pieces_mut(row).enumerate() {
                // Backwards from the start: the slice ends there, and `rev` begins with it.
                let source = from[..=start - piece * PIECE * step].iter().rev().step_by(step);
                row.iter_mut().zip(source).for_each(|(to, from)| *to = *from);
            }
        }
    }
}

/// Transposes a plane: neighbours in a column are adjacent in the source, neighbours in a row are
/// `step` apart. SIMD handles bands whose cache lines stay in L1, and square tiles handle the rest.
fn transpose_plane<T: Cell>(from: &[T], place: isize, step: isize, plane: &mut [T], columns: usize) {
    const BAND: usize = 128;
    let rows = plane.len() / columns;
    if let Ok(step) = usize::try_from(step) {
        // A few interleaved planes, such as the channels of an image.
        let from = &from[place as usize..];
        match columns {
            2 => return interleave::<T, 2>(from, step, plane),
            3 => {
                let done = interleave_three(from, step, plane);
                return interleave::<T, 3>(&from[done..], step, &mut plane[3 * done..]);
            }
            4 => return interleave::<T, 4>(from, step, plane),
            _ => {}
        }
    }
    for first in (0..columns).step_by(BAND) {
        let width = BAND.min(columns - first);
        interrupt::spend(width * rows);
        let source = (place + first as isize * step) as usize;
        let (done_columns, done_rows) = match usize::try_from(step) {
            Ok(stride) => {
                // The tiles that SIMD transposes. The squares below do the margins, or everything
                // if there is no SIMD path.
                T::transpose_tiles((width, rows), (&from[source..], stride), (&mut plane[first..], columns))
            }
            Err(_) => (0, 0),
        };
        let mut squares = |rows: Range<usize>, part: Range<usize>| {
            for row in rows.clone().step_by(TILE) {
                for column in part.clone().step_by(TILE) {
                    let size = [TILE.min(rows.end - row), TILE.min(part.end - column)];
                    let start = place + row as isize + column as isize * step;
                    transpose_square(from, start, step, size, &mut plane[row * columns + column..], columns);
                }
            }
        };
        // The rows that SIMD left, then the columns that it left of the other rows.
        squares(done_rows..rows, first..first + width);
        squares(0..done_rows, first + done_columns..first + width);
    }
}

/// Writes the first rows of three elements with SIMD, and returns how many.
fn interleave_three<T: Cell>(from: &[T], step: usize, plane: &mut [T]) -> usize {
    let (rows, _) = plane.as_chunks_mut::<3>();
    let planes = [0, 1, 2].map(|at| &from[at * step..][..rows.len()]);
    T::interleave_three(planes, rows)
}

/// Writes rows of `N` elements, one from each of `N` planes, which are `step` apart.
fn interleave<T: Cell, const N: usize>(from: &[T], step: usize, plane: &mut [T]) {
    let (rows, _) = plane.as_chunks_mut::<N>();
    let planes: [&[T]; N] = std::array::from_fn(|at| &from[at * step..][..rows.len()]);
    for (at, row) in rows.iter_mut().enumerate() {
        *row = planes.map(|plane| plane[at]);
    }
}

/// Transposes up to [`TILE`] rows and columns through a buffer.
fn transpose_square<T: Cell>(
    from: &[T],
    place: isize,
    step: isize,
    [rows, width]: [usize; 2],
    plane: &mut [T],
    columns: usize,
) {
    // Through a buffer, so that both sides are read and written in runs.
    let mut tile = [[T::ZERO; TILE]; TILE];
    for (column, cells) in tile.iter_mut().enumerate().take(width) {
        let start = (place + column as isize * step) as usize;
        cells[..rows].copy_from_slice(&from[start..start + rows]);
    }
    for row in 0..rows {
        for (cell, column) in plane[row * columns..][..width].iter_mut().zip(&tile) {
            *cell = column[row];
        }
    }
}

/// Iterates over the rows of an order, which are the indices of all dimensions but the last, and
/// tracks where each starts in the source.
struct Odometer<'a> {
    order: &'a Strided,
    index: smallvec::SmallVec<[usize; 6]>,
    place: isize,
}

impl<'a> Odometer<'a> {
    fn new(order: &'a Strided, row: usize) -> Odometer<'a> {
        let outer = order.sizes.len() - 1;
        let mut odometer =
            Odometer { order, index: smallvec::SmallVec::from_elem(0, outer), place: order.offset as isize };
        odometer.advance(row);
        odometer
    }

    /// Returns the rows from here to the end of the innermost counted dimension.
    fn rows_in_plane(&self) -> usize {
        match self.index.last() {
            Some(index) => self.order.sizes[self.index.len() - 1] - index,
            None => 1,
        }
    }

    /// Advances by `rows`.
    fn advance(&mut self, rows: usize) {
        let mut carry = rows;
        for axis in (0..self.index.len()).rev() {
            if carry == 0 {
                return;
            }
            let (size, stride) = (self.order.sizes[axis], self.order.strides[axis]);
            let total = self.index[axis] + carry;
            let index = if total < size { total } else { total % size };
            carry = if total < size { 0 } else { total / size };
            self.place += (index as isize - self.index[axis] as isize) * stride;
            self.index[axis] = index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_core::ops::tensor::geometry::SliceAxis;

    /// Compares with the naive definition, for sizes around the tile and several thread counts.
    #[test]
    fn copies_follow_the_definition() -> Result<()> {
        let orders = [
            (vec![5, 7], Strided::transpose(&[5, 7], &[1, 0])),
            (vec![2, 33, 17], Strided::transpose(&[2, 33, 17], &[0, 2, 1])),
            (vec![2, 40, 3, 8], Strided::transpose(&[2, 40, 3, 8], &[0, 2, 1, 3])),
            (vec![3, 18, 5, 16], Strided::transpose(&[3, 18, 5, 16], &[3, 1, 2, 0])),
            (vec![130, 700], Strided::transpose(&[130, 700], &[1, 0])),
            (vec![2, 3, 101], Strided::transpose(&[2, 3, 101], &[0, 2, 1])),
            (vec![4, 1, 3], Strided::expand(&[4, 1, 3], &[2, 4, 5, 3])?),
            (vec![3, 1], Strided::expand(&[3, 1], &[3, 9])?),
            (vec![3, 4], Strided::tile(&[3, 4], &[2, 3])),
            (vec![6, 9], {
                let parts = [SliceAxis::new(6, -1, i64::MIN, -2)?, SliceAxis::new(9, 8, 0, -3)?];
                Strided::slice(&[6, 9], &parts)
            }),
            (vec![9], Strided::slice(&[9], &[SliceAxis::new(9, 1, 9, 2)?])),
            (vec![1], Strided::expand(&[1], &[1, 1])?),
            (vec![200_000], Strided::slice(&[200_000], &[SliceAxis::new(200_000, 3, 199_000, 1)?])),
        ];
        for (shape, order) in orders {
            let source: Vec<[u8; 4]> =
                (0..shape.iter().product::<usize>()).map(|value| (value as u32).to_le_bytes()).collect();
            let expected = order.collect(&source)?;
            // Bytes have fast paths of their own.
            let bytes: Vec<[u8; 1]> = source.iter().map(|cell| [cell[0] ^ cell[1]]).collect();
            let expected_bytes: Vec<[u8; 1]> = expected.iter().map(|cell| [cell[0] ^ cell[1]]).collect();
            for threads in [1, 2] {
                let mut result = vec![[0xff; 4]; order.count()];
                copy_strided(&order, &source, &mut result, threads)?;
                assert_eq!(result, expected, "{shape:?} {order:?}");
                let mut result = vec![[0xff; 1]; order.count()];
                copy_strided(&order, &bytes, &mut result, threads)?;
                assert_eq!(result, expected_bytes, "bytes of {shape:?} {order:?}");
            }
        }
        let order = Strided::transpose(&[2, 3], &[1, 0]);
        assert!(copy_strided(&order, &[[0; 4]; 5], &mut [[0; 4]; 6], 1).is_err(), "a source too short");
        Ok(())
    }
}
