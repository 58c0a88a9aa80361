//! `Pad`, `CenterCropPad` and `Tile`: extend each dimension beyond its ends.

use std::fmt::Write as _;

use ort_core::ep::KernelDef;
use ort_core::ops::tensor::geometry::normalize_axes;
use ort_core::{Result, ensure, error};

use super::copy::as_bits;
use super::fill::{few_axes, fill};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand, strides};
use crate::shader::{Shader, TYPES};

wgpu_kernels![
    WgpuKernel::new(
        KernelDef {
            op: "Pad",
            types: &[("T", TYPES)],
            host_inputs: &[1, 3],
            when: few_axes,
            ..KernelDef::BASE
        },
        pad,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "CenterCropPad",
            types: &[("T", TYPES)],
            host_inputs: &[1],
            when: few_axes,
            ..KernelDef::BASE
        },
        center_crop_pad,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "Tile",
            types: &[("T", TYPES)],
            host_inputs: &[1],
            when: few_axes,
            ..KernelDef::BASE
        },
        tile,
    ),
];

/// What the elements outside of the tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

/// A dimension of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    /// Its size in the result.
    total: usize,
    /// The padding before the tensor's elements.
    before: usize,
    /// The tensor's elements that remain after negative pads cropped some.
    length: usize,
    /// The first of those.
    first: usize,
    /// The size in the tensor.
    size: usize,
}

impl Axis {
    /// A padded dimension. Negative pads crop first, and the mode extends what remains.
    fn padded(size: usize, (begin, end): (i64, i64), mode: Mode) -> Result<Axis> {
        let invalid = || error!(InvalidArgument, "pads {begin} and {end} are out of range for size {size}");
        let cut = |pad: i64| usize::try_from(pad.min(0).unsigned_abs()).unwrap_or(usize::MAX);
        let total = size as i128 + i128::from(begin) + i128::from(end);
        let total = usize::try_from(total).map_err(|_| invalid())?;
        let before = usize::try_from(begin.max(0)).map_err(|_| invalid())?;
        let first = cut(begin).min(size);
        let length = (size - first).saturating_sub(cut(end));
        let repeats = length > 0 || mode == Mode::Constant || total == 0;
        ensure!(repeats, InvalidArgument, "size {size} has no elements to repeat");
        Ok(Axis { total, before, length, first, size })
    }

    fn is_plain(&self) -> bool {
        self.total == self.size && self.before == 0 && self.first == 0 && self.length == self.size
    }

    /// Merges an unchanged inner axis into this one.
    fn around(&self, inner: &Axis) -> Axis {
        let scaled = |number: usize| number.saturating_mul(inner.size);
        Axis {
            total: scaled(self.total),
            before: scaled(self.before),
            length: scaled(self.length),
            first: scaled(self.first),
            size: scaled(self.size),
        }
    }
}

/// Merges the dimensions into as few as possible.
fn joined(axes: &[Axis], mode: Mode) -> Vec<Axis> {
    let mut result: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes {
        // `Reflect` and `Edge` repeat single elements, so a padded axis cannot absorb an inner one.
        let by_blocks = matches!(mode, Mode::Constant | Mode::Wrap);
        match result.last_mut() {
            Some(last) if axis.is_plain() && (by_blocks || last.is_plain()) => *last = last.around(axis),
            _ => result.push(*axis),
        }
    }
    result
}

fn pad(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    let mode = match cx.attrs.string("mode")? {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
    };
    let given = cx.ints(1)?;
    let axes = match cx.find_ints(3)? {
        Some(axes) => normalize_axes(&axes, x.rank())?,
        None => (0..x.rank()).collect(),
    };
    ensure!(
        given.len() == 2 * axes.len(),
        InvalidArgument,
        "{} pads are given for axes {axes:?}",
        given.len()
    );
    let (begins, ends) = given.split_at(axes.len());
    let mut pads = vec![(0, 0); x.rank()];
    for (axis, (begin, end)) in axes.iter().zip(begins.iter().zip(ends)) {
        pads.get_mut(*axis).into_iter().for_each(|pads| *pads = (*begin, *end));
    }
    padded(cx, &pads, mode, cx.find_input(2))
}

fn center_crop_pad(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, target) = (cx.input(0)?, cx.ints(1)?);
    let axes = match cx.attrs.find_ints("axes") {
        Some(axes) => normalize_axes(axes, x.rank())?,
        None => (0..x.rank()).collect(),
    };
    ensure!(
        target.len() == axes.len(),
        InvalidArgument,
        "{} sizes are given for axes {axes:?}",
        target.len()
    );
    let mut pads = vec![(0, 0); x.rank()];
    for (axis, size) in axes.iter().zip(&target) {
        // Rounded towards zero: the odd element is cropped or added at the end.
        let difference = size.saturating_sub(x.size(*axis) as i64);
        let half = difference / 2;
        pads.get_mut(*axis).into_iter().for_each(|pads| *pads = (half, difference - half));
    }
    padded(cx, &pads, Mode::Constant, None)
}

