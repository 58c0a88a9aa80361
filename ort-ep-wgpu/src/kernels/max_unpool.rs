//! `MaxUnpool`: scatters the values of a max pool to its indices. If an index repeats, the last
//! value wins.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::UnpooledImage;
use ort_gpu::read::has_up_to_three_axes;

use super::elementwise::FLOATS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Access, Shader};

wgpu_kernels![WgpuKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        sources(cx, &mut taken)?;
        Ok(taken)
    }),
    ..WgpuKernel::new(
        KernelDef {
            op: "MaxUnpool",
            types: &[("T1", FLOATS)],
            host_inputs: &[2],
            when: has_up_to_three_axes,
            ..KernelDef::BASE
        },
        dispatches,
    )
}];

/// For each output element, one more than the index of its source; 0 if it has none.
fn sources(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    Ok(cx.workspace(taken, DType::U32, &cx.output(0)?.shape))
}

/// Records the source of each output element. The pooled image and the result share their upper
/// left corner.
const MARK: &str = "
fn combine(a: u32, b: u32) -> u32 { return max(a, b); }
fn element(i: u32) {
    var rest = bitcast<u32>(indices(i));
    if (rest >= p.image_count) { return; }
    var place = 0u;
    var step = 1u;
    for (var back = 1u; back <= RANK; back++) {
        let axis = RANK - back;
        let at = rest % image(axis);
        rest /= image(axis);
        if (at >= result(axis)) { return; }
        place += at * step;
        step *= result(axis);
    }
    combine_sources(place, i + 1u);
}";

const TAKE: &str = "
fn element(i: u32) {
    let source = sources(i);
    if (source == 0u) { set_y(i, 0.0); } else { set_y(i, x(source - 1u)); }
}";

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let image = UnpooledImage::new(cx.attrs, &x.shape, &indices.shape, y.rank())?;
    let sources = sources(cx, &mut 0)?;
    let clear = Shader::new(cx).write("sources", &sources);
    let mark = Shader::new(cx)
        .read("indices", indices)
        .tensor("sources", &sources, Access::Combine)
        .sizes("image", &image.shape)
        .sizes("result", &y.shape)
        .number("image_count", image.count())
        .constant("RANK", x.rank());
    let take = Shader::new(cx).read("x", x).read("sources", &sources).write("y", y);
    Ok(vec![
        // Three dispatches: which update of an element is last is known only after all of them.
        clear.each(y.count(), "fn element(i: u32) { set_sources(i, 0u); }")?,
        mark.each(x.count(), MARK)?,
        take.each(y.count(), TAKE)?,
    ])
}
