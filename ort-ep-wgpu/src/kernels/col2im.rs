//! `Col2Im`: sums the overlapping blocks of columns to an image, one invocation per pixel.
//! Gathering avoids atomic adds.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::Col2ImAxis;
use ort_gpu::read;

use super::elementwise::FLOATS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{MOST_AXES, Shader};

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        op: "Col2Im",
        types: &[("T", FLOATS)],
        host_inputs: &[1, 2],
        when: |node| read::has_few_image_axes(node, MOST_AXES),
        ..KernelDef::BASE
    },
    dispatches
)];

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y, blocks) = (cx.input(0)?, cx.output(0)?, read::col2im(cx)?);
    let sizes = |number: fn(&Col2ImAxis) -> usize| blocks.axes.iter().map(number).collect::<Vec<_>>();
    let numbers = |number: fn(&Col2ImAxis) -> i64| blocks.axes.iter().map(number).collect::<Vec<_>>();
    let shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .sizes("size", &sizes(|axis| axis.size))
        .sizes("block", &sizes(|axis| axis.block))
        .sizes("places", &sizes(|axis| axis.places))
        .integers("stride", &numbers(|axis| axis.stride))
        .integers("begin", &numbers(|axis| axis.begin))
        .integers("dilation", &numbers(|axis| axis.dilation))
        .constant("RANK", blocks.axes.len())
        .number("pixels", blocks.volume(|axis| axis.size))
        .number("rows", blocks.volume(|axis| axis.block))
        .number("columns", blocks.volume(|axis| axis.places));
    let code = "
    // The place of the block whose element `row` is over the pixel; -1 where there is none.
    fn column(pixel: u32, row: u32) -> i32 {
        var rest = pixel;
        var rest_row = row;
        var step = 1u;
        var column = 0u;
        for (var n = RANK; n > 0u; n--) {
            let k = n - 1u;
            let at = i32(rest % size(k)) + begin(k) - i32(rest_row % block(k)) * dilation(k);
            if (at < 0 || at % stride(k) != 0 || u32(at / stride(k)) >= places(k)) { return -1; }
            column += u32(at / stride(k)) * step;
            step *= places(k);
            rest /= size(k);
            rest_row /= block(k);
        }
        return i32(column);
    }
    fn element(i: u32) {
        let image = i / p.pixels;
        var sum = 0.0;
        for (var row = 0u; row < p.rows; row++) {
            let at = column(i - image * p.pixels, row);
            if (at >= 0) { sum += x((image * p.rows + row) * p.columns + u32(at)); }
        }
        set_y(i, sum);
    }";
    Ok(vec![shader.each(y.count(), code)?])
}
