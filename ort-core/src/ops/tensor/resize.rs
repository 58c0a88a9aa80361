//! Interpolation: `Resize`, and `Upsample`, which it replaced.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    AttrKind, BatchRule, Cost, Draft, Grad, InferCx, OP, OpSpec, Upgrade, attr, one, opt, var,
};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

use super::geometry::{ResizePolicy, normalize_axes, scaled_size};
use super::gradients;

static RESIZE: OpSpec = OpSpec {
    name: "Resize",
    since: 19,
    first: 10,
    inputs: &[
        one("X", "T1"),
        opt("roi", "T2").host(),
        opt("scales", "tensor(float)").host(),
        opt("sizes", "tensor(int64)").host(),
    ],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", TypeSet::ALL_TENSOR), var("T2", TypeSet::IEEE_FLOATS)],
    attrs: &[
        attr::string("keep_aspect_ratio_policy", "stretch"),
        attr::optional("axes", AttrKind::Ints),
        attr::int("antialias", 0),
        attr::float("extrapolation_value", 0.0),
        attr::int("exclude_outside", 0),
        attr::string("nearest_mode", "round_prefer_floor"),
        attr::string("coordinate_transformation_mode", "half_pixel"),
        attr::float("cubic_coeff_a", -0.75),
        attr::string("mode", "nearest"),
    ],
    cost: Cost::Compute,
    infer: infer_resize,
    upgrades: &[Upgrade { before: 11, apply: scales_behind_roi }],
    grad: Grad::Rule(gradients::of_resize),
    batch: BatchRule::Rule(batch::resized),
    ..OP
};

static UPSAMPLE: OpSpec = OpSpec {
    name: "Upsample",
    since: 9,
    inputs: &[one("X", "T"), one("scales", "tensor(float)").host()],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16])))],
    attrs: &[attr::string("mode", "nearest")],
    cost: Cost::Compute,
    upgrades: &[
        Upgrade { before: 7, apply: scales_of_an_image },
        Upgrade { before: 9, apply: scales_to_input },
        Upgrade { before: i64::MAX, apply: become_resize },
    ],
    ..OP
};

ops![RESIZE, UPSAMPLE];

/// Version 10 of `Resize` had two inputs and asymmetric coordinates.
///
/// Its nearest mode rounded down along axes that grow and up along axes that shrink.
fn scales_behind_roi(draft: &mut Draft<'_>) -> Result<()> {
    let mut scales = draft.required(1)?;
    let nearest = !matches!(draft.attr("mode"), Some(Attribute::String(mode)) if mode != "nearest");
    let given = draft.constant_input(1).map(|tensor| tensor.to_vec::<f32>()).transpose()?.unwrap_or_default();
    let part =
        |choose: fn(f32, f32) -> f32| given.iter().map(|&scale| choose(scale, 1.0)).collect::<Vec<_>>();
    let (growing, shrinking) = (part(f32::max), part(f32::min));
    let shrinks = nearest && shrinking.iter().any(|&scale| scale < 1.0);
    // One node has one rounding mode: grow first in a node of its own, then shrink.
    if shrinks && growing.iter().any(|&scale| scale > 1.0) {
        let growing = draft.constant(Tensor::from_slice(&[growing.len()], &growing)?);
        let data = draft.required(0)?;
        let attrs = [
            ("coordinate_transformation_mode", Attribute::String("asymmetric".into())),
            ("nearest_mode", Attribute::String("floor".into())),
        ];
        let grown = draft.emit_many("Resize", &[Some(data), None, Some(growing)], &attrs, 1)?;
        if let Some(&grown) = grown.first() {
            draft.set_input(0, grown);
        }
        scales = draft.constant(Tensor::from_slice(&[shrinking.len()], &shrinking)?);
    }
    let rounding = if shrinks { "ceil" } else { "floor" };
    draft.inputs = [draft.input(0), None, Some(scales)].as_slice().into();
    draft.set_attr("coordinate_transformation_mode", Attribute::String("asymmetric".into()));
    draft.set_attr("nearest_mode", Attribute::String(rounding.into()));
    Ok(())
}

/// Version 1 of `Upsample` scaled the last two dimensions of an image.
fn scales_of_an_image(draft: &mut Draft<'_>) -> Result<()> {
    let mut take = |name: &str| match draft.take_attr(name) {
        Some(Attribute::Float(scale)) => Ok(scale),
        _ => Err(error!(InvalidGraph, "Required attribute '{name}' is missing")),
    };
    let (height, width) = (take("height_scale")?, take("width_scale")?);
    draft.set_attr("scales", Attribute::Floats(vec![1.0, 1.0, height, width]));
    // Version 1 has the name `bilinear` for the mode.
    if let Some(Attribute::String(mode)) = draft.attr("mode")
        && mode == "bilinear"
    {
        draft.set_attr("mode", Attribute::String("linear".into()));
    }
    Ok(())
}

