//! Functions of one 8-bit value as lookup tables.
//!
//! However many operators compute it, such a function has 256 results. The operators themselves
//! compute the table, from all values at once, by constant folding: the results keep their bits.

use super::qdq::of_bytes;
use crate::dtype::DType;
use crate::ir::{Node, ValueId};
use crate::ops::fused::lookup_table::ENTRIES;
use crate::rewrite::Then::Build;
use crate::rewrite::{Found, Patch};
use crate::spec::RUNTIME;
use crate::tensor::Tensor;
use crate::{Result, error, rules};

rules! { "tables", All;
    /// An operator on one quantized tensor, whose other inputs are single constants or functions of
    /// the same tensor, becomes LookupTable.
    table_of_codes: "m@QLinearAdd|QLinearMul|QLinearSigmoid|QLinearLeakyRelu(x, ..)" if is_function => Build(table),
        [
            "x=u8[2,40] m.op=QLinearAdd m._1=f32:0.37 m._2=u8:128 m._3=u8:7 m._4=f32:0.23 m._5=u8:9 m._6=f32:0.71 m._7=u8:9",
            "x=i8[2,40] m.op=QLinearMul m._1=f32:0.5 m._2=i8:-4 m._3=i8[1,1]:100 m._4=f32:0.01 m._5=i8:3 m._6=f32:0.4 m._7=i8:9",
            "x=u8[2,40] m.op=QLinearSigmoid m._1=f32:0.05 m._2=u8:128 m._3=f32:0.004 m._4=u8:0",
            "x=i8[2,40] m.op=QLinearLeakyRelu m._1=f32:0.05 m._2=i8:12 m._3=f32:0.04 m._4=i8:0 m.alpha=0.25",
        ], known Nothing;
    /// The same for a constant that is the first side.
    table_of_second_codes: "m@QLinearAdd|QLinearMul(#c, cs, cz?, x, ..)" if is_function => Build(table),
        ["x=u8[2,40] c=u8:200 cs=f32:0.01 cz=u8:3 m.op=QLinearMul m._4=f32:0.23 m._5=u8:9 m._6=f32:0.71 m._7=u8:9"],
        known Nothing;
    /// A sum or product of functions of one quantized tensor becomes LookupTable.
    table_of_tables: "m@QLinearAdd|QLinearMul(LookupTable(x, #t), ..)" if is_function => Build(table),
        ["x=u8[2,40] t=u8[256] m.op=QLinearAdd m._1=f32:0.37 m._2=u8:128 m._3=u8:7 m._4=f32:0.23 m._5=u8:9 m._6=f32:0.71 m._7=u8:9"],
        keep true, known Nothing;
    /// A function of a function is one table.
    table_of_table: "LookupTable(LookupTable(x, #t), #u)" => Build(composed),
        ["x=u8[2,40] t=u8[256] u=u8[256]", "x=i8[2,40] t=i8[256] u=i8[256]"], known Nothing;
    /// A float function of a dequantized value before QuantizeLinear becomes LookupTable.
    table_of_floats: "q@QuantizeLinear(m@Abs|Add|Clip|Cos|Div|Elu|Erf|Exp|Gelu|HardSigmoid|HardSwish|Log|Max|Min|Mul|Neg|Pow|Reciprocal|Relu|Selu|Sigmoid|Sin|Softplus|Softsign|Sqrt|Sub|Tanh(DequantizeLinear(x, #s, z?), ..), #ys, yz?)"
        if is_float_function => Build(float_table),
        [
            "x=u8[2,40] s=f32:0.05 z=u8:128 ys=f32:0.01 yz=u8:128 m.op=Erf",
            "x=i8[2,40] s=f32:0.05 z=i8:8 ys=f32:0.01 yz=i8:1 m.op=HardSigmoid m.alpha=0.3",
            "x=u8[2,40] s=f32:0.05 z=u8:0 ys=f32:0.1 yz=u8:0 m.op=Pow m._1=f32:1.5",
            "x=u8[2,40] s=f32:0.05 z=u8:99 ys=f32:0.02 yz=u8:3 m.op=Clip m._1=f32:0 m._2=f32:6",
        ], known Nothing;
    /// The same for two float functions, such as the Erf of a quotient.
    table_of_two_floats: "q@QuantizeLinear(n@Add|Clip|Div|Elu|Erf|Exp|HardSigmoid|Log|Max|Min|Mul|Pow|Relu|Sigmoid|Softplus|Sqrt|Sub|Tanh(m@Add|Clip|Div|Exp|Max|Min|Mul|Neg|Pow|Sub(DequantizeLinear(x, #s, z?), ..), ..), #ys, yz?)"
        if is_float_function => Build(float_table),
        [
            "x=u8[2,40] s=f32:0.05 z=u8:128 ys=f32:0.01 yz=u8:128 m.op=Div m._1=f32:1.4142135 n.op=Erf",
            "x=i8[2,40] s=f32:0.05 z=i8:8 ys=f32:0.01 yz=i8:1 m.op=Neg n.op=Add n._1=f32:0.5",
        ], known Nothing;
}

