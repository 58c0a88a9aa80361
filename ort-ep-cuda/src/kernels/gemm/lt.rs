//! GEMM by cuBLASLt, if it is found. cuBLASLt is column-major, so we exchange the operands: our
//! rows are its columns.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;

use super::super::finish::{Addend, finish};
use super::{FEW_ROWS, Part, Product};
use crate::launch::{Launch, OpCx, Walk};
use crate::libraries::{Compute, Element, Epilogue, Layout, Matmul, allows_tf32};

/// The least depth at which a separate epilogue pass over the result pays; our own kernels fuse it.
const DEEP: usize = 128;

/// The part of a GEMM that the library computes, and the rest.
struct Split<'a> {
    matmul: Matmul,
    bias: Option<&'a Part>,
    /// The addend that has the result's layout, with its factor.
    matrix: Option<(&'a Part, f32)>,
    rest: Vec<Addend<'a>>,
    has_activation_left: bool,
}

/// Returns the launches with cuBLASLt, or `None` if our own kernels compute the GEMM.
pub(super) fn launches(product: &Product, cx: &OpCx<'_>, walk: &Walk) -> Result<Option<Vec<Launch>>> {
    let Some(lt) = cx.limits.libraries.and_then(|libraries| libraries.lt.as_ref()) else { return Ok(None) };
    let Some(split) = split(product, cx, walk) else { return Ok(None) };
    let factor = split.matrix.map_or(0.0, |(_, factor)| factor);
    let room = if product.has_workspace { cx.limits.room } else { 0 };
    let Some((routine, workspace)) = lt.product(&split.matmul, [product.alpha, factor], room)? else {
        return Ok(None);
    };
    let y = &product.y.tensor;
    let launch = Launch::library(Arc::new(routine))
        .tensor(&product.b.tensor)
        .tensor(&product.a.tensor)
        .tensor(split.matrix.map_or(y, |(part, _)| &part.tensor))
        .tensor(y)
        .find_tensor(split.bias.map(|part| &part.tensor))
        .workspace(workspace);
    let mut launches = vec![launch];
    if split.has_activation_left || !split.rest.is_empty() {
        let activation = product.activation.as_ref().filter(|_| split.has_activation_left);
        let sizes: Vec<usize> = walk.sizes.iter().copied().chain([product.rows, product.columns]).collect();
        launches.extend(finish(y, &sizes, &split.rest, activation)?);
    }
    Ok(Some(launches))
}

