//! Quantized-operator fusion.
//!
//! A float operator between `DequantizeLinear` and `QuantizeLinear` becomes an operator on
//! quantized values. A matmul of inputs that the model quantizes at run time returns floats
//! directly.
//!
//! The arithmetic is that of Jacob et al., "Quantization and Training of Neural Networks for
//! Efficient Integer-Arithmetic-Only Inference", arXiv 1712.05877. Integer accumulators are exact,
//! floats round, so a quantized result may differ by one.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Node, ValueId};
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::spec::MICROSOFT;
use crate::tensor::Tensor;
use crate::{Result, error, rules};

rules! { "qdq", Extended;
    /// Dequantizing and quantizing with the same scale and zero point becomes the input.
    qdq_nothing: "QuantizeLinear(DequantizeLinear(x, #s, #z), #ys, #yz)" if parameters_stay => Template("x"),
        ["x=u8[2,3] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7"], keep true, known Nothing;
    /// Dequantizing and quantizing with another scale or zero point becomes a table lookup:
    /// QLinearLeakyRelu with a slope of 1.
    qdq_requantize: "QuantizeLinear(DequantizeLinear(x, #xs, #xz), #ys, #yz)" if all_alike
        => Template("QLinearLeakyRelu(x, #xs, #xz, #ys, #yz; alpha=1)"),
        ["x=u8[2,40] xs=f32:0.37 xz=u8:128 ys=f32:0.71 yz=u8:9"], known Nothing;
    /// Division of dequantized values by a number before QuantizeLinear becomes a table lookup:
    /// QLinearLeakyRelu with a slope of 1. A tie may round the other way.
    qdq_division: "QuantizeLinear(Div(DequantizeLinear(x, #xs, #xz), #divisor), #ys, #yz)" if divides_by_number
        => Build(division),
        [
            "x=u8[2,40] xs=f32:0.37 xz=u8:128 divisor=f32:6 ys=f32:0.071 yz=u8:9",
            "x=i8[2,40] xs=f32:0.37 xz=i8:3 divisor=f32[1,1]:0.75 ys=f32:0.5 yz=i8:-9",
        ], known Nothing;
    /// Where between DequantizeLinear and QuantizeLinear of other scales or zero points requantizes
    /// each side by a table and selects quantized values.
    qdq_where_scaled: "QuantizeLinear(Where(c, DequantizeLinear(a, #as, #az), DequantizeLinear(b, #bs, #bz)), #ys, #yz)"
        if all_alike => Build(scaled_where),
        [
            "c=bool[2,30] a=u8[2,30] as=f32:0.37 az=u8:128 b=u8[30] bs=f32:0.23 bz=u8:7 ys=f32:0.71 yz=u8:9",
            "c=bool[2,30] a=i8[1] as=f32:0.5 az=i8:-4 b=i8[2,30] bs=f32:0.5 bz=i8:3 ys=f32:0.5 yz=i8:3",
        ], known Nothing;
    /// Softmax over the last axis between DequantizeLinear and QuantizeLinear becomes
    /// QLinearSoftmax, a table of exponentials, if the reciprocal of the result's scale is whole:
    /// ONNX Runtime's tools choose 1/256.
    qdq_softmax: "QuantizeLinear(m@Softmax(DequantizeLinear(x, #xs, #xz)), #ys, #yz)" if is_row_softmax
        => Template("QLinearSoftmax(x, #xs, #xz, #ys, #yz; axis=-1; opset=13)"),
        [
            "x=u8[3,40] xs=f32:0.05 xz=u8:128 ys=f32:0.00390625 yz=u8:0 m.axis=-1",
            "x=i8[2,3,300] xs=f32:0.1 xz=i8:3 ys=f32:0.00390625 yz=i8:-128 m.axis=2",
        ];
    /// Conv between DequantizeLinear and QuantizeLinear becomes QLinearConv. A float bias is
    /// quantized.
    qdq_conv: "QuantizeLinear(c@Conv(DequantizeLinear(x, #xs, #xz), d@DequantizeLinear(#w, #ws, #wz), b?), #ys, #yz)"
        if is_conv => Build(conv),
        [
            "x=u8[1,4,6,6] xs=f32:0.015625 xz=u8:128 w=i8[8,4,3,3] ws=f32:0.03125 wz=i8:3 ys=f32:0.25 yz=u8:9",
            "x=u8[1,4,6,6] xs=f32:0.015625 xz=u8:5 w=i8[8,4,3,3] ws=f32:0.03125 wz=i8:0 b=const:f32[8] ys=f32:0.25 yz=u8:9 c.pads=[1,1,1,1]",
        ], known Nothing;
    /// Conv between DequantizeLinear and QuantizeLinear becomes QLinearConv, with a quantized bias.
    qdq_conv_bias: "QuantizeLinear(c@Conv(DequantizeLinear(x, #xs, #xz), d@DequantizeLinear(#w, #ws, #wz), DequantizeLinear(#b, #bs, bz?)), #ys, #yz)"
        if is_conv => Build(conv),
        ["x=i8[1,4,6,6] xs=f32:0.015625 xz=i8:-5 w=i8[8,4,1,1] ws=f32:0.03125 wz=i8:0 b=i32[8] bs=f32:0.00048828125 ys=f32:0.25 yz=i8:9"], known Nothing;
    /// Gemm between DequantizeLinear and QuantizeLinear becomes QGemm. A float bias is quantized.
    qdq_gemm: "QuantizeLinear(g@Gemm(DequantizeLinear(x, #xs, #xz), d@DequantizeLinear(#w, #ws, #wz), b?; alpha=1), #ys, #yz)"
        if is_gemm => Build(gemm),
        [
            "x=u8[3,8] xs=f32:0.015625 xz=u8:128 w=i8[5,8] ws=f32:0.03125 wz=i8:0 b=const:f32[5] ys=f32:0.25 yz=u8:9 g.transB=1",
            "x=u8[8,3] xs=f32:0.015625 xz=u8:128 w=i8[8,5] ws=f32:0.03125 wz=i8:0 ys=f32:0.25 yz=u8:9 g.transA=1 g.beta=0.25",
        ], known Nothing;
    /// Gemm between DequantizeLinear and QuantizeLinear becomes QGemm, with a quantized bias.
    qdq_gemm_bias: "QuantizeLinear(g@Gemm(DequantizeLinear(x, #xs, #xz), d@DequantizeLinear(#w, #ws, #wz), DequantizeLinear(#b, #bs, bz?); alpha=1), #ys, #yz)"
        if is_gemm => Build(gemm),
        [
            "x=u8[3,8] xs=f32:0.015625 xz=u8:128 w=i8[8,5] ws=f32:0.03125 wz=i8:0 b=i32[5] bs=f32:0.00048828125 ys=f32:0.25 yz=u8:9",
            "x=u8[8,3] xs=f32:0.015625 xz=u8:128 w=i8[8,5] ws=f32:0.03125 wz=i8:0 b=i32[5] bs=f32:0.00048828125 ys=f32:0.25 yz=u8:9 g.transA=1 g.beta=2",
        ], known Nothing;
    /// MatMul between DequantizeLinear and QuantizeLinear becomes QLinearMatMul.
    qdq_matmul: "QuantizeLinear(MatMul(DequantizeLinear(a, #as, #az), DequantizeLinear(b, #bs, #bz)), #ys, #yz)"
        if all_single => Template("QLinearMatMul(a, #as, #az, b, #bs, #bz, #ys, #yz)"),
        ["a=u8[2,3,8] as=f32:0.015625 az=u8:128 b=i8[2,8,5] bs=f32:0.03125 bz=i8:0 ys=f32:0.25 yz=u8:9"];
    /// Add between DequantizeLinear and QuantizeLinear becomes QLinearAdd. A tie may round the
    /// other way, as in ONNX Runtime.
    qdq_add: "QuantizeLinear(Add(DequantizeLinear(a, #as, #az), DequantizeLinear(b, #bs, #bz)), #ys, #yz)"
        if all_alike => Template("QLinearAdd(a, #as, #az, b, #bs, #bz, #ys, #yz)"),
        ["a=u8[2,40] as=f32:0.37 az=u8:128 b=u8[2,40] bs=f32:0.23 bz=u8:7 ys=f32:0.71 yz=u8:9"], known Nothing;
    /// Mul between DequantizeLinear and QuantizeLinear becomes QLinearMul. A tie may round the
    /// other way, as in ONNX Runtime.
    qdq_mul: "QuantizeLinear(Mul(DequantizeLinear(a, #as, #az), DequantizeLinear(b, #bs, #bz)), #ys, #yz)"
        if all_alike => Template("QLinearMul(a, #as, #az, b, #bs, #bz, #ys, #yz)"),
        ["a=u8[2,40] as=f32:0.5 az=u8:128 b=u8[2,40] bs=f32:0.25 bz=u8:7 ys=f32:16 yz=u8:9"], known Nothing;
    /// GlobalAveragePool between DequantizeLinear and QuantizeLinear becomes
    /// QLinearGlobalAveragePool.
    qdq_global_average: "QuantizeLinear(GlobalAveragePool(DequantizeLinear(x, #xs, #xz)), #ys, #yz)"
        if all_alike => Template("QLinearGlobalAveragePool(x, #xs, #xz, #ys, #yz)"),
        ["x=u8[1,3,4,4] xs=f32:0.5 xz=u8:3 ys=f32:0.25 yz=u8:9"];
    /// AveragePool between DequantizeLinear and QuantizeLinear becomes QLinearAveragePool.
    qdq_average: "QuantizeLinear(p@AveragePool(DequantizeLinear(x, #xs, #xz); ceil_mode=0), #ys, #yz)"
        if is_average => Template("QLinearAveragePool(x, #xs, #xz, #ys, #yz; ..p)"),
        ["x=u8[1,3,4,4] xs=f32:0.5 xz=u8:3 ys=f32:0.25 yz=u8:8 p.kernel_shape=[2,2] p.strides=[2,2]"], known Nothing;
    /// Sigmoid between DequantizeLinear and QuantizeLinear becomes QLinearSigmoid, a table lookup.
    qdq_sigmoid: "QuantizeLinear(Sigmoid(DequantizeLinear(x, #xs, #xz)), #ys, #yz)" if all_alike
        => Template("QLinearSigmoid(x, #xs, #xz, #ys, #yz)"), ["x=u8[2,40] xs=f32:0.05 xz=u8:128 ys=f32:0.004 yz=u8:0"], known Nothing;
    /// Relu between DequantizeLinear and QuantizeLinear becomes QLinearLeakyRelu with a slope of 0.
    qdq_relu: "QuantizeLinear(Relu(DequantizeLinear(x, #xs, #xz)), #ys, #yz)" if all_alike
        => Template("QLinearLeakyRelu(x, #xs, #xz, #ys, #yz; alpha=0)"),
        ["x=u8[2,40] xs=f32:0.5 xz=u8:128 ys=f32:0.25 yz=u8:9"], known Nothing;
    /// LeakyRelu between DequantizeLinear and QuantizeLinear becomes QLinearLeakyRelu, a table
    /// lookup.
    qdq_leaky_relu: "QuantizeLinear(l@LeakyRelu(DequantizeLinear(x, #xs, #xz)), #ys, #yz)" if all_alike
        => Template("QLinearLeakyRelu(x, #xs, #xz, #ys, #yz; ..l)"),
        ["x=u8[2,40] xs=f32:0.5 xz=u8:128 ys=f32:0.25 yz=u8:9"], known Nothing;
    /// Concat of any number of dequantized values before QuantizeLinear becomes QLinearConcat.
    qdq_concat: "QuantizeLinear(k@Concat(DequantizeLinear(a, #as, #az), DequantizeLinear(b, #bs, #bz), ..), #ys, #yz)"
        if all_alike => Build(concat),
        ["a=u8[2,4] as=f32:0.5 az=u8:128 b=u8[2,3] bs=f32:0.25 bz=u8:7 ys=f32:0.5 yz=u8:9 k.axis=1"], known Nothing;
    /// MatMul of dequantized values that stays a float becomes MatMulIntegerToFloat.
    dequantized_matmul: "MatMul(DequantizeLinear(a, #as, az?), d@DequantizeLinear(#b, #bs, bz?))"
        if is_float_product => Template("MatMulIntegerToFloat(a, b, #as, bs, az?, bz?)"),
        [
            "a=u8[2,3,8] as=f32:0.015625 az=u8:128 b=i8[8,5] bs=f32[5] bz=const:i8[5]",
            "a=i8[3,8] as=f32:0.015625 az=i8:3 b=i8[8,5] bs=f32:0.25",
        ];
    /// Gemm of dequantized values that stays a float becomes QGemm, and its third input is added
    /// behind it.
    dequantized_gemm: "g@Gemm(DequantizeLinear(a, #as, #az), d@DequantizeLinear(#b, #bs, #bz), c?; alpha=1)"
        if is_float_product => Build(float_gemm),
        [
            "a=u8[3,8] as=f32:0.015625 az=u8:128 b=i8[5,8] bs=f32[5] bz=const:i8[5] c=f32[5] g.transB=1 d.axis=0",
            "a=u8[8,3] as=f32:0.015625 az=u8:128 b=i8[8,5] bs=f32:0.25 bz=i8:3 c=f32[3,1] g.transA=1 g.beta=0.5",
        ];
    /// A dynamically quantized MatMulInteger with Cast and scales becomes MatMulIntegerToFloat: the
    /// epilogue applies the scales.
    integer_product_scaled: "Mul(Cast(MatMulInteger(a, b, az, bz?); to=1), Mul(as, #bs))" if is_scaled_product
        => Template("MatMulIntegerToFloat(a, b, as, bs, az, bz?)"),
        ["a=u8[2,3,8] b=const:i8[8,5] az=u8:128 as=f32[1] bs=f32:0.25"];
    /// A vector added to MatMulIntegerToFloat becomes its bias.
    integer_product_bias: "Add(m@MatMulIntegerToFloat(a, b, as, bs, az?, bz?), #bias)" if bias_is_vector
        => Template("MatMulIntegerToFloat(a, b, as, bs, az?, bz?, bias)"),
        ["a=u8[2,3,8] b=const:i8[8,5] az=u8:128 as=f32[1] bs=f32:0.25 bias=f32[5]"];
}

