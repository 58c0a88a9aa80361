//! `Resize`: nearest-neighbour or separable-filter resampling, in one pass over the result.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::geometry::{ResizePolicy, normalize_axes};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::indexing::{bits_of, check_source, few_axes, pick};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, strides};
use crate::shader::{Shader, TYPES};

const fn resize(types: &'static [(&'static str, TypeSet)], when: fn(&NodeView<'_>) -> bool) -> WgpuKernel {
    let def = KernelDef { op: "Resize", types, host_inputs: &[1, 2, 3], when, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![
    resize(&[("T1", TYPES)], |node| moves(node) && few_axes(node)),
    resize(&[("T1", FLOATS)], |node| !moves(node) && few_axes(node)),
];

/// Returns whether elements are only moved: the mode is `nearest`, and nothing is extrapolated.
fn moves(node: &NodeView<'_>) -> bool {
    let is = |name: &str, value: &str| node.attrs().find_string(name) == Some(value);
    is("mode", "nearest") && !is("coordinate_transformation_mode", "tf_crop_and_resize")
}

/// One dimension, or several merged ones that stay as they are.
#[derive(Debug)]
struct Axis {
    from: usize,
    to: usize,
    /// The elements of the result per element of the input.
    scale: f32,
    /// The size of the result before truncation to an integer.
    width: f32,
    /// The region of interest, normalized to 0..1.
    roi: (f32, f32),
    stays: bool,
}

/// Reads a float tensor in host memory.
fn floats(view: TensorView<'_>) -> Result<Vec<f32>> {
    match view.dtype() {
        DType::F64 => Ok(view.to_vec::<f64>()?.into_iter().map(|number| number as f32).collect()),
        DType::F16 => Ok(view.to_vec::<half::f16>()?.into_iter().map(f32::from).collect()),
        _ => view.to_vec::<f32>(),
    }
}

/// Returns every dimension of the input.
fn axes(cx: &OpCx<'_>, from: &[usize], to: &[usize]) -> Result<Vec<Axis>> {
    ensure!(from.len() == to.len(), Fail, "shape {from:?} cannot be resized to {to:?}");
    let whole = |(from, to): (&usize, &usize)| {
        let (from, to) = (*from, *to);
        Axis { from, to, scale: 1.0, width: to as f32, roi: (0.0, 1.0), stays: from == to }
    };
    let mut axes: Vec<Axis> = from.iter().zip(to).map(whole).collect();
    let chosen = match cx.attrs.find_ints("axes") {
        Some(chosen) => normalize_axes(chosen, from.len())?,
        None => (0..from.len()).collect(),
    };
    let given = cx.find_host(2).map(floats).transpose()?.filter(|scales| !scales.is_empty());
    let by_scale = given.is_some();
    let scales = match given {
        Some(scales) => scales,
        None => {
            let policy = ResizePolicy::parse(cx.attrs.string("keep_aspect_ratio_policy")?)?;
            let sizes = chosen.iter().filter_map(|axis| from.get(*axis)).map(|size| *size as i64);
            policy
                .apply(&sizes.collect::<Vec<_>>(), &cx.ints(3)?)
                .0
                .into_iter()
                .map(|scale| scale.value() as f32)
                .collect()
        }
    };
    let count = chosen.len();
    ensure!(scales.len() == count, InvalidArgument, "{} scales are given for {count} axes", scales.len());
    let crops = cx.attrs.string("coordinate_transformation_mode")? == "tf_crop_and_resize";
    let roi = cx.find_host(1).filter(|_| crops).map(floats).transpose()?.unwrap_or_default();
    ensure!(!crops || roi.len() == 2 * count, InvalidArgument, "a region of {} for {count} axes", roi.len());
    for (entry, (axis, scale)) in chosen.iter().zip(scales).enumerate() {
        let Some(axis) = axes.get_mut(*axis) else { continue };
        axis.scale = scale;
        // With given scales, coordinates use the fractional output size.
        if by_scale {
            axis.width = scale * axis.from as f32;
        }
        if let (Some(start), Some(end)) = (roi.get(entry), roi.get(count + entry)) {
            axis.roi = (*start, *end);
        }
        axis.stays = axis.from == axis.to && scale == 1.0 && axis.roi == (0.0, 1.0);
    }
    Ok(axes)
}

/// Merges adjacent dimensions that stay as they are.
fn merged(axes: Vec<Axis>) -> Vec<Axis> {
    let mut merged: Vec<Axis> = Vec::new();
    for axis in axes {
        match merged.last_mut() {
            Some(last) if last.stays && axis.stays => {
                last.from = last.from.saturating_mul(axis.from);
                last.to = last.from;
            }
            _ => merged.push(axis),
        }
    }
    merged
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    check_source(x, y)?;
    let axes = merged(axes(cx, &x.shape, &y.shape)?);
    // Uniform lists have only integers, so floats pass as bits.
    let bits = |number: fn(&Axis) -> f32| -> Vec<i64> {
        axes.iter().map(|axis| i64::from(number(axis).to_bits().cast_signed())).collect()
    };
    let from: Vec<usize> = axes.iter().map(|axis| axis.from).collect();
    let to: Vec<usize> = axes.iter().map(|axis| axis.to).collect();
    let shader = Shader::new(cx)
        .sizes("from_size", &from)
        .sizes("to_size", &to)
        .sizes("step", &strides(&from))
        .integers("scale_bits", &bits(|axis| axis.scale))
        .integers("width_bits", &bits(|axis| axis.width))
        .integers("start_bits", &bits(|axis| axis.roi.0))
        .integers("end_bits", &bits(|axis| axis.roi.1));
    let coordinate = coordinate(cx)?;
    let crops = cx.attrs.string("coordinate_transformation_mode")? == "tf_crop_and_resize";
    if cx.attrs.string("mode")? == "nearest" && !crops {
        let code = format!("{coordinate}{}{}", nearest(cx)?, picked(&axes));
        return Ok(vec![pick(shader.read("x", &bits_of(x)?), y, &code)?]);
    }
    let (first, taps) = taps(cx, &axes)?;
    let shader = shader
        .integers("first_tap", &first)
        .sizes("taps", &taps)
        .integers("stretch_bits", &bits(|axis| axis.scale.min(1.0)))
        .float("extrapolation", cx.attrs.float("extrapolation_value")?)
        .float("cubic_a", cx.attrs.float("cubic_coeff_a")?);
    let code = format!("{coordinate}{}{}", weight(cx)?, summed(cx, &axes)?);
    Ok(vec![shader.read("x", x).write("y", y).each(y.count(), &code)?])
}

/// Generates `coordinate(k, index)`, the position of an output index on an input axis, in `f32`,
/// the only float type of WGSL. Quotients are corrected: WGSL allows an error of 2.5 ULP, and at a
/// tie the smallest error selects another nearest element.
fn coordinate(cx: &OpCx<'_>) -> Result<String> {
    let formula = match cx.attrs.string("coordinate_transformation_mode")? {
        "half_pixel" => "return divide_(x + 0.5, scale) - 0.5;",
        "half_pixel_symmetric" => {
            "return f32(from_size(k)) / 2.0 * (1.0 - divide_(f32(to_size(k)), width)) + divide_(x + 0.5, scale) - 0.5;"
        }
        "pytorch_half_pixel" => {
            "if (to_size(k) > 1u) { return divide_(x + 0.5, scale) - 0.5; }
            return 0.0;"
        }
        "align_corners" => {
            "if (width == 1.0) { return 0.0; }
            return divide_(x * last, width - 1.0);"
        }
        "asymmetric" => "return divide_(x, scale);",
        "tf_half_pixel_for_nn" => "return divide_(x + 0.5, scale);",
        "tf_crop_and_resize" => {
            "let start = bitcast<f32>(start_bits(k));
            let end = bitcast<f32>(end_bits(k));
            if (to_size(k) > 1u) { return start * last + divide_(x * (end - start) * last, width - 1.0); }
            return 0.5 * (start + end) * last;"
        }
        other => return Err(error!(InvalidGraph, "the coordinate transformation '{other}' is not known")),
    };
    Ok(format!(
        "fn coordinate(k: u32, index: u32) -> f32 {{
            let x = f32(index);
            let scale = bitcast<f32>(scale_bits(k));
            let width = bitcast<f32>(width_bits(k));
            let last = f32(from_size(k)) - 1.0;
            {formula}
        }}\n"
    ))
}