/// Whether `m` computes each element from one element of `x`, which is no constant.
fn is_function(found: &Found<'_>) -> bool {
    let of_x = |id: &ValueId| Some(*id) == found.value("x") || table_of(found, *id).is_some();
    is_varying(found)
        && found.node("m").is_some_and(|node| {
            node.inputs.iter().flatten().all(|id| of_x(id) || is_single_constant(found, *id))
        })
}

/// The nodes between `DequantizeLinear` and `QuantizeLinear`, in the order of their values.
const FUNCTIONS: [&str; 2] = ["m", "n"];

/// Whether the nodes between `DequantizeLinear` and `QuantizeLinear` compute each element from one
/// element of `x`.
fn is_float_function(found: &Found<'_>) -> bool {
    let parameters = ["s", "z", "ys", "yz"].into_iter().filter_map(|name| found.value(name));
    let functions = FUNCTIONS.into_iter().filter_map(|name| found.node(name));
    let others = functions.flat_map(|node| node.inputs.iter().skip(1).flatten().copied());
    let of_floats = ["s", "ys"].into_iter().all(|name| found.dtype(name) == Some(DType::F32));
    let stays_of_type = found
        .value("yz")
        .map_or(found.dtype("x") == Some(DType::U8), |_| found.dtype("yz") == found.dtype("x"));
    is_varying(found)
        && of_bytes(found, "x")
        && of_floats
        && stays_of_type
        && parameters.chain(others).all(|id| is_single_constant(found, id))
}

fn is_varying(found: &Found<'_>) -> bool {
    found.value("x").is_some() && found.tensor("x").is_none()
}

/// Whether a value is a constant of one element that adds no axes to `x`.
fn is_single_constant(found: &Found<'_>, id: ValueId) -> bool {
    let rank = found.rank("x").unwrap_or(0);
    let constant = found.graph.constants.get(&id);
    constant.is_some_and(|tensor| tensor.element_count() == 1 && tensor.shape().len() <= rank)
}

/// Returns the constant table by which a value is computed from `x`.
fn table_of(found: &Found<'_>, id: ValueId) -> Option<ValueId> {
    let node = found.producer(id).filter(|node| node.spec.domain == RUNTIME)?;
    match (node.spec.name, node.inputs.as_slice()) {
        ("LookupTable", &[x, Some(table)]) if x == found.value("x") => {
            found.graph.constants.contains_key(&table).then_some(table)
        }
        _ => None,
    }
}

