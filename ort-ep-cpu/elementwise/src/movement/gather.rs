//! Gather operators: `Gather`, `GatherElements` and `GatherND`.

use ort_core::dtype::DType;
use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::{contiguous_strides, normalize_axis};
use ort_core::tensor::TensorView;
use ort_core::{Error, Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_threads::interrupt::{self, PIECE, pieces, pieces_mut, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::{Cell, Io, Movement, movement, only, operand};

movement!["Gather", |cx: &mut CompileCx<'_>| Ok(Gather { axis: cx.attrs().int("axis")? }), unaligned: &[0]];
movement![
    "GatherElements",
    |cx: &mut CompileCx<'_>| Ok(GatherElements { axis: cx.attrs().int("axis")? }),
    unaligned: &[0]
];
movement![
    "GatherND",
    |cx: &mut CompileCx<'_>| Ok(GatherNd { batch: cx.attrs().int("batch_dims")? }),
    unaligned: &[0]
];

/// Returns the error for an index that an axis of this size does not have.
fn outside_of(index: i64, size: i64) -> Error {
    if size == 0 {
        return error!(InvalidArgument, "indices element out of data bounds, idx={index}: the axis is empty");
    }
    error!(
        InvalidArgument,
        "indices element out of data bounds, idx={index} must be within the inclusive range [{},{}]",
        -size,
        size - 1
    )
}

/// Indices of either integer type, read without conversion.
#[derive(Clone, Copy)]
pub(super) enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Indices<'a> {
    pub(super) fn new(view: TensorView<'a>) -> Result<Indices<'a>> {
        match view.dtype() {
            DType::I32 => Ok(Indices::I32(view.as_slice()?)),
            DType::I64 => Ok(Indices::I64(view.as_slice()?)),
            other => Err(error!(InvalidArgument, "indices of type {}", other.name())),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Indices::I32(indices) => indices.len(),
            Indices::I64(indices) => indices.len(),
        }
    }

    #[inline]
    fn get(&self, place: usize) -> i64 {
        match self {
            Indices::I32(indices) => i64::from(indices[place]),
            Indices::I64(indices) => indices[place],
        }
    }

    /// Returns the index, counted from the front. [`Self::check`] must have passed.
    #[inline]
    pub(super) fn at(&self, place: usize, size: usize) -> usize {
        let index = self.get(place);
        // `check` bounded the index by the size, so neither the sum nor the cast overflows.
        (if index < 0 { index + size as i64 } else { index }) as usize
    }

    /// Returns an error if an index is outside of `size`.
    pub(super) fn check(&self, size: usize) -> Result<()> {
        let size = size as i64;
        let outside = |index: i64| index < -size || index >= size;
        let found = match self {
            Indices::I32(indices) => {
                pieces(indices).flatten().map(|&index| i64::from(index)).find(|&index| outside(index))
            }
            Indices::I64(indices) => pieces(indices).flatten().copied().find(|&index| outside(index)),
        };
        match found {
            Some(index) => Err(outside_of(index, size)),
            None => Ok(()),
        }
    }
}

struct Gather {
    axis: i64,
}

impl Movement for Gather {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let axis = normalize_axis(self.axis, shape.len())?;
        let from = operand(from, 0, shape)?;
        let indices = Indices::new(io.input(1)?)?;
        // Before the parallel loop, which cannot return errors.
        indices.check(shape[axis])?;
        let (size, run) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let outer: usize = shape[..axis].iter().product();
        let (to, picks) = (only(to)?, indices.len());
        ensure!(to.len() == outer * picks * run, Fail, "{picks} indices of shape {shape:?}");
        // About 64 KiB of copies make a task worthwhile.
        let least_rows = ((64 << 10) / (run * size_of::<T>()).max(1)).max(1);
        for_each_row_chunk_mut(io.threads, to, run, least_rows, |first, rows| {
            // Two counters instead of a division per row.
            let (mut base, mut pick) = (first / picks * size, first % picks);
            for row in rows.chunks_exact_mut(run) {
                let start = (base + indices.at(pick, size)) * run;
                match row {
                    // For a single element, a plain move beats a call.
                    [cell] => *cell = from[start],
                    row => interrupt::copy(&from[start..start + run], row),
                }
                pick += 1;
                if pick == picks {
                    (base, pick) = (base + size, 0);
                }
            }
        });
        Ok(())
    }
}

struct GatherElements {
    axis: i64,
}

impl Movement for GatherElements {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let (shape, picked) = (io.shape(0)?, io.input(1)?.shape());
        let indices = Indices::new(io.input(1)?)?;
        let (from, to) = (operand(from, 0, shape)?, only(to)?);
        let walk = ElementWalk::new(shape, picked, self.axis)?;
        ensure!(to.len() == indices.len(), Fail, "indices of shape {picked:?} do not fill the output");
        indices.check(walk.size)?;
        for_each_row_chunk_mut(io.threads, to, walk.row, (16 << 10) / walk.row.max(1) + 1, |first, rows| {
            for (index, row) in rows.chunks_exact_mut(walk.row).enumerate() {
                let (row_index, base) = (first + index, walk.base(first + index));
                for (piece, cells) in pieces_mut(row).enumerate() {
                    for (column, cell) in (piece * PIECE..).zip(cells) {
                        let pick = indices.at(row_index * walk.row + column, walk.size);
                        *cell = from[base + column * walk.column_step + pick * walk.axis_step];
                    }
                }
            }
        });
        Ok(())
    }
}

/// How `GatherElements` and `ScatterElements` address the data: each element keeps its own index in
/// all dimensions except the axis.
pub(super) struct ElementWalk {
    /// The size of the data along the axis.
    pub(super) size: usize,
    /// The length of a row of the indices.
    pub(super) row: usize,
    /// The stride in the data between columns; 0 if the last dimension is the axis.
    pub(super) column_step: usize,
    /// The stride in the data along the axis.
    pub(super) axis_step: usize,
    /// For all dimensions except the last, the size of the indices and the stride in the data.
    outer: SmallVec<[(usize, usize); 6]>,
}

impl ElementWalk {
    pub(super) fn new(shape: &[usize], picked: &[usize], axis: i64) -> Result<ElementWalk> {
        ensure!(
            shape.len() == picked.len(),
            InvalidArgument,
            "data of shape {shape:?} do not match indices of shape {picked:?}"
        );
        let axis = normalize_axis(axis, shape.len())?;
        // Along the axis, `Indices::check` bounds the indices.
        let inside = (0..shape.len()).all(|other| other == axis || picked[other] <= shape[other]);
        // Without indices nothing is read, whatever the other sizes are.
        let empty = picked.contains(&0);
        ensure!(
            inside || empty,
            InvalidArgument,
            "indices of shape {picked:?} are out of range for data of shape {shape:?}"
        );
        let strides = contiguous_strides(shape);
        let step = |other: usize| if other == axis { 0 } else { strides[other] as usize };
        let last = shape.len() - 1;
        Ok(ElementWalk {
            size: shape[axis],
            row: picked[last],
            column_step: step(last),
            axis_step: strides[axis] as usize,
            outer: (0..last).map(|other| (picked[other], step(other))).collect(),
        })
    }

    /// Returns the first data element of a row, with index 0 along the axis.
    pub(super) fn base(&self, row: usize) -> usize {
        let mut rest = row;
        let mut base = 0;
        for &(size, step) in self.outer.iter().rev() {
            base += rest % size * step;
            rest /= size;
        }
        base
    }
}

struct GatherNd {
    batch: i64,
}

impl Movement for GatherNd {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let tuples = Tuples::new(shape, io.input(1)?, usize::try_from(self.batch).unwrap_or(usize::MAX))?;
        let (from, to) = (operand(from, 0, shape)?, only(to)?);
        let run = tuples.run;
        ensure!(to.len() == tuples.count * run, Fail, "the tuples do not fill the output");
        let least_rows = ((64 << 10) / (run * size_of::<T>()).max(1)).max(1);
        for_each_row_chunk_mut(io.threads, to, run, least_rows, |first, rows| {
            for (index, row) in rows.chunks_exact_mut(run).enumerate() {
                let start = tuples.start(first + index);
                interrupt::copy(&from[start..start + run], row);
            }
        });
        Ok(())
    }
}

