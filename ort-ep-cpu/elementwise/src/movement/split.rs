//! `Split`, the inverse of `Concat`.

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::{SliceAxis, Strided, normalize_axis};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::strided::copy_strided;
use super::{Cell, Io, Movement, movement};

movement!["Split", |cx: &mut CompileCx<'_>| Ok(Split { axis: cx.attrs().int("axis")? }), unaligned: &[0]];

struct Split {
    axis: i64,
}

impl Split {
    /// Returns the sizes of the parts: those that the node gives, or equal ones.
    fn parts(&self, io: &Io<'_>, size: usize, count: usize) -> Result<SmallVec<[usize; 8]>> {
        let Some(given) = io.ints(1)? else {
            let part = size.div_ceil(count.max(1));
            return Ok((0..count).map(|index| part.min(size.saturating_sub(index * part))).collect());
        };
        ensure!(
            given.len() == count,
            InvalidArgument,
            "split has {} sizes, but there are {count} outputs",
            given.len()
        );
        let invalid = || error!(InvalidArgument, "split {given:?} does not add up to size {size}");
        given.iter().map(|&part| usize::try_from(part).map_err(|_| invalid())).collect()
    }
}

impl Movement for Split {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let axis = normalize_axis(self.axis, shape.len())?;
        let mut slices: SmallVec<[SliceAxis; 6]> = shape.iter().map(|&size| SliceAxis::all(size)).collect();
        let mut start = 0usize;
        for (part, output) in self.parts(io, shape[axis], to.len())?.into_iter().zip(to) {
            ensure!(part <= shape[axis].saturating_sub(start), InvalidArgument, "the parts exceed {shape:?}");
            slices[axis] = SliceAxis { start, step: 1, count: part };
            if let Some(output) = output {
                copy_strided(&Strided::slice(shape, &slices), from[0], output, io.threads)?;
            }
            start += part;
        }
        Ok(())
    }
}
