//! `MaxUnpool`: scatters the values of a max pool back to their indices. Of several values with one
//! index, the last wins; an index out of range is skipped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::nn::geometry::Windows;
use ort_core::{Result, ensure, error};

use super::conv::has_up_to_three_axes;
use super::movement::{by_bytes, element_bytes};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        sources(cx, &mut taken)?;
        Ok(taken)
    }),
    ..CudaKernel::new(
        KernelDef {
            op: "MaxUnpool",
            types: &[("T1", TypeSet::FLOATS)],
            host_inputs: &[2],
            when: has_up_to_three_axes,
            ..KernelDef::BASE
        },
        launches,
    )
}];

/// Reserves, per result element, the number of its source element plus one; 0 means none.
fn sources(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    Ok(cx.workspace(taken, DType::U32, &cx.output(0)?.shape))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let [batch, channels, sizes @ ..] = &*x.shape else {
        return Err(error!(InvalidArgument, "an image of shape {:?}", x.shape));
    };
    let fits = indices.count() == x.count() && y.rank() == x.rank() && x.rank() <= MOST_AXES;
    ensure!(fits, InvalidArgument, "{:?} indices for values of shape {:?}", indices.shape, x.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let windows = Windows::of_pool(cx.attrs, x.rank())?.transposed_on(cx.attrs, sizes)?;
    let image = [*batch, *channels].into_iter().chain(windows.iter().map(|axis| axis.input));
    let image: Vec<usize> = image.collect();
    let image_count = image.iter().copied().fold(1, usize::saturating_mul);
    let mut corner = vec![x.rank()];
    for shape in [&*image, &*y.shape] {
        corner.extend(shape.iter().copied().chain(std::iter::repeat(1)).take(MOST_AXES));
    }
    // Three launches: clear the sources, mark each position with its last source, then copy.
    let sources = sources(cx, &mut 0)?;
    let clear = Launch::new("sample", "unpool_clear").threads(y.count())?.tensor(&sources);
    let mut launches = vec![clear.uint(y.count())?];
    if x.count() > 0 {
        let mark = Launch::new("sample", "unpool_mark").threads(x.count())?.tensor(indices).tensor(&sources);
        let mark = mark.uints::<{ 1 + 2 * MOST_AXES }>(&corner)?;
        launches.push(mark.uint(image_count)?.uint(x.count())?);
    }
    let take = by_bytes("sample", "unpool_take", element_bytes(x.dtype)?).threads(y.count())?;
    launches.push(take.tensor(x).tensor(&sources).tensor(y).uint(y.count())?);
    Ok(launches)
}
