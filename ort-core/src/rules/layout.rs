//! NHWC layout for quantized operators.
//!
//! With the channels last, convolutions read and write whole vectors of channels, however small the
//! image. Each convolution is put between transpositions. The other rules move these behind
//! operators that are independent of the order of axes, until they meet and cancel.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::rewrite::Then::Build;
use crate::rewrite::{Found, Patch};
use crate::rules;
use crate::spec::{MICROSOFT, RUNTIME};
use crate::tensor::Tensor;

rules! { "layout", All;
    /// QLinearConv becomes its NHWC form between two Transposes: it reads and writes whole vectors
    /// of channels.
    conv_channels_last: "c@QLinearConv(x, xs, xz, #w, ws, #wz, ys, yz, b?)" if is_image => Build(conv),
        [
            "x=u8[1,4,6,5] xs=f32:0.015625 xz=u8:128 w=const:i8[8,4,3,3] ws=f32:0.03125 wz=i8:0 ys=f32:0.25 yz=u8:9 b=i32[8] c.pads=[1,1,1,1]",
            "x=u8[2,4,6,5] xs=f32:0.015625 xz=u8:3 w=const:i8[4,1,3,3] ws=f32:0.03125 wz=i8:0 ys=f32:0.25 yz=u8:9 c.group=4",
        ];
    /// QLinearGlobalAveragePool after a Transpose to NCHW reads NHWC, and the Transpose moves
    /// behind it.
    mean_channels_last: "p@QLinearGlobalAveragePool(t@Transpose(x), xs, xz, ys, yz; channels_last=0)"
        if channels_go_first => Build(mean),
        ["x=u8[1,4,5,3] xs=f32:0.5 xz=u8:3 ys=f32:0.25 yz=u8:9 t.perm=[0,3,1,2]"], keep true;
    /// QLinearAveragePool after a Transpose to NCHW reads NHWC, and the Transpose moves behind it.
    average_channels_last: "p@QLinearAveragePool(t@Transpose(x), xs, xz, ys, yz; channels_last=0)"
        if channels_go_first => Build(average),
        ["x=u8[1,4,6,3] xs=f32:0.5 xz=u8:3 ys=f32:0.25 yz=u8:9 t.perm=[0,3,1,2] p.kernel_shape=[2,3] p.strides=[2,1]"], keep true;
    /// MaxPool of quantized values after a Transpose to NCHW becomes NhwcMaxPool, and the Transpose
    /// moves behind it.
    max_channels_last: "p@MaxPool(t@Transpose(x))" if is_image_of_codes => Build(max),
        ["x=u8[2,6,5,4] t.perm=[0,3,1,2] p.kernel_shape=[3,3] p.strides=[2,2] p.pads=[1,1,1,1]"], keep true;
    /// A Transpose before QLinearSigmoid or QLinearLeakyRelu moves behind it, to meet its inverse.
    transpose_after_function: "m@QLinearSigmoid|QLinearLeakyRelu(t@Transpose(x), xs, xz, ys, yz)" => Build(function),
        ["x=u8[2,4,5] xs=f32:0.05 xz=u8:128 ys=f32:0.004 yz=u8:0 t.perm=[2,0,1] m.op=QLinearSigmoid"], keep true;
    /// A Transpose before LookupTable moves behind it, to meet its inverse.
    transpose_after_table: "LookupTable(t@Transpose(x), table)" => Build(table),
        ["x=u8[2,4,5] table=u8[256] t.perm=[2,0,1]"], keep true;
    /// Resize of quantized values to the nearest, after a Transpose to NCHW, resizes NHWC, and the
    /// Transpose moves behind it.
    resize_channels_last: "r@Resize(t@Transpose(x), roi?, scales?, sizes?)" if resizes_codes => Build(resize),
        [
            "x=u8[1,4,6,3] sizes=[1,3,8,9] t.perm=[0,3,1,2] r.mode=nearest",
            "x=i8[2,4,6,3] sizes=[2,3,2,3] t.perm=[0,3,1,2] r.mode=nearest r.coordinate_transformation_mode=asymmetric r.nearest_mode=floor",
        ], keep true;
    /// Equal Transposes before all parts of QLinearConcat become one behind it, to meet its
    /// inverse.
    transpose_after_concat: "k@QLinearConcat(ys, yz, t@Transpose(x), ..)" if all_move_alike => Build(concat),
        ["ys=f32:0.5 yz=u8:9 x=u8[1,4,5,3] t.perm=[0,3,1,2] k.axis=1 k._3=f32:0.25 k._4=u8:7"], keep true;
    /// Equal Transposes before both sides of QLinearAdd or QLinearMul become one behind it, to meet
    /// its inverse.
    transpose_after_codes: "m@QLinearAdd|QLinearMul(s@Transpose(a), as, az, t@Transpose(b), bs, bz, ys, yz)"
        if both_move_alike => Build(binary),
        ["a=u8[2,4,5] as=f32:0.37 az=u8:128 b=u8[2,4,1] bs=f32:0.23 bz=u8:7 ys=f32:0.71 yz=u8:9 s.perm=[0,2,1] t.perm=[0,2,1] m.op=QLinearAdd"],
        keep true;
    /// A Transpose before QLinearAdd or QLinearMul with a constant moves behind it, to meet its
    /// inverse. Scales and biases of channels are such constants.
    transpose_after_constant: "m@QLinearAdd|QLinearMul(t@Transpose(a), as, az, #b, bs, bz, ys, yz)" if constant_moves
        => Build(with_constant),
        [
            "a=u8[2,5,6,4] as=f32:0.37 az=u8:128 b=u8[1,4,1,1] bs=f32:0.23 bz=u8:7 ys=f32:0.71 yz=u8:9 t.perm=[0,3,1,2] m.op=QLinearMul",
            "a=i8[2,5,6,4] as=f32:0.37 az=i8:12 b=i8[4,1,1] bs=f32:0.23 bz=i8:7 ys=f32:0.71 yz=i8:9 t.perm=[0,3,1,2] m.op=QLinearAdd",
            "a=u8[2,4,5] as=f32:0.37 az=u8:128 b=u8[1] bs=f32:0.23 bz=u8:7 ys=f32:0.71 yz=u8:9 t.perm=[2,0,1] m.op=QLinearAdd",
        ], keep true;
    /// The same for a constant that is the first side.
    transpose_after_first_constant: "m@QLinearAdd|QLinearMul(#b, bs, bz, t@Transpose(a), as, az, ys, yz)"
        if constant_moves => Build(with_constant),
        [
            "b=u8[1] bs=f32:0.23 bz=u8:7 a=u8[2,5,6,4] as=f32:0.37 az=u8:128 ys=f32:0.71 yz=u8:9 t.perm=[0,3,1,2] m.op=QLinearMul",
            "b=u8[4,1,1] bs=f32:0.23 bz=u8:7 a=u8[2,5,6,4] as=f32:0.37 az=u8:128 ys=f32:0.71 yz=u8:9 t.perm=[0,3,1,2] m.op=QLinearAdd",
        ], keep true;
}

