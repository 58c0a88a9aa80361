//! `Col2Im`: sums the columns of sliding blocks into an image, the inverse layout of im2col.

use num_complex::Complex;
use num_traits::Zero;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_threads::interrupt::{self, PIECE, pieces, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::number::{Number, with_numbers};

cpu_kernels![KernelDef { op: "Col2Im", make, ..KernelDef::BASE }];

#[derive(Clone)]
struct Col2Im {
    strides: Option<Vec<i64>>,
    pads: Option<Vec<i64>>,
    dilations: Option<Vec<i64>>,
}

/// One dimension of the image.
struct Axis {
    size: usize,
    block: usize,
    stride: i64,
    begin: i64,
    dilation: i64,
    /// The number of block positions.
    count: usize,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let is_text = cx.node.dtype(0) == Some(DType::String);
    ensure!(!is_text, NotImplemented, "Col2Im of strings, which cannot be added up");
    let list = |name: &str| cx.attrs().find_ints(name).map(<[i64]>::to_vec);
    let op = Col2Im { strides: list("strides"), pads: list("pads"), dilations: list("dilations") };
    Ok(Box::new(op))
}

impl Executable for Col2Im {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // For each thread, accumulators for one image, in the widest compute type.
        let pixels = shapes.output(0).get(2..).map_or(0, elements);
        let images = shapes.output(0).get(..2).map_or(0, elements);
        Ok(tables(pixels.saturating_mul(size_of::<f64>()).saturating_mul(shapes.threads.min(images))))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (input, image, block) = (cx.input(0)?, cx.input(1)?.to_ints()?, cx.input(2)?.to_ints()?);
        let (axes, threads) = (self.axes(&image, &block)?, cx.threads());
        with_numbers!(
            input,
            cx.output(0)?,
            // Real and imaginary parts are summed apart, because the accumulators are real.
            |from, to, parts| (0..parts).try_for_each(|part| add_up(
                &axes,
                (from, to),
                (parts, part),
                threads
            )),
            "columns"
        )
    }
}

impl Col2Im {
    fn axes(&self, image: &[i64], block: &[i64]) -> Result<Vec<Axis>> {
        let rank = image.len();
        let entry = |list: &Option<Vec<i64>>, index: usize, default: i64| match list {
            None => Ok(default),
            Some(list) => list.get(index).copied().ok_or_else(|| error!(InvalidGraph, "a list is too short")),
        };
        ensure!(block.len() == rank, InvalidArgument, "a block {block:?} of an image {image:?}");
        let mut axes = Vec::with_capacity(rank);
        for index in 0..rank {
            let (stride, dilation) = (entry(&self.strides, index, 1)?, entry(&self.dilations, index, 1)?);
            let (begin, end) = (entry(&self.pads, index, 0)?, entry(&self.pads, rank + index, 0)?);
            // Values below 2^31 keep the arithmetic below free of overflow.
            let small =
                [stride, dilation, begin, end, image[index], block[index]].iter().all(|v| v.abs() < 1 << 31);
            ensure!(
                small && stride > 0 && dilation > 0,
                InvalidGraph,
                "strides and dilations are not positive"
            );
            // The standard's count of block positions; it is negative if a block does not fit.
            let places =
                (image[index] + begin + end - dilation * (block[index] - 1) - 1).div_euclid(stride) + 1;
            let whole =
                |value: i64| usize::try_from(value).map_err(|_| error!(InvalidArgument, "size {value}"));
            let (size, block, count) = (whole(image[index])?, whole(block[index])?, whole(places)?);
            axes.push(Axis { size, block, stride, begin, dilation, count });
        }
        Ok(axes)
    }
}

/// Accumulates one of the reals of each element.
fn add_up<T: Number>(
    axes: &[Axis],
    (from, to): (&[T], &mut [T]),
    (parts, part): (usize, usize),
    threads: usize,
) -> Result<()> {
    let pixels: usize = axes.iter().map(|axis| axis.size).product();
    let columns: usize = axes.iter().map(|axis| axis.count).product();
    let rows: usize = axes.iter().map(|axis| axis.block).product();
    let images = (to.len() / parts).checked_div(pixels).unwrap_or(0);
    // The sizes are inputs, so products of them may overflow.
    let fits =
        images.checked_mul(rows).and_then(|rows| rows.checked_mul(columns)) == Some(from.len() / parts);
    ensure!(
        fits || to.is_empty(),
        InvalidArgument,
        "the input has {} elements, expected {images} x {rows} x {columns}: images, elements of a block, positions of the block",
        from.len() / parts
    );
    for_each_row_chunk_mut(threads, to, pixels * parts, 1, |first, chunk| {
        let mut sums = vec![T::Compute::zero(); pixels];
        for (index, image) in chunk.chunks_exact_mut(pixels * parts).enumerate() {
            interrupt::fill(&mut sums, T::Compute::zero());
            let source = &from[(first + index) * rows * columns * parts..][..rows * columns * parts];
            // The input is [images, rows, columns]: elements of a block, then positions.
            for (row, cells) in source.chunks_exact((columns * parts).max(1)).enumerate() {
                for (piece, cells) in cells.chunks(PIECE * parts).enumerate() {
                    spend(4 * cells.len());
                    for (column, cell) in cells.iter().skip(part).step_by(parts).enumerate() {
                        // Overlapping blocks add up, in the order of the rows.
                        if let Some(pixel) = pixel(axes, row, piece * PIECE + column) {
                            sums[pixel] += cell.widen();
                        }
                    }
                }
            }
            let image = image.iter_mut().skip(part).step_by(parts);
            image.zip(pieces(&sums).flatten()).for_each(|(to, &sum)| *to = T::narrow(sum));
        }
    });
    Ok(())
}

/// Returns the pixel under element `row` of the block at position `column`; `None` in the padding.
fn pixel(axes: &[Axis], row: usize, column: usize) -> Option<usize> {
    let (mut row, mut column, mut pixel, mut step) = (row, column, 0, 1);
    for axis in axes.iter().rev() {
        let (inside, place) = ((row % axis.block) as i64, (column % axis.count) as i64);
        let index = place * axis.stride - axis.begin + inside * axis.dilation;
        let index = usize::try_from(index).ok().filter(|&index| index < axis.size)?;
        pixel += index * step;
        (row, column, step) = (row / axis.block, column / axis.count, step * axis.size);
    }
    Some(pixel)
}
