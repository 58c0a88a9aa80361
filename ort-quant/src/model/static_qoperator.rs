//! Static quantization in the QOperator form: `QLinearConv`, `QLinearMatMul` and `QGemm`.
//!
//! Products read and write codes. A `Relu` behind a product vanishes into the range of its output,
//! and nodes that only move data work on codes, so that a value becomes floating point only for
//! readers that need it. Names are those of onnxruntime.quantization's `quantize_static`.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::onnx::proto::NodeProto;
use ort_core::{Result, Within};

use super::draft::{node, reads, subgraphs};
use super::integer_products::{Relus, bias_of, integer_product};
use super::options::{Quantizer, StaticOptions};
use super::products::Product;
use super::smoothed::Smoothing;
use super::smoothing;
use super::static_qdq::{add_grid, missing_range, prepared};
use super::static_weights::weight_codes;
use super::weights::BiasOf;
use super::work::{Outcome, Work, is_standard, title};
use crate::range::ValueRange;

const MICROSOFT: &str = "com.microsoft";

/// Operators that move elements and compute none, on the elements of their first input.
const MOVES: [&str; 6] = ["Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];

/// The values of the ranges that are needed: inputs and results of products.
pub(super) fn activations(
    work: &Work,
    nodes: &[NodeProto],
    (options, quantizer): (&StaticOptions, &Quantizer),
) -> BTreeSet<String> {
    let mut values = BTreeSet::new();
    let relus = Relus::of(work, nodes, options, quantizer);
    for (index, node) in nodes.iter().enumerate() {
        let allowed = quantizer.allows(work.place(index), node);
        if let (Ok(()), Some(Ok(found))) = (allowed, integer_product(work, node, options)) {
            values.extend(found.activations.iter().filter_map(|place| node.input.get(*place)).cloned());
            values.insert(relus.result(node).0.to_string());
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
    let relus = Relus::of(work, &nodes, options, quantizer);
    let mut values = Values {
        codes: BTreeMap::new(),
        divided: BTreeMap::new(),
        absent: BTreeSet::new(),
        skipped: BTreeSet::new(),
        ranges,
        smoothing,
    };
    for (index, node) in nodes.iter().enumerate() {
        if values.skipped.contains(&index) {
            continue;
        }
        let allowed = quantizer.allows(work.place(index), node);
        let Some(found) = integer_product(work, node, options) else {
            if !values.moved(work, node, !quantizer.excludes(work.place(index), node)) {
                values.compute_inputs(work, node);
                work.pass(node);
            }
            continue;
        };
        let (result, relu) = relus.result(node);
        let found = allowed.and(found).and_then(|found| {
            let inputs = found.activations.iter().filter_map(|place| node.input.get(*place));
            missing_range(inputs.map(String::as_str).chain([result]), &values.ranges).map(|()| found)
        });
        match found {
            Err(reason) => {
                work.note(node, Vec::new(), Outcome::Kept { reason });
                values.compute_inputs(work, node);
                work.draft.nodes.push(node.clone());
            }
            Ok(found) => {
                let place = || format!("node '{}' ({})", title(node), node.op_type());
                values.replace(work, node, (&found, result), options).within(place)?;
                values.skipped.extend(relu);
            }
        }
    }
    for output in work.outputs.clone() {
        values.compute_floats(work, &output);
    }
    Ok(())
}

/// A value as codes.
#[derive(Clone)]
struct Codes {
    codes: String,
    scale: String,
    zero_point: String,
    /// The number that the scale is.
    step: f32,
}

/// The values so far.
struct Values {
    codes: BTreeMap<String, Codes>,
    /// The codes of smoothed values after their division.
    divided: BTreeMap<String, Codes>,
    /// The values that are codes alone.
    absent: BTreeSet<String>,
    /// The nodes that vanished.
    skipped: BTreeSet<usize>,
    ranges: BTreeMap<String, ValueRange>,
    smoothing: Smoothing,
}

impl Values {
    /// Adds a node that moves data, if its input is codes alone. Returns whether it did.
    fn moved(&mut self, work: &mut Work, old: &NodeProto, is_allowed: bool) -> bool {
        let moves = is_allowed && MOVES.iter().any(|operator| is_standard(old, operator));
        let ([input, ..], [output], true) = (&old.input[..], &old.output[..], moves) else { return false };
        let Some(codes) = self.codes.get(input).filter(|_| self.absent.contains(input)).cloned() else {
            return false;
        };
        let moved = Codes { codes: work.draft.value_name(&format!("{output}_quantized")), ..codes.clone() };
        let mut new = old.clone();
        new.input.iter_mut().take(1).for_each(|input| input.clone_from(&codes.codes));
        new.output = vec![moved.codes.clone()];
        work.draft.nodes.push(new);
        self.codes.insert(output.clone(), moved);
        self.absent.insert(output.clone());
        true
    }

    /// Makes the inputs of a node and of its bodies floating point.
    fn compute_inputs(&mut self, work: &mut Work, node: &NodeProto) {
        let captured = subgraphs(node).flat_map(|graph| reads(&graph.node));
        for name in node.input.iter().cloned().chain(captured) {
            self.compute_floats(work, &name);
        }
    }

    /// Makes a value floating point if it is codes alone.
    fn compute_floats(&mut self, work: &mut Work, name: &str) {
        let Some(codes) = self.codes.get(name).filter(|_| self.absent.contains(name)) else { return };
        let title = work.draft.node_name(&format!("{name}_DequantizeLinear"));
        let inputs = [codes.codes.as_str(), codes.scale.as_str(), codes.zero_point.as_str()];
        work.draft.nodes.push(node(("", "DequantizeLinear"), title, &inputs, &[name], Vec::new()));
        self.absent.remove(name);
    }

    /// Adds the scale and the zero point of a value.
    fn grid(&self, work: &mut Work, (value, name): (&str, &str), options: &StaticOptions) -> Result<Codes> {
        let range = self.ranges.get(value).copied().unwrap_or(ValueRange { low: 0.0, high: 0.0 });
        let grid = options.activations().grid(range.low, range.high)?;
        let (scale, zero_point) = add_grid(&mut work.draft, name, &grid, options.ty);
        let codes = work.draft.value_name(&format!("{name}_quantized"));
        Ok(Codes { codes, scale, zero_point, step: grid.scale })
    }

    /// The codes of a value. The first reader quantizes it for all.
    fn input(&mut self, work: &mut Work, value: &str, options: &StaticOptions) -> Result<Codes> {
        let divided = self.smoothing.get(value).filter(|smoothed| !smoothed.is_folded()).cloned();
        // A smoothed value has other codes than the value itself.
        let known = if divided.is_some() { &self.divided } else { &self.codes };
        if let Some(codes) = known.get(value) {
            return Ok(codes.clone());
        }
        let name = match &divided {
            Some(by) => {
                self.compute_floats(work, value);
                smoothing::divide(work, value, by)
            }
            None => value.to_string(),
        };
        let codes = self.grid(work, (value, &name), options)?;
        let title = work.draft.node_name(&format!("{name}_QuantizeLinear"));
        let inputs = [name.as_str(), codes.scale.as_str(), codes.zero_point.as_str()];
        work.draft.nodes.push(node(("", "QuantizeLinear"), title, &inputs, &[&codes.codes], Vec::new()));
        let known = if divided.is_some() { &mut self.divided } else { &mut self.codes };
        known.insert(value.to_string(), codes.clone());
        Ok(codes)
    }

    /// Replaces a product by its integer operator, which writes the codes of `result`.
    fn replace(
        &mut self,
        work: &mut Work,
        old: &NodeProto,
        (product, result): (&Product, &str),
        options: &StaticOptions,
    ) -> Result<()> {
        let name = |place: usize| old.input.get(place).map(String::as_str).unwrap_or_default();
        let left = self.input(work, name(0), options)?;
        let mut precision = "uint8 inputs and output".to_string();
        let (mut shape, mut before, mut after, mut codes) = (Vec::new(), 0, 0, String::new());
        let mut bias = None;
        let right = match &product.weight {
            Some(weight) => {
                let scales = self.smoothing.get(name(0)).map(|by| smoothing::row_scales(by, old));
                let tensor = bias_of(old).and_then(|bias| work.draft.constant(bias)).cloned();
                let of = tensor.map(|tensor| BiasOf { tensor, input_scale: left.step });
                let (names, added) = weight_codes(work, (name(1), weight), (scales, of), options)?;
                (before, after) = if added == 0 { (0, 0) } else { (weight.before, added) };
                shape.clone_from(&weight.shape);
                let grouping = if weight.axis.is_some() { "per channel" } else { "per tensor" };
                let smooth = if self.smoothing.contains_key(name(0)) { ", smoothed" } else { "" };
                precision = format!("int8, {grouping}, uint8 inputs and output{smooth}");
                codes.clone_from(&names.codes);
                bias = names.bias;
                [names.codes, names.scale, names.zero_point]
            }
            None => {
                let right = self.input(work, name(1), options)?;
                [right.codes, right.scale, right.zero_point]
            }
        };
        let output = self.grid(work, (result, result), options)?;
        let left = [left.codes, left.scale, left.zero_point];
        let operands: Vec<&str> = left.iter().chain(&right).map(String::as_str).collect();
        let grid = [output.scale.as_str(), output.zero_point.as_str()];
        let bias = bias.as_deref();
        let (domain, operator, inputs) = match old.op_type() {
            "Conv" => ("", "QLinearConv", [&operands[..], &grid, bias.as_slice()].concat()),
            "Gemm" => (MICROSOFT, "QGemm", [&operands[..], &[bias.unwrap_or_default()], &grid].concat()),
            _ => ("", "QLinearMatMul", [&operands[..], &grid].concat()),
        };
        if domain == MICROSOFT {
            work.draft.import(MICROSOFT, 1);
        }
        let mut attributes = if operator == "QLinearMatMul" { Vec::new() } else { old.attribute.clone() };
        attributes.retain(|attribute| attribute.name() != "beta");
        let title = work.draft.node_name(&format!("{}_quant", title(old)));
        work.draft.nodes.push(node((domain, operator), title, &inputs, &[&output.codes], attributes));
        precision.extend(options.biases.of(old).map(|_| ", bias corrected"));
        work.note(old, shape, Outcome::Quantized { precision, before, after, codes });
        self.codes.insert(result.to_string(), output);
        self.absent.insert(result.to_string());
        Ok(())
    }
}
