//! `Resize`: nearest-neighbour copies, or a weighted sum of neighbours, in one pass over the
//! result.

use ort_core::dtype::TypeSet;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::problem::{Resize, ResizeAxis, ResizeInputs};
use ort_core::{Result, ensure, error};

use super::elements::{MOVED, by_bytes, element_bytes, few_axes, unit};
use super::movement::copied;
use super::rows::{SHORT_FLOATS, suffix};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx};

const fn resize(types: &'static [(&'static str, TypeSet)], when: fn(&NodeView<'_>) -> bool) -> CudaKernel {
    let def = KernelDef { op: "Resize", types, host_inputs: &[1, 2, 3], when, ..KernelDef::BASE };
    CudaKernel::new(def, launches)
}

cuda_kernels![
    resize(&[("T1", MOVED)], |node| Resize::moves(node.attrs()) && few_axes(node)),
    resize(&[("T1", SHORT_FLOATS)], |node| !Resize::moves(node.attrs()) && few_axes(node)),
];

/// Attribute values, by their numbers in `cu/resize.cu`.
const TRANSFORMS: &[&str] = &[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
];
const ROUNDINGS: &[&str] = &["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"];
const MODES: &[&str] = &["nearest", "linear", "cubic"];

/// The number of results up to which each gets a thread; beyond it, a thread computes several.
const BUSY: usize = 1 << 17;
/// The most results per thread.
const MOST_EACH: usize = 8;

/// Returns the index of an attribute's value among the known ones.
pub(super) fn choice(cx: &OpCx<'_>, attribute: &str, among: &[&str]) -> Result<i64> {
    let value = cx.attrs.string(attribute)?;
    let found = among.iter().position(|known| *known == value);
    let found =
        found.ok_or_else(|| error!(InvalidGraph, "{attribute} is '{value}', expected one of {among:?}"));
    Ok(found? as i64)
}

/// Returns how many planes a thread handles, out of `planes` with `count` results in total.
pub(super) fn each(count: usize, planes: usize) -> usize {
    (count / BUSY).clamp(1, MOST_EACH).min(planes.max(1))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (from, to) = (&x.shape, &y.shape);
    ensure!(
        from.len() == to.len() && x.count() > 0,
        InvalidArgument,
        "shape {from:?} cannot be resized to {to:?}"
    );
    let resize = Resize::new(cx.attrs)?;
    let inputs = ResizeInputs { roi: cx.find_host(1), scales: cx.find_host(2), sizes: cx.find_host(3) };
    let mut axes = resize.axes(cx.attrs, from, to, &inputs)?;
    if axes.iter().all(ResizeAxis::stays) {
        return copied(x, y);
    }
    // Contiguous elements of an unchanged last axis are moved together.
    let (bytes, mut many) = (element_bytes(x.dtype)?, 1);
    let sums = !Resize::moves(cx.attrs);
    if let Some(last) = axes.last_mut().filter(|axis| !sums && axis.stays()) {
        many = unit(bytes, [last.from]);
        last.from /= many;
        last.to = last.from;
    }
    let planes = match axes.first() {
        Some(first) if first.stays() => axes.remove(0).from,
        _ => 1,
    };
    let plane = |size: fn(&ResizeAxis) -> usize| axes.iter().map(size).fold(1, usize::saturating_mul);
    let (plane_from, plane_to) = (plane(|axis| axis.from), plane(|axis| axis.to));
    let each = each(planes.saturating_mul(plane_to), planes);
    let count = plane_to.saturating_mul(planes.div_ceil(each));
    let mut words = of_axes(cx, &resize, &axes)?;
    words.extend([planes, each, plane_from, plane_to].map(|number| number as i64));
    let launch = if sums {
        // The kernel is a template over the number of changing axes, instantiated for 2, 3 and all.
        let changing = axes.iter().filter(|axis| !axis.stays()).count();
        let changing = if changing <= 2 {
            2
        } else if changing == 3 {
            3
        } else {
            MOST_AXES
        };
        Launch::new("resize", format!("resize_{changing}_{}", suffix(x.dtype)?))
    } else {
        by_bytes("resize", "resize_nearest", bytes * many)
    };
    let launch = launch.threads(count)?.tensor(x).tensor(y);
    Ok(vec![launch.ints::<{ 14 * MOST_AXES + 13 }>(&words)?.uint(count)?])
}

/// Returns the bits of a float for an integer structure.
pub(super) fn bits(number: f32) -> i64 {
    i64::from(number.to_bits().cast_signed())
}

/// Fills the structure `Resize` of `cu/resize.cu`, except for its planes.
fn of_axes(cx: &OpCx<'_>, resize: &Resize<'_>, axes: &[ResizeAxis]) -> Result<Vec<i64>> {
    let (mut slots, mut stays) = (Vec::new(), Vec::new());
    let [mut inner, mut step] = [1usize; 2];
    let mut shrinks = false;
    for axis in axes.iter().rev() {
        let [from, to, behind, apart] = [axis.from, axis.to, inner, step].map(|number| number as i64);
        inner = inner.saturating_mul(axis.to);
        step = step.saturating_mul(axis.from);
        if axis.stays() {
            stays.push([to, behind, apart]);
            continue;
        }
        let stretch = resize.stretch(axis);
        shrinks |= stretch < 1.0;
        let (first, taps) = resize.taps(axis)?;
        let floats = [axis.scale, axis.width, axis.roi[0], axis.roi[1]].map(bits);
        let [scale, width, start, end] = floats;
        slots.push([from, to, behind, apart, scale, width, start, end, first, taps, bits(stretch)]);
    }
    // In memory order, so that the kernel reads neighbours one after the other.
    slots.reverse();
    let counts = [slots.len() as i64, stays.len() as i64];
    let none = [1, 1, 1, 0, bits(1.0), bits(1.0), 0, bits(1.0), 0, 1, bits(1.0)];
    slots.resize(MOST_AXES, none);
    stays.resize(MOST_AXES, [1, 1, 0]);
    let excludes = resize.exclude_outside;
    let mut words = [slots.concat(), stays.concat(), counts.to_vec()].concat();
    words.push(choice(cx, "coordinate_transformation_mode", TRANSFORMS)?);
    words.push(choice(cx, "nearest_mode", ROUNDINGS)?);
    words.push(choice(cx, "mode", MODES)?);
    words.extend([i64::from(excludes), i64::from(excludes || shrinks)]);
    words.extend([bits(resize.extrapolation), bits(resize.cubic_a)]);
    Ok(words)
}