/// Whether the value `name` has one element and at most one axis.
pub(super) fn is_single(found: &Found<'_>, name: &str) -> bool {
    found.fixed_shape(name).is_some_and(|shape| matches!(shape.as_slice(), [] | [1]))
}

/// The names that patterns give to scales.
const SCALES: [&str; 5] = ["s", "as", "bs", "xs", "ys"];

/// Whether quantizing dequantized values restores them. The scale must be a single number such that
/// all dequantized values are finite and in the order of the quantized ones.
pub(super) fn scale_is_single(found: &Found<'_>) -> bool {
    scale_is_usual(found) && of_bytes(found, "x")
}

pub(super) fn scale_is_usual(found: &Found<'_>) -> bool {
    // In float32, 255 * 1e30 is finite, and multiples of 1e-30 are normal numbers.
    let is_usual = found.scalar("s").is_some_and(|scale| (1e-30..1e30).contains(&scale));
    is_usual && is_single(found, "s") && found.dtype("s") == Some(DType::F32)
}

/// Like [`scale_is_single`], for values that are quantized again with the same scale and zero
/// point. Files often have equal constants of several names.
pub(super) fn parameters_stay(found: &Found<'_>) -> bool {
    let stays = |before: &str, after: &str| {
        is_single(found, after)
            && found.dtype(before) == found.dtype(after)
            && found.scalar(before).is_some_and(|number| found.scalar(after) == Some(number))
    };
    scale_is_single(found) && stays("s", "ys") && stays("z", "yz")
}

