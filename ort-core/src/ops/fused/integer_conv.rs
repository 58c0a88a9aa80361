//! `ConvIntegerToFloat`: a convolution of quantized values whose result stays a float, with the
//! epilogue of `FusedConv`.

use super::activation::Activation;
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::ops::microsoft::check_rank;
use crate::ops::nn::conv;
use crate::spec::{
    AttrKind, BatchRule, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, RUNTIME, Requirement, attr, one, opt,
    var,
};

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// `y = activation(Conv(x - x_zero, w - w_zero) * x_scale * w_scale + bias + residual)`.
///
/// The counterpart of `MatMulIntegerToFloat`: accumulators are exact integers. The scale and zero
/// point of `x` are single; those of `w` are single, or one for each filter.
static CONV_INTEGER_TO_FLOAT: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "ConvIntegerToFloat",
    inputs: &[
        one("x", "T1"),
        one("w", "T2"),
        one("x_scale", "T"),
        one("w_scale", "T"),
        opt("x_zero_point", "T1"),
        opt("w_zero_point", "T2"),
        opt("bias", "T"),
        opt("residual", "T"),
    ],
    outputs: &[one("y", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32])), var("T1", BYTES), var("T2", BYTES)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::optional("dilations", AttrKind::Ints),
        attr::int("group", 1),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
        attr::string("activation", ""),
        attr::optional("activation_params", AttrKind::Floats),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::integer_conv),
    ..OP
};

ops![CONV_INTEGER_TO_FLOAT];

/// The places of the inputs.
const W: usize = 1;
const SCALES: [usize; 2] = [2, 3];
const ZEROS: [usize; 2] = [4, 5];
const BIAS: usize = 6;
const RESIDUAL: usize = 7;

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    conv::infer(cx, [W, BIAS])?;
    let (Some(shape), Some(residual)) = (cx.output_shape(0), cx.shape(RESIDUAL)) else { return Ok(()) };
    check_rank(cx, RESIDUAL, "the residual", shape.len())?;
    let mut sizes = shape.iter().zip(residual);
    sizes.try_for_each(|(size, own)| {
        cx.require(Requirement::equal("a size of the residual", own, size).or_fail())
    })
}

/// `FusedConv` of the dequantized image and filters.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let dequantize = |draft: &mut Draft<'_>, side: usize| {
        let [scale, zero] =
            [SCALES, ZEROS].map(|places| places.get(side).and_then(|place| draft.input(*place)));
        let inputs = [draft.input(side), scale, zero];
        // Filters are the first axis. A single scale has no axis.
        draft.emit_one("DequantizeLinear", &inputs, &[("axis", Attribute::Int(0))])
    };
    let (x, w) = (dequantize(draft, 0)?, dequantize(draft, W)?);
    let inputs = [Some(x), Some(w), draft.input(BIAS), draft.input(RESIDUAL)];
    let attrs = draft.attrs.clone();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let result = draft.emit_in((MICROSOFT, "FusedConv"), &inputs, &attrs, 1)?;
    draft.replace(&result)
}