/// Bounds-checked index tuples of `GatherND` and `ScatterND`.
pub(super) struct Tuples<'a> {
    indices: &'a [i64],
    /// The size and stride of each indexed dimension.
    dims: SmallVec<[(usize, usize); 6]>,
    /// The number of tuples.
    pub(super) count: usize,
    /// Tuples per batch.
    per_batch: usize,
    /// The stride between batches in the data.
    batch_step: usize,
    /// The number of elements that a tuple addresses.
    pub(super) run: usize,
}

impl<'a> Tuples<'a> {
    pub(super) fn new(shape: &[usize], indices: TensorView<'a>, batch: usize) -> Result<Tuples<'a>> {
        let picked = indices.shape();
        let invalid =
            || error!(InvalidArgument, "data of shape {shape:?} do not match indices of shape {picked:?}");
        let (&depth, outer) = picked.split_last().ok_or_else(invalid)?;
        // `batch_dims` is hostile, so the sum is checked.
        let depth_fits = batch.checked_add(depth).is_some_and(|used| used <= shape.len());
        ensure!(
            depth_fits && batch <= outer.len(),
            InvalidArgument,
            "data of shape {shape:?} do not match indices of shape {picked:?}"
        );
        ensure!(
            shape[..batch] == outer[..batch],
            InvalidArgument,
            "data of shape {shape:?} do not match indices of shape {picked:?}"
        );
        let strides = contiguous_strides(shape);
        let dims: SmallVec<[(usize, usize); 6]> =
            (batch..batch + depth).map(|axis| (shape[axis], strides[axis] as usize)).collect();
        let indices = indices.as_slice::<i64>()?;
        // At least 1, because tuples of no index address the whole data and have no elements.
        for tuple in spending(2 * depth, indices.chunks_exact(depth.max(1))) {
            for (&index, &(size, _)) in tuple.iter().zip(&dims) {
                normalize_axis(index, size).map_err(|_| outside_of(index, size as i64))?;
            }
        }
        Ok(Tuples {
            indices,
            dims,
            count: outer.iter().product(),
            // Only used if there are tuples, so no product that divides is 0.
            per_batch: outer[batch..].iter().product(),
            batch_step: shape[batch..].iter().product(),
            run: shape[batch + depth..].iter().product(),
        })
    }

    /// Returns the first element that a tuple addresses.
    pub(super) fn start(&self, tuple: usize) -> usize {
        let depth = self.dims.len();
        let picked = &self.indices[tuple * depth..(tuple + 1) * depth];
        let inside = picked.iter().zip(&self.dims).map(|(&index, &(size, step))| {
            (if index < 0 { index + size as i64 } else { index }) as usize * step
        });
        tuple / self.per_batch * self.batch_step + inside.sum::<usize>()
    }
}
