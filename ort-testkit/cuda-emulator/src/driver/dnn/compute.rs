//! Convolutions and what follows them, computed one product at a time.

use super::super::routine::{Element, short};
use super::descriptors::{Axis, Sizes, Tensor};

/// What follows the sums: `y = relu(alpha * sum + factor * addend + bias)`.
#[derive(Default)]
pub(super) struct Finish {
    pub(super) alpha: f64,
    /// Like the result, with its factor.
    pub(super) addend: Option<(u64, f64)>,
    /// A number for each filter.
    pub(super) bias: Option<u64>,
    pub(super) has_relu: bool,
    /// Whether what is no number stays so.
    pub(super) propagates: bool,
}

fn relu(value: f64, propagates: bool) -> f64 {
    if value.is_nan() && propagates { value } else { value.max(0.0) }
}

/// The places of an index in axes of these sizes, the last one the nearest.
fn places(mut index: usize, axes: &[Axis], of: fn(&Axis) -> usize) -> Vec<usize> {
    let mut places = vec![0; axes.len()];
    for (place, axis) in places.iter_mut().zip(axes).rev() {
        *place = index % of(axis);
        index /= of(axis);
    }
    places
}

pub(super) fn convolve(sizes: &Sizes, [x, w, y]: [u64; 3], finish: &Finish) {
    let volume = |of: fn(&Axis) -> usize| sizes.axes.iter().map(of).product::<usize>();
    let (positions, taps, pixels) =
        (volume(|axis| axis.output), volume(|axis| axis.kernel), volume(|axis| axis.input));
    // With the library's own choice of arithmetic, float32 may be shortened on tensor cores.
    let shortens = sizes.element == Element::F32 && sizes.math != 3;
    let read = |at: u64, index: usize| {
        let value = sizes.element.read(at, index);
        if shortens { short(value) } else { value }
    };
    // For each position and tap, the pixel; none in the padding.
    let pixel = |position: usize, tap: usize| {
        let (out, kernel) =
            (places(position, &sizes.axes, |axis| axis.output), places(tap, &sizes.axes, |axis| axis.kernel));
        let mut pixel = 0;
        for ((axis, out), kernel) in sizes.axes.iter().zip(out).zip(kernel) {
            let at = (out * axis.stride + kernel * axis.dilation).checked_sub(axis.pad)?;
            pixel = if at < axis.input { pixel * axis.input + at } else { return None };
        }
        Some(pixel)
    };
    let map: Vec<Option<usize>> =
        (0..positions * taps).map(|index| pixel(index / taps, index % taps)).collect();
    let filters = sizes.groups * sizes.filters;
    for image in 0..sizes.batch {
        for filter in 0..filters {
            let first = filter / sizes.filters * sizes.channels;
            for position in 0..positions {
                let mut sum = 0.0;
                for channel in 0..sizes.channels {
                    let from = (image * sizes.groups * sizes.channels + first + channel) * pixels;
                    let weights = (filter * sizes.channels + channel) * taps;
                    for (tap, pixel) in map[position * taps..(position + 1) * taps].iter().enumerate() {
                        sum += pixel.map_or(0.0, |pixel| read(x, from + pixel) * read(w, weights + tap));
                    }
                }
                let to = (image * filters + filter) * positions + position;
                let mut value = finish.alpha * sum;
                if let Some((addend, factor)) = finish.addend {
                    value += factor * sizes.element.read(addend, to);
                }
                if let Some(bias) = finish.bias {
                    value += sizes.element.read(bias, filter);
                }
                let value = if finish.has_relu { relu(value, finish.propagates) } else { value };
                sizes.element.write(y, to, value);
            }
        }
    }
}

/// `y = alpha * a + beta * y`, where `a` may be a number for each channel.
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

/// Nothing below zero stays.
pub(super) fn activate(of: &Tensor, x: u64, y: u64, propagates: bool) {
    for index in 0..of.sizes.iter().product() {
        of.element.write(y, index, relu(of.element.read(x, index), propagates));
    }
}
