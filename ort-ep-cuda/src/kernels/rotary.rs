//! `RotaryEmbedding` of ONNX and of ONNX Runtime: rotates pairs of each head's elements by the
//! angles of the position. A position out of range reads the nearest row of the caches.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::heads::{Placing, Positions, Rotation, Rows};
use super::lines::SHORT_FLOATS;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const ROTARY: KernelDef =
    KernelDef { op: "RotaryEmbedding", types: &[("T", SHORT_FLOATS)], ..KernelDef::BASE };

cuda_kernels![
    CudaKernel::new(ROTARY, standard),
    CudaKernel::new(KernelDef { domain: MICROSOFT, ..ROTARY }, microsoft),
];

fn count_of(cx: &OpCx<'_>, name: &str) -> Result<usize> {
    let value = cx.attrs.find_int(name).unwrap_or(0);
    usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
}

fn standard(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let positions = cx.find_input(3).map_or(Positions::ByNumber, Positions::ByToken);
    let width = Some(count_of(cx, "rotary_embedding_dim")?).filter(|width| *width > 0);
    rotate(cx, [1, 2], positions, (count_of(cx, "num_heads")?, width))
}

fn microsoft(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (ids, cos) = (cx.input(1)?, cx.input(2)?);
    ensure!(cos.rank() == 2, InvalidArgument, "cos_cache has shape {:?}, expected rank 2", cos.shape);
    let width = cos.size(1).saturating_mul(2);
    let asked = count_of(cx, "rotary_embedding_dim")?;
    ensure!(asked == 0 || asked == width, InvalidArgument, "caches of {width} for {asked} elements");
    let positions = if ids.rank() <= 1 { Positions::BehindFirst(ids) } else { Positions::ByToken(ids) };
    let heads = match count_of(cx, "num_heads")? {
        // Without `num_heads`, the caches span a whole head.
        0 => cx.input(0)?.size(2).checked_div(width).unwrap_or(0),
        heads => heads,
    };
    rotate(cx, [2, 3], positions, (heads, Some(width)))
}

/// Rotates the first `width` elements of each head, or all; `caches` are the inputs with cosines
/// and sines.
fn rotate(
    cx: &OpCx<'_>,
    caches: [usize; 2],
    positions: Positions<'_>,
    (heads, width): (usize, Option<usize>),
) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if x.count() == 0 {
        return Ok(Vec::new());
    }
    let (sizes, by_token) = match *x.shape {
        [batch, heads, rows, size] => ([batch, heads, rows, size], false),
        [batch, rows, hidden] if heads > 0 && hidden % heads == 0 => {
            ([batch, heads, rows, hidden / heads], true)
        }
        ref shape => {
            return Err(error!(InvalidArgument, "X of shape {shape:?} does not split into {heads} heads"));
        }
    };
    let [batch, heads, rows, size] = sizes;
    let [cos, sin] = caches.map(|cache| cx.input(cache));
    let (cos, sin, width) = (cos?, sin?, width.unwrap_or(size));
    let half = width / 2;
    let fits = width <= size && width % 2 == 0 && cos.shape == sin.shape && cos.shape.last() == Some(&half);
    ensure!(fits, InvalidArgument, "caches {:?}, {:?} for {width} of {size}", cos.shape, sin.shape);
    let tokens = batch.saturating_mul(rows);
    let (given, expected) = match positions {
        Positions::ByToken(ids) => (ids.count(), tokens),
        Positions::BehindFirst(ids) => (ids.count(), 1),
        _ => (cos.count().checked_div(half).unwrap_or(tokens), tokens),
    };
    ensure!(
        given == expected,
        InvalidArgument,
        "got {given} positions, expected one for each of the {tokens} tokens"
    );
    let interleaved = cx.attrs.find_int("interleaved").unwrap_or(0) != 0;
    let lie = |operand| match by_token {
        true => Rows::by_token(operand, [heads, rows, size], (0, 1)),
        false => Rows::by_head(operand, [heads, rows, size]),
    };
    let rotation = Some(Rotation { angles: [cos, sin], half, positions, interleaved });
    Placing { rotation, ..Placing::new(sizes, &lie(x)) }.launches(&lie(y), rows)
}