/// The names that patterns give to zero points.
const ZEROS: [&str; 5] = ["z", "az", "bz", "xz", "yz"];

/// Whether all scales are single F32 numbers, all zero points are single, and all quantized values
/// are 8-bit.
fn all_single(found: &Found<'_>) -> bool {
    let single = |name: &str| is_single(found, name) && found.dtype(name) == Some(DType::F32);
    SCALES.into_iter().filter(|name| found.value(name).is_some()).all(single)
        && ZEROS.into_iter().filter(|name| found.value(name).is_some()).all(|name| is_single(found, name))
        && ["a", "b", "x", "yz"]
            .into_iter()
            .filter(|name| found.value(name).is_some())
            .all(|name| of_bytes(found, name))
}

pub(super) fn of_bytes(found: &Found<'_>, name: &str) -> bool {
    matches!(found.dtype(name), Some(DType::I8 | DType::U8))
}

/// Like [`all_single`], with all quantized values of one type.
fn all_alike(found: &Found<'_>) -> bool {
    let dtype = found.dtype("yz");
    let mut codes = ["a", "b", "x"].into_iter().filter(|name| found.value(name).is_some());
    all_single(found) && codes.all(|name| found.dtype(name) == dtype)
}

fn is_average(found: &Found<'_>) -> bool {
    let dilated = found.node("p").and_then(|node| node.attrs.find_ints("dilations"));
    all_alike(found) && dilated.is_none_or(|dilations| dilations.iter().all(|&dilation| dilation == 1))
}

