//! Depthwise convolution of one channel's plane.
//!
//! Square kernels of the usual sizes, and rows much narrower than a vector, are read in place. For
//! all others, the plane is first copied into scratch with its padding. The copy is split by the
//! strides into phases, which are the positions with equal remainder. Each tap of the kernel then
//! reads adjacent values, whatever the stride. There too, rows much narrower than a vector are
//! computed as one long row over the padded width, and the results between rows are dropped.

pub use crate::simd::plane::Planes;
use crate::simd::plane::{FlatPlan, square};
use crate::simd::stencil::{Filter, Input, Taps, close_rows, pad_row, pad_row_by_two, tap_rows, taps};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_vector::activation::{Activation, Clamp};
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::slices::UnaryOp;
use ort_cpu_vector::simd::{Isa, SLACK, Simd, SimdOp, dispatch, math};
use ort_cpu_vector::window::Window;

/// The most results of a plane that is read as one row. The plan holds a mask for each vector of
/// results and each tap.
const LARGEST_FLAT: usize = 1024;

/// The plan for all planes of one convolution.
#[derive(Debug, Clone)]
pub struct DepthwisePlan {
    window: Window,
    isa: Isa,
    way: Way,
}

/// How a plane is computed.
#[derive(Debug, Clone)]
enum Way {
    /// All rows as one, read in place.
    Flat(FlatPlan),
    /// A square kernel of a usual size, read in place.
    Square,
    /// Any window, over a padded copy.
    Padded(Phases),
}

/// The layout of a padded copy of a plane, split by the strides into phases.
#[derive(Debug, Clone)]
struct Phases {
    /// Rows and columns of one phase.
    size: [usize; 2],
    /// The offset of each tap from the position of output 0.
    offsets: Vec<usize>,
    /// Whether all rows are computed as one.
    flat: bool,
}

impl DepthwisePlan {
    /// Plans a convolution for an instruction set.
    pub fn new(isa: Isa, window: Window) -> DepthwisePlan {
        let Window { output, kernel, strides, dilations, .. } = window;
        let isa = isa.min(Isa::widest());
        let lanes = match isa {
            Isa::Avx512 => 16,
            Isa::Avx2 => 8,
            _ => 4,
        };
        let by_rows = output[0] * output[1].div_ceil(lanes);
        // Row by row, one load serves several rows of results. A single long row must therefore
        // need less than two thirds of the vectors.
        let pays = |at_once: usize| at_once * 3 < by_rows * 2;
        let is_square = match (kernel, strides) {
            ([3, 3] | [5, 5] | [7, 7], [1, 1] | [2, 2]) | ([3, 3] | [5, 5], [2, 1]) => {
                isa != Isa::Scalar && dilations == [1, 1]
            }
            _ => false,
        };
        // If half a vector holds a row, vectors of that width beat all others.
        if is_square && isa == Isa::Avx512 && output[1] <= 8 {
            return DepthwisePlan { window, isa: Isa::Avx2, way: Way::Square };
        }
        let flat = output[0] * output[1] <= LARGEST_FLAT && pays((output[0] * output[1]).div_ceil(lanes));
        let way = match flat.then(|| FlatPlan::new(lanes, &window)).flatten() {
            Some(plan) => Way::Flat(plan),
            None if is_square => Way::Square,
            None => {
                let mut phases = Phases::new(&window);
                phases.flat = pays((output[0] * phases.size[1]).div_ceil(lanes));
                Way::Padded(phases)
            }
        };
        DepthwisePlan { window, isa, way }
    }

    /// Returns how many f32 of scratch a plane needs.
    pub fn scratch_len(&self) -> usize {
        match &self.way {
            Way::Flat(_) | Way::Square => 0,
            Way::Padded(phases) => {
                let flat_output =
                    if phases.flat { self.window.output[0] * phases.size[1] + SLACK } else { 0 };
                phases.len(&self.window) + flat_output
            }
        }
    }

