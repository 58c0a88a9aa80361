//! Pairwise distances (`CDist`), by summing squared differences.
//!
//! ONNX Runtime computes `|a|^2 + |b|^2 - 2ab` by a GEMM, which cancels catastrophically if rows
//! are long and close to each other. Summing squared differences does not.

use std::iter::Sum;
use std::ops::{Add, Mul, Sub};

use ort_core::dtype::{DType, Element};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

cpu_kernels![KernelDef { domain: MICROSOFT, op: "CDist", make, ..KernelDef::BASE }];

/// Independent accumulators, so that additions do not wait for each other.
const LANES: usize = 8;
/// Minimum elements per task.
const TASK: usize = 1 << 14;

/// An element type of `CDist`.
trait Real:
    Element + Copy + Default + Sum + Sub<Output = Self> + Mul<Output = Self> + Add<Output = Self>
{
    fn root(self) -> Self;
}

impl Real for f32 {
    fn root(self) -> f32 {
        self.sqrt()
    }
}

impl Real for f64 {
    fn root(self) -> f64 {
        self.sqrt()
    }
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let is_root = cx.attrs().string("metric")? == "euclidean";
    Ok(Box::new(move |cx: &mut RunCx<'_>| match cx.input(0)?.dtype() {
        DType::F32 => distances::<f32>(cx, is_root),
        DType::F64 => distances::<f64>(cx, is_root),
        dtype => Err(error!(NotImplemented, "distances of {} are not supported", dtype.name())),
    }))
}

fn distances<T: Real>(cx: &mut RunCx<'_>, is_root: bool) -> Result<()> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let (&[_, width], &[columns, other]) = (a.shape(), b.shape()) else {
        return Err(error!(InvalidArgument, "CDist takes matrices, got {:?} and {:?}", a.shape(), b.shape()));
    };
    ensure!(width == other, InvalidArgument, "the rows are of {width} and {other} elements");
    let (a, b) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
    let threads = cx.threads();
    let output = cx.output(0)?.as_mut_slice::<T>()?;
    let rows_of_task = TASK.div_ceil(columns.saturating_mul(width).max(1));
    // A block of columns is the unit of work between two deadline checks.
    let columns_at_once = (TASK / width.max(1)).max(1);
    for_each_row_chunk_mut(threads, output, columns, rows_of_task, |first, rows| {
        for (row, output) in (first..).zip(rows.chunks_exact_mut(columns)) {
            let a = &a[row * width..(row + 1) * width];
            for (block, output) in output.chunks_mut(columns_at_once).enumerate() {
                spend(output.len() * (4 + width / 4));
                for (column, output) in (block * columns_at_once..).zip(output) {
                    let sum = squared(a, &b[column * width..(column + 1) * width]);
                    *output = if is_root { sum.root() } else { sum };
                }
            }
        }
    });
    Ok(())
}

/// Returns the sum of squared differences.
fn squared<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::default(); LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let square = |(a, b): (&T, &T)| {
        let difference = *a - *b;
        difference * difference
    };
    // The lanes and their order are fixed, so the bits depend on the width alone.
    let rest: T = a.remainder().iter().zip(b.remainder()).map(square).sum();
    for (a, b) in a.zip(b) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, pair)| *lane = *lane + square(pair));
    }
    lanes.into_iter().sum::<T>() + rest
}
