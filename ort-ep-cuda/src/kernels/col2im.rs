//! `Col2Im` kernel: each thread accumulates one pixel of the image.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

use super::lines::{SHORT_FLOATS, suffix};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef {
        op: "Col2Im",
        types: &[("T", SHORT_FLOATS)],
        host_inputs: &[1, 2],
        when: few_axes,
        ..KernelDef::BASE
    },
    launches
)];

fn few_axes(node: &NodeView<'_>) -> bool {
    let axes = node.shape(1).and_then(|shape| shape.first().and_then(|size| size.as_constant()));
    axes.is_none_or(|axes| axes <= MOST_AXES as i64)
}

/// Returns, per axis: image size, block size, block positions, stride, leading padding and
/// dilation.
fn axes(cx: &OpCx<'_>) -> Result<[Vec<i64>; 6]> {
    let (sizes, blocks) = (cx.ints(1)?, cx.ints(2)?);
    let rank = sizes.len();
    let list = |name: &str, len: usize, default: i64| {
        let list = cx.attrs.find_ints(name).map_or_else(|| vec![default; len], <[i64]>::to_vec);
        ensure!(list.len() == len, InvalidGraph, "{name} has {} numbers, expected {len}", list.len());
        Ok(list)
    };
    let (strides, dilations, pads) =
        (list("strides", rank, 1)?, list("dilations", rank, 1)?, list("pads", 2 * rank, 0)?);
    ensure!(blocks.len() == rank, InvalidArgument, "a block {blocks:?} of an image {sizes:?}");
    let small =
        [&sizes, &blocks, &strides, &dilations, &pads].into_iter().flatten().all(|n| n.abs() < 1 << 31);
    let positive = strides.iter().chain(&dilations).all(|number| *number > 0);
    ensure!(
        small && positive,
        InvalidGraph,
        "strides {strides:?} and dilations {dilations:?} are not positive"
    );
    let (before, behind) = pads.split_at_checked(rank).unwrap_or_default();
    let padded = sizes.iter().zip(before).zip(behind).map(|((size, before), behind)| size + before + behind);
    let reach = blocks.iter().zip(&dilations).map(|(block, dilation)| dilation * (block - 1) + 1);
    let places =
        padded.zip(reach).zip(&strides).map(|((size, reach), stride)| (size - reach).div_euclid(*stride) + 1);
    let (places, before): (Vec<i64>, _) = (places.collect(), before.to_vec());
    Ok([sizes, blocks, places, strides, before, dilations])
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y, axes) = (cx.input(0)?, cx.output(0)?, axes(cx)?);
    let [sizes, blocks, places, ..] = &axes;
    let product = |numbers: &[i64]| {
        let product =
            numbers.iter().try_fold(1usize, |all, number| all.checked_mul(usize::try_from(*number).ok()?));
        product.ok_or_else(|| error!(InvalidArgument, "sizes of {numbers:?}"))
    };
    let (pixels, rows, columns) = (product(sizes)?, product(blocks)?, product(places)?);
    let images = y.count().checked_div(pixels).unwrap_or(0);
    let (given, expected) = (x.count(), images.saturating_mul(rows).saturating_mul(columns));
    ensure!(
        given == expected || y.count() == 0,
        InvalidArgument,
        "{given} elements of columns, expected {expected}"
    );
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let mut words = [sizes.len(), pixels, rows, columns].map(|number| number as i64).to_vec();
    for numbers in &axes {
        ensure!(numbers.len() <= MOST_AXES, NotImplemented, "an image of {} axes", numbers.len());
        words.extend(numbers.iter().copied().chain(std::iter::repeat(1)).take(MOST_AXES));
    }
    let launch = Launch::new("sample", format!("col2im_{}", suffix(x.dtype)?)).threads(y.count())?;
    let launch = launch.tensor(x).tensor(y).ints::<{ 4 + 6 * MOST_AXES }>(&words)?;
    Ok(vec![launch.uint(y.count())?])
}
