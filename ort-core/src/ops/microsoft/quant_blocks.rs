//! `MatMulNBits`, `MatMulBnb4` and `GatherBlockQuantized`: block-quantized weights, with a scale
//! for each block.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::tensor::geometry::normalize_axis;
use crate::spec::{AttrKind, Cost, Grad, GradCx, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

static MATMUL_NBITS: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MatMulNBits",
    grad: Grad::Rule(gradient_of_product),
    inputs: &[
        one("A", "T1"),
        one("B", "T2"),
        one("scales", "T1"),
        opt("zero_points", "T3"),
        opt("g_idx", "T4"),
        opt("bias", "T1"),
    ],
    outputs: &[one("Y", "T1")],
    types: &[
        var("T1", FLOATS),
        var("T2", TypeSet::of(&[DType::U8])),
        var("T3", FLOATS.union(TypeSet::of(&[DType::U8]))),
        var("T4", TypeSet::of(&[DType::I32])),
    ],
    attrs: &[
        attr::required("K", AttrKind::Int),
        attr::required("N", AttrKind::Int),
        attr::int("bits", 4),
        attr::required("block_size", AttrKind::Int),
        attr::int("accuracy_level", 0),
        attr::int("weight_prepacked", 0),
    ],
    cost: Cost::Compute,
    infer: infer_matmul,
    ..OP
};

const CODES: TypeSet = TypeSet::of(&[DType::I4, DType::U4, DType::U8]);
const FLOAT_CODES: TypeSet = TypeSet::FLOAT8.union(TypeSet::of(&[DType::F4E2M1]));

static GATHER_BLOCK_QUANTIZED: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GatherBlockQuantized",
    grad: Grad::None("its rows are quantized values"),
    inputs: &[one("data", "T1"), one("indices", "Tind"), one("scales", "T2"), opt("zero_points", "T1")],
    outputs: &[one("output", "T2")],
    types: &[
        var("T1", CODES.union(FLOAT_CODES)),
        var("T2", FLOATS),
        var("Tind", TypeSet::of(&[DType::I32, DType::I64])),
    ],
    attrs: &[
        attr::int("gather_axis", 0),
        attr::int("quantize_axis", 1),
        attr::int("block_size", 128),
        attr::int("bits", 4),
    ],
    infer: infer_gather,
    ..OP
};

static MATMUL_BNB4: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MatMulBnb4",
    grad: Grad::None("its weights are quantized values"),
    inputs: &[one("A", "T1"), one("B", "T2"), one("absmax", "T1")],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", FLOATS), var("T2", TypeSet::of(&[DType::U8]))],
    attrs: &[
        attr::required("K", AttrKind::Int),
        attr::required("N", AttrKind::Int),
        attr::required("block_size", AttrKind::Int),
        attr::required("quant_type", AttrKind::Int),
        attr::int("training_mode", 0),
        attr::int("transB", 1),
    ],
    cost: Cost::Compute,
    infer: infer_bnb4,
    ..OP
};

ops![MATMUL_NBITS, MATMUL_BNB4, GATHER_BLOCK_QUANTIZED];

/// Refuses an input whose element count differs from that of `sizes`, if its shape is known.
fn check_count(cx: &InferCx<'_>, index: usize, name: &str, sizes: &[i64]) -> Result<()> {
    let Some(shape) = cx.shape(index) else { return Ok(()) };
    let given: Option<Vec<i64>> = shape.iter().map(Dim::as_constant).collect();
    let Some(given) = given else { return Ok(()) };
    let count = |sizes: &[i64]| sizes.iter().try_fold(1_i64, |count, size| count.checked_mul(*size));
    ensure!(
        // An expected count that overflows fits no tensor.
        count(sizes).is_some() && count(&given) == count(sizes),
        InvalidGraph,
        "{name} has shape {given:?}, expected {sizes:?}"
    );
    Ok(())
}

