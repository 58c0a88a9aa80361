//! Constant quantized values that stay quantized.
//!
//! A run would dequantize a whole table or matrix to floats, four or more times its bytes. These
//! rules read the quantized values where they are and dequantize only what a step needs.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::ops::quant::problem::{GranularityKind, Quantization};
use crate::ops::tensor::geometry::normalize_axis;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::rules::linear::{activation, bias_is_vector, residual, residual_has_output_shape};
use crate::rules::qdq::{addend_of_gemm, becomes_integer};
use crate::spec::{MICROSOFT, RUNTIME};
use crate::{Error, Result, rules};

rules! { "quantized_weights", Extended;
    /// Gather from a dequantized constant gathers quantized values, and only the gathered ones are
    /// dequantized. A table of 4 bits becomes GatherBlockQuantized.
    gather_quantized: "g@Gather(d@DequantizeLinear(#x, #s, z?), i)" => Build(gather),
        [
            "x=u8[9,8] s=f32:0.5 z=u8:7 i=i64[2,3] d.axis=0",
            "x=i8[9,8] s=f32[9] z=const:i8[9] i=i64[2,3] d.axis=0",
            "x=i8[9,8] s=f32[8] i=i32[4] d.axis=-1",
            "x=u8[9,8] s=f32[8] z=const:u8[8] i=i64[2,2] g.axis=1 d.axis=1",
            "x=i8[9,8] s=f32[9,2] z=const:i8[9,2] i=i64[4] d.axis=1 d.block_size=4",
            "x=u8[2,9,6] s=f32[2,9,2] i=i64[3,2] g.axis=1 d.axis=2 d.block_size=3",
            "x=i4[9,32] s=f32[9,2] z=const:i4[9,2] i=i64[2,3] d.axis=1 d.block_size=16",
            "x=u4[9,20] s=f32[9] z=const:u4[9] i=i64[4] d.axis=0",
        ], known Nothing;
    /// GatherElements or GatherND from a dequantized constant with a single scale gathers quantized
    /// values, and only the gathered ones are dequantized.
    gather_quantized_elements: "g@GatherElements|GatherND(d@DequantizeLinear(#x, #s, z?), i)"
        => Build(gather_elements),
        [
            "x=u8[9,8] s=f32:0.5 z=u8:7 i=i64[2,8] g.op=GatherElements",
            "x=i8[9,8] s=f32[1] i=i64[3,1] g.op=GatherND d.axis=0",
        ], known Nothing;
    /// MatMul with a dequantized constant becomes DequantizeMatMul, which dequantizes a panel of
    /// the matrix at a time.
    quantized_matmul: "MatMul(a, d@DequantizeLinear(#x, #s, z?))" => Build(matmul),
        [
            "a=f32[2,3,40] x=i8[40,50] s=f32:0.5 z=i8:7",
            "a=f32[3,40] x=u8[40,50] s=f32[50] z=const:u8[50]",
            "a=f32[3,40] x=i8[40,50] s=f32[40] d.axis=0",
            "a=f32[3,40] x=u4[40,50] s=f32[3,50] z=const:u4[3,50] d.axis=0 d.block_size=16",
        ];
    /// MatMul with a transposed dequantized constant becomes DequantizeMatMul with `transB`.
    quantized_matmul_transposed: "MatMul(a, t@Transpose(d@DequantizeLinear(#x, #s, z?)))" if is_reversed
        => Build(transposed_matmul), ["a=f32[2,3,40] x=i8[50,40] s=f32[50] d.axis=0", "a=f32[3,40] x=u8[50,40] s=f32:0.5 t.perm=[1,0]"];
    /// Gemm with a dequantized constant becomes DequantizeMatMul, and a third input that is no
    /// vector is added behind it.
    quantized_gemm: "g@Gemm(a, d@DequantizeLinear(#x, #s, z?), c?; transA=0)" => Build(gemm),
        [
            "a=f32[3,40] x=i8[50,40] s=f32[50] c=f32[50] d.axis=0 g.transB=1",
            "a=f32[3,40] x=u8[40,50] s=f32:0.25 z=u8:3 c=f32[3,1] g.alpha=0.5 g.beta=0.25",
            "a=f32[3,40] x=i4[50,40] s=f32[50,2] z=const:i4[50,2] d.axis=1 d.block_size=32 g.transB=1",
        ];
    /// A vector added to DequantizeMatMul becomes its bias.
    quantized_bias: "Add(m@DequantizeMatMul(a, #b, s, z?; activation=''), #bias)" if bias_is_vector
        => Template("DequantizeMatMul(a, b, s, z?, bias; ..m)"),
        ["a=f32[2,3,40] b=i8[40,50] s=f32[50] bias=f32[50]"];
    /// A tensor of the same shape added to DequantizeMatMul becomes its residual.
    quantized_residual: "Add(m@DequantizeMatMul(a, #b, s, z?, bias?; activation=''), residual)"
        if residual_has_output_shape => Build(residual),
        ["a=f32[2,3,40] b=u8[50,40] s=f32[50] z=u8[50] bias=f32[50] residual=f32[2,3,50] m.axis=0 m.transB=1"];
    /// An activation after DequantizeMatMul joins its epilogue.
    quantized_activation: "act@Activation(m@DequantizeMatMul(a, #b, s, z?, bias?, residual?; activation=''))"
        => Build(activation),
        ["a=f32[2,3,40] b=i4[40,50] s=f32[3,50] bias=f32[50] act.op=Gelu m.axis=0 m.block_size=16 m.alpha=0.5"];
}

