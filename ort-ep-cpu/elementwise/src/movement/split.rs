//! `Split`, the inverse of `Concat`.

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::{SliceAxis, Strided, normalize_axis};
use ort_core::ops::tensor::problem::split_sizes;
use ort_core::{Result, ensure};
use smallvec::SmallVec;

use super::strided::copy_strided;
use super::{Cell, Io, Movement, movement};

movement!["Split", |cx: &mut CompileCx<'_>| Ok(Split { axis: cx.attrs().int("axis")? }), unaligned: &[0]];

struct Split {
    axis: i64,
}

impl Movement for Split {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let axis = normalize_axis(self.axis, shape.len())?;
        let mut slices: SmallVec<[SliceAxis; 6]> = shape.iter().map(|&size| SliceAxis::all(size)).collect();
        let mut start = 0usize;
        let sizes = split_sizes(shape[axis], io.ints(1)?.as_deref(), to.len())?;
        for (part, output) in sizes.into_iter().zip(to) {
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