fn infer_matmul(cx: &mut InferCx<'_>) -> Result<()> {
    let (k, n) = (cx.attrs.int("K")?, cx.attrs.int("N")?);
    let (bits, block) = (cx.attrs.int("bits")?, cx.attrs.int("block_size")?);
    ensure!(k > 0 && n > 0, InvalidGraph, "K is {k} and N is {n}, expected sizes above 0");
    ensure!(matches!(bits, 2 | 4 | 8), InvalidGraph, "bits is {bits}, expected 2, 4 or 8");
    ensure!(
        // The upper bound keeps `block * bits` from overflowing.
        (16..=1 << 30).contains(&block) && block.count_ones() == 1,
        InvalidGraph,
        "block_size is {block}, expected a power of two of at least 16"
    );
    // `div_ceil`, which signed integers lack in stable Rust.
    let blocks = (k - 1) / block + 1;
    check_count(cx, 1, "B", &[n, blocks, block * bits / 8])?;
    check_count(cx, 2, "scales", &[n, blocks])?;
    if cx.has_input(3) {
        let is_packed = cx.dtype(3)? == DType::U8;
        // Packed zero points start each row at a byte.
        let row = if is_packed { (blocks.saturating_mul(bits) - 1) / 8 + 1 } else { blocks };
        check_count(cx, 3, "zero_points", &[n, row])?;
    }
    if let Some(groups) = cx.shape(4).and_then(|shape| shape.first()).and_then(Dim::as_constant) {
        // `g_idx` may cover the unused end of the last block as well.
        let padded = blocks.saturating_mul(block);
        ensure!(
            groups == k || groups == padded,
            InvalidGraph,
            "g_idx has {groups} elements, expected K = {k} or {padded}"
        );
    }
    check_count(cx, 5, "bias", &[n])?;
    let Some(a) = cx.shape(0) else { return Ok(()) };
    let Some((last, rows)) = a.split_last() else {
        return Err(error!(InvalidGraph, "A is a scalar, expected its last dimension to be K = {k}"));
    };
    if let Some(last) = last.as_constant() {
        ensure!(last == k, InvalidGraph, "A has {last} in its last dimension, expected K = {k}");
    }
    let mut shape = rows.to_vec();
    shape.push(Dim::constant(n));
    cx.set_shape(0, shape)
}

/// Two weights share a byte, and blocks ignore the rows of the weights, which are [N, K].
fn infer_bnb4(cx: &mut InferCx<'_>) -> Result<()> {
    let (k, n) = (cx.attrs.int("K")?, cx.attrs.int("N")?);
    let (kind, block) = (cx.attrs.int("quant_type")?, cx.attrs.int("block_size")?);
    let count = k.checked_mul(n).filter(|count| *count > 0 && k > 0);
    let Some(count) = count else {
        return Err(error!(InvalidGraph, "K is {k} and N is {n}, expected sizes above 0"));
    };
    ensure!(matches!(kind, 0 | 1), InvalidGraph, "quant_type is {kind}, expected 0 (FP4) or 1 (NF4)");
    ensure!(
        (16..=1 << 30).contains(&block) && block.count_ones() == 1,
        InvalidGraph,
        "block_size is {block}, expected a power of two of at least 16"
    );
    check_count(cx, 1, "B", &[(count - 1) / 2 + 1])?;
    check_count(cx, 2, "absmax", &[(count - 1) / block + 1])?;
    let Some(a) = cx.shape(0) else { return Ok(()) };
    let [depth, columns] = if cx.attrs.flag("transB")? { [k, n] } else { [n, k] };
    let Some((last, rows)) = a.split_last() else {
        return Err(error!(InvalidGraph, "A is a scalar, expected {depth} in its last dimension"));
    };
    cx.require_equal("the last dimension of A", last, &Dim::constant(depth))?;
    let mut shape = rows.to_vec();
    shape.push(Dim::constant(columns));
    cx.set_shape(0, shape)
}

