//! `RotaryEmbedding` of ONNX and of `com.microsoft`: rotates pairs of each head's elements by the
//! angles of a position. A position out of range of the caches reads the nearest row.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

wgpu_kernels![
    WgpuKernel::new(
        KernelDef { op: "RotaryEmbedding", types: &[("T", FLOATS)], ..KernelDef::BASE },
        standard
    ),
    WgpuKernel::new(
        KernelDef { domain: MICROSOFT, op: "RotaryEmbedding", types: &[("T", FLOATS)], ..KernelDef::BASE },
        microsoft
    ),
];

/// The angle caches, the positions of tokens, and how many leading elements of a head are rotated.
struct Angles<'a> {
    cos: &'a Operand,
    sin: &'a Operand,
    ids: Option<&'a Operand>,
    /// Whether there is a single position, which is the first of every sequence.
    one_id: bool,
    heads: usize,
    rotated: Option<usize>,
}

/// Reads a size attribute, 0 by default.
fn count_of(cx: &OpCx<'_>, name: &str) -> Result<usize> {
    let value = cx.attrs.find_int(name).unwrap_or(0);
    usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
}

fn standard(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (cos, sin, ids) = (cx.input(1)?, cx.input(2)?, cx.find_input(3));
    let rotated = count_of(cx, "rotary_embedding_dim")?;
    let rotated = (rotated > 0).then_some(rotated);
    rotate(cx, &Angles { cos, sin, ids, one_id: false, heads: count_of(cx, "num_heads")?, rotated })
}

fn microsoft(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (ids, cos, sin) = (cx.input(1)?, cx.input(2)?, cx.input(3)?);
    ensure!(cos.rank() == 2, InvalidArgument, "cos_cache has shape {:?}, expected rank 2", cos.shape);
    let width = cos.size(1).saturating_mul(2);
    let rotated = count_of(cx, "rotary_embedding_dim")?;
    ensure!(rotated == 0 || rotated == width, InvalidArgument, "caches of {width} for {rotated} elements");
    let heads = match (count_of(cx, "num_heads")?, &*cx.input(0)?.shape) {
        // Without `num_heads`, a head is as wide as the caches cover.
        (0, [_, _, hidden]) => hidden.checked_div(width).unwrap_or(0),
        (heads, _) => heads,
    };
    let one_id = ids.rank() <= 1;
    rotate(cx, &Angles { cos, sin, ids: Some(ids), one_id, heads, rotated: Some(width) })
}

/// The layout of heads in X.
struct Heads {
    batch: usize,
    heads: usize,
    sequence: usize,
    size: usize,
    /// Whether it is token-major, with heads after the sequence.
    last: bool,
}

impl Heads {
    fn new(shape: &[usize], heads: usize) -> Result<Heads> {
        match (shape, heads) {
            (&[batch, heads, sequence, size], _) => Ok(Heads { batch, heads, sequence, size, last: false }),
            (&[batch, sequence, hidden], heads) if heads > 0 && hidden.is_multiple_of(heads) => {
                Ok(Heads { batch, heads, sequence, size: hidden / heads, last: true })
            }
            (shape, heads) => {
                Err(error!(InvalidArgument, "X of shape {shape:?} does not split into {heads} heads"))
            }
        }
    }
}

impl Angles<'_> {
    /// Returns the number of rows in the caches, after checking that they fit the heads.
    fn rows(&self, heads: &Heads, rotated: usize) -> Result<usize> {
        let (cos, sin, half) = (&self.cos.shape, &self.sin.shape, rotated / 2);
        let fits = rotated <= heads.size && rotated.is_multiple_of(2) && cos == sin;
        ensure!(
            fits && cos.last() == Some(&half),
            InvalidArgument,
            "caches {cos:?} and {sin:?} for {rotated} of {} elements",
            heads.size
        );
        let rows = self.cos.count().checked_div(half).unwrap_or(0);
        let (tokens, given) =
            (heads.batch.saturating_mul(heads.sequence), self.ids.map_or(rows, Operand::count));
        let expected = if self.one_id { 1 } else { tokens };
        let enough = given == expected || (half == 0 && self.ids.is_none());
        ensure!(
            enough,
            InvalidArgument,
            "got {given} positions, expected one for each of the {tokens} tokens"
        );
        ensure!(rows > 0 || half == 0, InvalidArgument, "the caches are empty");
        Ok(rows)
    }

    /// The expression of a token's row in the caches.
    fn row(&self) -> &'static str {
        match (self.ids, self.one_id) {
            (Some(_), true) => "ids(0u) + i32(token % p.sequence)",
            (Some(_), false) => "ids(token)",
            (None, _) => "i32(token)",
        }
    }
}

fn rotate(cx: &OpCx<'_>, angles: &Angles<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if x.count() == 0 {
        return Ok(Vec::new());
    }
    let heads = Heads::new(&x.shape, angles.heads)?;
    let rotated = angles.rotated.unwrap_or(heads.size);
    let mut shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .read("cos_cache", angles.cos)
        .read("sin_cache", angles.sin)
        .number("half", rotated / 2)
        .number("size", heads.size)
        .number("heads", heads.heads)
        .number("sequence", heads.sequence)
        .number("rows", angles.rows(&heads, rotated)?);
    if let Some(ids) = angles.ids {
        shader = shader.read("ids", ids);
    }
    let token = match heads.last {
        true => "head / p.heads",
        false => "head / (p.heads * p.sequence) * p.sequence + head % p.sequence",
    };
    let (pair, second, distance) = match cx.attrs.find_int("interleaved").unwrap_or(0) != 0 {
        true => ("(at >> 1u)", "(at & 1u) == 1u", "1u"),
        false => ("at % p.half", "at >= p.half", "p.half"),
    };
    let row = angles.row();
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
