//! `QLinearSoftmax`: softmax of rows of quantized values by a table of exponentials.
//!
//! `exp(x - max)` depends only on the difference of two quantized values, so 256 exponentials serve
//! all rows. As in ONNX Runtime, the reciprocal of the result's scale is rounded down to a whole
//! number.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, NodeView, RunCx, Unary};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_byte::{QuantizedByte, scale, zero};
use ort_cpu_threads::interrupt;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "QLinearSoftmax",
    in_place: &[(0, 0)],
    when: |node| first_axis(node).is_some(),
    make,
    ..KernelDef::BASE
}];

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 14;

/// Returns the first axis of the rows: the last axis, or before opset 13 all axes from `axis` on.
/// `None` if the lanes are no rows or the rank is not known.
fn first_axis(node: &NodeView<'_>) -> Option<usize> {
    let (rank, attrs) = (node.rank(0)?.max(1), node.attrs());
    let axis = normalize_axis(attrs.int("axis").ok()?, rank).ok()?;
    (attrs.int("opset").ok()? < 13 || axis + 1 == rank).then_some(axis)
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let axis = first_axis(&cx.node).ok_or_else(|| error!(Fail, "softmax of lanes that are no rows"))?;
    let dtype = cx.node.dtype(0).unwrap_or(DType::U8);
    for_each_type!(
        dtype in [U8, I8],
        T => Ok(Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, axis))),
        else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
    )
}

fn run<T: QuantizedByte>(cx: &mut RunCx<'_>, axis: usize) -> Result<()> {
    // The zero point of the input shifts all values alike, which softmax does not see.
    let (x_scale, y_scale, y_zero) = (scale(cx, 1)?, scale(cx, 3)?, zero::<T>(cx, 4)?);
    let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    let width: usize = shape.iter().skip(axis).product();
    let (from, to) = match cx.unary::<T>(0, 0)? {
        Unary::Apart(from, to) => (Some(from), to),
        Unary::InPlace(to) => (None, to),
    };
    if width == 0 {
        return Ok(());
    }
    let rows = Rows {
        powers: std::array::from_fn(|distance| (-(distance as f32) * x_scale).exp()),
        steps: y_scale.recip().floor(),
        zero: y_zero,
    };
    for_each_row_chunk_mut(cx.threads(), to, width, GRAIN.div_ceil(width), |first, chunk| {
        if let Some(from) = from {
            let start = first * width;
            interrupt::copy(&from[start..start + chunk.len()], chunk);
        }
        chunk.chunks_exact_mut(width).for_each(|row| rows.softmax(row));
    });
    Ok(())
}

struct Rows {
    /// `exp(-d * scale)` for each difference `d` of two quantized values.
    powers: [f32; 256],
    /// The steps of the result from 0 to 1.
    steps: f32,
    zero: f32,
}

impl Rows {
    fn softmax<T: QuantizedByte>(&self, row: &mut [T]) {
        let greatest = row.iter().map(|value| value.integer()).max().unwrap_or(0);
        let distance = |value: T| (greatest - value.integer()) as usize & 255;
        let mut sum = 0.0_f64;
        for piece in interrupt::pieces(row) {
            sum += piece.iter().map(|value| f64::from(self.powers[distance(*value)])).sum::<f64>();
        }
        let sum = sum as f32;
        let result = |power: f32| T::nearest((power / sum * self.steps).round_ties_even() + self.zero);
        // A long row repeats its values, so a table of results is smaller.
        if row.len() >= self.powers.len() {
            let results = self.powers.map(result);
            for piece in interrupt::pieces_mut(row) {
                piece.iter_mut().for_each(|value| *value = results[distance(*value)]);
            }
        } else {
            row.iter_mut().for_each(|value| *value = result(self.powers[distance(*value)]));
        }
    }
}