fn scales_to_input(draft: &mut Draft<'_>) -> Result<()> {
    match draft.take_attr("scales") {
        Some(Attribute::Floats(scales)) => {
            let id = draft.constant(Tensor::from_slice(&[scales.len()], &scales)?);
            draft.set_input(1, id);
            Ok(())
        }
        _ => Err(error!(InvalidGraph, "Required attribute 'scales' is missing")),
    }
}

fn become_resize(draft: &mut Draft<'_>) -> Result<()> {
    // `Upsample` has the inputs and the meaning of `Resize` before version 11.
    draft.op = "Resize".to_string();
    scales_behind_roi(draft)
}

fn infer_resize(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axes = match cx.attrs.find_ints("axes") {
        Some(axes) => normalize_axes(axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    // An empty list counts as absent.
    let is_empty = |index: usize| {
        let length = cx.shape(index).and_then(<[_]>::first).and_then(Dim::as_constant);
        !cx.has_input(index) || length == Some(0)
    };
    ensure!(!(is_empty(2) && is_empty(3)), InvalidGraph, "Resize needs scales or sizes");
    let mut sizes = shape.to_vec();
    if is_empty(2) {
        let policy = ResizePolicy::parse(cx.attrs.string("keep_aspect_ratio_policy")?)?;
        let targets = cx.dims(3);
        if let Some(targets) = &targets {
            ensure!(
                targets.len() == axes.len(),
                InvalidGraph,
                "{} sizes are given for axes {axes:?}",
                targets.len()
            );
        }
        let resized = resized(cx, shape, &axes, targets, policy)?;
        for (&axis, size) in axes.iter().zip(resized) {
            sizes = axes::with_size(&sizes, axis, size);
        }
        return cx.set_shape(0, sizes);
    }
    // The standard forbids scales beside sizes. If a model has both, the scales win.
    let scales = cx.floats(2);
    if let Some(scales) = &scales {
        ensure!(
            scales.len() == axes.len(),
            InvalidGraph,
            "{} scales are given for axes {axes:?}",
            scales.len()
        );
    }
    for (entry, &axis) in axes.iter().enumerate() {
        let scale = scales.as_ref().and_then(|scales| scales.get(entry));
        let size = match scale {
            Some(&scale) => scaled_dim(axes::size(shape, axis)?, scale)?,
            None => None,
        };
        sizes = axes::with_size(&sizes, axis, size.unwrap_or_else(|| cx.fresh()));
    }
    cx.set_shape(0, sizes)
}

/// The sizes of the resized axes if target sizes are given.
fn resized(
    cx: &InferCx<'_>,
    shape: &[Dim],
    axes: &[usize],
    targets: Option<Vec<Dim>>,
    policy: ResizePolicy,
) -> Result<Vec<Dim>> {
    let unknown = || axes.iter().map(|_| cx.fresh()).collect();
    let Some(targets) = targets else { return Ok(unknown()) };
    let negative = targets.iter().any(|size| size.as_constant().is_some_and(|size| size < 0));
    ensure!(!negative, InvalidGraph, "sizes {targets:?} have a negative value");
    if policy == ResizePolicy::Stretch {
        return Ok(targets);
    }
    // The other policies derive one scale from all sizes, so all must be constants.
    let numbers = |dims: Vec<&Dim>| dims.into_iter().map(Dim::as_constant).collect::<Option<Vec<i64>>>();
    let known = (
        numbers(axes.iter().filter_map(|&axis| shape.get(axis)).collect()),
        numbers(targets.iter().collect()),
    );
    let (Some(from), Some(targets)) = known else { return Ok(unknown()) };
    let (_, sizes) = policy.apply(&from, &targets);
    Ok(sizes.into_iter().map(Dim::constant).collect())
}

/// `floor(size * scale)`, or `None` if a symbolic size is scaled by a number that is no simple
/// fraction.
fn scaled_dim(size: &Dim, scale: f32) -> Result<Option<Dim>> {
    // The standard demands scales above 0. A NaN fails the comparison.
    ensure!(scale > 0.0 && scale.is_finite(), InvalidGraph, "the scale {scale} is not positive");
    if let Some(size) = size.as_constant() {
        return Ok(Some(Dim::constant(scaled_size(size, scale))));
    }
    // Fractions whose divisor is a power of two are exact as floats.
    let exact = (0..7).map(|power| 1i64 << power).find(|&divisor| (scale * divisor as f32).fract() == 0.0);
    Ok(exact
        .filter(|_| scale < 4096.0)
        .map(|divisor| (size * (scale * divisor as f32) as i64).floor_div(&Dim::constant(divisor))))
}
