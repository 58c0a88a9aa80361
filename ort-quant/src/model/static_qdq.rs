//! Static quantization in the QDQ form: `QuantizeLinear` and `DequantizeLinear` around products.
//!
//! Only the inputs of products are quantized, so that a value is rounded once before each product
//! and nowhere else. Sums, normalizations and softmax stay in floating point, where 8 bits ruin
//! transformers. Names are those of onnxruntime.quantization's `quantize_static`.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::{Error, ErrorKind, Result, Within};

use super::draft::{integer, integer_of, node};
use super::options::{Quantizer, StaticOptions};
use super::weights::{Form, Job};
use super::work::{Outcome, Work, is_standard, title};
use crate::integer::{GridOptions, QuantType};
use crate::linear::LinearQuantizer;
use crate::range::ValueRange;

/// A product.
struct Product {
    /// The constant weight, if it has one.
    weight: Option<ProductWeight>,
    /// The positions of the inputs that are computed.
    activations: Vec<usize>,
}

struct ProductWeight {
    shape: Vec<usize>,
    axis: Option<usize>,
    before: usize,
}

/// The position of the weight.
const WEIGHT: usize = 1;

/// The values whose ranges are needed.
pub(super) fn activations(work: &Work, nodes: &[NodeProto], quantizer: &Quantizer) -> BTreeSet<String> {
    let mut values = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate() {
        if let (Ok(()), Some(Ok(found))) =
            (quantizer.allows(work.place(index), node), product(work, node, true))
        {
            values.extend(found.activations.iter().filter_map(|place| node.input.get(*place)).cloned());
        }
    }
    values
}

pub(super) fn rewrite(
    work: &mut Work,
    nodes: &[NodeProto],
    options: &StaticOptions,
    quantizer: &Quantizer,
) -> Result<()> {
    let mut values = Values { done: BTreeMap::new(), ranges: ranges(nodes, options) };
    for (index, node) in nodes.iter().enumerate() {
        let found = match product(work, node, !options.per_tensor) {
            None => {
                work.pass(node);
                continue;
            }
            Some(found) => quantizer.allows(work.place(index), node).and(found),
        };
        let found = found.and_then(|found| {
            let named = |place: &usize| node.input.get(*place).map_or("", String::as_str);
            match found.activations.iter().map(named).find(|name| !values.ranges.contains_key(*name)) {
                Some(name) => Err(format!("no sample has a finite element of '{name}'")),
                None => Ok(found),
            }
        });
        match found {
            Err(reason) => {
                work.note(node, Vec::new(), Outcome::Kept { reason });
                work.draft.nodes.push(node.clone());
            }
            Ok(found) => {
                let place = || format!("node '{}' ({})", title(node), node.op_type());
                replace(work, node, &found, (options, &mut values)).within(place)?;
            }
        }
    }
    Ok(())
}

/// The ranges by value. That of a softmax is known.
fn ranges(nodes: &[NodeProto], options: &StaticOptions) -> BTreeMap<String, ValueRange> {
    let mut ranges = options.ranges.clone();
    for node in nodes.iter().filter(|node| is_standard(node, "Softmax")) {
        if let Some(range) = node.output.first().and_then(|output| ranges.get_mut(output)) {
            *range = ValueRange { low: 0.0, high: 1.0 };
        }
    }
    ranges
}

/// The product of a node, or why it stays; `None` for another node.
fn product(work: &Work, node: &NodeProto, per_channel: bool) -> Option<std::result::Result<Product, String>> {
    let operators = ["MatMul", "Gemm", "Conv", "ConvTranspose"];
    let operator = operators.into_iter().find(|operator| is_standard(node, operator))?;
    let [input, weight, ..] = &node.input[..] else { return None };
    let is_float = |name: &str| work.types.dtype(name).is_none_or(|dtype| dtype == DType::F32);
    if !is_float(input) || !is_float(weight) {
        return Some(Err("it is not in float32".into()));
    }
    let Ok(constant) = work.weight(weight) else {
        // Inputs that are codes already are left as they are.
        let is_product = operator == "MatMul" && work.draft.constant(input).is_none() && input != weight;
        let computed = Product { weight: None, activations: vec![0, 1] };
        return Some(if is_product { Ok(computed) } else { Err("its weight is computed".into()) });
    };
    if constant.dtype != DType::F32 {
        return Some(Err("it is not in float32".into()));
    }
    if work.draft.constant(input).is_some() {
        return Some(Err("both of its inputs are constants".into()));
    }
    let rank = constant.shape.len();
    let axis = match operator {
        "Conv" => Some(0),
        // The channels of each group begin again.
        "ConvTranspose" => (integer_of(node, "group", 1) == 1).then_some(1),
        "Gemm" => Some(usize::from(integer_of(node, "transB", 0) == 0)),
        _ => (rank > 1).then(|| rank - 1),
    };
    let axis = axis.filter(|_| per_channel);
    let before = constant.bytes();
    let weight = Some(ProductWeight { shape: constant.shape, axis, before });
    Some(Ok(Product { weight, activations: vec![0] }))
}

/// The values that are quantized so far: what their readers read instead.
struct Values {
    done: BTreeMap<String, String>,
    ranges: BTreeMap<String, ValueRange>,
}