fn tile(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, repeats) = (cx.input(0)?, cx.ints(1)?);
    ensure!(
        repeats.len() == x.rank(),
        InvalidArgument,
        "repeats {repeats:?} do not have one value for each axis of shape {:?}",
        x.shape
    );
    let axes = x.shape.iter().zip(&repeats).map(|(size, repeat)| {
        let total = size.saturating_mul(usize::try_from(*repeat).unwrap_or(0));
        Axis { total, before: 0, length: *size, first: 0, size: *size }
    });
    extended(cx, &axes.collect::<Vec<Axis>>(), Mode::Wrap, None)
}

fn padded(
    cx: &OpCx<'_>,
    pads: &[(i64, i64)],
    mode: Mode,
    padding: Option<&Operand>,
) -> Result<Vec<Dispatch>> {
    // Next to a size of 0, another may be arbitrarily large.
    if cx.output(0)?.count() == 0 {
        return Ok(Vec::new());
    }
    let sizes = cx.input(0)?.shape.iter().zip(pads);
    let axes = sizes.map(|(size, pads)| Axis::padded(*size, *pads, mode)).collect::<Result<Vec<Axis>>>()?;
    extended(cx, &axes, mode, padding)
}

/// Returns the dispatch for these dimensions. `padding` is a single element, zero by default.
fn extended(cx: &OpCx<'_>, axes: &[Axis], mode: Mode, padding: Option<&Operand>) -> Result<Vec<Dispatch>> {
    let (x, y) = (as_bits(cx.input(0)?), as_bits(cx.output(0)?));
    let fits = axes.iter().map(|axis| axis.total).eq(y.shape.iter().copied());
    ensure!(
        fits,
        InvalidArgument,
        "a tensor of shape {:?} cannot be cropped or padded to shape {:?}",
        x.shape,
        y.shape
    );
    let axes = joined(axes, mode);
    let list = |of: fn(&Axis) -> usize| axes.iter().map(of).collect::<Vec<usize>>();
    let steps = strides(&list(|axis| axis.size));
    let start = axes.iter().zip(&steps).map(|(axis, step)| axis.first.saturating_mul(*step)).sum::<usize>();
    let mut shader = Shader::new(cx).read("x", &x).write("y", &y);
    shader =
        shader.sizes("pad_total", &list(|axis| axis.total)).sizes("pad_before", &list(|axis| axis.before));
    shader = shader.sizes("pad_length", &list(|axis| axis.length)).sizes("pad_step", &steps);
    shader = shader.number("x_start", start);
    let padding = padding.filter(|padding| padding.count() > 0 && mode == Mode::Constant);
    if let Some(padding) = padding {
        shader = shader.read("padding", &as_bits(padding));
    }
    let outside = if padding.is_some() { "padding(0u)" } else { "y_t(0)" };
    Ok(vec![fill(shader, &y, &value(&axes, mode, outside))?])
}

/// Generates `value(i)`, the value of an output element.
fn value(axes: &[Axis], mode: Mode, outside: &str) -> String {
    let mut code = String::from(
        "fn value(i: u32) -> y_t {\nvar rest = i; var at = p.x_start; var k = 0; var n = 0; var last = 0;\n",
    );
    for (index, axis) in axes.iter().enumerate().rev() {
        let place = if index == 0 { "rest".to_owned() } else { format!("rest % pad_total({index}u)") };
        // Writing to a string does not fail.
        let _ =
            writeln!(code, "k = i32({place}) - i32(pad_before({index}u)); n = i32(pad_length({index}u));");
        // GLSL leaves `%` of negative numbers undefined.
        let moved = match mode {
            _ if axis.is_plain() => String::new(),
            Mode::Constant => format!("if (k < 0 || k >= n) {{ return {outside}; }}"),
            Mode::Edge => "k = clamp(k, 0, n - 1);".to_owned(),
            Mode::Wrap => "k -= k / n * n; if (k < 0) { k += n; }".to_owned(),
            Mode::Reflect => {
                "last = max(n - 1, 1); k -= k / (2 * last) * (2 * last); if (k < 0) { k += 2 * last; }\n\
                 k = min(min(k, 2 * last - k), n - 1);"
                    .to_owned()
            }
        };
        let _ = writeln!(code, "{moved}\nat += u32(k) * pad_step({index}u);");
        if index > 0 {
            let _ = writeln!(code, "rest = rest / pad_total({index}u);");
        }
    }
    code + "return x(at);\n}"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_stay_join_those_around_them() -> Result<()> {
        let axes = |pads: &[(i64, i64)], mode| {
            let axes = [2, 3, 4].iter().zip(pads).map(|(size, pads)| Axis::padded(*size, *pads, mode));
            Ok::<_, ort_core::Error>(joined(&axes.collect::<Result<Vec<Axis>>>()?, mode))
        };
        let one = axes(&[(1, 1), (0, 0), (0, 0)], Mode::Constant)?;
        assert_eq!(one, [Axis { total: 48, before: 12, length: 24, first: 0, size: 24 }]);
        assert_eq!(axes(&[(1, 1), (0, 0), (0, 0)], Mode::Edge)?.len(), 2);
        assert_eq!(axes(&[(0, 0), (0, 0), (1, 0)], Mode::Reflect)?.len(), 2);
        assert!(axes(&[(0, 0), (0, 0), (-5, 0)], Mode::Edge).is_err());
        Ok(())
    }
}