    /// Convolves planes: `to[y][x] = activation(bias + sum of weights[ky][kx] * from[...])`. The
    /// results of all planes are contiguous, and `to` says how many there are.
    ///
    /// `scratch` holds at least [`scratch_len`](Self::scratch_len) values of any content.
    ///
    /// # Panics
    /// If a slice's length does not match the window.
    pub fn run(&self, planes: Planes<'_>, activation: Activation, to: &mut [f32], scratch: &mut [f32]) {
        let Window { input, output, kernel, .. } = self.window;
        let output_len = output[0] * output[1];
        let count = to.len() / output_len.max(1);
        assert_eq!(to.len(), count * output_len, "whole planes of results");
        assert!(planes.holds(count, input[0] * input[1], kernel[0] * kernel[1]), "whole input planes");
        if to.is_empty() {
            return;
        }
        let (epilogue, rest) = match activation.split() {
            // HardSwish and SiLU run in registers. Other functions are applied to stored planes.
            (_, Some(Unary::HardSwish)) => (Epilogue::HardSwish, None),
            (_, Some(Unary::Silu)) => (Epilogue::Silu, None),
            (clamp, rest) => (Epilogue::Clamp(clamp), rest),
        };
        match self.way {
            Way::Square => self.square(epilogue, planes, to),
            _ => dispatch(self.isa, OneByOne { plan: self, epilogue, planes, to: &mut *to, scratch }),
        }
        if let Some(function) = rest {
            unary_in_place(self.isa, function, to);
        }
    }

    /// Convolves planes under a square kernel.
    fn square(&self, epilogue: Epilogue, planes: Planes<'_>, to: &mut [f32]) {
        let (isa, window) = (self.isa, &self.window);
        macro_rules! squares {
            ($epilogue:expr; $(($k:literal, $sy:literal, $sx:literal))+) => {
                match (window.kernel[0], window.strides) {
                    $(($k, [$sy, $sx]) => {
                        let epilogue = $epilogue;
                        dispatch(isa, Square::<_, $k, $sy, $sx> { window, epilogue, planes, to });
                    })+
                    _ => {}
                }
            };
        }
        match epilogue {
            // Bounds alone leave the registers to the weights. With a choice of functions at each
            // vector, AVX2 takes up to a quarter longer.
            Epilogue::Clamp(clamp) if window.kernel[0] == 3 => squares!(clamp; (3, 1, 1)(3, 2, 2)(3, 2, 1)),
            epilogue => squares!(
                epilogue;
                (3, 1, 1)(3, 2, 2)(3, 2, 1)(5, 1, 1)(5, 2, 2)(5, 2, 1)(7, 1, 1)(7, 2, 2)
            ),
        }
    }
}

impl Phases {
    fn new(window: &Window) -> Phases {
        let Window { kernel, strides, dilations, .. } = *window;
        let size = [0, 1].map(|axis| window.extent(axis).div_ceil(strides[axis]));
        let mut offsets = Vec::with_capacity(kernel[0] * kernel[1]);
        for ky in 0..kernel[0] {
            for kx in 0..kernel[1] {
                let (y, x) = (ky * dilations[0], kx * dilations[1]);
                // Positions with equal remainders are adjacent in a phase, so a tap reads
                // contiguous values at any stride.
                let plane = (y % strides[0]) * strides[1] + x % strides[1];
                offsets.push(plane * (size[0] * size[1] + SLACK) + y / strides[0] * size[1] + x / strides[1]);
            }
        }
        Phases { size, offsets, flat: false }
    }

    fn len(&self, window: &Window) -> usize {
        let [sy, sx] = window.strides;
        // Each phase has slack, because the taps read whole vectors beyond its end.
        sy * sx * (self.size[0] * self.size[1] + SLACK) + SLACK
    }
}

/// The activation that is applied in registers.
#[derive(Clone, Copy)]
enum Epilogue {
    Clamp(Clamp),
    HardSwish,
    Silu,
}

impl UnaryOp for Epilogue {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        match self {
            Epilogue::Clamp(clamp) => clamp.apply(s, x),
            Epilogue::HardSwish => HardSwish.apply(s, x),
            Epilogue::Silu => Silu.apply(s, x),
        }
    }

    #[inline(always)]
    fn apply_each<S: Simd, const V: usize>(self, s: S, x: [S::F32; V]) -> [S::F32; V] {
        match self {
            Epilogue::Clamp(clamp) => clamp.apply_each(s, x),
            Epilogue::HardSwish => HardSwish.apply_each(s, x),
            Epilogue::Silu => Silu.apply_each(s, x),
        }
    }
}

