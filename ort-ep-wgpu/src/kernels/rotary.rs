//! `RotaryEmbedding` of ONNX and of `com.microsoft`: rotates pairs of each head's elements by the
//! angles of a position. A position out of range of the caches reads the nearest row.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::Positions;
use ort_gpu::attention::rotary::{self, RotaryPlan};

use super::elementwise::FLOATS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

wgpu_kernels![
    WgpuKernel::new(ROTARY, |cx| rotate(cx, rotary::standard(cx)?)),
    WgpuKernel::new(KernelDef { domain: MICROSOFT, ..ROTARY }, |cx| rotate(cx, rotary::microsoft(cx)?)),
];

const ROTARY: KernelDef = KernelDef { op: "RotaryEmbedding", types: &[("T", FLOATS)], ..KernelDef::BASE };

fn rotate(cx: &OpCx<'_>, plan: Option<RotaryPlan<'_>>) -> Result<Vec<Dispatch>> {
    let Some(RotaryPlan { heads, rotation }) = plan else { return Ok(Vec::new()) };
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mut shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .read("cos_cache", rotation.cos)
        .read("sin_cache", rotation.sin)
        .number("half", rotation.half)
        .number("size", heads.size)
        .number("heads", heads.heads)
        .number("sequence", heads.rows)
        .number("rows", rotation.cache_rows);
    let token = match heads.is_token_major {
        true => "head / p.heads",
        false => "head / (p.heads * p.sequence) * p.sequence + head % p.sequence",
    };
    // The row of a token in the caches.
    let row = match rotation.positions {
        Positions::First(ids) => {
            shader = shader.read("ids", ids);
            "ids(0u) + i32(token % p.sequence)"
        }
        Positions::ByToken(ids) => {
            shader = shader.read("ids", ids);
            "ids(token)"
        }
        Positions::Numbered => "i32(token)",
        Positions::ByPlace => "i32(token % p.sequence)",
    };
    // A pair is two neighbours if interleaved, and otherwise one element of each half.
    let (pair, second, distance) = match rotation.is_interleaved {
        true => ("(at >> 1u)", "(at & 1u) == 1u", "1u"),
        false => ("at % p.half", "at >= p.half", "p.half"),
    };
    let code = format!(
        "fn element(i: u32) {{
            let head = i / p.size;
            let at = i - head * p.size;
            if (at >= 2u * p.half) {{ set_y(i, x(i)); return; }}
            let token = {token};
            let row = u32(clamp({row}, 0, i32(p.rows) - 1)) * p.half + {pair};
            let second = {second};
            let other = x(select(i + {distance}, i - {distance}, second));
            let turned = select(-sin_cache(row), sin_cache(row), second) * other;
            set_y(i, cos_cache(row) * x(i) + turned);
        }}"
    );
    Ok(vec![shader.each(x.count(), &code)?])
}