// NCHW to NHWC, and back.
const TO_LAST: [i64; 4] = [0, 2, 3, 1];
const TO_SECOND: [i64; 4] = [0, 3, 1, 2];

fn transpose(patch: &mut Patch<'_>, value: ValueId, order: &[i64]) -> Result<ValueId> {
    patch.node("Transpose", &[value], &[("perm", Attribute::Ints(order.to_vec()))])
}

/// Returns the permutation of a transposition, if it is given.
fn order(found: &Found<'_>, name: &str) -> Option<Vec<i64>> {
    found.node(name).and_then(|node| node.attrs.find_ints("perm")).map(<[i64]>::to_vec)
}

fn is_image(found: &Found<'_>) -> bool {
    // The permutations above have four axes.
    found.rank("x") == Some(4)
}

fn channels_go_first(found: &Found<'_>) -> bool {
    order(found, "t").is_some_and(|order| order == TO_SECOND)
}

fn is_image_of_codes(found: &Found<'_>) -> bool {
    matches!(found.dtype("x"), Some(DType::I8 | DType::U8)) && channels_go_first(found)
}

/// Whether `Resize` takes the nearest of quantized values, by constant sizes or scales of all axes.
fn resizes_codes(found: &Found<'_>) -> bool {
    let Some(node) = found.node("r") else { return false };
    let extrapolates = node.attrs.find_string("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    let has_axes = node.attrs.find_ints("axes").is_some_and(|axes| !axes.is_empty());
    let is_nearest = node.attrs.find_string("mode").is_none_or(|mode| mode == "nearest");
    let has_all = factors(found).is_some_and(|scales| scales.len() == 4)
        || found.ints("sizes").is_some_and(|sizes| sizes.len() == 4);
    is_image_of_codes(found) && is_nearest && has_all && !extrapolates && !has_axes
}

/// Returns the constant scales of `Resize`; `None` if it has none.
fn factors(found: &Found<'_>) -> Option<Vec<f32>> {
    let scales = found.tensor("scales")?.to_vec::<f32>().ok()?;
    (!scales.is_empty()).then_some(scales)
}

/// Whether each part of a concatenation is transposed like the first.
fn all_move_alike(found: &Found<'_>) -> bool {
    let parts = parts(found).map(|parts| parts.len());
    parts.is_some() && order(found, "t").is_some_and(|order| found.rank("x") == Some(order.len()))
}

/// Returns the parts of a concatenation before their transpositions, if these are all equal.
fn parts(found: &Found<'_>) -> Option<Vec<ValueId>> {
    let order = order(found, "t")?;
    // A scale and a zero point follow each part, and those of the result come first.
    let parts = found.node("k")?.inputs.iter().skip(2).step_by(3);
    let before = |part: &Option<ValueId>| {
        let node = found.producer((*part)?).filter(|node| node.spec.name == "Transpose")?;
        let is_same = node.attrs.find_ints("perm") == Some(order.as_slice());
        node.inputs.first().copied().flatten().filter(|_| is_same)
    };
    parts.map(before).collect()
}

fn both_move_alike(found: &Found<'_>) -> bool {
    let same = order(found, "s").is_some() && order(found, "s") == order(found, "t");
    same && found.rank("a").is_some() && found.rank("a") == found.rank("b")
}

/// Whether the constant of an addition or product broadcasts to the transposed value, and has at
/// most its axes.
fn constant_moves(found: &Found<'_>) -> bool {
    let (Some(order), Some(rank), Some(constant)) =
        (order(found, "t"), found.rank("a"), found.fixed_shape("b"))
    else {
        return false;
    };
    let broadcasts = found.output_shape().is_some_and(|shape| Some(shape) == moved_shape(found).as_deref());
    order.len() == rank && constant.len() <= rank && broadcasts
}

/// Returns the shape of the transposed value.
fn moved_shape(found: &Found<'_>) -> Option<Vec<Dim>> {
    let shape = found.shape("a")?;
    order(found, "t")?.into_iter().map(|axis| shape.get(usize::try_from(axis).ok()?).cloned()).collect()
}

fn conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let x = patch.value("x")?;
    let mut inputs = vec![Some(transpose(patch, x, &TO_LAST)?)];
    inputs.extend(patch.inputs(&["xs", "xz", "w", "ws", "wz", "ys", "yz"])?);
    inputs.extend(patch.found().value("b").map(Some));
    // The attribute concerns images alone; the weights stay [M, C / group, ...].
    let mut attrs = patch.attrs("c");
    attrs.push(("channels_last", Attribute::Int(1)));
    let y = patch.emit((MICROSOFT, "QLinearConv"), &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &TO_SECOND)?]))
}