/// `x * clip(x / 6 + 1/2, 0, 1)`.
#[derive(Clone, Copy)]
pub(crate) struct HardSwish;

impl UnaryOp for HardSwish {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        let linear = s.mul_add(x, s.splat(1.0 / 6.0), s.splat(0.5));
        s.mul(x, Clamp { min: 0.0, max: 1.0 }.apply(s, linear))
    }
}

/// `x * sigmoid(x)`.
#[derive(Clone, Copy)]
pub(crate) struct Silu;

impl UnaryOp for Silu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        let [result] = math::silu(s, [x]);
        result
    }

    #[inline(always)]
    fn apply_each<S: Simd, const V: usize>(self, s: S, x: [S::F32; V]) -> [S::F32; V] {
        math::silu(s, x)
    }
}

/// Planes that are convolved one by one, for dispatch to SIMD code.
struct OneByOne<'a> {
    plan: &'a DepthwisePlan,
    epilogue: Epilogue,
    planes: Planes<'a>,
    to: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl SimdOp for OneByOne<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OneByOne { plan, epilogue, planes, to, scratch } = self;
        let Window { input, output, kernel, .. } = plan.window;
        for (index, to) in to.chunks_exact_mut(output[0] * output[1]).enumerate() {
            let (from, filter) = planes.plane(index, input[0] * input[1], kernel[0] * kernel[1]);
            match &plan.way {
                Way::Flat(flat) => flat.run(s, from, filter, epilogue, to),
                Way::Padded(phases) => padded(s, plan, phases, Plane { from, filter, to }, epilogue, scratch),
                Way::Square => {}
            }
        }
    }
}

/// Planes under a square kernel, for dispatch to SIMD code. Kernel and strides are constants, so
/// that the compiler keeps all weights in registers.
struct Square<'a, E, const K: usize, const SY: usize, const SX: usize> {
    window: &'a Window,
    epilogue: E,
    planes: Planes<'a>,
    to: &'a mut [f32],
}

impl<E: UnaryOp, const K: usize, const SY: usize, const SX: usize> SimdOp for Square<'_, E, K, SY, SX> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Without registers, its long code would only take long to compile.
        if const { S::IN_REGISTERS } {
            square::<S, _, K, SY, SX>(s, self.window, self.planes, self.epilogue, self.to);
        }
    }
}

/// A plane, its filter and its result.
struct Plane<'a> {
    from: &'a [f32],
    filter: Filter<'a>,
    to: &'a mut [f32],
}

/// Convolves one plane over a padded copy of it.
#[inline(always)]
fn padded<S: Simd, E: UnaryOp>(
    s: S,
    plan: &DepthwisePlan,
    phases: &Phases,
    plane: Plane<'_>,
    epilogue: E,
    scratch: &mut [f32],
) {
    let (window, Plane { from, filter, to }) = (&plan.window, plane);
    let (padded, rest) = scratch.split_at_mut(phases.len(window));
    pad(s, window, phases.size, from, padded);
    let ([height, width], stride) = (window.output, phases.size[1]);
    let of_filter = Taps { offsets: &phases.offsets, filter };
    if phases.flat {
        // Results between rows are garbage. They are computed because whole vectors are cheaper
        // than masks, and `close_rows` drops them.
        let len = (height - 1) * stride + width;
        taps(s, padded, of_filter, epilogue, (&mut *rest, len));
        close_rows(s, rest, stride, (to, width));
    } else {
        any(s, Input { values: padded, stride }, of_filter, epilogue, (to, width));
    }
}

