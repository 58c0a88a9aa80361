//! Row normalizations: `LayerNormalization`, `RMSNormalization`, `SimplifiedLayerNormalization`,
//! and their fusions with a residual add.

use ort_core::Result;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::nn::problem::{RowNorm, centers};
use ort_core::spec::MICROSOFT;

use super::elementwise::FLOATS;
use super::norm::{INVERSE_DEVIATION, Norm, Written, reading};
use super::rows::TeamRows;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand, Walk};
use crate::shader::{MOST_AXES, Shader};

const LAYER: KernelDef = KernelDef {
    op: "LayerNormalization",
    types: &[("T", FLOATS), ("U", FLOATS)],
    in_place: &[(0, 0)],
    when: few_axes,
    ..KernelDef::BASE
};

/// Input and output may differ in type, so they must not alias.
const MIXED: KernelDef =
    KernelDef { types: &[("T", FLOATS), ("U", FLOATS), ("V", FLOATS)], in_place: &[], ..LAYER };

/// Preferred over [`MIXED`] if the types are equal: input and output may alias.
const SAME: KernelDef = KernelDef {
    rank: 1,
    in_place: &[(0, 0)],
    when: |node| few_axes(node) && node.dtype(0) == node.dtype(1),
    ..MIXED
};

const SKIP: KernelDef = KernelDef {
    domain: MICROSOFT,
    op: "SkipLayerNormalization",
    types: &[("T", FLOATS), ("U", FLOATS)],
    in_place: &[(0, 0), (1, 0), (0, 3), (1, 3)],
    ..KernelDef::BASE
};

wgpu_kernels![
    WgpuKernel::new(LAYER, layer),
    WgpuKernel::new(KernelDef { op: "RMSNormalization", ..MIXED }, layer),
    WgpuKernel::new(KernelDef { op: "RMSNormalization", ..SAME }, layer),
    WgpuKernel::new(KernelDef { op: "SimplifiedLayerNormalization", ..MIXED }, layer),
    WgpuKernel::new(KernelDef { op: "SimplifiedLayerNormalization", ..SAME }, layer),
    WgpuKernel::new(SKIP, skip),
    WgpuKernel::new(KernelDef { op: "SkipSimplifiedLayerNormalization", ..SKIP }, skip),
];

/// The storage bindings that every device supports.
const BINDINGS: usize = 8;

/// Returns whether the rank is known and at most [`MOST_AXES`].
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES)
}

fn layer(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let problem = RowNorm::from_axis(cx.attrs, &y.shape)?;
    let (rows, centers) = (TeamRows::rows(problem.count, problem.len), centers(cx.op));
    let (mut shader, mut result) = parameter(reading(cx, x), ("scale", cx.input(1)?), y, &rows)?;
    result = format!("v * {result}");
    if let Some(bias) = cx.find_input(2) {
        let (with_bias, added) = parameter(shader, ("bias", bias), y, &rows)?;
        (shader, result) = (with_bias, format!("{result} + {added}"));
    }
    let epsilon = cx.attrs.float("epsilon")?;
    let norm = Norm { rows, value: "x(place)", centers, factor: INVERSE_DEVIATION, result: &result, epsilon };
    let (mean, factor) = match centers {
        true => (cx.find_output(1), cx.find_output(2)),
        false => (None, cx.find_output(1)),
    };
    Ok(vec![norm.dispatch(shader, Written { result: Some(y), mean, factor, value: None })?])
}

/// Adds a scale or bias that broadcasts to rows. Returns the expression of its element for element
/// `r` of a row, at `place`.
fn parameter(
    shader: Shader,
    (name, parameter): (&'static str, &Operand),
    whole: &Operand,
    rows: &TeamRows,
) -> Result<(Shader, String)> {
    let shader = shader.read(name, parameter);
    let walk = Walk::broadcast(&whole.shape, &[&parameter.shape])?;
    let trailing = parameter.shape.iter().rev().scan(1usize, |all, size| {
        *all = all.saturating_mul(*size);
        Some(*all)
    });
    // One row shared by all: its trailing axes span exactly a row, so index `r` suffices.
    let is_row = parameter.count() == rows.len
        && trailing.zip(row_sizes(whole)).all(|(own, row)| own == row.min(rows.len));
    if is_row {
        return Ok((shader, format!("{name}(r)")));
    }
    Ok((shader.walk_over(&format!("{name}_walk"), &walk, &[name]), format!("{name}(at_{name}(place))")))
}

/// The elements of the last axis, of the last two, and so on.
fn row_sizes(whole: &Operand) -> impl Iterator<Item = usize> {
    whole.shape.iter().rev().scan(1usize, |all, size| {
        *all = all.saturating_mul(*size);
        Some(*all)
    })
}

fn skip(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, skip, gamma) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    // Without results the statistics have the rows of the input.
    let y = cx.find_output(0).or(cx.find_output(3)).unwrap_or(x);
    let centers = centers(cx.op);
    let (beta, bias) = match centers {
        true => (cx.find_input(3), cx.find_input(4)),
        false => (None, cx.find_input(3)),
    };
    let (count, own) = (y.count(), skip.count());
    let parameters = [Some(gamma), beta, bias].into_iter().flatten().map(Operand::count);
    let problem = RowNorm::of_skip(&y.shape, own, parameters)?;
    let added = if own == count { "skip(place)" } else { "skip(place % p.skips)" };
    let value = format!("x(place) + {added}{}", if bias.is_some() { " + bias(r)" } else { "" });
    let result = if beta.is_some() { "v * gamma(r) + beta(r)" } else { "v * gamma(r)" };
    let norm = Norm {
        rows: TeamRows::rows(problem.count, problem.len),
        value: &value,
        centers,
        factor: INVERSE_DEVIATION,
        result,
        epsilon: cx.attrs.float("epsilon")?,
    };
    let shader = || {
        let shader = reading(cx, x).read("skip", skip).number("skips", own);
        bias.into_iter().fold(shader, |shader, bias| shader.read("bias", bias))
    };
    let full = || {
        let shader = shader().read("gamma", gamma);
        beta.into_iter().fold(shader, |shader, beta| shader.read("beta", beta))
    };
    let statistics = Written { mean: cx.find_output(1), factor: cx.find_output(2), ..Written::default() };
    let written = Written { result: cx.find_output(0), value: cx.find_output(3), ..statistics };
    let outputs = [written.result, written.mean, written.factor, written.value].iter().flatten().count();
    // Input, skip and scale, then the optional inputs and the outputs.
    if 3 + [beta, bias].iter().flatten().count() + outputs <= BINDINGS {
        return Ok(vec![norm.dispatch(full(), written)?]);
    }
    // Over the limit: two dispatches. The statistics come first, because the second may overwrite
    // the input in place.
    let rest = Written { mean: None, factor: None, ..written };
    Ok(vec![norm.dispatch(shader(), statistics)?, norm.dispatch(full(), rest)?])
}
