//! Separable interpolation: one pass per axis, in which each output element is a weighted sum of a
//! few input elements (taps).

use num_traits::Float;
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt::{self, PIECE, pieces_mut, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::super::grid_sample::cubic;
use super::coordinates::{Axis, Mode, Settings};
use super::element::Pixel;

/// The taps from which on a single element counts as work.
const MANY: usize = 64;

/// The weighted sums along one axis.
#[derive(Debug)]
pub(super) struct Pass<C> {
    axis: usize,
    /// The size of the axis in the output.
    to: usize,
    /// Taps per output element.
    width: usize,
    /// For each output element, the `width` input indices along the axis.
    places: Vec<usize>,
    /// The weights of those taps.
    weights: Vec<C>,
    /// Whether each output element lies outside of the input and takes the extrapolation value.
    outside: Vec<bool>,
    extrapolation: C,
}

/// Returns the order of the passes over all axes that keeps the intermediate tensors small: the
/// axis that shrinks most comes first, and of equal ratios the innermost.
pub(super) fn order_of_passes(from: &[usize], to: &[usize]) -> Vec<usize> {
    let mut axes: Vec<usize> = (0..from.len().min(to.len())).rev().collect();
    // An axis of size 0 has no ratio to compare. It goes last, so that the order is total.
    axes.sort_by(|&a, &b| {
        // Compares `to / from` without a division; products of two sizes fit 128 bits.
        let (left, right) = (to[a] as u128 * from[b] as u128, to[b] as u128 * from[a] as u128);
        (from[a] == 0).cmp(&(from[b] == 0)).then(left.cmp(&right))
    });
    axes
}

fn number<C: Float>(value: f64) -> C {
    num_traits::cast(value).unwrap_or_else(C::zero)
}

impl<C: Float> Pass<C> {
    pub(super) fn new(index: usize, axis: &Axis, settings: &Settings) -> Pass<C> {
        let width = taps_of(axis, settings);
        let mut pass = Pass {
            axis: index,
            to: axis.to,
            width: 1,
            places: Vec::with_capacity(axis.to.saturating_mul(width)),
            weights: Vec::with_capacity(axis.to.saturating_mul(width)),
            outside: Vec::with_capacity(axis.to),
            extrapolation: number(f64::from(settings.extrapolation)),
        };
        for element in 0..axis.to {
            spend(width.saturating_add(16));
            let x = match settings.mode {
                Mode::Nearest => axis.coordinate_of_nearest(settings.transform, element),
                Mode::Linear | Mode::Cubic => axis.coordinate(settings.transform, element),
            };
            // Only `tf_crop_and_resize` extrapolates; other modes clamp to the border.
            pass.outside.push(settings.is_cropping() && axis.is_outside(x));
            let (first, mut weights) = weights(x, axis, settings);
            let last = axis.from as i64 - 1;
            // The standard: taps outside of the input weigh 0, and the others sum to 1.
            if settings.exclude_outside {
                for (offset, weight) in weights.iter_mut().enumerate() {
                    if !(0..=last).contains(&(first + offset as i64)) {
                        *weight = 0.0;
                    }
                }
                let sum: f64 = weights.iter().sum();
                weights.iter_mut().filter(|_| sum != 0.0).for_each(|weight| *weight /= sum);
            }
            pass.width = weights.len();
            // Taps outside read the border element. `max(0)` covers an axis of size 0.
            let places =
                (0..weights.len() as i64).map(|offset| (first + offset).clamp(0, last.max(0)) as usize);
            pass.places.extend(places);
            pass.weights.extend(weights.iter().map(|&weight| number::<C>(weight)));
        }
        pass
    }
}

/// Coordinates are clamped to this distance.
const FARTHEST: f64 = (1u64 << 50) as f64;

/// Returns the taps per output element of an axis.
fn taps_of(axis: &Axis, settings: &Settings) -> usize {
    let (least, scale) = (least_taps(settings.mode), axis.scale.value());
    match settings.stretches() && scale < 1.0 {
        // The same count as in `weights`.
        true => (((least / 2) as f64 / scale).ceil() as usize).saturating_mul(2),
        false => least,
    }
}

impl Settings {
    /// Whether antialiasing stretches the filter of an axis that shrinks.
    fn stretches(&self) -> bool {
        self.antialias && self.mode != Mode::Nearest
    }
}

/// Returns the taps of a filter that is not stretched.
fn least_taps(mode: Mode) -> usize {
    match mode {
        Mode::Nearest => 1,
        Mode::Linear => 2,
        Mode::Cubic => 4,
    }
}

/// Returns an upper bound on [`taps_of`] if only the sizes of the axis are known. The scale times
/// the input size is within half an element of the output size.
fn most_taps(from: usize, to: usize, settings: &Settings) -> usize {
    let least = least_taps(settings.mode);
    match settings.stretches() && to <= from {
        true => {
            let stretched =
                from.saturating_mul(least).div_ceil(to.saturating_mul(2).saturating_sub(1).max(1));
            stretched.saturating_add(1).saturating_mul(2)
        }
        false => least,
    }
}

/// Returns the bytes of the tables of the passes along these axes, which are known only at run
/// time.
pub(super) fn bytes_of_axes(axes: &[Axis], settings: &Settings) -> usize {
    axes.iter().fold(0, |sum: usize, axis| sum.saturating_add(bytes_of(axis.to, taps_of(axis, settings))))
}

/// Returns the bytes of one pass: an index and an `f64` weight for each tap, a flag for each output
/// element, and the taps of one element under construction.
fn bytes_of(to: usize, taps: usize) -> usize {
    let places = taps.saturating_mul(size_of::<usize>() + size_of::<f64>());
    places.saturating_add(1).saturating_mul(to).saturating_add(places)
}

/// Returns an upper bound on the bytes of all passes' tables, from the sizes alone.
pub(super) fn pass_bytes(from: &[usize], to: &[usize], settings: &Settings) -> usize {
    let sizes = from.iter().zip(to);
    sizes.fold(0, |sum: usize, (&from, &to)| sum.saturating_add(bytes_of(to, most_taps(from, to, settings))))
}

/// Returns the first index that a coordinate reads, which may be outside, and the weights from
/// there on.
fn weights(x: f64, axis: &Axis, settings: &Settings) -> (i64, Vec<f64>) {
    if settings.mode == Mode::Nearest {
        return (settings.nearest(x, axis.from) as i64, vec![1.0]);
    }
    // Only a crop region leads this far outside, where every tap reads the same border element.
    // Clamping keeps integer coordinates exact.
    let x = x.clamp(-FARTHEST, FARTHEST);
    let scale = axis.scale.value().min(1.0);
    let smooth = settings.antialias && scale < 1.0;
    // The standard's reference takes the element left of a coordinate as the base, even if the
    // coordinate hits an element. With a stretched filter, that decides which elements are read.
    let base = if smooth { x.ceil() - 1.0 } else { x.floor() };
    let fraction = x - base;
    let a = f64::from(settings.cubic_a);
    let reach = |support: f64| (-support / scale).floor() as i64 + 1;
    let stretched = |first: i64, kernel: &dyn Fn(f64) -> f64| {
        let weights: Vec<f64> =
            (first..2 - first).map(|offset| kernel(((offset as f64 - fraction) * scale).abs())).collect();
        // Normalizing makes the stretched weights sum to 1.
        let sum: f64 = weights.iter().sum();
        (base as i64 + first, weights.into_iter().map(|weight| weight / sum).collect())
    };
    match (settings.mode, smooth) {
        (Mode::Cubic, true) => stretched(reach(2.0), &|x| cubic_kernel(x, a)),
        (Mode::Cubic, false) => (base as i64 - 1, cubic(fraction, a).to_vec()),
        (_, true) => stretched(reach(1.0), &|x| (1.0 - x).clamp(0.0, 1.0)),
        (_, false) => (base as i64, vec![1.0 - fraction, fraction]),
    }
}

/// Evaluates Keys' cubic convolution kernel at a distance.
fn cubic_kernel(x: f64, a: f64) -> f64 {
    match x {
        x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        _ => 0.0,
    }
}

/// Runs the passes in order from the input to the output, with intermediates in the workspace.
pub(super) fn run_passes<T: Pixel>(
    passes: &[Pass<T::Sum>],
    (shape, from): (&[usize], &[T]),
    to: &mut [T],
    workspace: &mut [u8],
    threads: usize,
) -> Result<()> {
    let too_small = || error!(Fail, "the workspace is too small");
    // The workspace was sized for the widest compute type, so there is enough for this one.
    let scratch: &mut [T::Sum] = bytemuck::checked::try_cast_slice_mut(workspace_part::<T::Sum>(workspace))
        .map_err(|_| too_small())?;
    // Ping-pong buffers: each pass reads one half and writes the other.
    let half = scratch.len() / 2;
    let (mut current, mut next) = scratch.split_at_mut(half);
    let mut shape = shape.to_vec();
    let last = passes.len() - 1;
    for (index, pass) in passes.iter().enumerate() {
        let before = shape.clone();
        shape[pass.axis] = pass.to;
        let (source, target) = (before.iter().product::<usize>(), shape.iter().product::<usize>());
        // A single pass needs no intermediate. Only the ends have the element type.
        if last == 0 {
            return pass.run(&before, from, to, threads);
        }
        if index == last {
            return pass.run(&before, current.get(..source).ok_or_else(too_small)?, to, threads);
        }
        let target = next.get_mut(..target).ok_or_else(too_small)?;
        if index == 0 {
            pass.run(&before, from, target, threads)?;
        } else {
            pass.run(&before, current.get(..source).ok_or_else(too_small)?, target, threads)?;
        }
        std::mem::swap(&mut current, &mut next);
    }
    Ok(())
}

/// Returns the prefix of the workspace that holds whole numbers.
fn workspace_part<C>(workspace: &mut [u8]) -> &mut [u8] {
    let whole = workspace.len() / size_of::<C>() * size_of::<C>();
    &mut workspace[..whole]
}

impl<C: Pixel<Sum = C> + Float + std::ops::AddAssign> Pass<C> {
    /// Sums along the axis of a tensor of shape `shape`.
    fn run<A, B>(&self, shape: &[usize], from: &[A], to: &mut [B], threads: usize) -> Result<()>
    where
        A: Pixel<Sum = C>,
        B: Pixel<Sum = C>,
    {
        let size = shape[self.axis];
        let inner: usize = shape[self.axis + 1..].iter().product();
        let outer: usize = shape[..self.axis].iter().product();
        // Checked once, so that the places of `Pass::new` are valid in every row.
        let fits = from.len() == outer * size * inner && to.len() == outer * self.to * inner;
        ensure!(fits, Fail, "a pass over shape {shape:?} does not fit its buffers");
        if inner == 1 {
            // About 8 Ki multiplications make a task worthwhile.
            let least_rows = (8 << 10) / (self.to * self.width).max(1) + 1;
            for_each_row_chunk_mut(threads, to, self.to, least_rows, |first, rows| {
                for (index, row) in rows.chunks_exact_mut(self.to).enumerate() {
                    self.sum_row(&from[(first + index) * size..][..size], row);
                }
            });
            return Ok(());
        }
        let least_rows = (8 << 10) / (inner * self.width).max(1) + 1;
        for_each_row_chunk_mut(threads, to, inner, least_rows, |first, rows| {
            for (index, row) in rows.chunks_exact_mut(inner).enumerate() {
                let (outer, element) = ((first + index) / self.to, (first + index) % self.to);
                let base = outer * size * inner;
                self.sum_rows(&from[base..base + size * inner], element, row);
            }
        });
        Ok(())
    }

    fn taps(&self, element: usize) -> (&[usize], &[C]) {
        let range = element * self.width..(element + 1) * self.width;
        (&self.places[range.clone()], &self.weights[range])
    }

    /// Computes a row along the innermost axis: each element has taps of its own.
    fn sum_row<A: Pixel<Sum = C>, B: Pixel<Sum = C>>(&self, from: &[A], row: &mut [B]) {
        for (piece, row) in pieces_mut(row).enumerate() {
            (piece * PIECE..).zip(row).for_each(|(element, value)| *value = self.sum(from, element));
        }
    }

    fn sum<A: Pixel<Sum = C>, B: Pixel<Sum = C>>(&self, from: &[A], element: usize) -> B {
        if self.outside[element] {
            return B::rounded(self.extrapolation);
        }
        let (places, weights) = self.taps(element);
        if places.len() > MANY {
            spend(places.len());
        }
        let mut sum = C::zero();
        for (&place, &weight) in places.iter().zip(weights) {
            sum += from[place].widen() * weight;
        }
        B::rounded(sum)
    }

    /// Computes a row whose elements all share the same taps, because the axis is not the
    /// innermost. It accumulates a part at a time, which fits the L1 cache.
    fn sum_rows<A: Pixel<Sum = C>, B: Pixel<Sum = C>>(&self, from: &[A], element: usize, row: &mut [B]) {
        if self.outside[element] {
            interrupt::fill(row, B::rounded(self.extrapolation));
            return;
        }
        const PART: usize = 64;
        let inner = row.len();
        let (places, weights) = self.taps(element);
        let parts = row.chunks_mut(PIECE).flat_map(|piece| {
            if places.len() * piece.len() > MANY * PART {
                spend(places.len() * piece.len() / 4);
            }
            piece.chunks_mut(PART)
        });
        for (part, values) in parts.enumerate() {
            let mut sums = [C::zero(); PART];
            for (&place, &weight) in places.iter().zip(weights) {
                let source = &from[place * inner + part * PART..][..values.len()];
                for (sum, value) in sums.iter_mut().zip(source) {
                    *sum += value.widen() * weight;
                }
            }
            values.iter_mut().zip(&sums).for_each(|(value, &sum)| *value = B::rounded(sum));
        }
    }
}
