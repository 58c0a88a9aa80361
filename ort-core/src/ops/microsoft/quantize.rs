//! ONNX Runtime's own `QuantizeLinear`, `DequantizeLinear` and `QLinearConv`, from before or beside
//! the standard's.

use super::qlinear::{CODES, channels_first, image_rank, move_channels, set_image};
use super::{SAME_AS_STANDARD, becomes, int};
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::nn::conv;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16]);
const INT32: TypeSet = TypeSet::of(&[DType::I32]);
const NARROW: TypeSet = CODES.union(TypeSet::of(&[DType::I4, DType::U4, DType::I16, DType::U16]));

static QUANTIZE_LINEAR: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QuantizeLinear",
    inputs: &[one("x", "T1"), one("y_scale", "T1"), opt("y_zero_point", "T2")],
    outputs: &[one("y", "T2")],
    types: &[var("T1", FLOATS), var("T2", NARROW)],
    attrs: &[attr::optional("axis", AttrKind::Int)],
    // This one divides in float32 whatever the type, the standard's in the type of the scale.
    upgrades: &[becomes(|draft| {
        draft.domain.clear();
        draft.set_attr("precision", Attribute::Int(i64::from(DType::F32.onnx_code())));
        Ok(())
    })],
    ..OP
};

static DEQUANTIZE_LINEAR: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "DequantizeLinear",
    inputs: &[one("x", "T1"), one("x_scale", "T2"), opt("x_zero_point", "T1")],
    outputs: &[one("y", "T2")],
    types: &[var("T1", NARROW.union(INT32)), var("T2", FLOATS)],
    attrs: &[attr::optional("axis", AttrKind::Int)],
    upgrades: SAME_AS_STANDARD,
    ..OP
};

/// The standard's operator, but with `channels_last` the image is NHWC. The weights keep their
/// layout.
static QLINEAR_CONV: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearConv",
    inputs: &[
        one("x", "T1"),
        one("x_scale", "tensor(float)"),
        one("x_zero_point", "T1"),
        one("w", "T2"),
        one("w_scale", "tensor(float)"),
        one("w_zero_point", "T2"),
        one("y_scale", "tensor(float)"),
        one("y_zero_point", "T3"),
        opt("B", "T4"),
    ],
    outputs: &[one("y", "T3")],
    types: &[var("T1", CODES), var("T2", CODES), var("T3", CODES), var("T4", INT32)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::int("channels_last", 0),
        attr::optional("dilations", AttrKind::Ints),
        attr::int("group", 1),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    cost: Cost::Compute,
    infer: infer_conv,
    lower: Some(lower_conv),
    ..OP
};

ops![QUANTIZE_LINEAR, DEQUANTIZE_LINEAR, QLINEAR_CONV];

fn infer_conv(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(image), Some(weight)) = (cx.shape(0), cx.shape(3)) else { return Ok(()) };
    let last = cx.attrs.flag("channels_last")?;
    let shape = conv::output_shape(cx, [&channels_first(image, last)?, weight], 8)?;
    set_image(cx, shape, last)
}

fn lower_conv(draft: &mut Draft<'_>) -> Result<()> {
    let last = int(draft, "channels_last")? != 0;
    draft.take_attr("channels_last");
    if !last {
        // Without `channels_last` it is the standard's operator.
        draft.domain.clear();
        return Ok(());
    }
    let (rank, image) = (image_rank(draft, Some(3))?, draft.required(0)?);
    let image = move_channels(draft, image, rank, true)?;
    draft.set_input(0, image);
    let (inputs, attrs) = (draft.inputs.clone(), draft.attrs.clone());
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let result = draft.emit_one("QLinearConv", &inputs, &attrs)?;
    let result = move_channels(draft, result, rank, false)?;
    draft.replace(&[result])
}