/// Whether a softmax goes along the last axis, and `QLinearSoftmax` has its steps: that rounds the
/// reciprocal of the scale down to a whole number.
fn is_row_softmax(found: &Found<'_>) -> bool {
    let axis = found.node("m").and_then(|node| node.attrs.find_int("axis")).unwrap_or(-1);
    let is_last = axis == -1 || found.rank("x").is_some_and(|rank| axis + 1 == rank as i64);
    let steps = found.scalar("ys").map(|scale| (scale as f32).recip());
    all_alike(found) && is_last && steps.is_some_and(|steps| f64::from(steps - steps.floor()) <= UNSEEN)
}

/// Whether a divisor is a single positive number that adds no axes.
fn divides_by_number(found: &Found<'_>) -> bool {
    let is_usual = found.scalar("divisor").is_some_and(|divisor| (1e-6..1e6).contains(&divisor));
    let adds_none = found.rank("divisor").is_some_and(|rank| rank == 0 || found.rank("x") >= Some(rank));
    all_alike(found) && is_usual && adds_none && found.dtype("divisor") == Some(DType::F32)
}

/// Divides the scale of the values instead.
fn division(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(scale), Some(divisor)) = (found.scalar("xs"), found.scalar("divisor")) else { return Ok(None) };
    let scale = patch.constant(Tensor::scalar(scale as f32 / divisor as f32)?);
    let mut inputs = vec![Some(patch.value("x")?), Some(scale)];
    inputs.extend(singles(patch, &["xz", "ys", "yz"])?);
    let identity = [("alpha", Attribute::Float(1.0))];
    Ok(Some(vec![patch.emit((MICROSOFT, "QLinearLeakyRelu"), &inputs, &identity)?]))
}

