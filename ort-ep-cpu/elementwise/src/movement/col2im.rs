//! `Col2Im`: sums the columns of sliding blocks into an image, the inverse layout of im2col.

use num_complex::Complex;
use num_traits::Zero;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::tensor::problem::{Col2Im as Blocks, Col2ImAxis};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_threads::interrupt::{self, PIECE, pieces, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::number::{Number, with_numbers};

cpu_kernels![KernelDef { op: "Col2Im", make, ..KernelDef::BASE }];

struct Col2Im {
    attrs: Attributes,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let is_text = cx.node.dtype(0) == Some(DType::String);
    ensure!(!is_text, NotImplemented, "Col2Im of strings, which cannot be added up");
    Ok(Box::new(Col2Im { attrs: cx.attrs().clone() }))
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
        let (blocks, threads) = (Blocks::new(&self.attrs, &image, &block)?, cx.threads());
        with_numbers!(
            input,
            cx.output(0)?,
            // Real and imaginary parts are summed apart, because the accumulators are real.
            |from, to, parts| (0..parts).try_for_each(|part| add_up(
                &blocks,
                (from, to),
                (parts, part),
                threads
            )),
            "columns"
        )
    }
}

/// Accumulates one of the reals of each element.
fn add_up<T: Number>(
    blocks: &Blocks,
    (from, to): (&[T], &mut [T]),
    (parts, part): (usize, usize),
    threads: usize,
) -> Result<()> {
    blocks.check_columns(from.len() / parts, to.len() / parts)?;
    let (pixels, columns) = (blocks.volume(|axis| axis.size), blocks.volume(|axis| axis.places));
    let rows = blocks.volume(|axis| axis.block);
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
                        if let Some(pixel) = pixel(&blocks.axes, row, piece * PIECE + column) {
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
fn pixel(axes: &[Col2ImAxis], row: usize, column: usize) -> Option<usize> {
    let (mut row, mut column, mut pixel, mut step) = (row, column, 0, 1);
    for axis in axes.iter().rev() {
        let (inside, place) = ((row % axis.block) as i64, (column % axis.places) as i64);
        let index = place * axis.stride - axis.begin + inside * axis.dilation;
        let index = usize::try_from(index).ok().filter(|&index| index < axis.size)?;
        pixel += index * step;
        (row, column, step) = (row / axis.block, column / axis.places, step * axis.size);
    }
    Some(pixel)
}
