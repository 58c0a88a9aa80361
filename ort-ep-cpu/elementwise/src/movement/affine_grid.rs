//! Sampling grids of affine maps (`AffineGrid`).

use half::{bf16, f16};
use ort_core::dtype::Element;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;

use super::number::Number;

cpu_kernels![KernelDef { op: "AffineGrid", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let align_corners = cx.attrs().flag("align_corners")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => affine_grid::<T>(cx, align_corners), else => {
            Err(error!(NotImplemented, "a grid of {} is not supported", dtype.name()))
        })
    }))
}

/// Returns the normalized coordinate of a pixel. The range -1 to 1 spans the centers of the
/// outermost pixels if `align_corners`, otherwise their outer edges.
fn coordinate(index: usize, size: usize, align_corners: bool) -> f64 {
    let (index, size) = (index as f64, size as f64);
    match align_corners {
        // A single pixel has no distance to divide by.
        true if size < 2.0 => -1.0,
        true => 2.0 * index / (size - 1.0) - 1.0,
        false => (2.0 * index + 1.0) / size - 1.0,
    }
}

fn affine_grid<T: Element + Number + Wide>(cx: &mut RunCx<'_>, align_corners: bool) -> Result<()> {
    let theta = cx.input(0)?;
    let output = cx.output(0)?;
    let shape = output.shape();
    let (Some(&rank), Some(spatial)) = (shape.last(), shape.get(1..shape.len().saturating_sub(1))) else {
        return Err(error!(InvalidArgument, "a grid of shape {shape:?}"));
    };
    // `theta` is [batch, rank, rank + 1]: a linear map and an offset for each image.
    let fits = theta.shape() == [shape[0], rank, rank + 1] && spatial.len() == rank;
    ensure!(fits, InvalidArgument, "maps of shape {:?} for a grid of shape {shape:?}", theta.shape());
    let theta = theta.as_slice::<T>()?;
    let to = output.as_mut_slice::<T>()?;
    let pixels: usize = spatial.iter().product();
    for (place, position) in spending(16, to.chunks_exact_mut(rank.max(1))).enumerate() {
        let map = &theta[place / pixels * rank * (rank + 1)..];
        for (row, value) in position.iter_mut().enumerate() {
            let row = &map[row * (rank + 1)..(row + 1) * (rank + 1)];
            // The last column is the offset, which the homogeneous coordinate 1 multiplies.
            let (mut rest, mut sum) = (place % pixels, row[rank].wide());
            // A map lists coordinates from the innermost dimension on.
            for (weight, &size) in row.iter().zip(spatial.iter().rev()) {
                sum += weight.wide() * coordinate(rest % size, size, align_corners);
                rest /= size;
            }
            *value = T::of_wide(sum);
        }
    }
    Ok(())
}

/// Conversion between a float type and `f64`.
trait Wide: Copy {
    fn wide(self) -> f64;
    fn of_wide(value: f64) -> Self;
}

macro_rules! wide {
    ($($float:ty: $to:expr, $from:expr;)*) => {
        $(impl Wide for $float {
            fn wide(self) -> f64 {
                $to(self)
            }

            fn of_wide(value: f64) -> $float {
                $from(value)
            }
        })*
    };
}

wide! {
    f32: f64::from, |value| value as f32;
    f64: std::convert::identity, std::convert::identity;
    f16: f16::to_f64, f16::from_f64;
    bf16: bf16::to_f64, bf16::from_f64;
}