fn replace(
    work: &mut Work,
    old: &NodeProto,
    product: &Product,
    (options, values): (&StaticOptions, &mut Values),
) -> Result<()> {
    let mut new = old.clone();
    for place in &product.activations {
        let Some(input) = new.input.get_mut(*place) else { continue };
        *input = values.quantized(work, input, options)?;
    }
    let mut precision = "uint8 inputs".to_string();
    let (mut shape, mut before, mut after, mut codes) = (Vec::new(), 0, 0, String::new());
    if let Some(weight) = &product.weight
        && let Some(input) = new.input.get_mut(WEIGHT)
    {
        let found = quantized_weight(work, values, (input, weight), options)?;
        *input = found.floats;
        codes = found.codes;
        let added = found.added;
        shape.clone_from(&weight.shape);
        (before, after) = if added == 0 { (0, 0) } else { (weight.before, added) };
        let grouping = if weight.axis.is_some() { "per channel" } else { "per tensor" };
        precision = format!("int8, {grouping}, uint8 inputs");
    }
    work.note(old, shape, Outcome::Quantized { precision, before, after, codes });
    work.draft.nodes.push(new);
    Ok(())
}

impl Values {
    /// The value behind `QuantizeLinear` and `DequantizeLinear`, which all readers share.
    fn quantized(&mut self, work: &mut Work, value: &str, options: &StaticOptions) -> Result<String> {
        if let Some(name) = self.done.get(value) {
            return Ok(name.clone());
        }
        let range = self.ranges.get(value).copied().unwrap_or(ValueRange { low: 0.0, high: 0.0 });
        let grid = options.activations().grid(range.low, range.high)?;
        let draft = &mut work.draft;
        let scale = draft.value_name(&format!("{value}_scale"));
        let point = draft.value_name(&format!("{value}_zero_point"));
        draft.initializers.push(TensorProto {
            name: Some(scale.clone()),
            data_type: Some(DType::F32.onnx_code()),
            float_data: vec![grid.scale],
            ..TensorProto::default()
        });
        draft.initializers.push(TensorProto {
            name: Some(point.clone()),
            data_type: Some(QuantType::UInt8.dtype().onnx_code()),
            int32_data: vec![grid.zero_point],
            ..TensorProto::default()
        });
        let codes = draft.value_name(&format!("{value}_QuantizeLinear_Output"));
        let floats = draft.value_name(&format!("{value}_DequantizeLinear_Output"));
        let name = draft.node_name(&format!("{value}_QuantizeLinear"));
        let inputs = [value, scale.as_str(), point.as_str()];
        draft.nodes.push(node(("", "QuantizeLinear"), name, &inputs, &[&codes], Vec::new()));
        let name = draft.node_name(&format!("{value}_DequantizeLinear"));
        let inputs = [codes.as_str(), scale.as_str(), point.as_str()];
        draft.nodes.push(node(("", "DequantizeLinear"), name, &inputs, &[&floats], Vec::new()));
        self.done.insert(value.to_string(), floats.clone());
        Ok(floats)
    }
}

/// A weight behind `DequantizeLinear`.
struct QuantizedWeight {
    /// The name of its value.
    floats: String,
    codes: String,
    /// The bytes that it added.
    added: usize,
}

/// Puts a weight behind `DequantizeLinear`.
fn quantized_weight(
    work: &mut Work,
    values: &mut Values,
    (name, weight): (&str, &ProductWeight),
    options: &StaticOptions,
) -> Result<QuantizedWeight> {
    let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
    let proto = work.draft.constant(name).cloned().ok_or_else(missing)?;
    let ty = QuantType::Int8;
    let grid = GridOptions { reduce_range: options.reduce_range, ..GridOptions::new(ty, true) };
    let channels = weight.axis.and_then(|axis| weight.shape.get(axis)).copied();
    let channels: Vec<usize> = channels.into_iter().collect();
    let job = Job {
        weight: proto,
        codes: String::new(),
        is_transposed: false,
        shape: weight.shape.clone(),
        is_half: false,
        has_one_point: false,
        form: Form::Linear(LinearQuantizer { grid, axis: weight.axis }),
    };
    let results = [
        ("_scale", DType::F32, channels.clone()),
        ("_zero_point", ty.dtype(), channels),
        ("_quantized", ty.dtype(), weight.shape.clone()),
    ];
    let (names, added) = work.add_weight(job, &results)?;
    let [scale, point, codes] = &names[..] else { return Err(missing()) };
    // Nodes that read the same codes share what is made of them.
    if let Some(floats) = values.done.get(codes) {
        return Ok(QuantizedWeight { floats: floats.clone(), codes: codes.clone(), added });
    }
    let draft = &mut work.draft;
    let floats = draft.value_name(&format!("{name}_DequantizeLinear_Output"));
    let node_name = draft.node_name(&format!("{name}_DequantizeLinear"));
    let axis = weight.axis.map(|axis| integer("axis", axis as i64)).into_iter().collect();
    draft.nodes.push(node(("", "DequantizeLinear"), node_name, &[codes, scale, point], &[&floats], axis));
    values.done.insert(codes.clone(), floats.clone());
    Ok(QuantizedWeight { floats, codes: codes.clone(), added })
}
