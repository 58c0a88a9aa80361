//! `MaxUnpool`: scatters the values of a max pool back to their indices. Of several values with one
//! index, the last wins; an index out of range is skipped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::UnpooledImage;
use ort_core::{Result, ensure};
use ort_gpu::read::has_up_to_three_axes;

use super::elements::{by_bytes, element_bytes};
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
    ensure!(x.rank() <= MOST_AXES, NotImplemented, "unpooling of shape {:?}", x.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let image = UnpooledImage::new(cx.attrs, &x.shape, &indices.shape, y.rank())?;
    let mut corner = vec![x.rank()];
    for shape in [&*image.shape, &*y.shape] {
        corner.extend(shape.iter().copied().chain(std::iter::repeat(1)).take(MOST_AXES));
    }
    // Three launches: clear the sources, mark each position with its last source, then copy.
    let sources = sources(cx, &mut 0)?;
    let clear = Launch::new("sample", "unpool_clear").threads(y.count())?.tensor(&sources);
    let mut launches = vec![clear.uint(y.count())?];
    if x.count() > 0 {
        let mark = Launch::new("sample", "unpool_mark").threads(x.count())?.tensor(indices).tensor(&sources);
        let mark = mark.uints::<{ 1 + 2 * MOST_AXES }>(&corner)?;
        launches.push(mark.uint(image.count())?.uint(x.count())?);
    }
    let take = by_bytes("sample", "unpool_take", element_bytes(x.dtype)?).threads(y.count())?;
    launches.push(take.tensor(x).tensor(&sources).tensor(y).uint(y.count())?);
    Ok(launches)
}
