//! `FusedGemm` and `FusedConv`: a product or a convolution with an activation.

use super::{agree, check_rank, float, number};
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::linalg::gemm;
use crate::ops::nn::conv;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error, not_one_of};

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
    ..OP
};

static FUSED_CONV: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "FusedConv",
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T"), opt("Z", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::optional("dilations", AttrKind::Ints),
        attr::int("group", 1),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
        attr::optional("activation", AttrKind::String),
        attr::optional("activation_params", AttrKind::Floats),
    ],
    cost: Cost::Compute,
    infer: infer_conv,
    lower: Some(lower_conv),
    ..OP
};

ops![FUSED_GEMM, FUSED_CONV];

/// The standard's activations that may be fused, with their parameters in the order of `activation_params`.
const ACTIVATIONS: &[(&str, &[&str])] = &[
    ("Celu", &["alpha"]),
    ("Clip", &["min", "max"]),
    ("Elu", &["alpha"]),
    ("HardSigmoid", &["alpha", "beta"]),
    ("HardSwish", &[]),
    ("LeakyRelu", &["alpha"]),
    ("Relu", &[]),
    ("Selu", &["alpha", "gamma"]),
    ("Sigmoid", &[]),
    ("Softplus", &[]),
    ("Softsign", &[]),
    ("Tanh", &[]),
    ("ThresholdedRelu", &["alpha"]),
];

/// The names of the parameters of an activation.
fn parameters(activation: &str) -> Result<&'static [&'static str]> {
    let known = ACTIVATIONS.iter().find(|(name, _)| *name == activation);
    known.map(|(_, parameters)| *parameters).ok_or_else(|| {
        let names: Vec<&str> = ACTIVATIONS.iter().map(|(name, _)| *name).collect();
        not_one_of("activation", activation, &names)
    })
}

fn infer_gemm(cx: &mut InferCx<'_>) -> Result<()> {
    let activation = cx.attrs.string("activation")?;
    for name in parameters(activation)? {
        let attr = format!("activation_{name}");
        ensure!(
            cx.attrs.find_float(&attr).is_some(),
            InvalidGraph,
            "activation '{activation}' needs attribute '{attr}'"
        );
    }
    gemm::infer(cx)
}

fn infer_conv(cx: &mut InferCx<'_>) -> Result<()> {
    if let Some(activation) = cx.attrs.find_string("activation") {
        let expected = parameters(activation)?.len();
        let given = cx.attrs.find_floats("activation_params").unwrap_or(&[]).len();
        // Those without parameters ignore what is given.
        ensure!(
            given == expected || expected == 0,
            InvalidGraph,
            "activation '{activation}' takes {expected} parameters, got {given}"
        );
    }
    conv::infer(cx, [1, 2])?;
    let (Some(shape), Some(addend)) = (cx.output_shape(0), cx.shape(3)) else { return Ok(()) };
    check_rank(cx, 3, "Z", shape.len())?;
    shape.iter().zip(addend).try_for_each(|(size, own)| agree("a size of Z", size, own))
}

fn lower_gemm(draft: &mut Draft<'_>) -> Result<()> {
    let activation = text(draft, "activation");
    let activation = activation.ok_or_else(|| error!(InvalidGraph, "attribute 'activation' is missing"))?;
    let values = parameters(&activation)?
        .iter()
        .map(|name| float(draft, &format!("activation_{name}")))
        .collect::<Result<Vec<f32>>>()?;
    let inputs = draft.inputs.clone();
    let attrs = others(draft);
    let product = emit(draft, "Gemm", &inputs, &attrs)?;
    activate(draft, product, &activation, &values)
}

fn lower_conv(draft: &mut Draft<'_>) -> Result<()> {
    let activation = text(draft, "activation");
    let values = match draft.attr("activation_params") {
        Some(Attribute::Floats(values)) => values.clone(),
        _ => Vec::new(),
    };
    let inputs: Vec<Option<ValueId>> = draft.inputs.iter().take(3).copied().collect();
    let attrs = others(draft);
    let mut result = emit(draft, "Conv", &inputs, &attrs)?;
    if let Some(addend) = draft.input(3) {
        result = draft.emit("Add", &[result, addend], &[])?;
    }
    match activation {
        Some(activation) => activate(draft, result, &activation, &values),
        None => draft.replace(&[result]),
    }
}

fn text(draft: &Draft<'_>, name: &str) -> Option<String> {
    match draft.attr(name) {
        Some(Attribute::String(value)) => Some(value.clone()),
        _ => None,
    }
}

/// The attributes that are not the activation's.
fn others(draft: &Draft<'_>) -> Vec<(String, Attribute)> {
    draft.attrs.iter().filter(|(name, _)| !name.starts_with("activation")).cloned().collect()
}

fn emit(
    draft: &mut Draft<'_>,
    op: &str,
    inputs: &[Option<ValueId>],
    attrs: &[(String, Attribute)],
) -> Result<ValueId> {
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    Ok(draft.emit_many(op, inputs, &attrs, 1)?[0])
}

/// Makes the draft the activation of a value.
fn activate(draft: &mut Draft<'_>, value: ValueId, activation: &str, values: &[f32]) -> Result<()> {
    let dtype = draft.dtype(0)?;
    if activation == "Clip" {
        let mut inputs = vec![value];
        for &bound in values {
            inputs.push(number(draft, bound, dtype)?);
        }
        draft.become_op(activation, &inputs, &[]);
        return Ok(());
    }
    let named = parameters(activation)?.iter().zip(values);
    let attrs: Vec<(&str, Attribute)> =
        named.map(|(name, value)| (*name, Attribute::Float(*value))).collect();
    draft.become_op(activation, &[value], &attrs);
    Ok(())
}