fn mean(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let inputs = patch.inputs(&["x", "xs", "xz", "ys", "yz"])?;
    let attrs = [("channels_last", Attribute::Int(1))];
    let y = patch.emit((MICROSOFT, "QLinearGlobalAveragePool"), &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &TO_SECOND)?]))
}

fn average(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let (inputs, mut attrs) = (patch.inputs(&["x", "xs", "xz", "ys", "yz"])?, patch.attrs("p"));
    attrs.retain(|(name, _)| *name != "channels_last");
    attrs.push(("channels_last", Attribute::Int(1)));
    let y = patch.emit((MICROSOFT, "QLinearAveragePool"), &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &TO_SECOND)?]))
}

fn max(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let (inputs, mut attrs) = (patch.inputs(&["x"])?, patch.attrs("p"));
    // `storage_order` orders the indices, an output that is not read.
    attrs.retain(|(name, _)| *name != "storage_order");
    let y = patch.emit((MICROSOFT, "NhwcMaxPool"), &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &TO_SECOND)?]))
}

fn table(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let (inputs, order) = (patch.inputs(&["x", "table"])?, order(&patch.found(), "t"));
    let y = patch.emit((RUNTIME, "LookupTable"), &inputs, &[])?;
    order.map(|order| Ok(vec![transpose(patch, y, &order)?])).transpose()
}

