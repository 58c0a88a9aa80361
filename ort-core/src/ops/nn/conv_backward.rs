//! Convolution backward data and backward filter: `ConvGradInput` and `ConvGradWeights`.
//!
//! Both have the strides, dilations, pads and groups of the convolution, and take the shape of
//! their output as an input. The number of windows need not match the size of the image: positions
//! outside the image count as zero padding.

use super::conv_gradients;
use super::geometry::Windows;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{AttrKind, AttrSpec, Cost, Draft, Grad, InferCx, OP, OpSpec, RUNTIME, attr, one, var};
use crate::{Result, ensure, error};

const ATTRS: &[AttrSpec] = &[
    attr::optional("dilations", AttrKind::Ints),
    attr::int("group", 1),
    attr::optional("pads", AttrKind::Ints),
    attr::optional("strides", AttrKind::Ints),
];

static CONV_GRAD_INPUT: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "ConvGradInput",
    inputs: &[one("dY", "T"), one("W", "T"), one("shape", "tensor(int64)").host()],
    outputs: &[one("dX", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: ATTRS,
    cost: Cost::Compute,
    infer: |cx| infer(cx, 1),
    lower: Some(lower_input),
    grad: Grad::Rule(conv_gradients::of_input_gradient),
    ..OP
};

static CONV_GRAD_WEIGHTS: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "ConvGradWeights",
    inputs: &[one("X", "T"), one("dY", "T"), one("shape", "tensor(int64)").host()],
    outputs: &[one("dW", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: ATTRS,
    cost: Cost::Compute,
    infer: |cx| infer(cx, 2),
    lower: Some(lower_weights),
    grad: Grad::Rule(conv_gradients::of_weights_gradient),
    ..OP
};

ops![CONV_GRAD_INPUT, CONV_GRAD_WEIGHTS];

/// Sets the output to the shape that input 2 holds, and checks the ranks and attributes.
///
/// The weights' shape is that of input 1, or the output shape itself if `weights` is another index.
fn infer(cx: &mut InferCx<'_>, weights: usize) -> Result<()> {
    let group = cx.attrs.int("group")?;
    ensure!((1..1 << 31).contains(&group), InvalidGraph, help = "group is 1 or more", "group {group}");
    let Some(shape) = cx.dims(2) else { return Ok(()) };
    let ranks = [cx.shape(0), cx.shape(1)].map(|given| given.map_or(shape.len(), <[Dim]>::len));
    ensure!(
        shape.len() >= 3 && ranks.iter().all(|rank| *rank == shape.len()),
        InvalidGraph,
        help = "all have a batch or filters, channels, and the same spatial axes, of which there is one at least",
        "tensors of rank {ranks:?} and a shape of {} sizes",
        shape.len()
    );
    let kernel = if weights == 1 { cx.shape(1).map(<[Dim]>::to_vec) } else { Some(shape.clone()) };
    if let Some(kernel) = kernel {
        Windows::new(cx.attrs, kernel.get(2..).unwrap_or_default())?;
    }
    cx.set_shape(0, shape)
}

/// The attributes of the convolution, one number per spatial axis.
struct Numbers {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    pads: Vec<i64>,
    group: i64,
    /// The number of spatial axes.
    spatial: usize,
}

impl Numbers {
    fn of(draft: &Draft<'_>) -> Result<Numbers> {
        let rank = draft.shape(0).or(draft.shape(1)).map(|shape| shape.len()).filter(|rank| *rank >= 3);
        let spatial = rank.ok_or_else(|| error!(NotImplemented, "the rank is not known"))? - 2;
        let list = |name: &str, len: usize, default: i64| match draft.attr(name) {
            Some(Attribute::Ints(values)) if values.len() == len => values.clone(),
            _ => vec![default; len],
        };
        let group = match draft.attr("group") {
            Some(Attribute::Int(group)) => *group,
            _ => 1,
        };
        Ok(Numbers {
            strides: list("strides", spatial, 1),
            dilations: list("dilations", spatial, 1),
            pads: list("pads", spatial * 2, 0),
            group,
            spatial,
        })
    }
}

/// Decomposes into a `ConvTranspose` without padding, whose border is then cut off. Positions after
/// the last window are padded with zeros.
fn lower_input(draft: &mut Draft<'_>) -> Result<()> {
    let (upstream, weights, shape) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let Numbers { strides, dilations, pads, group, spatial } = Numbers::of(draft)?;
    let attrs = [
        ("strides", Attribute::Ints(strides)),
        ("dilations", Attribute::Ints(dilations)),
        ("group", Attribute::Int(group)),
    ];
    // [N, M, windows...] and [M, C / group, kernel...] give [N, C, image...] with its padding.
    let whole = draft.emit("ConvTranspose", &[upstream, weights], &attrs)?;
    let there = draft.emit("Shape", &[whole], &[("start", Attribute::Int(2))])?;
    let (two, rank) = (draft.constant_ints(&[2])?, draft.constant_ints(&[spatial as i64 + 2])?);
    let wanted = draft.emit("Slice", &[shape, two, rank], &[])?;
    // A negative pad crops. The end pad is negative if the windows overhang the image, and positive
    // if they fall short of it.
    let begins: Vec<i64> = pads.iter().take(spatial).map(|begin| -begin).collect();
    let begins = draft.constant_ints(&begins)?;
    let ends = draft.emit("Sub", &[wanted, there], &[])?;
    let ends = draft.emit("Sub", &[ends, begins], &[])?;
    let pads = draft.emit("Concat", &[begins, ends], &[("axis", Attribute::Int(0))])?;
    let axes: Vec<i64> = (2..spatial as i64 + 2).collect();
    let axes = draft.constant_ints(&axes)?;
    let gradient = draft.emit_one("Pad", &[Some(whole), Some(pads), None, Some(axes)], &[])?;
    draft.replace(&[gradient])
}

/// Decomposes into a convolution of the image with the upstream gradient as its kernel.
///
/// Batch and channels swap roles, and so do strides and dilations. The convolution sums over the
/// batch; the filters stay in the order of their groups. Where strides leave a remainder that no
/// window covers, it returns more positions than the kernel has, so the end is sliced off.
fn lower_weights(draft: &mut Draft<'_>) -> Result<()> {
    let (image, upstream, shape) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let Numbers { strides, dilations, pads, group, spatial } = Numbers::of(draft)?;
    let perm =
        |order: Vec<usize>| [("perm", Attribute::Ints(order.into_iter().map(|axis| axis as i64).collect()))];
    // The upstream gradient becomes the kernel [M, N, windows...].
    let exchanged: Vec<usize> = [1, 0].into_iter().chain(2..spatial + 2).collect();
    let upstream = draft.emit("Transpose", &[upstream], &perm(exchanged.clone()))?;
    // `[N, G * C, ...]` becomes `[C, G * N, ...]`, so that a group of the convolution sums over the
    // batch.
    let range = |start, end| [("start", Attribute::Int(start)), ("end", Attribute::Int(end))];
    let (rank, axis) = (spatial as i64 + 2, [("axis", Attribute::Int(0))]);
    let batch = draft.emit("Shape", &[image], &range(0, 1))?;
    let places = draft.emit("Shape", &[image], &range(2, rank))?;
    let groups = draft.constant_ints(&[group, -1])?;
    let split = draft.emit("Concat", &[batch, groups, places], &axis)?;
    let split = draft.emit("Reshape", &[image, split], &[])?;
    let turned =
        draft.emit("Transpose", &[split], &perm([2, 1, 0].into_iter().chain(3..spatial + 3).collect()))?;
    let channels = draft.emit("Shape", &[turned], &range(0, 1))?;
    let rest = draft.constant_ints(&[-1])?;
    let joined = draft.emit("Concat", &[channels, rest, places], &axis)?;
    let image = draft.emit("Reshape", &[turned, joined], &[])?;
    let attrs = [
        ("strides", Attribute::Ints(dilations)),
        ("dilations", Attribute::Ints(strides)),
        ("pads", Attribute::Ints(pads)),
        ("group", Attribute::Int(group)),
    ];
    let sums = draft.emit("Conv", &[image, upstream], &attrs)?;
    // From [C / group, M, kernel...] to [M, C / group, kernel...].
    let sums = draft.emit("Transpose", &[sums], &perm(exchanged))?;
    let (two, end) = (draft.constant_ints(&[2])?, draft.constant_ints(&[rank])?);
    let ends = draft.emit("Slice", &[shape, two, end], &[])?;
    let starts = draft.constant_ints(&vec![0; spatial])?;
    let axes: Vec<i64> = (2..rank).collect();
    let axes = draft.constant_ints(&axes)?;
    let gradient = draft.emit("Slice", &[sums, starts, ends, axes], &[])?;
    draft.replace(&[gradient])
}
