//! Experimental operators of the first opsets: `Affine`, `Scale`, `ScaledTanh`,
//! `ParametricSoftplus`, `ImageScaler`, `Crop` and `DynamicSlice`.
//!
//! The standard dropped them, but ONNX Runtime still runs them before opset 10, and converters of
//! that time wrote them (Tiny YOLO). Each decomposes into a few standard operators.

use super::shared::{INPUT, OUTPUT, X, Y, same_shape};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::microsoft::{float, number};
use crate::spec::{AttrKind, Draft, InferCx, OP, OpSpec, Requirement, Upgrade, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, error};

/// A record from a float tensor to one of the same shape.
const OF_FLOATS: OpSpec = OpSpec {
    since: 10,
    inputs: INPUT,
    outputs: OUTPUT,
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    infer: same_shape,
    ..OP
};

static AFFINE: OpSpec = OpSpec {
    name: "Affine",
    inputs: X,
    outputs: Y,
    attrs: &[attr::float("alpha", 1.0), attr::float("beta", 0.0)],
    lower: Some(|draft| {
        let x = draft.required(0)?;
        let scaled = times(draft, x, "alpha")?;
        let beta = constant(draft, "beta")?;
        draft.become_op("Add", &[scaled, beta], &[]);
        Ok(())
    }),
    ..OF_FLOATS
};

static SCALE: OpSpec = OpSpec {
    name: "Scale",
    attrs: &[attr::float("scale", 1.0)],
    lower: Some(|draft| {
        let (x, scale) = (draft.required(0)?, constant(draft, "scale")?);
        draft.become_op("Mul", &[x, scale], &[]);
        Ok(())
    }),
    ..OF_FLOATS
};

/// `alpha * function(beta * x)`. The schemas have no defaults, but ONNX Runtime's kernels require
/// both factors.
const OF_TWO_FACTORS: OpSpec = OpSpec {
    attrs: &[attr::optional("alpha", AttrKind::Float), attr::optional("beta", AttrKind::Float)],
    infer: infer_two_factors,
    ..OF_FLOATS
};

static SCALED_TANH: OpSpec =
    OpSpec { name: "ScaledTanh", lower: Some(|draft| lower_two_factors(draft, "Tanh")), ..OF_TWO_FACTORS };

static PARAMETRIC_SOFTPLUS: OpSpec = OpSpec {
    name: "ParametricSoftplus",
    inputs: X,
    outputs: Y,
    lower: Some(|draft| lower_two_factors(draft, "Softplus")),
    ..OF_TWO_FACTORS
};

/// `scale * x`, plus a bias for each channel of an image.
static IMAGE_SCALER: OpSpec = OpSpec {
    name: "ImageScaler",
    attrs: &[attr::optional("bias", AttrKind::Floats), attr::float("scale", 1.0)],
    infer: infer_image_scaler,
    lower: Some(lower_image_scaler),
    ..OF_FLOATS
};

/// Crops the borders off an image, or with `scale` takes that many rows and columns after the top
/// and left borders.
static CROP: OpSpec = OpSpec {
    name: "Crop",
    attrs: &[attr::required("border", AttrKind::Ints), attr::optional("scale", AttrKind::Ints)],
    infer: infer_crop,
    lower: Some(lower_crop),
    ..OF_FLOATS
};

/// The predecessor of the `Slice` whose bounds are inputs.
static DYNAMIC_SLICE: OpSpec = OpSpec {
    name: "DynamicSlice",
    since: 10,
    inputs: &[one("data", "T"), one("starts", "Tind"), one("ends", "Tind"), opt("axes", "Tind")],
    outputs: OUTPUT,
    types: &[
        var("T", TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16]))),
        var("Tind", TypeSet::of(&[DType::I32, DType::I64])),
    ],
    upgrades: &[Upgrade {
        // No opset has a canonical form of this operator, so every node becomes a `Slice`.
        before: i64::MAX,
        apply: |draft| {
            draft.op = "Slice".to_string();
            Ok(())
        },
    }],
    ..OP
};

ops![AFFINE, SCALE, SCALED_TANH, PARAMETRIC_SOFTPLUS, IMAGE_SCALER, CROP, DYNAMIC_SLICE];

fn infer_two_factors(cx: &mut InferCx<'_>) -> Result<()> {
    // Reading the factors refuses a node without them when the model is loaded.
    cx.attrs.float("alpha")?;
    cx.attrs.float("beta")?;
    same_shape(cx)
}

fn lower_two_factors(draft: &mut Draft<'_>, function: &str) -> Result<()> {
    let x = draft.required(0)?;
    let scaled = times(draft, x, "beta")?;
    let value = draft.emit(function, &[scaled], &[])?;
    let alpha = constant(draft, "alpha")?;
    draft.become_op("Mul", &[value, alpha], &[]);
    Ok(())
}

/// Emits a float attribute as a constant of the input's type.
fn constant(draft: &mut Draft<'_>, name: &str) -> Result<ValueId> {
    let (value, dtype) = (float(draft, name)?, draft.dtype(0)?);
    number(draft, value, dtype)
}

