//! `Resize`: nearest-neighbour or separable-filter resampling, in one pass over the result.

use ort_core::dtype::TypeSet;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::problem::{Resize, ResizeAxis, ResizeInputs};
use ort_core::{Result, error};

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
    resize(&[("T1", TYPES)], |node| Resize::moves(node.attrs()) && few_axes(node)),
    resize(&[("T1", FLOATS)], |node| !Resize::moves(node.attrs()) && few_axes(node)),
];

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    check_source(x, y)?;
    let resize = Resize::new(cx.attrs)?;
    let inputs = ResizeInputs { roi: cx.find_host(1), scales: cx.find_host(2), sizes: cx.find_host(3) };
    let axes = resize.axes(cx.attrs, &x.shape, &y.shape, &inputs)?;
    // Uniform lists have only integers, so floats pass as bits.
    let bits = |number: &dyn Fn(&ResizeAxis) -> f32| -> Vec<i64> {
        axes.iter().map(|axis| i64::from(number(axis).to_bits().cast_signed())).collect()
    };
    let from: Vec<usize> = axes.iter().map(|axis| axis.from).collect();
    let to: Vec<usize> = axes.iter().map(|axis| axis.to).collect();
    let shader = Shader::new(cx)
        .sizes("from_size", &from)
        .sizes("to_size", &to)
        .sizes("step", &strides(&from))
        .integers("scale_bits", &bits(&|axis| axis.scale))
        .integers("width_bits", &bits(&|axis| axis.width))
        .integers("start_bits", &bits(&|axis| axis.roi[0]))
        .integers("end_bits", &bits(&|axis| axis.roi[1]));
    let coordinate = coordinate(&resize)?;
    if Resize::moves(cx.attrs) {
        let code = format!("{coordinate}{}{}", nearest(&resize)?, picked(&axes));
        return Ok(vec![pick(shader.read("x", &bits_of(x)?), y, &code)?]);
    }
    let taps = axes.iter().map(|axis| resize.taps(axis)).collect::<Result<Vec<_>>>()?;
    let first: Vec<i64> = taps.iter().map(|(first, _)| *first).collect();
    let taps: Vec<usize> = taps.iter().map(|(_, count)| usize::try_from(*count).unwrap_or(0)).collect();
    let shader = shader
        .integers("first_tap", &first)
        .sizes("taps", &taps)
        .integers("stretch_bits", &bits(&|axis| resize.stretch(axis)))
        .float("extrapolation", resize.extrapolation)
        .float("cubic_a", resize.cubic_a);
    let code = format!("{coordinate}{}{}", weight(&resize)?, summed(&resize, &axes));
    Ok(vec![shader.read("x", x).write("y", y).each(y.count(), &code)?])
}

/// Generates `coordinate(k, index)`, the position of an output index on an input axis, in `f32`,
/// the only float type of WGSL. Quotients are corrected: WGSL allows an error of 2.5 ULP, and at a
/// tie the smallest error selects another nearest element.
fn coordinate(resize: &Resize<'_>) -> Result<String> {
    let formula = match resize.transform {
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
fn nearest(resize: &Resize<'_>) -> Result<String> {
    let rounded = match resize.rounding {
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
fn picked(axes: &[ResizeAxis]) -> String {
    let place = |(k, axis): (usize, &ResizeAxis)| match axis.stays() {
        true => format!(" + at{k} * step({k}u)"),
        false => format!(" + nearest({k}u, coordinate({k}u, at{k})) * step({k}u)"),
    };
    let place: String = axes.iter().enumerate().map(place).collect();
    format!("fn picked(i: u32) -> x_t {{\n{}return x(0u{place});\n}}\n", indices(axes.len()))
}

/// Generates `base(k, x)`, the element that taps are relative to, and `weight(k, distance)`, the
/// weight of a tap at a distance from the coordinate.
fn weight(resize: &Resize<'_>) -> Result<String> {
    let stretched = if resize.antialias { "bitcast<f32>(stretch_bits(k))" } else { "1.0" };
    let kernel = match resize.mode {
        "nearest" => {
            let nearest = nearest(resize)?;
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
fn summed(resize: &Resize<'_>, axes: &[ResizeAxis]) -> String {
    let smooth = resize.antialias && axes.iter().any(|axis| axis.scale < 1.0);
    let excludes = resize.exclude_outside;
    let mut code = format!("fn element(i: u32) {{\n{}", indices(axes.len()));
    code.push_str("let place_ = 0u;\nlet weight_ = 1.0;\nvar sum = 0.0;\nvar whole = 0.0;\n");
    let changing: Vec<usize> =
        axes.iter().enumerate().filter(|(_, axis)| !axis.stays()).map(|(k, _)| k).collect();
    for k in &changing {
        code.push_str(&format!("let x{k} = coordinate({k}u, at{k});\nlet base{k} = base({k}u, x{k});\n"));
        if resize.crops() {
            code.push_str(&format!(
                "if (x{k} < 0.0 || x{k} > f32(from_size({k}u)) - 1.0) {{
                set_y(i, p.extrapolation);
                return;
                }}\n"
            ));
        }
    }
    let mut outer = String::from("_");
    for (k, _) in axes.iter().enumerate().filter(|(_, axis)| axis.stays()) {
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
    code
}
