//! Operators of the domain `com.microsoft`, as found in exported and optimized models. The records
//! follow the schemas that ONNX Runtime registers.
//!
//! An operator that is a standard one under another name or with another default becomes that one
//! when a model is loaded (`upgrades`), so nothing after the loader sees it. One that is a
//! composition of standard operators is decomposed if no provider has a kernel for it (`lower`).

mod attention_decoder;
mod attention_gradients;
mod attention_groups;
mod attention_heads;
mod attention_packed;
mod attention_projected;
mod attention_quantized;
mod attention_rotary;
mod bias;
mod distance;
mod embed_layer_norm;
pub(in crate::ops) mod fused;
mod gated_add;
mod gelu;
mod images;
mod matrix;
mod mixture;
mod nhwc_max_pool;
mod padding;
mod position_bias;
pub(in crate::ops) mod qlinear;
mod qlinear_elementwise;
mod qlinear_movement;
mod qlinear_reduce;
mod quant_blocks;
mod quant_matmul;
mod quantize;
mod recurrent_attention;
mod skip_layer_norm;
mod tensor;
mod text;

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, ValueId};
use crate::spec::{Draft, InferCx, Registry, Upgrade};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

/// The upgrade of an operator that equals the standard's of the same name.
const SAME_AS_STANDARD: &[Upgrade] = &[becomes(|draft| {
    draft.domain.clear();
    Ok(())
})];

/// The upgrade of an operator that becomes another one in every version.
const fn becomes(apply: fn(&mut Draft<'_>) -> Result<()>) -> Upgrade {
    Upgrade { before: i64::MAX, apply }
}

/// Refuses two sizes that are both constant and differ. Kernels compare symbolic ones.
pub(in crate::ops) fn agree(what: &str, expected: &Dim, actual: &Dim) -> Result<()> {
    let differ = matches!((expected.as_constant(), actual.as_constant()), (Some(a), Some(b)) if a != b);
    ensure!(!differ, InvalidGraph, "{what} is {actual}, expected {expected}");
    Ok(())
}

/// Refuses an input that is not a vector with one value per column, the last dimension of `shape`.
pub(in crate::ops) fn check_per_column(
    cx: &InferCx<'_>,
    index: usize,
    what: &str,
    shape: &[Dim],
) -> Result<()> {
    let Some(own) = cx.shape(index) else { return Ok(()) };
    let ([length], Some(width)) = (own, shape.last()) else {
        return Err(error!(
            InvalidGraph,
            "{what} has rank {} and the input rank {}, expected rank 1 and at least 1",
            own.len(),
            shape.len()
        ));
    };
    cx.require_equal(format!("the length of {what}"), length, width)
}

/// Refuses an input whose rank is known and differs from `rank`.
pub(in crate::ops) fn check_rank(cx: &InferCx<'_>, index: usize, what: &str, rank: usize) -> Result<()> {
    let Some(shape) = cx.shape(index) else { return Ok(()) };
    ensure!(shape.len() == rank, InvalidGraph, "{what} has rank {}, expected {rank}", shape.len());
    Ok(())
}

/// Emits a scalar constant of a float type.
pub(in crate::ops) fn number(draft: &mut Draft<'_>, value: f32, dtype: DType) -> Result<ValueId> {
    let tensor = match dtype {
        DType::F64 => Tensor::scalar(f64::from(value))?,
        DType::F16 => Tensor::scalar(half::f16::from_f32(value))?,
        DType::BF16 => Tensor::scalar(half::bf16::from_f32(value))?,
        _ => Tensor::scalar(value)?,
    };
    Ok(draft.constant(tensor))
}

/// Returns a float attribute of a node whose defaults are filled in.
pub(in crate::ops) fn float(draft: &Draft<'_>, name: &str) -> Result<f32> {
    match draft.attr(name) {
        Some(Attribute::Float(value)) => Ok(*value),
        _ => Err(error!(InvalidGraph, "attribute '{name}' must be a float")),
    }
}

/// Returns an integer attribute of a node whose defaults are filled in.
pub(in crate::ops) fn int(draft: &Draft<'_>, name: &str) -> Result<i64> {
    match draft.attr(name) {
        Some(Attribute::Int(value)) => Ok(*value),
        _ => Err(error!(InvalidGraph, "attribute '{name}' must be an integer")),
    }
}

/// Returns the attributes of a node, with defaults filled in.
pub(in crate::ops) fn draft_attributes(draft: &Draft<'_>) -> Result<Attributes> {
    // Drafts have the attributes as given; the record knows the defaults.
    let spec = Registry::global()?.find(&draft.domain, &draft.op);
    let spec = spec.ok_or_else(|| error!(Fail, "operator {} is not known", draft.op))?;
    Attributes::new(spec, draft.attrs.clone())
}

/// Returns whether the node has the output at `index`.
fn wants(draft: &Draft<'_>, index: usize) -> bool {
    draft.outputs.get(index).copied().flatten().is_some()
}
