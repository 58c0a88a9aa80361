//! GEMM by cuBLASLt, if it is found. cuBLASLt is column-major, so we exchange the operands: our
//! rows are its columns.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_gpu::gemm::StridedTensor;

use super::super::finish::{Addend, finish};
use super::product::{FEW_ROWS, Product};
use crate::launch::{Launch, OpCx, Walk};
use crate::libraries::{Compute, Epilogue, LtElement, LtLayout, Matmul, allows_tf32};

/// The least depth at which a separate epilogue pass over the result pays; our own kernels fuse it.
const DEEP: usize = 128;

/// The part of a GEMM that the library computes, and the rest.
struct LibrarySplit<'a> {
    matmul: Matmul,
    bias: Option<&'a StridedTensor>,
    /// The addend that has the result's layout, with its factor.
    matrix: Option<(&'a StridedTensor, f32)>,
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
    let y = &product.gemm.result.tensor;
    let launch = Launch::library(Arc::new(routine))
        // The library sees every matrix transposed, hence the right operand comes first.
        .tensor(&product.gemm.rhs.tensor)
        .tensor(&product.gemm.lhs.tensor)
        // Without an addend, the factor is 0, and the library does not read this matrix.
        .tensor(split.matrix.map_or(y, |(part, _)| &part.tensor))
        .tensor(y)
        .find_tensor(split.bias.map(|part| &part.tensor))
        .workspace(workspace);
    let mut launches = vec![launch];
    if split.has_activation_left || !split.rest.is_empty() {
        let activation = product.activation.as_ref().filter(|_| split.has_activation_left);
        let sizes: Vec<usize> =
            walk.sizes.iter().copied().chain([product.gemm.rows, product.gemm.columns]).collect();
        launches.extend(finish(y, &sizes, &split.rest, activation)?);
    }
    Ok(Some(launches))
}

/// Splits a GEMM between library and epilogue pass. Returns `None` if the library cannot compute
/// it, or is slower.
fn split<'a>(product: &'a Product, cx: &OpCx<'_>, walk: &Walk) -> Option<LibrarySplit<'a>> {
    let (rows, columns, depth) = (product.gemm.rows, product.gemm.columns, product.gemm.depth);
    // GEMV is bound by memory bandwidth, and our own kernels are made for that.
    // The library walks one batch axis at most.
    if rows.min(columns) <= FEW_ROWS || depth == 0 || walk.sizes.len() > 1 {
        return None;
    }
    let element = element(product)?;
    let compute = match element {
        LtElement::F64 => Compute::F64,
        LtElement::F32 if allows_tf32(&cx.limits) => Compute::Tf32,
        _ => Compute::F32,
    };
    let step = |index: usize| walk.steps.get(index).and_then(|steps| steps.first()).copied().unwrap_or(0);
    let batch = walk.sizes.first().copied().unwrap_or(1);
    let (b, b_turned) = side([columns, depth], [product.gemm.rhs.column, product.gemm.rhs.depth], step(1))?;
    let (a, a_turned) = side([depth, rows], [product.gemm.lhs.depth, product.gemm.lhs.row], step(0))?;
    let d = matrix(&product.gemm.result, [rows, columns], step(2))?;
    let is_half = matches!(element, LtElement::F16 | LtElement::Bf16);
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
        if is_vector && factor == 1.0 && bias.is_none() && element != LtElement::F64 {
            bias = Some(part);
        } else if let (Some(layout), None) = (matrix(part, [rows, columns], step), &whole) {
            whole = Some((part, factor, layout));
        } else if part.tensor.arg == product.gemm.result.tensor.arg {
            // The library call would overwrite the addend.
            return None;
        } else {
            let steps = walk.sizes.first().map(|_| step).into_iter();
            let steps = steps.chain([part.row as i64, part.column as i64]).collect();
            rest.push(Addend { tensor: &part.tensor, steps, factor });
        }
    }
    let epilogue = match product.activation.as_ref().map(|activation| activation.name) {
        Some("Relu") if rest.is_empty() && element != LtElement::F64 => Epilogue::Relu,
        Some("FastGelu") if rest.is_empty() && element != LtElement::F64 => Epilogue::Gelu,
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
    Some(LibrarySplit { matmul, bias, matrix, rest, has_activation_left })
}

fn element(product: &Product) -> Option<LtElement> {
    let dtype = product.gemm.result.tensor.dtype;
    let others = [&product.gemm.lhs, &product.gemm.rhs].into_iter().chain(&product.addends);
    match dtype {
        _ if others.into_iter().any(|part| part.tensor.dtype != dtype) => None,
        DType::F32 => Some(LtElement::F32),
        DType::F64 => Some(LtElement::F64),
        DType::F16 => Some(LtElement::F16),
        DType::BF16 => Some(LtElement::Bf16),
        _ => None,
    }
}

/// Returns an operand's layout for the library, as stored or transposed; `None` if it is contiguous
/// along neither axis.
fn side([rows, columns]: [usize; 2], [row, column]: [usize; 2], step: i64) -> Option<(LtLayout, bool)> {
    let layout = |rows: usize, columns: usize, near: usize, far: usize| {
        // The stride along an axis of size 1 does not matter.
        let leading = if columns == 1 { rows } else { far };
        let fits = (near == 1 || rows == 1) && leading >= rows;
        fits.then_some(LtLayout { rows, columns, leading, step: usize::try_from(step).ok()? })
    };
    let plain = layout(rows, columns, row, column).map(|layout| (layout, false));
    plain.or_else(|| layout(columns, rows, column, row).map(|layout| (layout, true)))
}

/// Whether rows of float16 or bfloat16 are whole 16-byte vectors. For other results, the library
/// uses kernels of older devices. For 128 x 50257 with depth 768, cuBLASLt 13.1 on an H100 takes
/// 128 microseconds, and our warpgroups 61.
fn is_whole(of_halves: LtLayout) -> bool {
    (2 * of_halves.leading).is_multiple_of(16)
}

/// Returns the layout of the result, or of an addend like it, which is never transposed.
fn matrix(part: &StridedTensor, [rows, columns]: [usize; 2], step: i64) -> Option<LtLayout> {
    side([columns, rows], [part.column, part.row], step)
        .filter(|(_, is_turned)| !is_turned)
        .map(|(layout, _)| layout)
}