/// Selects from two sides that are requantized.
fn scaled_where(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let mut inputs = patch.inputs(&["c"])?;
    for [side, scale, zero] in [["a", "as", "az"], ["b", "bs", "bz"]] {
        let found = patch.found();
        let stays = found.scalar(scale) == found.scalar("ys") && found.scalar(zero) == found.scalar("yz");
        let mut of_side = patch.inputs(&[side])?;
        if !stays {
            of_side.extend(singles(patch, &[scale, zero, "ys", "yz"])?);
            let identity = [("alpha", Attribute::Float(1.0))];
            of_side = vec![Some(patch.emit((MICROSOFT, "QLinearLeakyRelu"), &of_side, &identity)?)];
        }
        inputs.extend(of_side);
    }
    Ok(Some(vec![patch.emit(("", "Where"), &inputs, &[])?]))
}

/// Concatenates quantized values of any number of scales.
fn concat(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(node) = found.node("k") else { return Ok(None) };
    let (graph, dtype) = (found.graph, found.dtype("yz"));
    let single = |id: ValueId| {
        let tensor = graph.constants.get(&id)?;
        (tensor.element_count() == 1 && tensor.shape().len() < 2).then(|| tensor.reshape(&[]))
    };
    let mut parts = Vec::new();
    for input in &node.inputs {
        let part = input.and_then(|input| found.producer(input));
        let Some(part) = part.filter(|part| part.spec.name == "DequantizeLinear") else { return Ok(None) };
        let &[Some(x), Some(scale), Some(zero)] = part.inputs.as_slice() else { return Ok(None) };
        let (Some(scale), Some(zero)) = (single(scale), single(zero)) else { return Ok(None) };
        let (scale, zero) = (scale?, zero?);
        if scale.dtype() != DType::F32 || Some(zero.dtype()) != dtype {
            return Ok(None);
        }
        parts.push((x, scale, zero));
    }
    let mut inputs = singles(patch, &["ys", "yz"])?;
    for (x, scale, zero) in parts {
        inputs.extend([Some(x), Some(patch.constant(scale)), Some(patch.constant(zero))]);
    }
    let attrs = patch.attrs("k");
    Ok(Some(vec![patch.emit((MICROSOFT, "QLinearConcat"), &inputs, &attrs)?]))
}

/// Whether the weights have one scale, or one for each index of `axis`.
pub(super) fn weights_are_scaled(found: &Found<'_>, axis: usize, rank: usize) -> bool {
    let (Some(shape), Some(scales), Some(node)) =
        (found.fixed_shape("w"), found.fixed_shape("ws"), found.node("d"))
    else {
        return false;
    };
    // The standard's default axis of `DequantizeLinear` is 1.
    let given = node.attrs.find_int("axis").unwrap_or(1);
    let given = if given < 0 { given + rank as i64 } else { given };
    let blocked = node.attrs.find_int("block_size").unwrap_or(0) != 0;
    let per_place = given == axis as i64 && shape.get(axis).is_some_and(|&count| scales == [count]);
    shape.len() == rank && !blocked && (is_single(found, "ws") || per_place)
}

