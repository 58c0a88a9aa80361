//! `GridSample`: resamples an image of any rank at the positions of a grid.

use num_complex::Complex;
use num_traits::{Float, NumCast, Zero};
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, OutputsFrom, RunCx};
use ort_core::tensor::{CompactString, TensorView};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements, tables};
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::makes_strings;
use super::number::{Number, with_numbers};

cpu_kernels![
    KernelDef { op: "GridSample", make, ..KernelDef::BASE },
    KernelDef {
        op: "GridSample",
        rank: 1,
        when: makes_strings,
        outputs: OutputsFrom::Kernel,
        make: make_of_strings,
        ..KernelDef::BASE
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

/// What a position outside of the image reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

#[derive(Debug, Clone, Copy)]
struct GridSample {
    mode: Mode,
    padding: Padding,
    align_corners: bool,
}

/// Positions per block. The weights of a block are computed once and used for all channels.
const BLOCK: usize = 256;
/// A tap outside of the image, which adds nothing.
const NONE: usize = usize::MAX;

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(GridSample::read(cx)?))
}

fn make_of_strings(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let sampler = GridSample::read(cx)?;
    let nearest = sampler.mode == Mode::Nearest;
    ensure!(
        nearest,
        NotImplemented,
        "strings are not interpolated; the mode 'nearest' takes them as they are"
    );
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(1)).saturating_mul(size_of::<f32>());
    Ok(Box::new(WithHeap { bound, run: move |cx: &mut RunCx<'_>| sampler.pick(cx) }))
}

impl GridSample {
    fn read(cx: &CompileCx<'_>) -> Result<GridSample> {
        let mode = match cx.attrs().string("mode")? {
            "nearest" => Mode::Nearest,
            "linear" => Mode::Linear,
            "cubic" => Mode::Cubic,
            other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
        };
        let padding = match cx.attrs().string("padding_mode")? {
            "zeros" => Padding::Zeros,
            "border" => Padding::Border,
            "reflection" => Padding::Reflection,
            other => return Err(error!(InvalidGraph, "the padding mode '{other}' is not known")),
        };
        Ok(GridSample { mode, padding, align_corners: cx.attrs().flag("align_corners")? })
    }
}

/// The sizes of an image and its grid.
struct Sizes<'a> {
    planes: usize,
    channels: usize,
    image: &'a [usize],
    points: usize,
}

impl<'a> Sizes<'a> {
    fn of(shape: &'a [usize], grid_shape: &[usize]) -> Result<Sizes<'a>> {
        let rank = shape.len().saturating_sub(2);
        let fits = rank > 0 && grid_shape.len() == shape.len() && grid_shape[grid_shape.len() - 1] == rank;
        ensure!(
            fits && grid_shape[0] == shape[0],
            Fail,
            "the image of shape {shape:?} does not match the grid of shape {grid_shape:?}"
        );
        let points = grid_shape[1..grid_shape.len() - 1].iter().product();
        Ok(Sizes { planes: shape[0] * shape[1], channels: shape[1], image: &shape[2..], points })
    }

    fn pixels(&self) -> usize {
        self.image.iter().product()
    }
}

impl Executable for GridSample {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // The positions in the widest compute type.
        Ok(tables(elements(shapes.input(1)).saturating_mul(size_of::<f64>())))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (image, grid) = (cx.input(0)?, cx.input(1)?);
        let (sizes, threads) = (Sizes::of(image.shape(), grid.shape())?, cx.threads());
        with_numbers!(
            image,
            cx.output(0)?,
            |from, to, parts| self.sample(&sizes, &grid, (from, to, parts), threads),
            "GridSample"
        )
    }
}

/// Converts the grid to the compute type.
fn positions<C: Float>(grid: &TensorView<'_>) -> Result<Vec<C>> {
    let dtype = grid.dtype();
    let cast = |value: f64| <C as NumCast>::from(value).unwrap_or_else(C::nan);
    for_each_type!(dtype in FLOATS, T => {
        let numbers = spending(1, grid.as_slice::<T>()?);
        Ok(numbers.map(|&value| cast(num_traits::AsPrimitive::<f64>::as_(value))).collect())
    }, else => Err(error!(NotImplemented, "a grid of {} is not supported", dtype.name())))
}

fn number<C: Float>(value: f64) -> C {
    <C as NumCast>::from(value).unwrap_or_else(C::zero)
}

/// Reflects a coordinate at the borders until it is between them.
fn reflect<C: Float>(x: C, low: C, high: C) -> C {
    let range = high - low;
    if range <= C::zero() {
        return low;
    }
    let two = C::one() + C::one();
    // Reflections repeat every two ranges, so a far coordinate needs no loop.
    let distance = (x - low).abs() % (two * range);
    low + if distance > range { two * range - distance } else { distance }
}

impl GridSample {
    /// Returns the coordinates of the image's borders.
    fn borders<C: Float>(&self, size: usize) -> (C, C) {
        let half = number::<C>(if self.align_corners { 0.0 } else { 0.5 });
        (-half, number::<C>(size as f64 - 1.0) + half)
    }

    /// Returns the pixel at an index, which may be outside of the image.
    fn place<C: Float>(&self, index: C, size: usize) -> usize {
        let last = number::<C>(size as f64 - 1.0);
        if index >= C::zero() && index <= last {
            return index.to_usize().unwrap_or(0);
        }
        match self.padding {
            Padding::Zeros => NONE,
            Padding::Border => index.max(C::zero()).min(last).to_usize().unwrap_or(0),
            Padding::Reflection => {
                let (low, high) = self.borders(size);
                reflect(index, low, high).max(C::zero()).min(last).to_usize().unwrap_or(0)
            }
        }
    }

    /// Computes the pixels that a position reads along one dimension, and their weights.
    fn taps<C: Float>(&self, position: C, size: usize, taps: &mut [(usize, C); 4]) -> usize {
        let one = C::one();
        let length = number::<C>(size as f64);
        let half = number::<C>(0.5);
        // Denormalizes: -1 and 1 are the centers of the outermost pixels, or their outer edges.
        let mut x = if self.align_corners {
            (position + one) * half * (length - one)
        } else {
            ((position + one) * length - one) * half
        };
        if self.mode == Mode::Nearest {
            x = round_half_even(x);
        }
        let (low, high) = self.borders::<C>(size);
        // Cubic interpolation pads the taps, not the position, as PyTorch and ONNX Runtime do.
        if (x < low || x > high) && self.mode != Mode::Cubic {
            match self.padding {
                Padding::Zeros => {}
                Padding::Border => x = x.max(C::zero()).min(length - one),
                Padding::Reflection => x = reflect(x, low, high),
            }
        }
        let floor = x.floor();
        let fraction = x - floor;
        match self.mode {
            Mode::Nearest => {
                // Padding by reflection may have left a fraction; the rounding came before it.
                taps[0] = (self.place(x.trunc(), size), one);
                1
            }
            Mode::Linear => {
                taps[0] = (self.place(floor, size), one - fraction);
                taps[1] = (self.place(floor + one, size), fraction);
                2
            }
            Mode::Cubic => {
                // PyTorch's coefficient: this operator has no attribute for it.
                let weights = cubic(fraction, number(-0.75));
                for (index, weight) in weights.into_iter().enumerate() {
                    taps[index] = (self.place(floor + number(index as f64 - 1.0), size), weight);
                }
                4
            }
        }
    }

    /// Samples elements of `parts` reals each.
    fn sample<T: Number>(
        &self,
        sizes: &Sizes<'_>,
        grid: &TensorView<'_>,
        (from, to, parts): (&[T], &mut [T], usize),
        threads: usize,
    ) -> Result<()> {
        let (channels, pixels, points, rank) =
            (sizes.channels, sizes.pixels(), sizes.points, sizes.image.len());
        let positions = positions::<T::Compute>(grid)?;
        let fits = to.len() == sizes.planes * points * parts;
        ensure!(fits, Fail, "the output does not fit {:?}", grid.shape());
        // No padding mode finds a pixel in an empty image.
        if pixels == 0 {
            interrupt::fill(to, T::narrow(T::Compute::zero()));
            return Ok(());
        }
        for_each_row_chunk_mut(threads, to, points * parts, 1, |first, planes| {
            let mut combined = Vec::new();
            let mut plane = 0;
            // `points` is not 0 here: without points there are no rows.
            let count = planes.len() / (points * parts);
            while plane < count {
                // All channels of a batch read the same positions, so they share taps and weights.
                let batch = (first + plane) / channels;
                let group = (channels - (first + plane) % channels).min(count - plane);
                for start in (0..points).step_by(BLOCK) {
                    let block = BLOCK.min(points - start);
                    let positions = &positions[(batch * points + start) * rank..][..block * rank];
                    let width = self.combine(positions, sizes.image, &mut combined);
                    for row in plane..plane + group {
                        spend(block * width * parts);
                        let source = &from[(first + row) * pixels * parts..][..pixels * parts];
                        let target = &mut planes[(row * points + start) * parts..][..block * parts];
                        let places = combined.chunks_exact(width);
                        match parts {
                            // A constant count unrolls the loop over the reals of an element.
                            1 => weigh::<T, 1>(source, target, places),
                            _ => weigh::<T, 2>(source, target, places),
                        }
                    }
                }
                plane += group;
            }
        });
        Ok(())
    }

    /// Picks the nearest strings; outside of the image they are empty.
    fn pick(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (image, grid) = (cx.input(0)?, cx.input(1)?);
        let sizes = Sizes::of(image.shape(), grid.shape())?;
        let (texts, positions) = (image.strings()?, positions::<f32>(&grid)?);
        let (pixels, rank) = (sizes.pixels(), sizes.image.len());
        let mut shape = image.shape()[..2].to_vec();
        shape.extend(&grid.shape()[1..=rank]);
        let mut combined = Vec::new();
        let picked = (0..sizes.planes).flat_map(|plane| {
            let batch = plane / sizes.channels;
            let positions = &positions[batch * sizes.points * rank..][..sizes.points * rank];
            self.combine(positions, sizes.image, &mut combined);
            // Nearest mode has one tap per position, so a tap is an element.
            let text = |&(place, _): &(usize, f32)| texts.get(plane * pixels + place).cloned();
            let texts = combined.iter().map(|tap| if tap.0 == NONE { None } else { text(tap) });
            texts.map(Option::unwrap_or_default).collect::<Vec<CompactString>>()
        });
        let picked = cx.strings(&shape, picked)?;
        cx.set(0, picked)
    }

    /// Combines the taps of all dimensions for a block of positions. Returns the number of taps per
    /// position.
    fn combine<C: Float>(&self, positions: &[C], sizes: &[usize], combined: &mut Vec<(usize, C)>) -> usize {
        combined.clear();
        let mut width = 1;
        for position in spending(32, positions.chunks_exact(sizes.len())) {
            let start = combined.len();
            combined.push((0, C::one()));
            // A position lists the innermost dimension first.
            let mut step = 1;
            for (&size, &x) in sizes.iter().rev().zip(position) {
                let mut taps = [(NONE, C::zero()); 4];
                let count = self.taps(x, size, &mut taps);
                // Each dimension multiplies the taps so far by its own, up to four.
                let before: smallvec::SmallVec<[(usize, C); 64]> = combined.drain(start..).collect();
                for &(place, weight) in &taps[..count] {
                    combined.extend(before.iter().map(|&(base, factor)| {
                        // A tap outside in one dimension stays outside, whatever the others say.
                        let outside = base == NONE || place == NONE;
                        (if outside { NONE } else { base + place * step }, factor * weight)
                    }));
                }
                step *= size;
            }
            width = combined.len() - start;
        }
        width
    }
}

/// Writes the weighted sums of each position's taps, for every real of an element.
fn weigh<'a, T: Number, const PARTS: usize>(
    source: &[T],
    target: &mut [T],
    places: impl Iterator<Item = &'a [(usize, T::Compute)]>,
) {
    for (element, taps) in target.chunks_exact_mut(PARTS).zip(places) {
        for (part, value) in element.iter_mut().enumerate() {
            let mut sum = T::Compute::zero();
            for &(place, weight) in taps.iter().filter(|tap| tap.0 != NONE) {
                sum += source[place * PARTS + part].widen() * weight;
            }
            *value = T::narrow(sum);
        }
    }
}

fn round_half_even<C: Float>(x: C) -> C {
    let (floor, half) = (x.floor(), number::<C>(0.5));
    let fraction = x - floor;
    // By halving, because a large float does not fit an integer.
    let is_even = (floor * half).fract() == C::zero();
    if fraction < half || (fraction == half && is_even) { floor } else { floor + C::one() }
}

/// Returns the weights of four neighbours for a fraction past the second one: cubic convolution
/// after R. Keys, "Cubic Convolution Interpolation for Digital Image Processing" (1981).
pub(super) fn cubic<C: Float>(fraction: C, a: C) -> [C; 4] {
    let one = C::one();
    let near = |x: C| ((a + number(2.0)) * x - (a + number(3.0))) * x * x + one;
    let far = |x: C| ((a * x - number::<C>(5.0) * a) * x + number::<C>(8.0) * a) * x - number::<C>(4.0) * a;
    let rest = one - fraction;
    [far(fraction + one), near(fraction), near(rest), far(rest + one)]
}