/// Emits the product of `x` and a float attribute.
fn times(draft: &mut Draft<'_>, x: ValueId, name: &str) -> Result<ValueId> {
    let factor = constant(draft, name)?;
    draft.emit("Mul", &[x, factor], &[])
}

/// Returns the shape of an image: batch, channels, height, width.
fn image<'s>(cx: &InferCx<'s>) -> Result<Option<[&'s Dim; 4]>> {
    let Some(shape) = cx.shape(0) else { return Ok(None) };
    match shape {
        [batch, channels, height, width] => Ok(Some([batch, channels, height, width])),
        _ => Err(error!(InvalidGraph, "images have rank 4, got rank {}", shape.len())),
    }
}

fn infer_image_scaler(cx: &mut InferCx<'_>) -> Result<()> {
    let bias = cx.attrs.floats("bias")?.len() as i64;
    if let Some([_, channels, _, _]) = image(cx)? {
        let what = "the number of channels, each of which needs a bias,";
        cx.require_equal(what, channels, &Dim::constant(bias))?;
    }
    same_shape(cx)
}

fn lower_image_scaler(draft: &mut Draft<'_>) -> Result<()> {
    let x = draft.required(0)?;
    let bias = match draft.attr("bias") {
        Some(Attribute::Floats(values)) => values.clone(),
        _ => return Err(error!(InvalidGraph, "Required attribute 'bias' is missing")),
    };
    let scaled = times(draft, x, "scale")?;
    let to = Attribute::Int(i64::from(draft.dtype(0)?.onnx_code()));
    let tensor = Tensor::from_slice(&[1, bias.len(), 1, 1], &bias)?;
    let bias = draft.constant(tensor);
    // The attribute holds float32, and the image may have another float type.
    let bias = draft.emit("Cast", &[bias], &[("to", to)])?;
    draft.become_op("Add", &[scaled, bias], &[]);
    Ok(())
}

/// The attributes of `Crop`.
struct Cropping {
    left: i64,
    top: i64,
    right: i64,
    bottom: i64,
    /// The cropped height and width. Without it the right and bottom borders apply.
    size: Option<[i64; 2]>,
}

impl Cropping {
    fn new(border: &[i64], scale: Option<&[i64]>) -> Result<Cropping> {
        // The schema orders the borders left, top, right, bottom, although height comes before
        // width.
        let &[left, top, right, bottom] = border else {
            return Err(error!(InvalidGraph, "border has {} values, expected 4", border.len()));
        };
        let size = scale.map(|scale| {
            let size = <[i64; 2]>::try_from(scale);
            size.map_err(|_| {
                error!(InvalidGraph, "scale has {} values, expected height and width", scale.len())
            })
        });
        let size = size.transpose()?;
        let mut all = border.iter().chain(size.iter().flatten());
        // The bound keeps sums of borders and sizes from overflowing.
        let wrong = all.find(|value| !(0..=i64::from(i32::MAX)).contains(*value));
        match wrong {
            None => Ok(Cropping { left, top, right, bottom, size }),
            Some(value) => {
                Err(error!(InvalidGraph, "a border or size is {value}, expected 0 to {}", i32::MAX))
            }
        }
    }
}

fn infer_crop(cx: &mut InferCx<'_>) -> Result<()> {
    let Cropping { left, top, right, bottom, size } =
        Cropping::new(cx.attrs.ints("border")?, cx.attrs.find_ints("scale"))?;
    let Some([batch, channels, height, width]) = image(cx)? else { return Ok(()) };
    let [rows, columns] = match size {
        Some([rows, columns]) => [Dim::constant(rows), Dim::constant(columns)],
        None => [height - &Dim::constant(top + bottom), width - &Dim::constant(left + right)],
    };
    for (size, start, part) in [(height, top, &rows), (width, left, &columns)] {
        let end = part + start;
        let order = Requirement::at_most("the begin of the crop", &Dim::constant(start), &end);
        cx.require(order.help("make the borders smaller"))?;
        cx.require(Requirement::at_most("the end of the crop", &end, size).help("make the borders smaller"))?;
    }
    cx.set_shape(0, vec![batch.clone(), channels.clone(), rows, columns])
}

fn lower_crop(draft: &mut Draft<'_>) -> Result<()> {
    let ints = |name: &str| match draft.attr(name) {
        Some(Attribute::Ints(values)) => Some(values.as_slice()),
        _ => None,
    };
    let Cropping { left, top, right, bottom, size } =
        Cropping::new(ints("border").unwrap_or(&[]), ints("scale"))?;
    let ends = match size {
        Some([rows, columns]) => [top + rows, left + columns],
        // A negative end counts from the back, but 0 would be the front.
        None => [bottom, right].map(|border| if border == 0 { i64::MAX } else { -border }),
    };
    let x = draft.required(0)?;
    let [starts, ends, axes] = [[top, left], ends, [2, 3]];
    let (starts, ends) = (draft.constant_ints(&starts)?, draft.constant_ints(&ends)?);
    let axes = draft.constant_ints(&axes)?;
    draft.become_op("Slice", &[x, starts, ends, axes], &[]);
    Ok(())
}