fn infer_gather(cx: &mut InferCx<'_>) -> Result<()> {
    let (bits, block) = (cx.attrs.int("bits")?, cx.attrs.int("block_size")?);
    let dtype = cx.dtype(0)?;
    let is_float = FLOAT_CODES.contains(dtype);
    ensure!(
        (is_float && block == 0) || ((16..=1 << 30).contains(&block) && block.count_ones() == 1),
        InvalidGraph,
        "block_size is {block}, expected a power of two of at least 16"
    );
    ensure!(is_float || matches!(bits, 2 | 4 | 8), InvalidGraph, "bits is {bits}, expected 2, 4 or 8");
    ensure!(
        !is_float || !cx.has_input(3),
        InvalidGraph,
        "quantized values of a float type have no zero points"
    );
    let (Some(data), Some(indices)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let axis = normalize_axis(cx.attrs.int("gather_axis")?, data.len())?;
    let quantized = normalize_axis(cx.attrs.int("quantize_axis")?, data.len())?;
    let mut data = data.to_vec();
    // Values of fewer than 8 bits are packed into bytes along the last dimension.
    if dtype == DType::U8 {
        ensure!(axis == 0, InvalidGraph, "gather_axis is {axis}, expected 0 for bytes");
        ensure!(bits == 8 || axis != quantized, InvalidGraph, "gather_axis and quantize_axis are the same");
        // A byte type is no float type, so `bits` is checked above and divides 8.
        if let Some(last) = data.last_mut() {
            *last = &*last * (8 / bits);
        }
    }
    check_scales(cx, &data, quantized, block)?;
    check_zero_points(cx, if dtype == DType::U8 { bits } else { 8 })?;
    let (front, back) = axes::around(&data, axis);
    let shape = [front, indices, back].concat();
    cx.set_shape(0, shape)
}

/// Refuses scales other than one for each block of the data along `axis`.
fn check_scales(cx: &InferCx<'_>, data: &[Dim], axis: usize, block: i64) -> Result<()> {
    let Some(scales) = cx.shape(2) else { return Ok(()) };
    ensure!(
        scales.len() == data.len(),
        InvalidGraph,
        "scales have rank {}, data has rank {}",
        scales.len(),
        data.len()
    );
    let is_float = FLOAT_CODES.contains(cx.dtype(0)?);
    for (at, (scale, size)) in scales.iter().zip(data).enumerate() {
        let (Some(scale), Some(size)) = (scale.as_constant(), size.as_constant()) else { continue };
        // A block size of 0 is one block along the whole axis.
        let expected = match (at == axis, block) {
            (true, 0) => 1,
            (true, _) => size.max(0) / block + i64::from(size % block > 0),
            (false, _) => size,
        };
        // The scales of float data may broadcast along the other axes.
        let shared = is_float && at != axis && scale == 1;
        ensure!(
            scale == expected || shared,
            InvalidGraph,
            "scales have size {scale} on axis {at}, expected {expected}"
        );
    }
    Ok(())
}

/// Refuses zero points other than one for each scale. Those of fewer than 8 bits are packed into
/// bytes along the last dimension.
fn check_zero_points(cx: &InferCx<'_>, bits: i64) -> Result<()> {
    let (Some(scales), Some(zeros)) = (cx.shape(2), cx.shape(3)) else { return Ok(()) };
    ensure!(
        scales.len() == zeros.len(),
        InvalidGraph,
        "zero points have rank {}, scales have rank {}",
        zeros.len(),
        scales.len()
    );
    for (at, (scale, zero)) in scales.iter().zip(zeros).enumerate() {
        let (Some(scale), Some(zero)) = (scale.as_constant(), zero.as_constant()) else { continue };
        // The division rounds up: the last byte of a row may be partly used.
        let packed = if at + 1 == scales.len() { 8 / bits } else { 1 };
        let expected = scale / packed + i64::from(scale % packed > 0);
        ensure!(
            zero == expected,
            InvalidGraph,
            "zero points have size {zero} on axis {at}, expected {expected}"
        );
    }
    Ok(())
}

/// The gradient of `MatMulNBits`: `dA = dY * W`, with the dequantized weights `W` of shape
/// `[N, K]`. Multiplying the identity matrix by the quantized weights dequantizes them.
fn gradient_of_product(cx: &mut GradCx<'_>) -> Result<()> {
    let (rows, upstream) = (cx.input(0)?, cx.upstream()?);
    ensure!(!cx.wants(2) && !cx.wants(3), NotImplemented, "the scales of quantized values have no gradient");
    if cx.wants(5) {
        cx.set_broadcast(5, upstream)?;
    }
    if cx.wants(0) {
        let depth = cx.ints(&[cx.attrs().int("K")?])?;
        let places = cx.range(depth)?;
        let column = cx.reshape_to(places, &[-1, 1])?;
        // [K, 1] and [K] broadcast to the identity matrix of [K, K].
        let unit = cx.emit("Equal", &[column, places], &[])?;
        let unit = cx.cast(unit, cx.dtype(rows)?)?;
        let inputs = [Some(unit), cx.find_input(1), cx.find_input(2), cx.find_input(3), cx.find_input(4)];
        let attrs: Vec<(&str, Attribute)> = cx.attr_list();
        let weights = cx.pen.emit_in((MICROSOFT, "MatMulNBits"), &inputs, &attrs)?;
        // From [K, N] to [N, K].
        let weights = cx.transposed(weights)?;
        let gradient = cx.emit("MatMul", &[upstream, weights], &[])?;
        cx.set(0, gradient);
    }
    Ok(())
}
