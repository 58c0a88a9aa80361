//! Static quantization in the QDQ form: `QuantizeLinear` and `DequantizeLinear` around products.
//!
//! Only the inputs of products are quantized, so that a value is rounded once before each product
//! and nowhere else. Sums, normalizations and softmax stay in floating point, where 8 bits ruin
//! transformers. Names are those of onnxruntime.quantization's `quantize_static`.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};

use super::draft::{Draft, integer, node};
use super::options::{Mode, Quantizer, Scope, StaticOptions, StaticType};
use super::products::{Product, ProductWeight, product};
use super::range_search::GridNames;
use super::scope::quantized_inputs;
use super::smoothed::Smoothing;
use super::smoothing;
use super::static_bias;
use super::static_weights::{WeightNames, weight_codes};
use super::weights::RowScales;
use super::work::{Found, Outcome, Work, is_standard};
use crate::float8::value_scale;
use crate::integer::{Grid, QuantType};
use crate::range::ValueRange;

/// The position of the weight.
const WEIGHT: usize = 1;

/// The values whose ranges are needed.
pub(super) fn activations(work: &Work, nodes: &[NodeProto], quantizer: &Quantizer) -> BTreeSet<String> {
    let mut values = BTreeSet::new();
    let scope = match &quantizer.mode {
        Mode::Static(options) => options.scope,
        _ => Scope::Heavy,
    };
    for (node, places) in nodes.iter().zip(quantized_inputs(work, nodes, (scope, quantizer))) {
        values.extend(places.into_iter().filter_map(|place| node.input.get(place)).cloned());
    }
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
    let (nodes, ranges, smoothing) = prepared(work, nodes, options, quantizer)?;
    let mut values = Values { done: BTreeMap::new(), ranges, smoothing };
    let found = work.candidates(&nodes, quantizer, |node| {
        let found = product(work, node, !options.per_tensor)?;
        Some(found.and_then(|found| {
            let inputs = found.activations.iter().filter_map(|place| node.input.get(*place));
            missing_range(inputs.map(String::as_str), &values.ranges).map(|()| found)
        }))
    });
    let found = found.into_iter().map(|found| Some(found?.map(Step::Product)));
    let mut found: Vec<Option<Found<Step>>> = found.collect();
    let scoped = quantized_inputs(work, &nodes, (options.scope, quantizer));
    for ((found, places), node) in found.iter_mut().zip(scoped).zip(&nodes) {
        let names = places.iter().filter_map(|place| node.input.get(*place));
        let is_ready = missing_range(names.map(String::as_str), &values.ranges).is_ok();
        if found.is_none() && !places.is_empty() && is_ready {
            *found = Some(Ok(Step::Other(places)));
        }
    }
    work.each_layer(&nodes, found, |work, node, step| match step {
        Step::Product(product) => replace(work, node, &product, (options, &mut values)),
        Step::Other(places) => {
            let mut new = node.clone();
            for place in places {
                let Some(input) = new.input.get_mut(place) else { continue };
                *input = values.quantized(work, input, options)?;
            }
            work.draft.nodes.push(new);
            Ok(())
        }
    })
}

/// What becomes of a node.
enum Step {
    /// Its inputs and its weight are quantized.
    Product(Product),
    /// These inputs are.
    Other(Vec<usize>),
}

/// The nodes with the constants of smoothed values, the ranges, and the values that are smoothed.
pub(super) fn prepared(
    work: &mut Work,
    nodes: &[NodeProto],
    options: &StaticOptions,
    quantizer: &Quantizer,
) -> Result<(Vec<NodeProto>, BTreeMap<String, ValueRange>, Smoothing)> {
    let ranges = ranges(nodes, options);
    let mut nodes = nodes.to_vec();
    let mut smoothing = Smoothing::new();
    // Values of bodies are not smoothed, and products without a range of their input stay.
    if !work.is_inside {
        smoothing.clone_from(&options.smoothing);
        smoothing.retain(|name, _| ranges.contains_key(name));
        smoothing::fold(work, &mut nodes, &smoothing, quantizer)?;
    }
    static_bias::fold(work, &mut nodes, &options.biases);
    Ok((nodes, ranges, smoothing))
}

/// Whether all of these values have ranges. If not, the reason.
pub(super) fn missing_range<'n>(
    mut names: impl Iterator<Item = &'n str>,
    ranges: &BTreeMap<String, ValueRange>,
) -> std::result::Result<(), String> {
    match names.find(|name| !ranges.contains_key(*name)) {
        Some(name) => Err(format!("no sample has a finite element of '{name}'")),
        None => Ok(()),
    }
}

/// The ranges by value. That of a softmax is known.
fn ranges(nodes: &[NodeProto], options: &StaticOptions) -> BTreeMap<String, ValueRange> {
    let mut ranges = options.ranges.clone();
    let is_divided = |output: &&String| options.smoothing.contains_key(*output);
    for node in nodes.iter().filter(|node| is_standard(node, "Softmax")) {
        if let Some(range) =
            node.output.first().filter(|output| !is_divided(output)).and_then(|output| ranges.get_mut(output))
        {
            *range = ValueRange { low: 0.0, high: 1.0 };
        }
    }
    ranges
}

/// The values that are quantized so far: what their readers read instead.
struct Values {
    done: BTreeMap<String, String>,
    ranges: BTreeMap<String, ValueRange>,
    smoothing: Smoothing,
}

