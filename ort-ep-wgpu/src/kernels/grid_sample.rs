//! `GridSample` samples images at the coordinates of a grid; `AffineGrid` generates such a grid.

use ort_core::dtype::TypeSet;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::problem::{AffineGrid, GridSample};
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::indexing::{bits_of, pick};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, strides};
use crate::shader::{Shader, TYPES};

const fn grid_sample(
    types: &'static [(&'static str, TypeSet)],
    when: fn(&NodeView<'_>) -> bool,
) -> WgpuKernel {
    WgpuKernel::new(KernelDef { op: "GridSample", types, when, ..KernelDef::BASE }, sampled)
}

wgpu_kernels![
    grid_sample(&[("T1", TYPES), ("T2", FLOATS)], |node| GridSample::moves(node.attrs()) && of_image(node)),
    grid_sample(&[("T1", FLOATS), ("T2", FLOATS)], |node| !GridSample::moves(node.attrs()) && of_image(node)),
    WgpuKernel::new(
        KernelDef { op: "AffineGrid", types: &[("T1", FLOATS)], host_inputs: &[1], ..KernelDef::BASE },
        affine_grid
    ),
];

/// Returns whether the input has one to three spatial axes, or an unknown rank.
fn of_image(node: &NodeView<'_>) -> bool {
    node.rank(0).is_none_or(|rank| (3..=5).contains(&rank))
}

/// Generates `position(x, size)`, the pixel coordinate of a grid value, and `place(index, size)`,
/// the pixel at an integer coordinate, or -1 for none.
fn places(cx: &OpCx<'_>) -> Result<String> {
    let corners = cx.attrs.flag("align_corners")?;
    let (padding, mode) = (cx.attrs.string("padding_mode")?, cx.attrs.string("mode")?);
    let unscaled = if corners { "(v + 1.0) * 0.5 * (n - 1.0)" } else { "((v + 1.0) * n - 1.0) * 0.5" };
    let rounded = if mode == "nearest" { "x = round(x);" } else { "" };
    let half = if corners { "0.0" } else { "0.5" };
    // Cubic mode pads the pixels that it reads, not the coordinate, as PyTorch and ONNX Runtime do.
    let moved = match padding {
        "border" if mode != "cubic" => "x = clamp(x, 0.0, n - 1.0);",
        "reflection" if mode != "cubic" => "x = reflected(x, n);",
        _ => "",
    };
    let outside = match padding {
        "zeros" => "return -1;",
        "border" => "return clamp(i32(clamp(index, 0.0, last)), 0, i32(size) - 1);",
        "reflection" => "return clamp(i32(reflected(index, f32(size))), 0, i32(size) - 1);",
        other => return Err(error!(InvalidGraph, "the padding mode '{other}' is not known")),
    };
    Ok(format!(
        "fn reflected(x: f32, n: f32) -> f32 {{
            let low = -{half};
            let range = n - 1.0 + {half} - low;
            if (range <= 0.0) {{ return low; }}
            let far = abs(x - low);
            let distance = far - 2.0 * range * trunc(far / (2.0 * range));
            return low + select(distance, 2.0 * range - distance, distance > range);
        }}
        fn position(v: f32, size: u32) -> f32 {{
            let n = f32(size);
            var x = {unscaled};
            {rounded}
            if (x < -{half} || x > n - 1.0 + {half}) {{ {moved} }}
            return x;
        }}
        fn place(index: f32, size: u32) -> i32 {{
            let last = f32(size) - 1.0;
            if (index >= 0.0 && index <= last) {{ return min(i32(index), i32(size) - 1); }}
            {outside}
        }}\n"
    ))
}

fn sampled(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, grid, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let GridSample { channels, image, points, .. } = GridSample::new(&x.shape, &grid.shape)?;
    // Indices of pixels are signed, because -1 stands for none.
    ensure!(x.count() <= i32::MAX as usize, NotImplemented, "an image {:?} is beyond 31 bits", x.shape);
    let (rank, pixels) = (image.len(), image.iter().product());
    let mode = cx.attrs.string("mode")?;
    let shader = Shader::new(cx)
        .sizes("sizes", &image)
        .sizes("steps", &strides(&image))
        .number("points", points)
        .number("channels", channels)
        .number("pixels", pixels)
        .read("grid", grid);
    let places = places(cx)?;
    let start = format!(
        "let plane = i / p.points;
        let point = (plane / p.channels * p.points + (i - plane * p.points)) * {rank}u;
        let base = plane * p.pixels;\n"
    );
    if mode == "nearest" {
        let code = format!("{places}fn picked(i: u32) -> x_t {{\n{start}{}}}\n", nearest(rank, pixels));
        return Ok(vec![pick(shader.read("x", &bits_of(x)?), y, &code)?]);
    }
    let code = format!("{places}fn element(i: u32) {{\n{start}{}}}\n", summed(mode, rank, pixels)?);
    Ok(vec![shader.read("x", x).write("y", y).each(y.count(), &code)?])
}