/// Adds all 256 values of the type of `x`, in the order of their bits.
fn codes(patch: &mut Patch<'_>) -> Result<ValueId> {
    let bits = (0..=u8::MAX).collect::<Vec<u8>>();
    let tensor = match patch.found().dtype("x") {
        Some(DType::U8) => Tensor::from_vec(&[ENTRIES], bits)?,
        Some(DType::I8) => Tensor::from_vec(&[ENTRIES], bits.into_iter().map(|bits| bits as i8).collect())?,
        other => return Err(error!(Fail, "a table of values of type {other:?}")),
    };
    Ok(patch.constant(tensor))
}

/// Returns the input of a node that computes the table: all values for `x`, the table of a function
/// of `x`, and constants without axes.
fn input_of_table(patch: &mut Patch<'_>, codes: ValueId, id: ValueId) -> Result<ValueId> {
    let found = patch.found();
    if Some(id) == found.value("x") {
        return Ok(codes);
    }
    match (table_of(&found, id), found.graph.constants.get(&id)) {
        (Some(table), _) => Ok(table),
        (None, Some(tensor)) if !tensor.shape().is_empty() => {
            let scalar = tensor.reshape(&[])?;
            Ok(patch.constant(scalar))
        }
        _ => Ok(id),
    }
}

/// Returns the inputs of the node that computes the table in place of `node`.
fn inputs_of_table(patch: &mut Patch<'_>, codes: ValueId, node: &Node) -> Result<Vec<Option<ValueId>>> {
    let inputs = node.inputs.iter();
    inputs.map(|input| input.map(|id| input_of_table(patch, codes, id)).transpose()).collect()
}

fn lookup(patch: &mut Patch<'_>, table: ValueId) -> Result<Option<Vec<ValueId>>> {
    let x = patch.value("x")?;
    Ok(Some(vec![patch.emit((RUNTIME, "LookupTable"), &[Some(x), Some(table)], &[])?]))
}

fn table(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(node) = patch.found().node("m").cloned() else { return Ok(None) };
    let codes = codes(patch)?;
    let inputs = inputs_of_table(patch, codes, &node)?;
    let attrs = patch.attrs("m");
    let table = patch.emit((node.spec.domain, node.spec.name), &inputs, &attrs)?;
    lookup(patch, table)
}

fn composed(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(first), Some(second)) = (found.tensor("t"), found.tensor("u")) else { return Ok(None) };
    let (places, second) = (first.view().bytes()?, second.view());
    let table = second.bytes()?;
    let entries = places.iter().map(|place| table.get(usize::from(*place)).copied());
    let Some(entries) = entries.collect::<Option<Vec<u8>>>() else { return Ok(None) };
    let tensor = match second.dtype() {
        DType::I8 => Tensor::from_vec(&[ENTRIES], entries.into_iter().map(|bits| bits as i8).collect())?,
        _ => Tensor::from_vec(&[ENTRIES], entries)?,
    };
    let table = patch.constant(tensor);
    lookup(patch, table)
}

fn float_table(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let codes = codes(patch)?;
    let parameter = |patch: &mut Patch<'_>, name: &str| {
        patch.found().value(name).map(|id| input_of_table(patch, codes, id)).transpose()
    };
    let [scale, zero, y_scale, y_zero] = ["s", "z", "ys", "yz"].map(|name| parameter(patch, name));
    let mut numbers = patch.emit(("", "DequantizeLinear"), &[Some(codes), scale?, zero?], &[])?;
    for name in FUNCTIONS {
        let Some(node) = patch.found().node(name).cloned() else { continue };
        let others = Node { inputs: node.inputs.iter().skip(1).copied().collect(), ..node.clone() };
        let mut inputs = vec![Some(numbers)];
        inputs.extend(inputs_of_table(patch, codes, &others)?);
        let attrs = patch.attrs(name);
        numbers = patch.emit((node.spec.domain, node.spec.name), &inputs, &attrs)?;
    }
    let of_quantize = patch.attrs("q");
    let table = patch.emit(("", "QuantizeLinear"), &[Some(numbers), y_scale?, y_zero?], &of_quantize)?;
    lookup(patch, table)
}
