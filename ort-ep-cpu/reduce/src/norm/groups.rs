//! `InstanceNormalization`, `GroupNormalization` and `MeanVarianceNormalization`.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use super::row::{Row, for_each_row};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::layout::{Layout, count, normalize_axis, offset};
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{PIECE, spending};
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef { op: "InstanceNormalization", in_place: &[(0, 0)], make: make_groups, ..KernelDef::BASE },
    KernelDef { op: "GroupNormalization", in_place: &[(0, 0)], make: make_groups, ..KernelDef::BASE },
    KernelDef { op: "MeanVarianceNormalization", make: make_mean_variance, ..KernelDef::BASE },
];

fn make_groups(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let epsilon = f64::from(cx.attrs().float("epsilon")?);
    // Instance normalization has a group for each channel.
    let groups = cx.attrs().find_int("num_groups").map(usize::try_from);
    let groups =
        groups.transpose().map_err(|_| error!(InvalidGraph, "num_groups is negative, expected 1 or more"))?;
    // Scale and bias as `f64`.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(1)).saturating_mul(2 * size_of::<f64>());
    let run = move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(1)?.dtype();
        for_each_type!(dtype in FLOATS, T => normalize_groups::<T>(cx, groups, epsilon), else => {
            Err(error!(NotImplemented, "normalizing {}", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn normalize_groups<T: Row>(cx: &mut RunCx<'_>, groups: Option<usize>, epsilon: f64) -> Result<()> {
    let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    let &[_, channels, ref spatial @ ..] = shape else {
        return Err(error!(InvalidArgument, "an input of shape {shape:?} has no channels"));
    };
    let spatial: usize = spatial.iter().product();
    let groups = groups.unwrap_or(channels);
    let even = groups > 0 && channels % groups == 0;
    ensure!(
        even || channels == 0,
        InvalidArgument,
        "the number of channels is {channels}, expected a multiple of num_groups {groups}"
    );
    let (scale, bias) = (to_f64s(&cx.input(1)?)?, to_f64s(&cx.input(2)?)?);
    let fits = scale.len() == channels && bias.len() == channels;
    ensure!(
        fits,
        InvalidArgument,
        "{} scales and {} biases for {channels} channels",
        scale.len(),
        bias.len()
    );
    let each = channels / groups.max(1);
    let isa = Isa::current();
    for_each_row(cx.threads(), cx.unary::<T>(0, 0)?, each * spatial, |row, from, to| {
        // The channels of a group are adjacent, so a group is one row for the moments.
        let (mean, variance) = T::moments(isa, from);
        let factor = 1.0 / (variance + epsilon).sqrt();
        let first = row % groups * each;
        let rows = from.chunks_exact(spatial).zip(to.chunks_exact_mut(spatial));
        for (channel, (from, to)) in (first..).zip(spending(8, rows)) {
            // Scale and bias are constants of a channel, so each channel is one multiplication and
            // addition per element.
            T::affine(isa, [mean, factor * scale[channel], bias[channel]], from, to);
        }
    });
    Ok(())
}

fn make_mean_variance(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let axes = cx.attrs().ints("axes")?.to_vec();
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => mean_variance::<T>(cx, &axes), else => {
            Err(error!(NotImplemented, "normalizing {}", dtype.name()))
        })
    }))
}

/// The epsilon that the standard's function adds to the standard deviation.
const EPSILON: f64 = 1e-9;

fn mean_variance<T: Row>(cx: &mut RunCx<'_>, axes: &[i64]) -> Result<()> {
    let input = cx.input(0)?;
    let mut mask = vec![false; input.rank()];
    for &axis in axes {
        mask[normalize_axis(axis, input.rank())?] = true;
    }
    let layout = Layout::new(input.shape(), &mask);
    let from = input.as_slice::<T>()?;
    let to = cx.output(0)?.as_mut_slice::<T>()?;
    // An empty tensor may have very many groups.
    if from.is_empty() {
        return Ok(());
    }
    let isa = Isa::current();
    let (run, columns) = if layout.inner_reduced { (layout.inner, 1) } else { (1, layout.inner) };
    let combined = layout.combined() as f64;
    for index in 0..count(&layout.kept) * columns {
        let base = offset(&layout.kept, index / columns) + index % columns;
        let starts =
            || spending(2 + run.min(PIECE), 0..layout.runs()).map(|run| base + offset(&layout.reduced, run));
        let rows = || starts().map(|start| &from[start..start + run]);
        let mean = rows().map(|row| T::sum(isa, row)).sum::<f64>() / combined;
        let squares: f64 = rows().map(|row| T::sum_squares_around(isa, mean, row)).sum();
        let factor = 1.0 / ((squares / combined).sqrt() + EPSILON);
        for start in starts() {
            let range = start..start + run;
            T::affine(isa, [mean, factor, 0.0], &from[range.clone()], &mut to[range]);
        }
    }
    Ok(())
}
