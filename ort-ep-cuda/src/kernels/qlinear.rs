//! `QLinearAdd`, `QLinearMul`, `QLinearSigmoid`, `QLinearLeakyRelu` and `QLinearConcat` on 8-bit
//! quantized values.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure};

use super::quantize::OF_BLOCK;
use super::type_tags::quantized_tag;
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, Walk};

const fn kernel(op: &'static str, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
    CudaKernel::new(KernelDef { domain: MICROSOFT, op, ..KernelDef::BASE }, launches)
}

const fn pairs(op: &'static str, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
    let kernel = kernel(op, launches);
    CudaKernel { def: KernelDef { when: few_axes, ..kernel.def }, ..kernel }
}

/// A unary kernel, which may run in place: a thread reads exactly the bytes it writes.
const fn mapped(op: &'static str, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
    let kernel = kernel(op, launches);
    CudaKernel { def: KernelDef { in_place: &[(0, 0)], ..kernel.def }, ..kernel }
}

cuda_kernels![
    pairs("QLinearAdd", |cx| binary(cx, false)),
    pairs("QLinearMul", |cx| binary(cx, true)),
    mapped("QLinearSigmoid", |cx| unary(cx, SIGMOID, 0.0)),
    mapped("QLinearLeakyRelu", |cx| unary(cx, LEAKY_RELU, cx.attrs.float("alpha")?)),
    kernel("QLinearConcat", concat),
];

/// The function numbers of `cu/quant.cu`.
const SAME: usize = 0;
const SIGMOID: usize = 1;
const LEAKY_RELU: usize = 2;

fn few_axes(node: &NodeView<'_>) -> bool {
    [0, 3].into_iter().all(|side| node.rank(side).is_none_or(|rank| rank <= MOST_AXES))
}

fn binary(cx: &OpCx<'_>, multiplies: bool) -> Result<Vec<Launch>> {
    let (mut a, mut b, c) = (0, 3, cx.output(0)?);
    if c.count() == 0 {
        return Ok(Vec::new());
    }
    let of = |side: usize| -> Result<&[usize]> { Ok(&cx.input(side)?.shape) };
    let mut walk = Walk::broadcast(&c.shape, &[of(a)?, of(b)?])?;
    // An operand that is constant along a row goes second, as on the CPU: the order affects the
    // last bit of the sum.
    if walk.steps.first().is_some_and(|steps| steps.last().is_none_or(|step| *step == 0)) {
        (a, b) = (b, a);
        walk = Walk::broadcast(&c.shape, &[of(a)?, of(b)?])?;
    }
    let mut launch = Launch::new("quant", "qlinear_binary").threads(c.count().div_ceil(4))?;
    for side in [a, b] {
        launch = launch.tensor(cx.input(side)?).tensor(cx.input(side + 1)?);
        launch = launch.find_tensor(cx.find_input(side + 2));
    }
    let launch = launch.tensor(cx.input(6)?).find_tensor(cx.find_input(7)).tensor(c);
    ensure!(walk.sizes.len() <= MOST_AXES, NotImplemented, "{} axes", walk.sizes.len());
    let mut words = vec![walk.sizes.len() as i64];
    let sizes: Vec<i64> = walk.sizes.iter().map(|size| *size as i64).collect();
    for list in [&sizes].into_iter().chain(&walk.steps) {
        words.extend(list.iter().copied().chain(std::iter::repeat(0)).take(MOST_AXES));
    }
    let launch = launch.ints::<{ 1 + 3 * MOST_AXES }>(&words)?.uint(quantized_tag(c.dtype)?)?;
    Ok(vec![launch.uint(multiplies.into())?.uint(c.count())?])
}

/// Requantizes values to another scale and zero point. Consecutive `part` values go to offset
/// `start` of each `row`.
fn map(
    from: [Option<&Operand>; 3],
    to: [Option<&Operand>; 3],
    (function, alpha): (usize, f32),
    [part, row, start]: [usize; 3],
) -> Result<Option<Launch>> {
    let ([Some(x), ..], [Some(y), ..]) = (from, to) else { return Ok(None) };
    let launch = Launch::new("quant", "qlinear_map").grid([x.count().div_ceil(OF_BLOCK), 1, 1])?;
    let [x_scale, x_zero] = [from[1], from[2]];
    let [y_scale, y_zero] = [to[1], to[2]];
    let launch = launch.tensor(x).find_tensor(x_scale).find_tensor(x_zero);
    let launch = launch.find_tensor(y_scale).find_tensor(y_zero).tensor(y).uint(quantized_tag(y.dtype)?)?;
    let launch = launch.uint(function)?.float(alpha).uint(part)?.uint(row)?.uint(start)?;
    Ok(Some(launch.uint(x.count())?))
}

fn unary(cx: &OpCx<'_>, function: usize, alpha: f32) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let from = [Some(x), Some(cx.input(1)?), cx.find_input(2)];
    let to = [Some(y), Some(cx.input(3)?), cx.find_input(4)];
    Ok(map(from, to, (function, alpha), [1, 1, 0])?.into_iter().collect())
}

/// Writes each tensor, which its scale and zero point follow, to its part of every row.
fn concat(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    let axis = cx.axis(cx.attrs.int("axis")?, y.rank())?;
    let row = |shape: &[usize]| shape.iter().skip(axis).fold(1usize, |row, size| row.saturating_mul(*size));
    let to = [Some(y), Some(cx.input(0)?), Some(cx.input(1)?)];
    let (mut all, mut start) = (Vec::new(), 0);
    for index in (2..cx.inputs.len()).step_by(3) {
        let x = cx.input(index)?;
        let part = row(&x.shape);
        if x.count() > 0 {
            let from = [Some(x), Some(cx.input(index + 1)?), Some(cx.input(index + 2)?)];
            all.extend(map(from, to, (SAME, 0.0), [part, row(&y.shape), start])?);
        }
        start += part;
    }
    Ok(all)
}
