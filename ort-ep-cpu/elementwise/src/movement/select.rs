//! Data-dependent selection: `NonZero` and `Compress`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, IoShapes, KernelDef, OutputsFrom, RunCx};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::{self, pieces, spending};

use super::{Cell, Io, Movement, movement, only, operand};

movement!["Compress", make_compress, unaligned: &[0]];
cpu_kernels![KernelDef {
    op: "NonZero",
    outputs: OutputsFrom::Kernel,
    unaligned: &[0],
    // One flag per element.
    make: |_| Ok(Box::new(WithHeap {
        bound: |shapes: &IoShapes<'_>| elements(shapes.input(0)),
        run: non_zero
    })),
    ..KernelDef::BASE
}];

struct Compress {
    axis: Option<i64>,
}

fn make_compress(cx: &mut CompileCx<'_>) -> Result<Compress> {
    Ok(Compress { axis: cx.attrs().find_int("axis") })
}

impl Movement for Compress {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.shape(0)?;
        let from = operand(from, 0, shape)?;
        let (outer, size, run) = match self.axis {
            None => (1, from.len(), 1),
            Some(axis) => {
                let axis = normalize_axis(axis, shape.len())?;
                (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product::<usize>())
            }
        };
        let condition = io.input(1)?.bytes()?;
        let kept = || {
            let flags = spending(2, (0..size).zip(condition));
            flags.filter(|(_, keep)| **keep != 0).map(|(index, _)| index)
        };
        let to = only(to)?;
        let count = outer * kept().count() * run;
        ensure!(to.len() == count, Fail, "{count} elements are kept of shape {shape:?}");
        if run == 0 {
            return Ok(());
        }
        let places = (0..outer).flat_map(|outer| kept().map(move |index| (outer * size + index) * run));
        for (to, place) in to.chunks_exact_mut(run).zip(places) {
            interrupt::copy(&from[place..place + run], to);
        }
        Ok(())
    }
}

/// Returns whether each element differs from zero, false or the empty string. Negative zero is
/// zero.
fn flags(view: &TensorView<'_>) -> Result<Vec<bool>> {
    let dtype = view.dtype();
    if dtype == DType::String {
        return Ok(spending(1, view.strings()?).map(|text| !text.is_empty()).collect());
    }
    let width = dtype.byte_size();
    let width =
        width.ok_or_else(|| error!(NotImplemented, "NonZero of {} is not supported", dtype.name()))?;
    let part = if dtype.is_complex() { width / 2 } else { width };
    // The mask drops the sign bit of floats. The last byte holds it, because elements are
    // little-endian.
    let sign = if dtype.is_float() || dtype.is_complex() { 0x7f } else { 0xff };
    let is_set = |number: &[u8]| match number.split_last() {
        Some((last, rest)) => last & sign != 0 || rest.iter().any(|&byte| byte != 0),
        None => false,
    };
    let elements = spending(2, view.bytes()?.chunks_exact(width));
    Ok(elements.map(|element| element.chunks_exact(part).any(is_set)).collect())
}

fn non_zero(cx: &mut RunCx<'_>) -> Result<()> {
    let view = cx.input(0)?;
    let (shape, flags) = (view.shape(), flags(&view)?);
    let count = pieces(&flags).flatten().filter(|&&flag| flag).count();
    let mut result = cx.allocate(DType::I64, &[shape.len(), count])?;
    let to = result.as_mut_slice::<i64>()?;
    let mut step = flags.len();
    for (&size, row) in shape.iter().zip(to.chunks_exact_mut(count.max(1))) {
        // The coordinate advances every `step` elements.
        // A size of 0 means no element, so no row has a place to write.
        step /= size.max(1);
        let set = spending(2, &flags).enumerate().filter(|(_, flag)| **flag);
        for (to, (place, _)) in row.iter_mut().zip(set) {
            *to = (place / step.max(1) % size) as i64;
        }
    }
    cx.set(0, result.finish()?)
}
