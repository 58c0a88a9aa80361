//! `FusedGemm` and `FusedConv`: a GEMM or a convolution with an activation epilogue.

use super::{check_rank, draft_attributes};
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::batch;
use crate::ops::fused::activation::{Activation, end_with};
use crate::ops::linalg::gemm;
use crate::ops::nn::conv;
use crate::spec::{
    AttrKind, AttrSpec, BatchRule, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, Requirement, attr, one, opt,
    var,
};

static FUSED_GEMM: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "FusedGemm",
    inputs: &[one("A", "T"), one("B", "T"), opt("C", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::HIGH_PRECISION.difference(TypeSet::of(&[DType::BF16])))],
    attrs: &[
        attr::float("alpha", 1.0),
        attr::float("beta", 1.0),
        attr::int("transA", 0),
        attr::int("transB", 0),
        attr::optional("activation", AttrKind::String),
        attr::optional("activation_alpha", AttrKind::Float),
        attr::optional("activation_beta", AttrKind::Float),
        attr::optional("activation_gamma", AttrKind::Float),
    ],
    cost: Cost::Compute,
    infer: infer_gemm,
    lower: Some(lower_gemm),
    batch: BatchRule::Rule(batch::gemm),
    ..OP
};

/// The attributes of a convolution with an activation epilogue.
pub(in crate::ops) const CONV_ATTRS: &[AttrSpec] = &[
    attr::string("auto_pad", "NOTSET"),
    attr::optional("dilations", AttrKind::Ints),
    attr::int("group", 1),
    attr::optional("kernel_shape", AttrKind::Ints),
    attr::optional("pads", AttrKind::Ints),
    attr::optional("strides", AttrKind::Ints),
    attr::optional("activation", AttrKind::String),
    attr::optional("activation_params", AttrKind::Floats),
];

static FUSED_CONV: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "FusedConv",
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T"), opt("Z", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: CONV_ATTRS,
    cost: Cost::Compute,
    infer: infer_conv,
    lower: Some(lower_conv),
    batch: BatchRule::Rule(batch::conv_with_addend),
    ..OP
};

ops![FUSED_GEMM, FUSED_CONV];

fn infer_gemm(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_gemm(cx.attrs)?;
    gemm::infer(cx)
}

fn infer_conv(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    conv::infer(cx, [1, 2])?;
    let (Some(shape), Some(addend)) = (cx.output_shape(0), cx.shape(3)) else { return Ok(()) };
    check_rank(cx, 3, "Z", shape.len())?;
    let mut sizes = shape.iter().zip(addend);
    sizes.try_for_each(|(size, own)| cx.require(Requirement::equal("a size of Z", own, size).or_fail()))
}

fn lower_gemm(draft: &mut Draft<'_>) -> Result<()> {
    let activation = Activation::of_gemm(&draft_attributes(draft)?)?;
    let inputs = draft.inputs.clone();
    let product = emit(draft, "Gemm", &inputs)?;
    end_with(draft, product, Some(&activation))
}

fn lower_conv(draft: &mut Draft<'_>) -> Result<()> {
    let activation = Activation::of_attributes(&draft_attributes(draft)?)?;
    // `Conv` has no input `Z`.
    let inputs: Vec<Option<ValueId>> = draft.inputs.iter().take(3).copied().collect();
    let mut result = emit(draft, "Conv", &inputs)?;
    if let Some(addend) = draft.input(3) {
        result = draft.emit("Add", &[result, addend], &[])?;
    }
    end_with(draft, result, activation.as_ref())
}

/// Emits the unfused operator, with all attributes but the activation's.
fn emit(draft: &mut Draft<'_>, op: &str, inputs: &[Option<ValueId>]) -> Result<ValueId> {
    let attrs = draft.attrs.clone();
    let others = attrs.iter().filter(|(name, _)| !name.starts_with("activation"));
    let others: Vec<(&str, Attribute)> = others.map(|(name, value)| (name.as_str(), value.clone())).collect();
    draft.emit_one(op, inputs, &others)
}
