//! `Col2Im`: sums the overlapping blocks of columns to an image, one invocation per pixel.
//! Gathering avoids atomic adds.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{MOST_AXES, Shader};

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        op: "Col2Im",
        types: &[("T", FLOATS)],
        host_inputs: &[1, 2],
        when: few_axes,
        ..KernelDef::BASE
    },
    dispatches
)];

fn few_axes(node: &NodeView<'_>) -> bool {
    let axes = node.shape(1).and_then(|shape| shape.first().and_then(|size| size.as_constant()));
    axes.is_none_or(|axes| axes <= MOST_AXES as i64)
}

/// One dimension of the image.
struct Axis {
    size: usize,
    block: usize,
    stride: i64,
    begin: i64,
    dilation: i64,
    /// The positions of the block.
    count: usize,
}

/// The dimensions of the image, checked to fit the shader's 32-bit integers.
fn axes(cx: &OpCx<'_>) -> Result<Vec<Axis>> {
    let (image, blocks) = (cx.ints(1)?, cx.ints(2)?);
    let rank = image.len();
    ensure!(blocks.len() == rank, InvalidArgument, "a block {blocks:?} of an image {image:?}");
    let entry = |name: &str, index: usize, default: i64| match cx.attrs.find_ints(name) {
        None => Ok(default),
        Some(list) => list.get(index).copied().ok_or_else(|| error!(InvalidGraph, "{name} is too short")),
    };
    let whole = |value: i64| {
        usize::try_from(value).map_err(|_| error!(InvalidArgument, "a size is {value}, expected 0 or more"))
    };
    let mut axes = Vec::with_capacity(rank);
    for (index, (size, block)) in image.iter().zip(&blocks).enumerate() {
        let (stride, dilation) = (entry("strides", index, 1)?, entry("dilations", index, 1)?);
        let (begin, end) = (entry("pads", index, 0)?, entry("pads", rank + index, 0)?);
        let small = [stride, dilation, begin, end, *size, *block].iter().all(|value| value.abs() < 1 << 31);
        ensure!(small && stride > 0 && dilation > 0, InvalidGraph, "strides and dilations are not positive");
        let places = (size + begin + end - dilation * (block - 1) - 1).div_euclid(stride) + 1;
        let (size, block, count) = (whole(*size)?, whole(*block)?, whole(places)?);
        axes.push(Axis { size, block, stride, begin, dilation, count });
    }
    Ok(axes)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y, axes) = (cx.input(0)?, cx.output(0)?, axes(cx)?);
    let product =
        |number: fn(&Axis) -> usize| axes.iter().fold(1usize, |all, axis| all.saturating_mul(number(axis)));
    let (pixels, rows, columns) =
        (product(|axis| axis.size), product(|axis| axis.block), product(|axis| axis.count));
    let images = y.count().checked_div(pixels).unwrap_or(0);
    let expected = images.saturating_mul(rows).saturating_mul(columns);
    ensure!(
        x.count() == expected || y.count() == 0,
        InvalidArgument,
        "{} elements of columns, expected {expected}",
        x.count()
    );
    let sizes = |number: fn(&Axis) -> usize| axes.iter().map(number).collect::<Vec<_>>();
    let numbers = |number: fn(&Axis) -> i64| axes.iter().map(number).collect::<Vec<_>>();
    let shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .sizes("size", &sizes(|axis| axis.size))
        .sizes("block", &sizes(|axis| axis.block))
        .sizes("places", &sizes(|axis| axis.count))
        .integers("stride", &numbers(|axis| axis.stride))
        .integers("begin", &numbers(|axis| axis.begin))
        .integers("dilation", &numbers(|axis| axis.dilation))
        .constant("RANK", axes.len())
        .number("pixels", pixels)
        .number("rows", rows)
        .number("columns", columns);
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