/// Generates `nearest(k, x)`, the element of an axis nearest to a coordinate.
fn nearest(cx: &OpCx<'_>) -> Result<String> {
    let rounded = match cx.attrs.string("nearest_mode")? {
        "round_prefer_floor" => "ceil(x - 0.5)",
        "round_prefer_ceil" => "floor(x + 0.5)",
        "floor" => "floor(x)",
        "ceil" => "ceil(x)",
        other => return Err(error!(InvalidGraph, "the nearest mode '{other}' is not known")),
    };
    Ok(format!(
        "fn nearest(k: u32, x: f32) -> u32 {{
            let last = from_size(k) - 1u;
            return min(u32(clamp({rounded}, 0.0, f32(last))), last);
        }}\n"
    ))
}

/// Generates the indices `at0`, `at1` .. of output element `i` along each axis.
fn indices(count: usize) -> String {
    let split = |k| format!("let at{k} = rest % to_size({k}u); rest /= to_size({k}u);\n");
    let split: String = (1..count).rev().map(split).collect();
    format!("var rest = i;\n{split}let at0 = rest;\n")
}

/// Generates `picked(i)`, the element that is nearest along all axes.
fn picked(axes: &[Axis]) -> String {
    let place = |(k, axis): (usize, &Axis)| match axis.stays {
        true => format!(" + at{k} * step({k}u)"),
        false => format!(" + nearest({k}u, coordinate({k}u, at{k})) * step({k}u)"),
    };
    let place: String = axes.iter().enumerate().map(place).collect();
    format!("fn picked(i: u32) -> x_t {{\n{}return x(0u{place});\n}}\n", indices(axes.len()))
}