/// Handles any kernel, stride and dilation, four rows at a time.
#[inline(always)]
fn any<S: Simd, E: UnaryOp>(
    s: S,
    input: Input<'_>,
    taps: Taps<'_>,
    epilogue: E,
    (to, width): (&mut [f32], usize),
) {
    let rows = to.len() / width;
    let mut row = 0;
    while row < rows {
        spend(width * taps.offsets.len() / 4);
        let from = Input { values: &input.values[row * input.stride..], ..input };
        let out = (&mut to[row * width..], width);
        // Four rows share the broadcast of each weight. Fewer remain at the end of a plane.
        row += match rows - row {
            1 => {
                tap_rows::<S, E, 1>(s, from, taps, epilogue, out);
                1
            }
            2..=3 => {
                tap_rows::<S, E, 2>(s, from, taps, epilogue, out);
                2
            }
            _ => {
                tap_rows::<S, E, 4>(s, from, taps, epilogue, out);
                4
            }
        };
    }
}

/// Copies the plane into its phases, surrounded by zeros.
#[inline(always)]
fn pad<S: Simd>(s: S, window: &Window, [rows, columns]: [usize; 2], from: &[f32], padded: &mut [f32]) {
    let Window { input: [height, width], strides: [sy, sx], pads: [top, left], .. } = *window;
    let plane = rows * columns + SLACK;
    for phase_row in 0..sy {
        for row in 0..rows {
            let start = phase_row * sx * plane + row * columns;
            let source = match (row * sy + phase_row).checked_sub(top) {
                Some(y) if y < height => &from[y * width..][..width],
                _ => &[],
            };
            // Strides of 1 and 2 have vector loads. Larger ones are rare.
            match sx {
                1 => pad_row(s, source, (left, columns), 0.0, &mut padded[start..]),
                2 => {
                    let (even, odd) = padded[start..].split_at_mut(plane);
                    pad_row_by_two(s, source, left, columns, even, odd);
                }
                _ => pad_row_by_any(source, (left, columns), sx, &mut padded[start..], plane),
            }
        }
    }
}