/// Resizes the axes in the order before the transposition.
fn resize(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (scales, sizes) = (factors(&found), found.ints("sizes"));
    let x = patch.value("x")?;
    let scales = match scales.as_deref() {
        Some(&[n, c, h, w]) => Some(patch.constant(Tensor::from_vec(&[4], vec![n, h, w, c])?)),
        _ => None,
    };
    let sizes = match sizes.as_deref() {
        Some(&[n, c, h, w]) if scales.is_none() => Some(patch.constant_ints(&[n, h, w, c])?),
        _ => None,
    };
    let attrs = patch.attrs("r");
    let y = patch.emit(("", "Resize"), &[Some(x), None, scales, sizes], &attrs)?;
    Ok(Some(vec![transpose(patch, y, &TO_SECOND)?]))
}

fn concat(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(node), Some(parts), Some(order)) =
        (found.node("k").cloned(), parts(&found), order(&found, "t"))
    else {
        return Ok(None);
    };
    let axis = node.attrs.int("axis")?;
    let axis = if axis < 0 { axis + order.len() as i64 } else { axis };
    let Some(&axis) = usize::try_from(axis).ok().and_then(|axis| order.get(axis)) else { return Ok(None) };
    let mut inputs = node.inputs.to_vec();
    inputs.iter_mut().skip(2).step_by(3).zip(parts).for_each(|(input, part)| *input = Some(part));
    let y = patch.emit((MICROSOFT, "QLinearConcat"), &inputs, &[("axis", Attribute::Int(axis))])?;
    Ok(Some(vec![transpose(patch, y, &order)?]))
}

fn function(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    moved(patch, "t", &["x", "xs", "xz", "ys", "yz"])
}

fn binary(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    moved(patch, "s", &["a", "as", "az", "b", "bs", "bz", "ys", "yz"])
}

/// Transposes the constant instead, which constant folding does once.
fn with_constant(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(node), Some(order), Some(shape)) =
        (found.node("m"), order(&found, "t"), found.fixed_shape("b"))
    else {
        return Ok(None);
    };
    let operator = (node.spec.domain, node.spec.name);
    let is_first = node.inputs.first().copied().flatten() == found.value("b");
    let mut constant = patch.value("b")?;
    if shape.iter().any(|size| *size != 1) {
        // Missing axes are leading ones.
        let mut sizes = vec![1; order.len() - shape.len()];
        sizes.extend(shape.iter().map(|size| *size as i64));
        let sizes = patch.constant_ints(&sizes)?;
        constant = patch.node("Reshape", &[constant, sizes], &[])?;
        let mut inverse: Vec<(i64, i64)> = order.iter().copied().zip(0..).collect();
        inverse.sort_unstable();
        let inverse: Vec<i64> = inverse.into_iter().map(|(_, place)| place).collect();
        constant = transpose(patch, constant, &inverse)?;
    }
    let mut of_constant = vec![Some(constant)];
    of_constant.extend(patch.inputs(&["bs", "bz"])?);
    let mut sides = [patch.inputs(&["a", "as", "az"])?, of_constant];
    if is_first {
        sides.reverse();
    }
    let mut inputs = sides.concat();
    inputs.extend(patch.inputs(&["ys", "yz"])?);
    let attrs = patch.attrs("m");
    let y = patch.emit(operator, &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &order)?]))
}

/// Emits the operator `m` on other inputs, and the transposition behind it.
fn moved(patch: &mut Patch<'_>, transposition: &str, names: &[&str]) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(node), Some(order)) = (found.node("m"), order(&found, transposition)) else { return Ok(None) };
    let operator = (node.spec.domain, node.spec.name);
    let (inputs, attrs) = (patch.inputs(names)?, patch.attrs("m"));
    let y = patch.emit(operator, &inputs, &attrs)?;
    Ok(Some(vec![transpose(patch, y, &order)?]))
}