/// Splits a GEMM between library and epilogue pass. Returns `None` if the library cannot compute
/// it, or is slower.
fn split<'a>(product: &'a Product, cx: &OpCx<'_>, walk: &Walk) -> Option<Split<'a>> {
    let (rows, columns, depth) = (product.rows, product.columns, product.depth);
    // GEMV is bound by memory bandwidth, and our own kernels are made for that.
    if rows.min(columns) <= FEW_ROWS || depth == 0 || walk.sizes.len() > 1 {
        return None;
    }
    let element = element(product)?;
    let compute = match element {
        Element::F64 => Compute::F64,
        Element::F32 if allows_tf32(&cx.limits) => Compute::Tf32,
        _ => Compute::F32,
    };
    let step = |index: usize| walk.steps.get(index).and_then(|steps| steps.first()).copied().unwrap_or(0);
    let batch = walk.sizes.first().copied().unwrap_or(1);
    let (b, b_turned) = side([columns, depth], [product.b.column, product.b.depth], step(1))?;
    let (a, a_turned) = side([depth, rows], [product.a.depth, product.a.row], step(0))?;
    let d = matrix(&product.y, [rows, columns], step(2))?;
    let is_half = matches!(element, Element::F16 | Element::Bf16);
    // The library is slow if result rows are not whole vectors (see `is_whole`). Our warpgroups can
    // read these operands and write such rows.
    if is_half && cx.limits.has_warpgroups() && !a_turned && is_whole(a) && is_whole(b) && !is_whole(d) {
        return None;
    }
    let (mut bias, mut whole, mut rest) = (None, None, Vec::new());
    for (index, part) in product.addends.iter().enumerate() {
        let factor = if index == 0 { product.beta } else { 1.0 };
        let step = step(3 + index);
        let is_vector = part.row == 0 && part.column == 1 && step == 0;
        // The library fuses one unscaled bias, but not in float64.
        if is_vector && factor == 1.0 && bias.is_none() && element != Element::F64 {
            bias = Some(part);
        } else if let (Some(layout), None) = (matrix(part, [rows, columns], step), &whole) {
            whole = Some((part, factor, layout));
        } else if part.tensor.arg == product.y.tensor.arg {
            // The library call would overwrite the addend.
            return None;
        } else {
            let steps = walk.sizes.first().map(|_| step).into_iter();
            let steps = steps.chain([part.row as i64, part.column as i64]).collect();
            rest.push(Addend { tensor: &part.tensor, steps, factor });
        }
    }
    let epilogue = match product.activation.as_ref().map(|activation| activation.name) {
        Some("Relu") if rest.is_empty() && element != Element::F64 => Epilogue::Relu,
        Some("FastGelu") if rest.is_empty() && element != Element::F64 => Epilogue::Gelu,
        _ => Epilogue::None,
    };
    let has_activation_left = product.activation.is_some() && epilogue == Epilogue::None;
    if (has_activation_left || !rest.is_empty()) && depth < DEEP {
        return None;
    }
    let c = whole.as_ref().map_or(d, |(_, _, layout)| *layout);
    let (transposed, layouts, has_bias) = ([b_turned, a_turned], [b, a, c, d], bias.is_some());
    let matmul = Matmul { element, compute, batch, transposed, layouts, has_bias, epilogue };
    let matrix = whole.map(|(part, factor, _)| (part, factor));
    Some(Split { matmul, bias, matrix, rest, has_activation_left })
}

fn element(product: &Product) -> Option<Element> {
    let dtype = product.y.tensor.dtype;
    let others = [&product.a, &product.b].into_iter().chain(&product.addends);
    match dtype {
        _ if others.into_iter().any(|part| part.tensor.dtype != dtype) => None,
        DType::F32 => Some(Element::F32),
        DType::F64 => Some(Element::F64),
        DType::F16 => Some(Element::F16),
        DType::BF16 => Some(Element::Bf16),
        _ => None,
    }
}

/// Returns an operand's layout for the library, as stored or transposed; `None` if it is contiguous
/// along neither axis.
fn side([rows, columns]: [usize; 2], [row, column]: [usize; 2], step: i64) -> Option<(Layout, bool)> {
    let layout = |rows: usize, columns: usize, near: usize, far: usize| {
        // The stride along an axis of size 1 does not matter.
        let leading = if columns == 1 { rows } else { far };
        let fits = (near == 1 || rows == 1) && leading >= rows;
        fits.then_some(Layout { rows, columns, leading, step: usize::try_from(step).ok()? })
    };
    let plain = layout(rows, columns, row, column).map(|layout| (layout, false));
    plain.or_else(|| layout(columns, rows, column, row).map(|layout| (layout, true)))
}

/// Whether rows of float16 or bfloat16 are whole 16-byte vectors. For other results, the library
/// uses kernels of older devices. For 128 x 50257 with depth 768, cuBLASLt 13.1 on an H100 takes
/// 128 microseconds, and our warpgroups 61.
fn is_whole(of_halves: Layout) -> bool {
    (2 * of_halves.leading).is_multiple_of(16)
}

/// Returns the layout of the result, or of an addend like it, which is never transposed.
fn matrix(part: &Part, [rows, columns]: [usize; 2], step: i64) -> Option<Layout> {
    side([columns, rows], [part.column, part.row], step)
        .filter(|(_, is_turned)| !is_turned)
        .map(|(layout, _)| layout)
}