/// Like `pad_row`, for any stride. Phase `p` goes to `padded[p * plane..]`.
fn pad_row_by_any(
    source: &[f32],
    (left, columns): (usize, usize),
    stride: usize,
    padded: &mut [f32],
    plane: usize,
) {
    for phase in 0..stride {
        let target = &mut padded[phase * plane..][..columns];
        for (index, value) in target.iter_mut().enumerate() {
            let x = (index * stride + phase).checked_sub(left);
            *value = x.and_then(|x| source.get(x)).copied().unwrap_or(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(window: &Window, from: &[f32], weights: &[f32], bias: f32) -> Vec<f64> {
        let Window { input, output, kernel, strides, dilations, pads } = *window;
        let mut result = Vec::new();
        for y in 0..output[0] {
            for x in 0..output[1] {
                let mut sum = f64::from(bias);
                for ky in 0..kernel[0] {
                    for kx in 0..kernel[1] {
                        let iy = (y * strides[0] + ky * dilations[0])
                            .checked_sub(pads[0])
                            .filter(|i| *i < input[0]);
                        let ix = (x * strides[1] + kx * dilations[1])
                            .checked_sub(pads[1])
                            .filter(|i| *i < input[1]);
                        if let (Some(iy), Some(ix)) = (iy, ix) {
                            sum +=
                                f64::from(from[iy * input[1] + ix]) * f64::from(weights[ky * kernel[1] + kx]);
                        }
                    }
                }
                result.push(sum);
            }
        }
        result
    }

    /// Planes of a test.
    const COUNT: usize = 3;

    #[test]
    fn planes_agree_with_the_definition() {
        // input, kernel, strides, dilations, padding before, padding after
        let mut cases = vec![
            ([1, 50], [1, 5], [1, 1], [1, 2], [0, 4], [0, 0]),
            ([1, 37], [1, 4], [1, 3], [1, 1], [0, 2], [0, 1]),
            ([9, 11], [3, 2], [2, 1], [1, 1], [1, 0], [1, 1]),
            ([9, 40], [2, 3], [1, 2], [2, 3], [0, 5], [2, 0]),
            ([20, 20], [3, 3], [3, 3], [1, 1], [0, 0], [0, 0]),
            ([3, 3], [3, 3], [1, 1], [3, 3], [3, 3], [3, 3]),
            ([1, 1], [5, 5], [2, 2], [1, 1], [4, 4], [4, 4]),
            ([20, 37], [3, 3], [1, 1], [1, 1], [0, 2], [1, 0]),
            ([3, 70], [3, 3], [2, 2], [1, 1], [1, 0], [1, 1]),
            ([19, 40], [5, 5], [2, 2], [1, 1], [2, 0], [0, 3]),
            ([9, 33], [7, 7], [1, 1], [1, 1], [6, 6], [6, 6]),
            ([25, 8], [7, 7], [2, 2], [1, 1], [9, 9], [0, 1]),
            ([9, 5], [3, 3], [1, 1], [2, 2], [2, 2], [2, 2]),
            ([6, 5], [4, 3], [1, 1], [1, 1], [0, 1], [0, 1]),
            ([12, 9], [9, 9], [1, 1], [1, 1], [4, 4], [4, 4]),
            ([30, 40], [9, 9], [2, 2], [1, 1], [4, 4], [4, 4]),
            ([6, 25], [5, 5], [2, 1], [1, 1], [2, 2], [2, 2]),
            ([4, 7], [5, 5], [2, 1], [1, 1], [2, 2], [2, 2]),
            ([24, 37], [3, 3], [2, 1], [1, 1], [1, 1], [1, 1]),
            ([3, 25], [5, 5], [1, 1], [1, 1], [2, 2], [2, 2]),
            ([2, 9], [3, 3], [1, 1], [1, 1], [1, 1], [1, 1]),
        ];
        for size in [1, 2, 5, 7, 13, 14, 17, 28, 33, 56] {
            for kernel in [1, 3, 5, 7] {
                for stride in [1, 2] {
                    let pad = kernel / 2;
                    cases.push(([size, size + 1], [kernel; 2], [stride; 2], [1; 2], [pad; 2], [pad; 2]));
                }
            }
        }
        type Case = (Activation, fn(f64) -> f64);
        let activations: [Case; 5] = [
            (Activation::None, |x| x),
            (Activation::Clip { min: 0.0, max: 0.5 }, |x| x.clamp(0.0, 0.5)),
            (Activation::Unary(Unary::HardSwish), |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
            (Activation::Unary(Unary::Silu), |x| x / (1.0 + (-x).exp())),
            (Activation::Unary(Unary::Tanh), f64::tanh),
        ];
        for isa in Isa::available() {
            for (number, &(input, kernel, strides, dilations, pads, after)) in cases.iter().enumerate() {
                let out = |axis: usize| {
                    (input[axis] + pads[axis] + after[axis] - (kernel[axis] - 1) * dilations[axis] - 1)
                        / strides[axis]
                        + 1
                };
                let window = Window { input, output: [out(0), out(1)], kernel, strides, dilations, pads };
                let (len, taps) = (input[0] * input[1], kernel[0] * kernel[1]);
                // What lies between planes must not be read.
                let stride = len + 3;
                let mut from = vec![f32::NAN; COUNT * stride];
                for (index, plane) in from.chunks_exact_mut(stride).enumerate() {
                    (0..len).for_each(|i| plane[i] = ((index * len + i) as f32 * 1.7).sin());
                }
                let from = &from[..(COUNT - 1) * stride + len];
                let weights: Vec<f32> = (0..COUNT * taps).map(|i| (i as f32 * 2.3).cos()).collect();
                let bias = [0.25, -0.5, 1.0];
                let (activation, function) = activations[number % activations.len()];
                let plan = DepthwisePlan::new(isa, window);
                let mut scratch = vec![f32::NAN; plan.scratch_len()];
                let mut to = vec![f32::NAN; COUNT * out(0) * out(1)];
                let planes = Planes { values: from, stride, weights: &weights, bias: Some(&bias) };
                plan.run(planes, activation, &mut to, &mut scratch);
                let want = (0..COUNT).flat_map(|index| {
                    let (from, Filter { weights, bias }) = planes.plane(index, len, taps);
                    reference(&window, from, weights, bias)
                });
                for (index, want) in want.enumerate() {
                    let want = function(want);
                    assert!(
                        (f64::from(to[index]) - want).abs() < 2e-5,
                        "{isa:?} {window:?} at {index}: {} {want}",
                        to[index]
                    );
                }
            }
        }
    }
}