/// Checks what convolutions and matmuls have in common: 8-bit values, and single scales except for
/// the weights.
fn sides_fit(found: &Found<'_>) -> bool {
    let scales = ["xs", "ys"].into_iter().all(|name| is_single(found, name));
    let floats = ["xs", "ys", "ws"].into_iter().all(|name| found.dtype(name) == Some(DType::F32));
    let zeros = is_single(found, "xz") && is_single(found, "yz");
    scales
        && floats
        && zeros
        && have_kernel(found)
        && ["x", "w", "yz"].into_iter().all(|name| of_bytes(found, name))
}

/// Whether there is a kernel for these types. We have one for all of them. If ONNX Runtime is to
/// run the result, input and output must have one type, and int8 inputs no uint8 weights.
fn have_kernel(found: &Found<'_>) -> bool {
    let [x, w, y] = ["x", "w", "yz"].map(|name| found.dtype(name));
    !found.must_be_portable() || (x == y && (x == Some(DType::U8) || w == x))
}

fn is_conv(found: &Found<'_>) -> bool {
    let Some(rank) = found.rank("w") else { return false };
    sides_fit(found) && weights_are_scaled(found, 0, rank) && (3..=5).contains(&rank)
}

fn is_gemm(found: &Found<'_>) -> bool {
    let transposed = found.node("g").is_some_and(|node| node.attrs.find_int("transB") == Some(1));
    sides_fit(found) && weights_are_scaled(found, if transposed { 0 } else { 1 }, 2)
}

/// Whether a constant bias has `count` numbers along its last axis, and at most two axes.
fn is_bias_of_columns(found: &Found<'_>, count: usize) -> bool {
    // A bias of [1, N] broadcasts over the rows of a `Gemm`.
    matches!(found.fixed_shape("b").as_deref(), Some([size] | [1, size]) if *size == count)
}

/// Returns the numbers of a constant bias of floats, or of quantized values without a zero point.
fn bias_numbers(found: &Found<'_>) -> Result<Option<Vec<f64>>> {
    let Some(tensor) = found.tensor("b") else { return Ok(None) };
    let is_codes = found.value("bs").is_some();
    match tensor.dtype() {
        DType::F32 if !is_codes => Ok(Some(tensor.to_doubles()?)),
        DType::I32 if is_codes => {
            // Tools write a zero point for each filter.
            let zeros = found.tensor("bz").map(Tensor::to_doubles).transpose()?;
            let no_zero = match zeros {
                Some(zeros) => zeros.iter().all(|zero| *zero == 0.0),
                None => found.value("bz").is_none(),
            };
            let Some(scales) = found.tensor("bs").filter(|scales| scales.dtype() == DType::F32 && no_zero)
            else {
                return Ok(None);
            };
            let scales = scales.to_doubles()?;
            let is_per_place = found.rank("b") == Some(1) && scales.len() == tensor.element_count();
            if scales.len() != 1 && !is_per_place {
                return Ok(None);
            }
            let scale = |at: usize| scales.get(at).or(scales.first()).copied().unwrap_or(0.0);
            let ints = tensor.to_doubles()?.into_iter().enumerate();
            Ok(Some(ints.map(|(at, int)| int * scale(at)).collect()))
        }
        _ => Ok(None),
    }
}

/// Returns the bias in units of the accumulator, with one value for each of `count` columns.
/// `Some(None)` if the pattern has no bias; `None` if its bias cannot be converted. The node
/// multiplies the bias by `factor`.
fn bias(patch: &mut Patch<'_>, count: usize, factor: f64) -> Result<Option<Option<ValueId>>> {
    let found = patch.found();
    if found.value("b").is_none() {
        return Ok(Some(None));
    }
    let (Some(numbers), Some(x_scale), Some(y_scale)) =
        (bias_numbers(&found)?, found.scalar("xs"), found.scalar("ys"))
    else {
        return Ok(None);
    };
    let Some(w_scales) = found.tensor("ws").and_then(|scales| scales.to_vec::<f32>().ok()) else {
        return Ok(None);
    };
    let whole = |(at, number): (usize, &f64)| {
        // The standard: the bias of `QLinearConv` has the scale `x_scale * w_scale` and the zero
        // point 0.
        let w_scale = w_scales.get(at).or(w_scales.first()).copied().map_or(0.0, f64::from);
        whole_steps(*number * factor, x_scale * w_scale, y_scale)
    };
    let steps: Option<Vec<i32>> = numbers.iter().enumerate().map(whole).collect();
    let Some(steps) = steps.filter(|_| is_bias_of_columns(&found, count)) else { return Ok(None) };
    let steps = Tensor::from_vec(&[count], steps)?;
    Ok(Some(Some(patch.constant(steps))))
}

