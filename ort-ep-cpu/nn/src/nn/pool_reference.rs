//! Reference pooling: `LpPool`, all pools in `double`, and windows too large for the fast loops.

use std::ops::Range;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::{Result, error};
use smallvec::SmallVec;

use super::conv_reference::{advance, meets};
use super::pool_windows::{planes, windows_of_pool};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::units::for_each_unit;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::spend;

const HALVES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

cpu_kernels![
    KernelDef {
        op: "LpPool",
        types: &[("T", HALVES)],
        make: |cx| via_f32(cx, |cx| make::<f32>(cx, norm(cx)?)),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "LpPool",
        types: &[("T", DOUBLE)],
        make: |cx| make::<f64>(cx, norm(cx)?),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "MaxPool",
        types: &[("T", DOUBLE)],
        make: |cx| make::<f64>(cx, Kind::Max),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "AveragePool",
        types: &[("T", DOUBLE)],
        make: |cx| {
            let include_pad = cx.attrs().flag("count_include_pad")?;
            make::<f64>(cx, Kind::Average { include_pad })
        },
        ..KernelDef::BASE
    },
];

/// The reduction of a window.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Max,
    Average { include_pad: bool },
    Norm(i32),
}

fn norm(cx: &CompileCx<'_>) -> Result<Kind> {
    // A norm with p of 0 would divide by it.
    let power = i32::try_from(cx.attrs().int("p")?).ok().filter(|power| *power != 0);
    power.map(Kind::Norm).ok_or_else(|| error!(InvalidGraph, "a norm with this p"))
}

pub(super) fn make<T: Real>(cx: &mut CompileCx<'_>, kind: Kind) -> Result<Box<dyn Executable>> {
    let windows = windows_of_pool(&cx.node)?;
    let column_major = cx.attrs().find_int("storage_order").unwrap_or(0) != 0;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let image = cx.input(0)?;
        let (_, axes) = planes(&windows, image.shape())?;
        let (threads, image) = (cx.threads(), image.as_slice::<T>()?);
        let input: usize = axes.iter().map(|axis| axis.input).product();
        let output: usize = axes.iter().map(|axis| axis.output).product();
        if cx.wants(0) {
            let result = cx.output(0)?.as_mut_slice::<T>()?;
            for_each_unit(threads, (result, output), (&mut [0_u8; 0][..], 0), |unit, plane, _| {
                pool_plane(kind, &axes, &image[unit * input..][..input], |at, value, _| plane[at] = value);
            });
        }
        if cx.wants(1) {
            let indices = cx.output(1)?.as_mut_slice::<i64>()?;
            for_each_unit(threads, (indices, output), (&mut [0_u8; 0][..], 0), |unit, indices, _| {
                let from = &image[unit * input..][..input];
                let mut set = |at: usize, found: usize| {
                    let found = if column_major { column_major_place(&axes, found) } else { found };
                    // The standard counts indices through the whole tensor, not through a plane.
                    indices[at] = (unit * input + found) as i64;
                };
                match &axes[..] {
                    // Images have two axes almost always. This skips the counters over axes in the
                    // inner loop.
                    [y, x] => greatest_places([y, x], from, set),
                    _ => pool_plane::<T>(kind, &axes, from, |at, _, found| set(at, found)),
                }
            });
        }
        Ok(())
    }))
}

/// Passes the index of the maximum of each window over a two-axis plane to `found`.
fn greatest_places<T: Real>([y, x]: [&WindowAxis; 2], from: &[T], mut found: impl FnMut(usize, usize)) {
    let inside = |axis: &WindowAxis, at| {
        let taps = taps_in(axis, at, axis.pads[0]..axis.pads[0] + axis.input);
        let first = at * axis.stride + taps.start * axis.dilation;
        (taps.len(), first.saturating_sub(axis.pads[0]))
    };
    for (row, column) in (0..y.output).flat_map(|row| (0..x.output).map(move |column| (row, column))) {
        let ((rows, first_row), (columns, first)) = (inside(y, row), inside(x, column));
        spend(4 + 2 * rows * columns);
        let mut best = None;
        for row_start in (0..rows).map(|tap| (first_row + tap * y.dilation) * x.input + first) {
            for place in (0..columns).map(|tap| row_start + tap * x.dilation) {
                let value = from[place].to_f64();
                // The first maximum wins, and NaN is greater than any number.
                if best
                    .is_none_or(|(most, _): (f64, usize)| value > most || (value.is_nan() && !most.is_nan()))
                {
                    best = Some((value, place));
                }
            }
        }
        found(row * x.output + column, best.map_or(0, |(_, place)| place));
    }
}

