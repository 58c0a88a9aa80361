//! `GridSample`: an image of any number of dimensions read at the positions that a grid gives.

use num_traits::{Float, NumCast, Zero};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use crate::cpu_kernels;
use crate::parallel::for_each_row_chunk_mut;

use super::number::Number;

cpu_kernels![KernelDef { op: "GridSample", make, ..KernelDef::BASE }];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

/// What stands outside of the image.
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

/// Positions whose weights are computed at once and used for all channels.
const BLOCK: usize = 256;
/// No pixel: the weight counts for zero.
const NONE: usize = usize::MAX;

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
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
    Ok(Box::new(GridSample { mode, padding, align_corners: cx.attrs().flag("align_corners")? }))
}

impl Executable for GridSample {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in NUMERIC, T => self.sample::<T>(cx), else => {
            Err(error!(NotImplemented, "GridSample of {}", dtype.name()))
        })
    }
}

/// The grid's numbers in the type of computation.
fn positions<C: Float>(grid: &TensorView<'_>) -> Result<Vec<C>> {
    let dtype = grid.dtype();
    let cast = |value: f64| <C as NumCast>::from(value).unwrap_or_else(C::nan);
    for_each_type!(dtype in FLOATS, T => {
        let numbers = grid.as_slice::<T>()?.iter();
        Ok(numbers.map(|&value| cast(num_traits::AsPrimitive::<f64>::as_(value))).collect())
    }, else => Err(error!(NotImplemented, "a grid of {}", dtype.name())))
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
    let distance = (x - low).abs() % (two * range);
    low + if distance > range { two * range - distance } else { distance }
}

impl GridSample {
    /// Between which coordinates the image lies.
    fn borders<C: Float>(&self, size: usize) -> (C, C) {
        let half = number::<C>(if self.align_corners { 0.0 } else { 0.5 });
        (-half, number::<C>(size as f64 - 1.0) + half)
    }

    /// The pixel at an index, which may be outside.
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

    /// The pixels along one dimension that a position reads, with their weights.
    fn taps<C: Float>(&self, position: C, size: usize, taps: &mut [(usize, C); 4]) -> usize {
        let one = C::one();
        let length = number::<C>(size as f64);
        let half = number::<C>(0.5);
        let mut x = if self.align_corners {
            (position + one) * half * (length - one)
        } else {
            ((position + one) * length - one) * half
        };
        if self.mode == Mode::Nearest {
            x = round_half_even(x);
        }
        let (low, high) = self.borders::<C>(size);
        // Cubic interpolation pads what it reads, not where it reads, as PyTorch and ONNX Runtime do.
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
                taps[0] = (self.place(x.trunc(), size), one);
                1
            }
            Mode::Linear => {
                taps[0] = (self.place(floor, size), one - fraction);
                taps[1] = (self.place(floor + one, size), fraction);
                2
            }
            Mode::Cubic => {
                let weights = cubic(fraction, number(-0.75));
                for (index, weight) in weights.into_iter().enumerate() {
                    taps[index] = (self.place(floor + number(index as f64 - 1.0), size), weight);
                }
                4
            }
        }
    }

    fn sample<T: Number>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (image, grid) = (cx.input(0)?, cx.input(1)?);
        let (shape, grid_shape) = (image.shape(), grid.shape());
        let rank = shape.len().saturating_sub(2);
        let fits = rank > 0 && grid_shape.len() == shape.len() && grid_shape[grid_shape.len() - 1] == rank;
        ensure!(
            fits && grid_shape[0] == shape[0],
            InvalidArgument,
            "image {shape:?} and grid {grid_shape:?}"
        );
        let (channels, sizes) = (shape[1], &shape[2..]);
        let pixels: usize = sizes.iter().product();
        let points: usize = grid_shape[1..grid_shape.len() - 1].iter().product();
        let from = image.as_slice::<T>()?;
        let positions = positions::<T::Compute>(&grid)?;
        let threads = cx.threads();
        let to = cx.output(0)?.as_mut_slice::<T>()?;
        ensure!(to.len() == shape[0] * channels * points, Fail, "the output does not fit {grid_shape:?}");
        if pixels == 0 {
            to.fill(T::narrow(T::Compute::zero()));
            return Ok(());
        }
        for_each_row_chunk_mut(threads, to, points, 1, |first, planes| {
            let mut combined = Vec::new();
            let mut plane = 0;
            let count = planes.len() / points;
            while plane < count {
                let batch = (first + plane) / channels;
                let group = (channels - (first + plane) % channels).min(count - plane);
                for start in (0..points).step_by(BLOCK) {
                    let block = BLOCK.min(points - start);
                    let positions = &positions[(batch * points + start) * rank..][..block * rank];
                    let width = self.combine(positions, sizes, &mut combined);
                    for row in plane..plane + group {
                        let source = &from[(first + row) * pixels..][..pixels];
                        let target = &mut planes[row * points + start..][..block];
                        for (value, taps) in target.iter_mut().zip(combined.chunks_exact(width)) {
                            let mut sum = T::Compute::zero();
                            for &(place, weight) in taps.iter().filter(|tap| tap.0 != NONE) {
                                sum += source[place].widen() * weight;
                            }
                            *value = T::narrow(sum);
                        }
                    }
                }
                plane += group;
            }
        });
        Ok(())
    }

    /// The pixels and weights of all dimensions together for a block of positions; returns how many each has.
    fn combine<C: Float>(&self, positions: &[C], sizes: &[usize], combined: &mut Vec<(usize, C)>) -> usize {
        combined.clear();
        let mut width = 1;
        for position in positions.chunks_exact(sizes.len()) {
            let start = combined.len();
            combined.push((0, C::one()));
            // Positions list the innermost dimension first.
            let mut step = 1;
            for (&size, &x) in sizes.iter().rev().zip(position) {
                let mut taps = [(NONE, C::zero()); 4];
                let count = self.taps(x, size, &mut taps);
                let before: smallvec::SmallVec<[(usize, C); 64]> = combined.drain(start..).collect();
                for &(place, weight) in &taps[..count] {
                    combined.extend(before.iter().map(|&(base, factor)| {
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

fn round_half_even<C: Float>(x: C) -> C {
    let (floor, half) = (x.floor(), number::<C>(0.5));
    let fraction = x - floor;
    let is_even = (floor * half).fract() == C::zero();
    if fraction < half || (fraction == half && is_even) { floor } else { floor + C::one() }
}

/// The weights of four neighbours at a fraction behind the second: cubic convolution after R. Keys, "Cubic
/// Convolution Interpolation for Digital Image Processing" (1981).
pub(super) fn cubic<C: Float>(fraction: C, a: C) -> [C; 4] {
    let one = C::one();
    let near = |x: C| ((a + number(2.0)) * x - (a + number(3.0))) * x * x + one;
    let far = |x: C| ((a * x - number::<C>(5.0) * a) * x + number::<C>(8.0) * a) * x - number::<C>(4.0) * a;
    let rest = one - fraction;
    [far(fraction + one), near(fraction), near(rest), far(rest + one)]
}