/// Maximum rounding error, as a fraction of the result's step. The fraction of results that it
/// changes is about as small.
const UNSEEN: f64 = 1.0 / (1 << 10) as f64;

/// Converts a number of the bias to whole steps of the accumulator. `None` if the rounding could
/// show in the result, whose quantized values are `code` apart.
fn whole_steps(number: f64, step: f64, code: f64) -> Option<i32> {
    /// The relative error of a product of two scales in single precision.
    const SINGLE: f64 = 1.0 / (1 << 22) as f64;
    let exact = number / step;
    let whole = exact.round_ties_even();
    let error = (exact - whole).abs();
    let is_unseen = error <= exact.abs() * SINGLE || error * step.abs() <= code.abs() * UNSEEN;
    // A bias much larger than the accumulators can be is not a quantized bias.
    (is_unseen && whole.abs() <= f64::from(1_u32 << 30)).then_some(whole as i32)
}

/// Returns the inputs of these names, each as a scalar if it has one element.
fn singles(patch: &mut Patch<'_>, names: &[&str]) -> Result<Vec<Option<ValueId>>> {
    names.iter().map(|name| patch.without_axes(name).map(Some)).collect()
}

fn conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(&filters) = patch.found().fixed_shape("w").as_deref().and_then(<[usize]>::first) else {
        return Ok(None);
    };
    let Some(bias) = bias(patch, filters, 1.0)? else { return Ok(None) };
    let mut inputs = patch.inputs(&["x"])?;
    inputs.extend(singles(patch, &["xs", "xz"])?);
    inputs.extend(patch.inputs(&["w"])?);
    inputs.extend(singles(patch, &["ws", "wz", "ys", "yz"])?);
    inputs.push(bias);
    let attrs = patch.attrs("c");
    Ok(Some(vec![patch.emit(("", "QLinearConv"), &inputs, &attrs)?]))
}

/// Returns the factor of the third input of the `Gemm` `g`.
fn beta(found: &Found<'_>) -> f32 {
    found.node("g").and_then(|node| node.attrs.find_float("beta")).unwrap_or(1.0)
}

/// Returns the left side `name` of the `Gemm` `g`, transposed if the node transposes it.
fn left(patch: &mut Patch<'_>, name: &str) -> Result<ValueId> {
    let value = patch.value(name)?;
    let transposed = patch.found().node("g").and_then(|node| node.attrs.find_int("transA"));
    match transposed {
        Some(1) => patch.node("Transpose", &[value], &[("perm", Attribute::Ints(vec![1, 0]))]),
        _ => Ok(value),
    }
}

/// Returns the third input `c` of the `Gemm` `g` times its factor; `None` if it is left out.
pub(super) fn addend_of_gemm(patch: &mut Patch<'_>) -> Result<Option<ValueId>> {
    let (addend, factor) = (patch.found().value("c"), beta(&patch.found()));
    let Some(addend) = addend.filter(|_| factor != 1.0) else { return Ok(addend) };
    let factor = patch.number_like("c", factor)?;
    let factor = factor.ok_or_else(|| error!(Fail, "the third input of a Gemm is no float"))?;
    patch.node("Mul", &[addend, factor], &[]).map(Some)
}

fn gemm(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let transposed = found.node("g").and_then(|node: &Node| node.attrs.find_int("transB")).unwrap_or(0);
    // The columns of the result are the rows of a transposed weight.
    let axis = if transposed == 1 { 0 } else { 1 };
    let Some(&columns) = found.fixed_shape("w").as_deref().and_then(|shape| shape.get(axis)) else {
        return Ok(None);
    };
    let Some(bias) = bias(patch, columns, f64::from(beta(&found)))? else { return Ok(None) };
    let mut inputs = vec![Some(left(patch, "x")?)];
    inputs.extend(singles(patch, &["xs", "xz"])?);
    inputs.extend(patch.inputs(&["w"])?);
    inputs.extend(singles(patch, &["ws", "wz"])?);
    inputs.push(bias);
    inputs.extend(singles(patch, &["ys", "yz"])?);
    let attrs = [("transB", Attribute::Int(transposed))];
    Ok(Some(vec![patch.emit((MICROSOFT, "QGemm"), &inputs, &attrs)?]))
}