/// The constant `x` of a `DequantizeLinear` `d`, with the scales `s` and zero points `z`.
struct Quantized {
    shape: Vec<usize>,
    dtype: DType,
    kind: GranularityKind,
    /// The axis of the scales; 0 for a single one.
    axis: usize,
    /// The attribute `output_dtype` in the form in which a node takes it.
    output: Option<(&'static str, Attribute)>,
    /// Whether the floats have the type of the scales.
    has_scale_type: bool,
}

impl Quantized {
    fn of(found: &Found<'_>) -> Option<Quantized> {
        let (x, scales, node) = (found.tensor("x")?, found.tensor("s")?, found.node("d")?);
        let attribute = |name: &str, default: i64| node.attrs.find_int(name).unwrap_or(default);
        // The standard's default axis is 1.
        let attrs = Quantization { axis: attribute("axis", 1), block_size: attribute("block_size", 0) };
        let kind = attrs.granularity(x.shape(), scales.shape()).ok()?.kind;
        let axis = match kind {
            GranularityKind::Tensor => 0,
            _ => normalize_axis(attrs.axis, x.shape().len()).ok()?,
        };
        let zeros = found.value("z").map(|_| found.tensor("z"));
        if zeros.is_some_and(|zeros| zeros.is_none_or(|zeros| zeros.shape() != scales.shape())) {
            return None;
        }
        let output = attribute("output_dtype", 0);
        Some(Quantized {
            shape: x.shape().to_vec(),
            dtype: x.dtype(),
            kind,
            axis,
            output: (output != 0).then_some(("output_dtype", Attribute::Int(output))),
            has_scale_type: output == 0 || output == i64::from(scales.dtype().onnx_code()),
        })
    }
}

/// Returns the single scale and zero point of a constant, without dimensions.
fn single_parameters(patch: &mut Patch<'_>) -> Result<[Option<ValueId>; 2]> {
    let has_zero = patch.found().value("z").is_some();
    let zero = if has_zero { Some(patch.without_axes("z")?) } else { None };
    Ok([Some(patch.without_axes("s")?), zero])
}

/// Returns scales and zero points with another shape of the same elements.
fn reshaped_parameters(patch: &mut Patch<'_>, shape: &[usize]) -> Result<[Option<ValueId>; 2]> {
    let mut parameters = [None, None];
    for (name, value) in ["s", "z"].into_iter().zip(&mut parameters) {
        let tensor = patch.found().tensor(name).cloned();
        *value = tensor.map(|tensor| Ok::<_, Error>(patch.constant(tensor.reshape(shape)?))).transpose()?;
    }
    Ok(parameters)
}

fn dequantize(
    patch: &mut Patch<'_>,
    quantized: ValueId,
    [scales, zeros]: [Option<ValueId>; 2],
    attrs: &[(&'static str, Attribute)],
) -> Result<Option<Vec<ValueId>>> {
    Ok(Some(vec![patch.emit(("", "DequantizeLinear"), &[Some(quantized), scales, zeros], attrs)?]))
}

fn gather_elements(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(table), Some(node)) = (Quantized::of(&found), found.node("g")) else { return Ok(None) };
    if table.kind != GranularityKind::Tensor {
        return Ok(None);
    }
    let (name, inputs, attrs) = (node.spec.name, patch.inputs(&["x", "i"])?, patch.attrs("g"));
    let quantized = patch.emit(("", name), &inputs, &attrs)?;
    let parameters = single_parameters(patch)?;
    dequantize(patch, quantized, parameters, table.output.as_slice())
}

fn gather(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(table), Some(node)) = (Quantized::of(&found), found.node("g")) else { return Ok(None) };
    let along = normalize_axis(node.attrs.find_int("axis").unwrap_or(0), table.shape.len())?;
    // `Gather` has no packed types.
    if matches!(table.dtype, DType::I4 | DType::U4) {
        return gather_blocks(patch, &table, along);
    }
    let of_rows = table.kind == GranularityKind::Axis && table.axis == along;
    let mut attrs = Vec::from(table.output.as_slice());
    let mut parameters = ["s", "z"].map(|name| patch.found().value(name));
    if table.kind == GranularityKind::Tensor {
        parameters = single_parameters(patch)?;
    } else {
        let Some(rank) = patch.found().rank("i") else { return Ok(None) };
        let (axis, size) = match (table.kind, &*table.shape) {
            (GranularityKind::Blocks { size, .. }, _) if table.axis != along => (table.axis, size),
            (GranularityKind::Axis, _) if !of_rows => (table.axis, 0),
            // A row that has a scale of its own becomes a block, because the rows of a result have
            // no single axis.
            (GranularityKind::Axis, &[rows, columns]) if rows > 0 && columns > 0 => {
                let shape = if along == 0 { [rows, 1] } else { [1, columns] };
                parameters = reshaped_parameters(patch, &shape)?;
                (1 - along, if along == 0 { columns } else { rows })
            }
            _ => return Ok(None),
        };
        // The axes of the indices take the place of the one that they index.
        let axis = if axis < along { axis } else { axis + rank - 1 };
        attrs.extend([("axis", Attribute::Int(axis as i64)), ("block_size", Attribute::Int(size as i64))]);
        if size > 0 {
            for value in parameters.iter_mut().flatten() {
                *value = gather_along(patch, *value, along)?;
            }
        }
    }
    let table = patch.value("x")?;
    let quantized = gather_along(patch, table, along)?;
    dequantize(patch, quantized, parameters, &attrs)
}

fn gather_along(patch: &mut Patch<'_>, value: ValueId, axis: usize) -> Result<ValueId> {
    let indices = patch.value("i")?;
    patch.node("Gather", &[value, indices], &[("axis", Attribute::Int(axis as i64))])
}

/// Gathers from a table of 4 bits by `GatherBlockQuantized`, whose blocks are powers of two.
fn gather_blocks(patch: &mut Patch<'_>, table: &Quantized, along: usize) -> Result<Option<Vec<ValueId>>> {
    /// The smallest block of the operator.
    const LEAST: usize = 16;
    let (parameters, axis, block) = match (table.kind, &*table.shape) {
        (GranularityKind::Blocks { size, .. }, _) if table.axis != along => {
            let zeros = patch.found().value("z");
            ([Some(patch.value("s")?), zeros], table.axis, size)
        }
        (GranularityKind::Axis, &[rows, columns]) if table.axis == along && along == 0 => {
            (reshaped_parameters(patch, &[rows, 1])?, 1, columns.next_power_of_two().max(LEAST))
        }
        _ => return Ok(None),
    };
    if !table.has_scale_type || block < LEAST || !block.is_power_of_two() {
        return Ok(None);
    }
    let [scales, zeros] = parameters;
    let inputs = [Some(patch.value("x")?), Some(patch.value("i")?), scales, zeros];
    let attrs = [("gather_axis", along), ("quantize_axis", axis), ("block_size", block)];
    let attrs = attrs.map(|(name, value)| (name, Attribute::Int(value as i64)));
    Ok(Some(vec![patch.emit((MICROSOFT, "GatherBlockQuantized"), &inputs, &attrs)?]))
}

fn matmul(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let product = product(patch, false, Vec::new(), None)?;
    Ok(product.map(|product| vec![product]))
}

/// Whether the order of a transposition is that of both axes, which is the default.
fn is_reversed(found: &Found<'_>) -> bool {
    let order = found.node("t").and_then(|node| node.attrs.find_ints("perm"));
    order.is_none_or(|order| order == [1, 0])
}

fn transposed_matmul(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let product = product(patch, true, Vec::new(), None)?;
    Ok(product.map(|product| vec![product]))
}

fn gemm(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(node) = found.node("g") else { return Ok(None) };
    let transposed = node.attrs.find_int("transB").unwrap_or(0) != 0;
    let columns = found.output_shape().and_then(<[Dim]>::last);
    let is_vector = matches!(found.shape("c"), Some([size]) if Some(size) == columns);
    let addend = addend_of_gemm(patch)?;
    let mut attrs = patch.attrs("g");
    attrs.retain(|(name, _)| *name == "alpha");
    let Some(product) = product(patch, transposed, attrs, addend.filter(|_| is_vector))? else {
        return Ok(None);
    };
    let sum = match addend.filter(|_| !is_vector) {
        Some(addend) => patch.node("Add", &[product, addend], &[])?,
        None => product,
    };
    Ok(Some(vec![sum]))
}

/// Emits `DequantizeMatMul` of the value `a` and the constant.
fn product(
    patch: &mut Patch<'_>,
    transposed: bool,
    mut attrs: Vec<(&'static str, Attribute)>,
    bias: Option<ValueId>,
) -> Result<Option<ValueId>> {
    let found = patch.found();
    let Some(matrix) = Quantized::of(&found) else { return Ok(None) };
    let is_integer = matrix.dtype.is_integer() && matrix.dtype.bits().is_some_and(|bits| bits <= 8);
    let is_matrix = matrix.shape.len() == 2 && found.rank("a").is_some_and(|rank| rank >= 2);
    let is_of_scale_type = matrix.has_scale_type && found.dtype("a") == found.dtype("s");
    if !is_integer || !is_matrix || !is_of_scale_type || waits_for_quantization(&found, &matrix, transposed) {
        return Ok(None);
    }
    if matrix.kind != GranularityKind::Tensor {
        attrs.push(("axis", Attribute::Int(matrix.axis as i64)));
    }
    if let GranularityKind::Blocks { size, .. } = matrix.kind {
        attrs.push(("block_size", Attribute::Int(size as i64)));
    }
    attrs.push(("transB", Attribute::Int(i64::from(transposed))));
    let inputs = [Some(patch.value("a")?), Some(patch.value("x")?), Some(patch.value("s")?)];
    let inputs = [&inputs[..], &[patch.found().value("z"), bias]].concat();
    patch.emit((RUNTIME, "DequantizeMatMul"), &inputs, &attrs).map(Some)
}

/// Whether a rule of the table `qdq` makes the matmul one of integers later.
fn waits_for_quantization(found: &Found<'_>, matrix: &Quantized, transposed: bool) -> bool {
    let has_scales = match matrix.kind {
        GranularityKind::Tensor => true,
        GranularityKind::Axis => matrix.axis == usize::from(!transposed),
        GranularityKind::Blocks { .. } => false,
    };
    let is_single = matrix.kind == GranularityKind::Tensor;
    // Those rules have no transposition.
    let is_direct = found.node("t").is_none();
    let a = found.value("a").and_then(|a| found.producer(a));
    is_direct
        && has_scales
        && matches!(matrix.dtype, DType::I8 | DType::U8)
        && becomes_integer(found, is_single)
        && a.is_some_and(|a| a.spec.name == "DequantizeLinear")
}
