//! `Resize`: nearest-neighbour copies, or a weighted sum of neighbours, in one pass over the
//! result.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::geometry::{ResizePolicy, normalize_axes};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::lines::{SHORT_FLOATS, suffix};
use super::movement::{MOVED, by_bytes, copied, element_bytes, few_axes, unit};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx};

const fn resize(types: &'static [(&'static str, TypeSet)], when: fn(&NodeView<'_>) -> bool) -> CudaKernel {
    let def = KernelDef { op: "Resize", types, host_inputs: &[1, 2, 3], when, ..KernelDef::BASE };
    CudaKernel::new(def, launches)
}

cuda_kernels![
    resize(&[("T1", MOVED)], |node| moves(node) && few_axes(node)),
    resize(&[("T1", SHORT_FLOATS)], |node| !moves(node) && few_axes(node)),
];

/// Attribute values, by their numbers in `cu/resize.cu`.
const TRANSFORMS: &[&str] = &[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    CROP,
];
const CROP: &str = "tf_crop_and_resize";
const ROUNDINGS: &[&str] = &["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"];
const MODES: &[&str] = &["nearest", "linear", "cubic"];

/// The number of results up to which each gets a thread; beyond it, a thread computes several.
const BUSY: usize = 1 << 17;
/// The most results per thread.
const MOST_EACH: usize = 8;

/// Whether elements are copied unchanged: the mode is nearest, and no value replaces those outside
/// of the input.
fn moves(node: &NodeView<'_>) -> bool {
    let is = |name: &str, value: &str| node.attrs().find_string(name) == Some(value);
    is("mode", "nearest") && !is("coordinate_transformation_mode", CROP)
}

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

/// One axis, or several adjacent ones that keep their size.
#[derive(Debug)]
struct Axis {
    from: usize,
    to: usize,
    /// Output elements per input element.
    scale: f32,
    /// The size of the result before truncation to an integer.
    width: f32,
    /// The part that is read, from 0 to 1.
    roi: [f32; 2],
}

impl Axis {
    fn stays(&self) -> bool {
        self.from == self.to && self.scale == 1.0 && self.roi == [0.0, 1.0]
    }
}

/// Returns the values of a float host input; empty if it is left out.
fn floats(view: Option<TensorView<'_>>) -> Result<Vec<f32>> {
    let Some(view) = view else { return Ok(Vec::new()) };
    Ok(match view.dtype() {
        DType::F64 => view.to_vec::<f64>()?.into_iter().map(|number| number as f32).collect(),
        DType::F16 => view.to_vec::<half::f16>()?.into_iter().map(f32::from).collect(),
        _ => view.to_vec::<f32>()?,
    })
}