/// Returns for each axis the first tap, relative to the element at or before the coordinate, and
/// the number of taps.
fn taps(cx: &OpCx<'_>, axes: &[Axis]) -> Result<(Vec<i64>, Vec<usize>)> {
    let support = match cx.attrs.string("mode")? {
        "nearest" => return Ok((vec![0; axes.len()], vec![1; axes.len()])),
        "linear" => 1.0,
        "cubic" => 2.0,
        other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
    };
    let antialias = cx.attrs.flag("antialias")?;
    let first = |axis: &Axis| {
        // Antialiasing widens the filter by the downscaling factor.
        let scale = if antialias { f64::from(axis.scale.min(1.0)) } else { 1.0 };
        (-support / scale).floor() as i64 + 1
    };
    let first: Vec<i64> = axes.iter().map(first).collect();
    let count = |first: &i64| usize::try_from(2i64.saturating_sub(first.saturating_mul(2))).unwrap_or(0);
    let taps = first.iter().map(count).collect();
    Ok((first, taps))
}

/// Generates `base(k, x)`, the element that taps are relative to, and `weight(k, distance)`, the
/// weight of a tap at a distance from the coordinate.
fn weight(cx: &OpCx<'_>) -> Result<String> {
    let stretched = if cx.attrs.flag("antialias")? { "bitcast<f32>(stretch_bits(k))" } else { "1.0" };
    let kernel = match cx.attrs.string("mode")? {
        "nearest" => {
            let nearest = nearest(cx)?;
            return Ok(format!(
                "{nearest}fn base(k: u32, x: f32) -> f32 {{ return f32(nearest(k, x)); }}
                fn weight(k: u32, distance: f32) -> f32 {{ return 1.0; }}\n"
            ));
        }
        "linear" => "return clamp(1.0 - d, 0.0, 1.0);",
        _ => {
            "let a = p.cubic_a;
            if (d <= 1.0) { return ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0; }
            if (d < 2.0) { return ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a; }
            return 0.0;"
        }
    };
    Ok(format!(
        "fn base(k: u32, x: f32) -> f32 {{
            // A stretched filter begins left of a coordinate, even of one exactly on an element.
            return select(floor(x), ceil(x) - 1.0, {stretched} < 1.0);
        }}
        fn weight(k: u32, distance: f32) -> f32 {{
            let d = abs(distance * {stretched});
            {kernel}
        }}\n"
    ))
}

/// Generates `element(i)`: nested loops over the taps of the axes that change.
fn summed(cx: &OpCx<'_>, axes: &[Axis]) -> Result<String> {
    let crops = cx.attrs.string("coordinate_transformation_mode")? == "tf_crop_and_resize";
    let smooth = cx.attrs.flag("antialias")? && axes.iter().any(|axis| axis.scale < 1.0);
    let excludes = cx.attrs.flag("exclude_outside")?;
    let mut code = format!("fn element(i: u32) {{\n{}", indices(axes.len()));
    code.push_str("let place_ = 0u;\nlet weight_ = 1.0;\nvar sum = 0.0;\nvar whole = 0.0;\n");
    let changing: Vec<usize> =
        axes.iter().enumerate().filter(|(_, axis)| !axis.stays).map(|(k, _)| k).collect();
    for k in &changing {
        code.push_str(&format!("let x{k} = coordinate({k}u, at{k});\nlet base{k} = base({k}u, x{k});\n"));
        if crops {
            code.push_str(&format!(
                "if (x{k} < 0.0 || x{k} > f32(from_size({k}u)) - 1.0) {{
                set_y(i, p.extrapolation);
                return;
                }}\n"
            ));
        }
    }
    let mut outer = String::from("_");
    for (k, _) in axes.iter().enumerate().filter(|(_, axis)| axis.stays) {
        code.push_str(&format!("let place_{k} = place{outer} + at{k} * step({k}u);\n"));
        outer = format!("_{k}");
    }
    let mut outer_weight = String::from("weight_");
    for k in &changing {
        let inside = match excludes {
            true => format!("if (tap{k} < 0 || tap{k} >= i32(from_size({k}u))) {{ continue; }}\n"),
            false => String::new(),
        };
        code.push_str(&format!(
            "for (var n{k} = 0u; n{k} < taps({k}u); n{k}++) {{
            let offset{k} = first_tap({k}u) + i32(n{k});
            let tap{k} = i32(base{k}) + offset{k};
            {inside}
            let weight{k} = {outer_weight} * weight({k}u, f32(offset{k}) - (x{k} - base{k}));
            let place_{k} = place{outer} + u32(clamp(tap{k}, 0, i32(from_size({k}u)) - 1)) * step({k}u);\n"
        ));
        (outer, outer_weight) = (format!("_{k}"), format!("weight{k}"));
    }
    code.push_str(&format!("sum += {outer_weight} * x(place{outer});\nwhole += {outer_weight};\n"));
    code.push_str(&"}\n".repeat(changing.len()));
    // Otherwise the weights add up to 1 already.
    code.push_str(if smooth || excludes { "set_y(i, sum / whole);\n}\n" } else { "set_y(i, sum);\n}\n" });
    Ok(code)
}
