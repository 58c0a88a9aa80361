//! Naive convolutions and their epilogues: one multiply-add at a time, accumulated in f64.

use super::super::routine::{Element, short};
use super::Pass;
use super::descriptors::{Axis, Sizes, Tensor};

/// The epilogue: `y = relu(alpha * sum + factor * addend + bias)`.
#[derive(Default)]
pub(super) struct Finish {
    pub(super) alpha: f64,
    /// A tensor like the result, and its factor.
    pub(super) addend: Option<(u64, f64)>,
    /// One number for each filter.
    pub(super) bias: Option<u64>,
    pub(super) has_relu: bool,
    /// Whether the activation propagates NaN.
    pub(super) propagates: bool,
}

fn relu(value: f64, propagates: bool) -> f64 {
    if value.is_nan() && propagates { value } else { value.max(0.0) }
}

/// The coordinates of a linear index in axes of these sizes, the last axis innermost.
fn places(mut index: usize, axes: &[Axis], of: fn(&Axis) -> usize) -> Vec<usize> {
    let mut places = vec![0; axes.len()];
    for (place, axis) in places.iter_mut().zip(axes).rev() {
        *place = index % of(axis);
        index /= of(axis);
    }
    places
}

/// The geometry of a convolution: the input pixel under each tap of each window.
struct Windows<'a> {
    sizes: &'a Sizes,
    positions: usize,
    taps: usize,
    pixels: usize,
    /// By position and tap; `None` in the padding.
    map: Vec<Option<usize>>,
}

impl Windows<'_> {
    fn of(sizes: &Sizes) -> Windows<'_> {
        let volume = |of: fn(&Axis) -> usize| sizes.axes.iter().map(of).product::<usize>();
        let (positions, taps, pixels) =
            (volume(|axis| axis.output), volume(|axis| axis.kernel), volume(|axis| axis.input));
        let pixel = |position: usize, tap: usize| {
            let out = places(position, &sizes.axes, |axis| axis.output);
            let kernel = places(tap, &sizes.axes, |axis| axis.kernel);
            let mut pixel = 0;
            for ((axis, out), kernel) in sizes.axes.iter().zip(out).zip(kernel) {
                let at = (out * axis.stride + kernel * axis.dilation).checked_sub(axis.pad)?;
                pixel = if at < axis.input { pixel * axis.input + at } else { return None };
            }
            Some(pixel)
        };
        let map = (0..positions * taps).map(|index| pixel(index / taps, index % taps)).collect();
        Windows { sizes, positions, taps, pixels, map }
    }

    /// Reads a factor. Unless the math type is FMA, a float32 factor is rounded to TF32, as on
    /// tensor cores.
    fn read(&self, at: u64, index: usize) -> f64 {
        let value = self.sizes.element.read(at, index);
        if self.sizes.element == Element::F32 && self.sizes.math != 3 { short(value) } else { value }
    }

    /// The linear index of an element: of which image or filter, which channel of how many, and
    /// which pixel of how many.
    fn at(&self, item: usize, (channel, channels): (usize, usize), (place, places): (usize, usize)) -> usize {
        match self.sizes.channels_last {
            false => (item * channels + channel) * places + place,
            true => (item * places + place) * channels + channel,
        }
    }

    /// The filter that computes a result.
    fn filter_of(&self, result: usize) -> usize {
        let filters = self.sizes.groups * self.sizes.filters;
        if self.sizes.channels_last { result % filters } else { result / self.positions % filters }
    }

    /// Calls `call` with the indices in image, filter and result of each multiply-add.
    fn products(&self, mut call: impl FnMut(usize, usize, usize)) {
        let Sizes { batch, groups, channels, filters, .. } = *self.sizes;
        for (image, filter) in
            (0..batch).flat_map(|image| (0..groups * filters).map(move |filter| (image, filter)))
        {
            for position in 0..self.positions {
                let result = self.at(image, (filter, groups * filters), (position, self.positions));
                let taps = &self.map[position * self.taps..(position + 1) * self.taps];
                for channel in 0..channels {
                    let of_all = (filter / filters * channels + channel, groups * channels);
                    for (tap, pixel) in taps.iter().enumerate() {
                        if let Some(pixel) = *pixel {
                            let from = self.at(image, of_all, (pixel, self.pixels));
                            let weight = self.at(filter, (channel, channels), (tap, self.taps));
                            call(from, weight, result);
                        }
                    }
                }
            }
        }
    }
}

/// Computes one of image, filter and result from the other two.
pub(super) fn convolve(sizes: &Sizes, pass: Pass, [x, w, y]: [u64; 3], finish: &Finish) {
    let windows = Windows::of(sizes);
    let [(_, of_x), (_, of_w), (_, of_y)] = sizes.memory(x, w, y);
    let (to, bytes) = pass.of([(x, of_x), (w, of_w), (y, of_y)]);
    let mut sums = vec![0.0; bytes / sizes.element.bytes()];
    windows.products(|pixel, weight, result| match pass {
        Pass::Forward => sums[result] += windows.read(x, pixel) * windows.read(w, weight),
        Pass::Data => sums[pixel] += windows.read(w, weight) * windows.read(y, result),
        Pass::Filter => sums[weight] += windows.read(x, pixel) * windows.read(y, result),
    });
    for (index, sum) in sums.into_iter().enumerate() {
        let mut value = finish.alpha * sum;
        if let Some((addend, factor)) = finish.addend {
            value += factor * sizes.element.read(addend, index);
        }
        if let Some(bias) = finish.bias {
            value += sizes.element.read(bias, windows.filter_of(index));
        }
        let value = if finish.has_relu { relu(value, finish.propagates) } else { value };
        sizes.element.write(to, index, value);
    }
}

/// `y = alpha * a + beta * y`, where `a` may hold one number for each channel.
pub(super) struct Addition {
    pub(super) a_of: Tensor,
    pub(super) y_of: Tensor,
    pub(super) alpha: f64,
    pub(super) beta: f64,
}

pub(super) fn add(addition: &Addition, a: u64, y: u64) {
    let Addition { a_of, y_of, alpha, beta } = addition;
    let (count, step) = (y_of.sizes.iter().product::<usize>(), y_of.steps[1]);
    for index in 0..count {
        let from = if a_of.sizes == y_of.sizes { index } else { index / step % y_of.sizes[1] };
        let value = alpha * a_of.element.read(a, from) + beta * y_of.element.read(y, index);
        y_of.element.write(y, index, value);
    }
}

/// Applies ReLU.
pub(super) fn activate(of: &Tensor, x: u64, y: u64, propagates: bool) {
    for index in 0..of.sizes.iter().product() {
        of.element.write(y, index, relu(of.element.read(x, index), propagates));
    }
}