/// Generates the coordinate along axis `k`. The grid lists the innermost axis first.
fn coordinate(k: usize, rank: usize) -> String {
    format!("let x{k} = position(grid(point + {}u), sizes({k}u));\n", rank - 1 - k)
}

fn nearest(rank: usize, pixels: usize) -> String {
    let mut code = String::from("var at = base;\n");
    // Without pixels there is nothing to read.
    for k in (0..rank).filter(|_| pixels > 0) {
        code.push_str(&coordinate(k, rank));
        code.push_str(&format!(
            "let place{k} = place(trunc(x{k}), sizes({k}u));
            if (place{k} < 0) {{ return x_t(0); }}
            at += u32(place{k}) * steps({k}u);\n"
        ));
    }
    code.push_str(if pixels > 0 { "return x(at);\n" } else { "return x_t(0);\n" });
    code
}

/// Generates nested loops over the taps of all axes.
fn summed(mode: &str, rank: usize, pixels: usize) -> Result<String> {
    let (first, count, weight) = match mode {
        "linear" => (0, 2, "1.0 - d"),
        // Cubic convolution with a = -0.75.
        "cubic" => (
            -1,
            4,
            "select(((-0.75 * d + 3.75) * d - 6.0) * d + 3.0, (1.25 * d - 2.25) * d * d + 1.0, d <= 1.0)",
        ),
        other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
    };
    if pixels == 0 {
        return Ok("set_y(i, 0.0);\n".to_owned());
    }
    let mut code = String::from("let at_ = base;\nlet weight_ = 1.0;\nvar sum = 0.0;\n");
    (0..rank).for_each(|k| code.push_str(&coordinate(k, rank)));
    let mut outer = String::from("_");
    for k in 0..rank {
        code.push_str(&format!(
            "for (var n{k} = 0; n{k} < {count}; n{k}++) {{
            let tap{k} = floor(x{k}) + f32(n{k} + ({first}));
            let place{k} = place(tap{k}, sizes({k}u));
            if (place{k} < 0) {{ continue; }}
            let at_{k} = at{outer} + u32(place{k}) * steps({k}u);
            var weight_{k} = weight{outer};
            {{ let d = abs(x{k} - tap{k}); weight_{k} *= {weight}; }}\n"
        ));
        outer = format!("_{k}");
    }
    code.push_str(&format!("sum += weight{outer} * x(at{outer});\n{}set_y(i, sum);\n", "}\n".repeat(rank)));
    Ok(code)
}

fn affine_grid(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (theta, y) = (cx.input(0)?, cx.output(0)?);
    let grid = AffineGrid::new(cx.attrs, &theta.shape, &y.shape)?;
    let coordinate = match grid.align_corners {
        true => "select(2.0 * at / (n - 1.0) - 1.0, -1.0, n < 2.0)",
        false => "(2.0 * at + 1.0) / n - 1.0",
    };
    let shader = Shader::new(cx)
        .read("theta", theta)
        .write("y", y)
        .sizes("sizes", &grid.inner_first)
        .number("pixels", grid.points)
        .constant("RANK", grid.inner_first.len());
    let code = format!(
        "fn element(i: u32) {{
            let place = i / RANK;
            let batch = place / p.pixels;
            let row = (batch * RANK + (i - place * RANK)) * (RANK + 1u);
            var rest = place - batch * p.pixels;
            var sum = theta(row + RANK);
            for (var k = 0u; k < RANK; k++) {{
                let at = f32(rest % sizes(k));
                let n = f32(sizes(k));
                sum += theta(row + k) * ({coordinate});
                rest /= sizes(k);
            }}
            set_y(i, sum);
        }}"
    );
    Ok(vec![shader.each(y.count(), &code)?])
}