fn replace(
    work: &mut Work,
    old: &NodeProto,
    product: &Product,
    (options, values): (&StaticOptions, &mut Values),
) -> Result<()> {
    let mut new = old.clone();
    let input = old.input.first().map(String::as_str).unwrap_or_default();
    let smoothed = values.smoothing.get(input).cloned();
    for place in &product.activations {
        let Some(input) = new.input.get_mut(*place) else { continue };
        *input = values.quantized(work, input, options)?;
    }
    let (input_type, weight_type) = match options.ty {
        StaticType::Int8 => ("uint8", "int8"),
        StaticType::Float8 => ("float8", "float8"),
    };
    let mut precision = format!("{input_type} inputs");
    let (mut shape, mut before, mut after, mut codes) = (Vec::new(), 0, 0, String::new());
    if let Some(weight) = &product.weight
        && let Some(input) = new.input.get_mut(WEIGHT)
    {
        let scales = smoothed.as_ref().map(|smoothed| smoothing::row_scales(smoothed, old));
        let found = quantized_weight(work, values, (input, weight, scales), options)?;
        *input = found.floats;
        codes = found.codes;
        let added = found.added;
        shape.clone_from(&weight.shape);
        (before, after) = if added == 0 { (0, 0) } else { (weight.before, added) };
        let grouping = if weight.axis.is_some() { "per channel" } else { "per tensor" };
        let smooth = if smoothed.is_some() { ", smoothed" } else { "" };
        precision = format!("{weight_type}, {grouping}, {input_type} inputs{smooth}");
    }
    let correction = options.biases.of(old);
    precision.extend(correction.map(|_| ", bias corrected"));
    work.note(old, shape, Outcome::Quantized { precision, before, after, codes });
    match correction.filter(|correction| correction.is_added) {
        Some(correction) => static_bias::push_with_add(work, new, correction),
        None => work.draft.nodes.push(new),
    }
    Ok(())
}

impl Values {
    /// The value behind `QuantizeLinear` and `DequantizeLinear`, which all readers share.
    fn quantized(&mut self, work: &mut Work, value: &str, options: &StaticOptions) -> Result<String> {
        if let Some(name) = self.done.get(value) {
            return Ok(name.clone());
        }
        let range = self.ranges.get(value).copied().unwrap_or(ValueRange { low: 0.0, high: 0.0 });
        let grid = match options.ty {
            StaticType::Int8 => options.activations().grid(range.low, range.high)?,
            StaticType::Float8 => Grid { scale: value_scale(range.low, range.high), zero_point: 0 },
        };
        let given = value;
        let divided = self.divided(work, value);
        let value = divided.as_str();
        let draft = &mut work.draft;
        let (scale, point) = add_grid(draft, value, &grid, options.ty);
        // The range of a softmax is not the caller's choice.
        if options.ranges.get(given) == self.ranges.get(given) {
            let names = GridNames { scale: scale.clone(), zero_point: point.clone() };
            work.grids.entry(given.to_string()).or_default().push(names);
        }
        let codes = draft.value_name(&format!("{value}_QuantizeLinear_Output"));
        let floats = draft.value_name(&format!("{value}_DequantizeLinear_Output"));
        let name = draft.node_name(&format!("{value}_QuantizeLinear"));
        let inputs = [value, scale.as_str(), point.as_str()];
        draft.nodes.push(node(("", "QuantizeLinear"), name, &inputs, &[&codes], Vec::new()));
        let name = draft.node_name(&format!("{value}_DequantizeLinear"));
        let inputs = [codes.as_str(), scale.as_str(), point.as_str()];
        draft.nodes.push(node(("", "DequantizeLinear"), name, &inputs, &[&floats], Vec::new()));
        self.done.insert(given.to_string(), floats.clone());
        Ok(floats)
    }

    /// The value after the division of SmoothQuant, or the value itself.
    fn divided(&self, work: &mut Work, value: &str) -> String {
        match self.smoothing.get(value).filter(|smoothed| !smoothed.is_folded()) {
            Some(smoothed) => smoothing::divide(work, value, smoothed),
            None => value.to_string(),
        }
    }
}

/// Adds the scale and the zero point of a value. Returns their names.
pub(super) fn add_grid(draft: &mut Draft, value: &str, grid: &Grid, ty: StaticType) -> (String, String) {
    let dtype = match ty {
        StaticType::Int8 => QuantType::UInt8.dtype(),
        StaticType::Float8 => DType::F8E4M3FN,
    };
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
        data_type: Some(dtype.onnx_code()),
        int32_data: vec![grid.zero_point],
        ..TensorProto::default()
    });
    (scale, point)
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
    (name, weight, scales): (&str, &ProductWeight, Option<RowScales>),
    options: &StaticOptions,
) -> Result<QuantizedWeight> {
    let (WeightNames { codes, scale, zero_point, .. }, added) =
        weight_codes(work, (name, weight), (scales, None), options)?;
    // Nodes that read the same codes share what is made of them.
    if let Some(floats) = values.done.get(&codes) {
        return Ok(QuantizedWeight { floats: floats.clone(), codes, added });
    }
    let draft = &mut work.draft;
    let floats = draft.value_name(&format!("{name}_DequantizeLinear_Output"));
    let node_name = draft.node_name(&format!("{name}_DequantizeLinear"));
    let axis = weight.axis.map(|axis| integer("axis", axis as i64)).into_iter().collect();
    let inputs = [codes.as_str(), scale.as_str(), zero_point.as_str()];
    draft.nodes.push(node(("", "DequantizeLinear"), node_name, &inputs, &[&floats], axis));
    values.done.insert(codes.clone(), floats.clone());
    Ok(QuantizedWeight { floats, codes, added })
}
