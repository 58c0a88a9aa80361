//! Problem descriptors read from a kernel's context, and conditions on nodes.

use ort_core::ep::NodeView;
use ort_core::ops::nn::problem::{ConvShape, DeformConv, EmbedLayerNorm, PixelLayout, Recurrent};
use ort_core::ops::tensor::geometry::{SliceArguments, Strided, permutation};
use ort_core::ops::tensor::problem::{AxisParts, BlockRearrangement, Col2Im, PadMode, Padded, Pads};
use ort_core::{Result, error};

use crate::operand::{OpCx, Operand};

/// Returns the order in which the result of `Transpose`, `Expand`, `Slice`, `DepthToSpace` or
/// `SpaceToDepth` reads its input.
///
/// # Errors
///
/// If the attributes or inputs do not fit the shapes.
pub fn order<L>(cx: &OpCx<'_, L>) -> Result<Strided> {
    let shape = &cx.input(0)?.shape;
    match cx.op {
        "Transpose" => Ok(Strided::transpose(shape, &permutation(cx.attrs, shape.len())?)),
        "Expand" => Strided::expand(shape, &cx.output(0)?.shape),
        "Slice" => {
            let (starts, ends) = (cx.ints(1)?, cx.ints(2)?);
            let (axes, steps) = (cx.find_ints(3)?, cx.find_ints(4)?);
            let (axes, steps) = (axes.as_deref(), steps.as_deref());
            let arguments = SliceArguments { starts: &starts, ends: &ends, axes, steps };
            Ok(Strided::slice(shape, &arguments.resolve(shape)?))
        }
        "DepthToSpace" => BlockRearrangement::new(cx.attrs, true)?.order(shape),
        "SpaceToDepth" => BlockRearrangement::new(cx.attrs, false)?.order(shape),
        other => Err(error!(Fail, "{other} does not rearrange one tensor")),
    }
}

/// Reads a `Concat` node, and returns its inputs as well.
///
/// # Errors
///
/// As [`AxisParts::of_concat`].
pub fn joined<'a, L>(cx: &'a OpCx<'_, L>) -> Result<(Vec<&'a Operand>, AxisParts)> {
    let inputs = (0..cx.inputs.len()).map(|index| cx.input(index)).collect::<Result<Vec<_>>>()?;
    let shapes: Vec<&[usize]> = inputs.iter().map(|input| &*input.shape).collect();
    let parts = AxisParts::of_concat(cx.attrs, &shapes, &cx.output(0)?.shape)?;
    Ok((inputs, parts))
}

/// Reads a `Split` node.
///
/// # Errors
///
/// As [`AxisParts::of_split`].
pub fn split<L>(cx: &OpCx<'_, L>) -> Result<AxisParts> {
    AxisParts::of_split(cx.attrs, &cx.input(0)?.shape, cx.find_ints(1)?.as_deref(), cx.outputs.len())
}

/// Reads a `Pad`, `CenterCropPad` or `Tile` node; `None` if the result is empty.
///
/// # Errors
///
/// If the attributes or inputs do not fit the shapes.
pub fn padded<L>(cx: &OpCx<'_, L>) -> Result<Option<Padded>> {
    let (shape, result) = (&cx.input(0)?.shape, cx.output(0)?);
    let pads = match cx.op {
        "Pad" => {
            let (mode, axes) = (PadMode::of(cx.attrs)?, cx.find_ints(3)?);
            Some(Pads::new(mode, &cx.ints(1)?, axes.as_deref(), shape.len())?)
        }
        "CenterCropPad" => Some(Pads::of_center_crop(cx.attrs.find_ints("axes"), shape, &cx.ints(1)?)?),
        _ => None,
    };
    // An empty result may have another axis of unbounded size; we do not compute with that.
    if pads.is_some() && result.count() == 0 {
        return Ok(None);
    }
    let padded = match pads {
        Some(pads) => pads.on(shape)?,
        None => Padded::of_tile(shape, &cx.ints(1)?)?,
    };
    padded.check_result(&result.shape)?;
    Ok((result.count() > 0).then_some(padded))
}

/// Reads a `Col2Im` node.
///
/// # Errors
///
/// If the attributes or inputs do not fit the shapes.
pub fn col2im<L>(cx: &OpCx<'_, L>) -> Result<Col2Im> {
    let blocks = Col2Im::new(cx.attrs, &cx.ints(1)?, &cx.ints(2)?)?;
    blocks.check_columns(cx.input(0)?.count(), cx.output(0)?.count())?;
    Ok(blocks)
}

/// Reads a convolution of its first two inputs.
///
/// # Errors
///
/// As [`ConvShape::new`].
pub fn conv<L>(cx: &OpCx<'_, L>, layout: PixelLayout) -> Result<ConvShape> {
    ConvShape::new(cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape, layout)
}

/// Reads a transposed convolution of its first two inputs.
///
/// # Errors
///
/// As [`ConvShape::transposed`].
pub fn conv_transpose<L>(cx: &OpCx<'_, L>) -> Result<ConvShape> {
    ConvShape::transposed(cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape)
}

/// Reads the windows of a `DeformConv` node, which determine its workspace.
///
/// # Errors
///
/// As [`DeformConv::new`].
pub fn deform_windows<L>(cx: &OpCx<'_, L>) -> Result<DeformConv> {
    DeformConv::new(cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape)
}

/// Reads a `DeformConv` node for a run.
///
/// # Errors
///
/// As [`DeformConv::new`] and [`DeformConv::check_offsets`].
pub fn deform_conv<L>(cx: &OpCx<'_, L>) -> Result<DeformConv> {
    let conv = deform_windows(cx)?;
    conv.check_offsets(cx.input(2)?.count(), cx.find_input(4).map(Operand::count))?;
    Ok(conv)
}

/// Reads an `LSTM`, `GRU` or `RNN` node.
///
/// # Errors
///
/// As [`Recurrent::new`].
pub fn recurrent<L>(cx: &OpCx<'_, L>) -> Result<Recurrent> {
    Recurrent::new(cx.op, cx.attrs, &cx.input(0)?.shape, &cx.input(2)?.shape)
}

/// Reads an `EmbedLayerNormalization` node.
///
/// # Errors
///
/// As [`EmbedLayerNorm::new`].
pub fn embed_layer_norm<L>(cx: &OpCx<'_, L>) -> Result<EmbedLayerNorm> {
    EmbedLayerNorm::new(|index| cx.find_shape(index))
}

/// Whether an image has one to three spatial axes, or an unknown rank.
pub fn has_up_to_three_axes(node: &NodeView<'_>) -> bool {
    // Batch and channels are two axes more.
    matches!(node.rank(0).or_else(|| node.output_type(0).shape().map(<[_]>::len)), None | Some(3..=5))
}

/// Whether the image of a `Col2Im` node has at most this number of spatial axes, or an unknown one.
pub fn has_few_image_axes(node: &NodeView<'_>, most: usize) -> bool {
    let axes = node.shape(1).and_then(|shape| shape.first().and_then(|size| size.as_constant()));
    // The length of the shape input is the number of spatial axes.
    axes.is_none_or(|axes| axes <= most as i64)
}

/// Whether a `Dropout` node certainly drops nothing.
pub fn is_inference(node: &NodeView<'_>) -> bool {
    // Without `training_mode` the operator is in inference mode.
    let constant = || node.constant(2).and_then(|training| training.view().to_ints().ok());
    node.input(2).is_none() || constant().is_some_and(|training| training == [0])
}
