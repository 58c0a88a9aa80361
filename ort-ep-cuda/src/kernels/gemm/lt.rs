//! Products by cuBLASLt, where it is found: the same product with its sides exchanged, as rows here
//! are columns there.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;

use super::super::finish::{Addend, finish};
use super::{FEW_ROWS, Part, Product};
use crate::launch::{Launch, OpCx, Walk};
use crate::libraries::{Compute, Element, Epilogue, Layout, Matmul, allows_tf32};

/// The sums of so many products or more are worth a pass of their own over the result, which our
/// kernels do not need.
const DEEP: usize = 128;

/// What of a product the library does, and what is left to do.
struct Split<'a> {
    matmul: Matmul,
    bias: Option<&'a Part>,
    /// The addend that is a matrix like the result, with its factor.
    matrix: Option<(&'a Part, f32)>,
    rest: Vec<Addend<'a>>,
    has_activation_left: bool,
}

/// The launches of a product by the library; none where our own kernels compute it.
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

/// How a product is divided; none where the library cannot have it, or should not.
fn split<'a>(product: &'a Product, cx: &OpCx<'_>, walk: &Walk) -> Option<Split<'a>> {
    let (rows, columns, depth) = (product.rows, product.columns, product.depth);
    // Products of vectors are read once and bound by that, which kernels of our own are made for.
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
    if is_half && cx.limits.has_warpgroups() && !a_turned && is_whole(a) && is_whole(b) && !is_whole(d) {
        return None;
    }
    let (mut bias, mut whole, mut rest) = (None, None, Vec::new());
    for (index, part) in product.addends.iter().enumerate() {
        let factor = if index == 0 { product.beta } else { 1.0 };
        let step = step(3 + index);
        let is_vector = part.row == 0 && part.column == 1 && step == 0;
        if is_vector && factor == 1.0 && bias.is_none() && element != Element::F64 {
            bias = Some(part);
        } else if let (Some(layout), None) = (matrix(part, [rows, columns], step), &whole) {
            whole = Some((part, factor, layout));
        } else if part.tensor.arg == product.y.tensor.arg {
            // The product would be written over it.
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

/// A side of so many rows and columns with a step along each, as the library reads it: as it lies,
/// or transposed. None where neither is side by side.
fn side([rows, columns]: [usize; 2], [row, column]: [usize; 2], step: i64) -> Option<(Layout, bool)> {
    let layout = |rows: usize, columns: usize, near: usize, far: usize| {
        // The step along what there is one of is of no account.
        let leading = if columns == 1 { rows } else { far };
        let fits = (near == 1 || rows == 1) && leading >= rows;
        fits.then_some(Layout { rows, columns, leading, step: usize::try_from(step).ok()? })
    };
    let plain = layout(rows, columns, row, column).map(|layout| (layout, false));
    plain.or_else(|| layout(columns, rows, column, row).map(|layout| (layout, true)))
}

/// Whether lines of halves are whole vectors. The library writes results of others by kernels of
/// older devices (cuBLASLt 13.1 on an H100: 128 microseconds for 128 x 50257 of 768 steps, where
/// warpgroups of ours take 61).
fn is_whole(of_halves: Layout) -> bool {
    (2 * of_halves.leading).is_multiple_of(16)
}

/// The result, or an addend like it, which is never transposed.
fn matrix(part: &Part, [rows, columns]: [usize; 2], step: i64) -> Option<Layout> {
    side([columns, rows], [part.column, part.row], step)
        .filter(|(_, is_turned)| !is_turned)
        .map(|(layout, _)| layout)
}