/// Converts a row-major index to a column-major one.
fn column_major_place(axes: &[WindowAxis], mut place: usize) -> usize {
    let mut result = 0;
    for axis in axes.iter().rev() {
        // Horner's scheme from the last axis, so the first axis varies fastest.
        result = result * axis.input + place % axis.input;
        place /= axis.input;
    }
    result
}

/// Returns the taps of a window along one axis that are in a range of the padded image. Skipping
/// all others lets a kernel be far larger than its image.
fn taps_in(axis: &WindowAxis, at: usize, range: Range<usize>) -> Range<usize> {
    let origin = at * axis.stride;
    // The first tap at or behind a bound; `kernel` if all taps are before it.
    let first = |bound: usize| bound.saturating_sub(origin).div_ceil(axis.dilation).min(axis.kernel);
    let (start, end) = (first(range.start), first(range.end));
    start..end.max(start)
}

/// Returns how many places of a window count: those in the image, and with `include_pad` those in
/// the padding.
fn count(axes: &[WindowAxis], position: &[usize], include_pad: bool) -> usize {
    let along = |(axis, at): (&WindowAxis, &usize)| {
        let end = axis.pads[0] + axis.input;
        // With `ceil_mode`, a window may reach beyond the padding at the end, which does not count.
        let range = if include_pad { 0..end + axis.pads[1] } else { axis.pads[0]..end };
        taps_in(axis, *at, range).len()
    };
    axes.iter().zip(position).map(along).fold(1, usize::saturating_mul)
}

/// Passes each result of a plane, and the index of its window's maximum, to `found`.
fn pool_plane<T: Real>(kind: Kind, axes: &[WindowAxis], from: &[T], mut found: impl FnMut(usize, T, usize)) {
    let (mut position, mut tap) = (vec![0; axes.len()], vec![0; axes.len()]);
    let results: usize = axes.iter().map(|axis| axis.output).product();
    for at in 0..results {
        // In double precision for all types: these loops are made for accuracy, not speed.
        let (mut best, mut sum) = (None, 0.0);
        let inside =
            |(axis, at): (&WindowAxis, &usize)| taps_in(axis, *at, axis.pads[0]..axis.pads[0] + axis.input);
        let ranges: SmallVec<[Range<usize>; 3]> = axes.iter().zip(&position).map(inside).collect();
        let taps: usize = ranges.iter().map(Range::len).product();
        tap.iter_mut().zip(&ranges).for_each(|(tap, range)| *tap = range.start);
        spend(8 + 4 * taps);
        for _ in 0..taps {
            if let Some(place) = meets(axes, &position, &tap) {
                let x = from[place].to_f64();
                if best.is_none_or(|(value, _): (f64, usize)| x > value || (x.is_nan() && !value.is_nan())) {
                    best = Some((x, place));
                }
                sum += match kind {
                    Kind::Norm(power) => x.abs().powi(power),
                    _ => x,
                };
            }
            advance_in(&mut tap, &ranges);
        }
        let result = T::from_f64(match kind {
            // A window that lies wholly in the padding has no maximum.
            Kind::Max => best.map_or(f64::NEG_INFINITY, |(value, _)| value),
            // The padding adds zeros to the sum, so only the count differs.
            Kind::Average { include_pad } => sum / count(axes, &position, include_pad) as f64,
            Kind::Norm(power) => sum.powf(1.0 / f64::from(power)),
        });
        found(at, result, best.map_or(0, |(_, place)| place));
        advance(&mut position, axes.iter().map(|axis| axis.output));
    }
}

/// Advances to the next taps, last axis fastest.
fn advance_in(taps: &mut [usize], ranges: &[Range<usize>]) {
    for (tap, range) in taps.iter_mut().zip(ranges).rev() {
        *tap += 1;
        if *tap < range.end {
            return;
        }
        *tap = range.start;
    }
}
