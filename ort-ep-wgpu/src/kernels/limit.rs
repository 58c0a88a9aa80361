//! `Clip` and `IsInf`.

use ort_core::ep::KernelDef;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::fill::fill;
use super::generate::float;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, Shader, TYPES};

wgpu_kernels![
    WgpuKernel::new(
        KernelDef {
            op: "Clip",
            types: &[("T", TYPES)],
            in_place: &[(0, 0)],
            host_inputs: &[1, 2],
            ..KernelDef::BASE
        },
        clip,
    ),
    WgpuKernel::new(KernelDef { op: "IsInf", types: &[("T1", FLOATS)], ..KernelDef::BASE }, is_inf),
];

/// If the limits cross, the upper one wins. NaN passes through.
fn clip(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mut shader = Shader::new(cx).read("x", x).write("y", y);
    let mut code = String::from("fn value(i: u32) -> y_t {\nvar v = x(i);\n");
    for (index, name, sign) in [(1, "low", '<'), (2, "high", '>')] {
        if let Some(limit) = cx.find_host(index) {
            shader = limited(shader, x, name, limit)?;
            code += &format!("if (v {sign} p.{name}) {{ v = p.{name}; }}\n");
        }
    }
    Ok(vec![fill(shader, y, &(code + "return v;\n}"))?])
}

/// Adds a limit as a uniform of the type that shaders compute in.
fn limited(shader: Shader, x: &Operand, name: &str, limit: TensorView<'_>) -> Result<Shader> {
    let value = Element::of(x.dtype)?.value;
    if value == "f32" {
        return Ok(shader.float(name, float(limit)?));
    }
    let limit = limit.to_ints()?.first().copied();
    let limit = limit.ok_or_else(|| error!(InvalidArgument, "a limit of Clip is empty"))?;
    let (least, most) =
        if value == "i32" { (i32::MIN.into(), i32::MAX.into()) } else { (0, u32::MAX.into()) };
    // A limit outside of 32 bits is clamped, unless elements would have to become it.
    let idle = if name == "low" { limit <= most } else { limit >= least };
    ensure!(idle, NotImplemented, "the limit {limit} is beyond the 32 bits of the device's integers");
    let limit = limit.clamp(least, most);
    Ok(if value == "i32" { shader.integer(name, limit) } else { shader.number(name, limit as usize) })
}

fn is_inf(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mut hits = vec!["false"];
    if cx.attrs.flag("detect_positive")? {
        hits.push("bits == 0x7f800000u");
    }
    if cx.attrs.flag("detect_negative")? {
        hits.push("bits == 0xff800000u");
    }
    let code = format!(
        "fn value(i: u32) -> y_t {{
            let bits = bitcast<u32>(x(i));
            return select(0u, 1u, {});
        }}",
        hits.join(" || ")
    );
    Ok(vec![fill(Shader::new(cx).read("x", x).write("y", y), y, &code)?])
}