/// Returns the axes of the input, with adjacent ones merged if they keep their size.
fn axes(cx: &OpCx<'_>, from: &[usize], to: &[usize]) -> Result<Vec<Axis>> {
    let chosen = match cx.attrs.find_ints("axes") {
        Some(chosen) => normalize_axes(chosen, from.len())?.to_vec(),
        None => (0..from.len()).collect(),
    };
    let given = floats(cx.find_host(2))?;
    let scales = if given.is_empty() {
        let policy = ResizePolicy::parse(cx.attrs.string("keep_aspect_ratio_policy")?)?;
        let sizes: Vec<i64> = chosen.iter().filter_map(|axis| Some(*from.get(*axis)? as i64)).collect();
        policy.apply(&sizes, &cx.ints(3)?).0.into_iter().map(|scale| scale.value() as f32).collect()
    } else {
        given.clone()
    };
    let transform = cx.attrs.string("coordinate_transformation_mode")?;
    let (crops, is_symmetric) = (transform == CROP, transform == "half_pixel_symmetric");
    let roi = if crops { floats(cx.find_host(1))? } else { Vec::new() };
    let fits = scales.len() == chosen.len() && (!crops || roi.len() == 2 * chosen.len());
    ensure!(fits, InvalidArgument, "{} scales, a region of {} for {chosen:?}", scales.len(), roi.len());
    let mut axes: Vec<Axis> = Vec::new();
    for (axis, (from, to)) in from.iter().zip(to).enumerate() {
        let (from, to) = (*from, *to);
        let mut own = Axis { from, to, scale: 1.0, width: to as f32, roi: [0.0, 1.0] };
        if let Some(entry) = chosen.iter().position(|chosen| *chosen == axis) {
            own.scale = scales.get(entry).copied().unwrap_or(1.0);
            if !given.is_empty() {
                own.width = own.scale * from as f32;
                // The special case for a result of one element depends on its actual size, not on
                // the scaled one.
                if to == 1 && !is_symmetric {
                    own.width = 1.0;
                }
            }
            if let (Some(start), Some(end)) = (roi.get(entry), roi.get(chosen.len() + entry)) {
                own.roi = [*start, *end];
            }
        }
        match axes.last_mut() {
            Some(last) if last.stays() && own.stays() => {
                last.from = last.from.saturating_mul(from);
                last.to = last.from;
            }
            _ => axes.push(own),
        }
    }
    Ok(axes)
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
    let mut axes = axes(cx, from, to)?;
    if axes.iter().all(Axis::stays) {
        return copied(x, y);
    }
    // Contiguous elements of an unchanged last axis are moved together.
    let (bytes, mut many) = (element_bytes(x.dtype)?, 1);
    let sums =
        cx.attrs.string("mode")? != "nearest" || cx.attrs.string("coordinate_transformation_mode")? == CROP;
    if let Some(last) = axes.last_mut().filter(|axis| !sums && axis.stays()) {
        many = unit(bytes, [last.from]);
        last.from /= many;
        last.to = last.from;
    }
    let planes = match axes.first() {
        Some(first) if first.stays() => axes.remove(0).from,
        _ => 1,
    };
    let plane = |size: fn(&Axis) -> usize| axes.iter().map(size).fold(1, usize::saturating_mul);
    let (plane_from, plane_to) = (plane(|axis| axis.from), plane(|axis| axis.to));
    let each = each(planes.saturating_mul(plane_to), planes);
    let count = plane_to.saturating_mul(planes.div_ceil(each));
    let mut words = of_axes(cx, &axes)?;
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
fn of_axes(cx: &OpCx<'_>, axes: &[Axis]) -> Result<Vec<i64>> {
    let antialias = cx.attrs.flag("antialias")?;
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
        let stretch = if antialias { axis.scale.min(1.0) } else { 1.0 };
        shrinks |= stretch < 1.0;
        let (first, taps) = taps(cx, stretch)?;
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
    let excludes = cx.attrs.flag("exclude_outside")?;
    let mut words = [slots.concat(), stays.concat(), counts.to_vec()].concat();
    words.push(choice(cx, "coordinate_transformation_mode", TRANSFORMS)?);
    words.push(choice(cx, "nearest_mode", ROUNDINGS)?);
    words.push(choice(cx, "mode", MODES)?);
    words.extend([i64::from(excludes), i64::from(excludes || shrinks)]);
    words.extend([bits(cx.attrs.float("extrapolation_value")?), bits(cx.attrs.float("cubic_coeff_a")?)]);
    Ok(words)
}

/// Returns the offset of the first tap from the element at or before a coordinate, and the number
/// of taps, for a filter stretched by antialiasing.
fn taps(cx: &OpCx<'_>, stretch: f32) -> Result<(i64, i64)> {
    let support = match cx.attrs.string("mode")? {
        "nearest" => return Ok((0, 1)),
        "linear" => 1.0,
        _ => 2.0,
    };
    let first = (-support / f64::from(stretch)).floor() as i64 + 1;
    Ok((first, 2i64.saturating_sub(first.saturating_mul(2))))
}