/// Whether a matmul of dequantized values, whose result is not quantized, can be one of integers:
/// of one scale on the left, and a constant matrix of one scale, or one for each column, on the
/// right.
fn is_float_product(found: &Found<'_>) -> bool {
    let Some(root) = found.root() else { return false };
    let transposed = root.attrs.find_int("transB").unwrap_or(0) != 0;
    let columns = if transposed { 0 } else { 1 };
    let (Some(b), Some(scales), Some(node)) =
        (found.fixed_shape("b"), found.fixed_shape("bs"), found.node("d"))
    else {
        return false;
    };
    // The standard's default axis of `DequantizeLinear` is 1.
    let axis = node.attrs.find_int("axis").unwrap_or(1).rem_euclid(2);
    let is_plain = node.attrs.find_int("block_size").unwrap_or(0) == 0;
    let of_columns =
        is_plain && axis == columns as i64 && b.get(columns).is_some_and(|size| scales == [*size]);
    let zeros_fit = |zero: &str, scale: &str| {
        found.value(zero).is_none() || found.fixed_shape(zero) == found.fixed_shape(scale)
    };
    let singles = ["as", "az"].into_iter().all(|name| found.value(name).is_none() || is_single(found, name));
    // ONNX Runtime multiplies no int8 values by uint8 weights.
    let is_portable = found.dtype("a") == Some(DType::U8) || found.dtype("b") == Some(DType::I8);
    let of_floats = ["as", "bs"].into_iter().all(|name| found.dtype(name) == Some(DType::F32));
    b.len() == 2
        && found.rank("a").is_some_and(|rank| rank > 1)
        && (is_single(found, "bs") || of_columns)
        && zeros_fit("bz", "bs")
        && singles
        && of_floats
        && (is_portable || !found.must_be_portable())
        && of_bytes(found, "a")
        && of_bytes(found, "b")
        && !becomes_integer(found, is_single(found, "bs"))
}

/// Whether a matmul of dequantized values becomes one of integers by a rule of the `QuantizeLinear`
/// behind it, whose turn comes later. `QLinearMatMul` has a single scale here, and `QGemm` may have
/// one for each column.
pub(super) fn becomes_integer(found: &Found<'_>, has_single_scale: bool) -> bool {
    let Some(root) = found.root() else { return false };
    let output = root.outputs.first().copied().flatten();
    let zeros = |name: &str| found.value(name).is_some();
    let has_zeros = (zeros("z") || zeros("bz")) && (zeros("az") || !zeros("as"));
    has_zeros
        && (has_single_scale || root.spec.name == "Gemm")
        && output.is_some_and(|output| found.is_quantized(output))
}

/// `QGemm` without a scale of the result. A bias stays a float, which no rounding changes.
fn float_gemm(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let mut inputs = vec![Some(left(patch, "a")?)];
    inputs.extend(singles(patch, &["as", "az"])?);
    inputs.extend(patch.inputs(&["b"])?);
    inputs.extend(singles(patch, &["bs", "bz"])?);
    let mut attrs = patch.attrs("g");
    attrs.retain(|(name, _)| *name == "transB");
    let product = patch.emit((MICROSOFT, "QGemm"), &inputs, &attrs)?;
    let addend = addend_of_gemm(patch)?;
    Ok(Some(vec![match addend {
        Some(addend) => patch.node("Add", &[product, addend], &[])?,
        None => product,
    }]))
}

/// Whether the scales and zero points of a quantized matmul fit `MatMulIntegerToFloat`.
fn is_scaled_product(found: &Found<'_>) -> bool {
    let columns =
        found.fixed_shape("b").filter(|shape| shape.len() == 2).and_then(|shape| shape.last().copied());
    let scales = found.fixed_shape("bs");
    let fits = columns.is_some_and(|columns| match scales.as_deref() {
        Some([] | [1]) => true,
        Some([count]) => *count == columns,
        _ => false,
    });
    let zero = found.value("bz").is_none() || found.rank("bz").is_some_and(|rank| rank < 2);
    let single = is_single(found, "as") && is_single(found, "az");
    fits && zero
        && single
        && found.dtype("as") == Some(DType::F32)
        && found.rank("a").is_some_and(|rank| rank > 1)
}

fn bias_is_vector(found: &Found<'_>) -> bool {
    let columns = found.shape("b").and_then(<[Dim]>::last);
    matches!(found.shape("bias"), Some([size]) if Some(size) == columns)
}
