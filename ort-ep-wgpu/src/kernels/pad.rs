//! `Pad`, `CenterCropPad` and `Tile`: extend each dimension beyond its ends.

use std::fmt::Write as _;

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{PadMode, Padded};
use ort_gpu::read;

use super::copy::as_bits;
use super::fill::{few_axes, fill};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
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
        pad,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "Tile",
            types: &[("T", TYPES)],
            host_inputs: &[1],
            when: few_axes,
            ..KernelDef::BASE
        },
        pad,
    ),
];

fn pad(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let Some(padded) = read::padded(cx)? else { return Ok(Vec::new()) };
    let (x, y) = (as_bits(cx.input(0)?), as_bits(cx.output(0)?));
    let padded = padded.merged();
    let shader = Shader::new(cx)
        .read("x", &x)
        .write("y", &y)
        .sizes("pad_total", &padded.list(|axis| axis.total))
        .sizes("pad_before", &padded.list(|axis| axis.before))
        .sizes("pad_length", &padded.list(|axis| axis.length))
        .sizes("pad_step", &padded.steps())
        .number("x_start", padded.start());
    // One element, zero by default.
    let padding = cx.find_input(2).filter(|padding| padding.count() > 0 && padded.mode == PadMode::Constant);
    let (shader, outside) = match padding {
        Some(padding) => (shader.read("padding", &as_bits(padding)), "padding(0u)"),
        None => (shader, "y_t(0)"),
    };
    Ok(vec![fill(shader, &y, &value(&padded, outside))?])
}

/// Generates `value(i)`, the value of an output element.
fn value(padded: &Padded, outside: &str) -> String {
    let mut code = String::from(
        "fn value(i: u32) -> y_t {\nvar rest = i; var at = p.x_start; var k = 0; var n = 0; var last = 0;\n",
    );
    for (index, axis) in padded.axes.iter().enumerate().rev() {
        // The outermost axis takes what remains, without a division.
        let place = if index == 0 { "rest".to_owned() } else { format!("rest % pad_total({index}u)") };
        // Writing to a string does not fail.
        let _ =
            writeln!(code, "k = i32({place}) - i32(pad_before({index}u)); n = i32(pad_length({index}u));");
        // GLSL leaves `%` of negative numbers undefined.
        let moved = match padded.mode {
            _ if axis.is_plain() => String::new(),
            PadMode::Constant => format!("if (k < 0 || k >= n) {{ return {outside}; }}"),
            PadMode::Edge => "k = clamp(k, 0, n - 1);".to_owned(),
            PadMode::Wrap => "k -= k / n * n; if (k < 0) { k += n; }".to_owned(),
            PadMode::Reflect => {
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
