//! Dynamic quantization: integer weights, and inputs that are quantized in each run.
//!
//! A recurrent layer becomes `DynamicQuantizeLSTM`, which quantizes its inputs and states itself.
//!
//! Names of values and nodes are those of onnxruntime.quantization's `quantize_dynamic`. Unlike it,
//! convolutions have a scale for each output channel, weights that several nodes read in different
//! ways are not changed in place, and `Gemm` keeps what is not a plain product in floating point.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};

use super::draft::{float_of, integer, integer_of, node, reads};
use super::options::{DynamicOptions, Quantizer};
use super::weights::{Form, Job};
use super::work::{Found, Outcome, WeightOf, Work, is_standard, title};
use crate::integer::{GridOptions, QuantType};
use crate::linear::LinearQuantizer;

const MICROSOFT: &str = "com.microsoft";

/// The operators with a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    MatMul,
    Gemm,
    Conv,
    Gather,
    Lstm,
}

impl Rule {
    const ALL: [Rule; 5] = [Rule::MatMul, Rule::Gemm, Rule::Conv, Rule::Gather, Rule::Lstm];

    fn operator(self) -> &'static str {
        match self {
            Rule::MatMul => "MatMul",
            Rule::Gemm => "Gemm",
            Rule::Conv => "Conv",
            Rule::Gather => "Gather",
            Rule::Lstm => "LSTM",
        }
    }
}

/// A layer that is quantized.
struct Layer8 {
    rule: Rule,
    is_transposed: bool,
    shape: Vec<usize>,
    before: usize,
}

/// A value as codes: their names, and those of scale and zero point.
#[derive(Clone)]
struct Codes {
    codes: String,
    scale: String,
    zero_point: String,
}

pub(super) fn rewrite(
    work: &mut Work,
    nodes: &[NodeProto],
    options: &DynamicOptions,
    quantizer: &Quantizer,
) -> Result<()> {
    let found = work.candidates(nodes, quantizer, |node| candidate(work, node));
    let floats = read_as_floats(work, nodes, &found);
    let mut quantized = Quantized { values: BTreeMap::new(), floats, options: *options };
    work.each_layer(nodes, found, |work, node, layer| match layer.rule {
        Rule::Gather => quantized.gather(work, node, &layer),
        Rule::Conv => quantized.conv(work, node, &layer),
        Rule::Lstm => lstm(work, node, options),
        Rule::MatMul | Rule::Gemm => quantized.product(work, node, &layer),
    })
}

/// The layer of a node, or why it stays; `None` for a node without a weight.
fn candidate(work: &Work, node: &NodeProto) -> Option<Found<Layer8>> {
    let rule = Rule::ALL.into_iter().find(|rule| is_standard(node, rule.operator()))?;
    let place = usize::from(rule != Rule::Gather);
    let name = node.input.get(place)?;
    // A Gather of integers, as in shape arithmetic, is no layer.
    if rule == Rule::Gather && !work.weight(name).is_ok_and(|weight| weight.dtype.is_float()) {
        return None;
    }
    Some(layer_of(work, node, rule, name))
}

fn layer_of(work: &Work, node: &NodeProto, rule: Rule, name: &str) -> Found<Layer8> {
    let weight = work.weight(name)?;
    if weight.dtype != DType::F32 {
        return Err(format!("its weight is {}, and dynamic quantization needs float32", weight.dtype));
    }
    let rank = weight.shape.len();
    match rule {
        Rule::MatMul if rank < 2 => return Err("its weight is a vector".into()),
        Rule::Gemm => {
            let is_plain = integer_of(node, "transA", 0) == 0
                && float_of(node, "alpha", 1.0) == 1.0
                && float_of(node, "beta", 1.0) == 1.0;
            if !is_plain || rank != 2 {
                return Err("it is more than a product and a bias: transA, alpha or beta".into());
            }
        }
        Rule::Lstm => {
            if integer_of(node, "layout", 0) != 0 {
                return Err("its layout has the batch first, which the integer operator lacks".into());
            }
            let other = node.input.get(2).map(String::as_str).unwrap_or_default();
            let other = work.weight(other)?;
            if rank != 3 || other.shape.len() != 3 || other.dtype != DType::F32 {
                return Err("its recurrent weight is not float32".into());
            }
        }
        Rule::Conv if rank < 3 => return Err("its weight has no spatial dimension".into()),
        _ => {}
    }
    let input = node.input.first().map(String::as_str).unwrap_or_default();
    if rule != Rule::Gather && work.types.dtype(input).is_some_and(|dtype| dtype != DType::F32) {
        return Err("its input is not float32".into());
    }
    let is_transposed = rule == Rule::Gemm && integer_of(node, "transB", 0) != 0;
    let before = weight.bytes();
    let mut shape = weight.shape;
    if is_transposed {
        shape.reverse();
    }
    Ok(Layer8 { rule, is_transposed, shape, before })
}

/// The outputs of quantized tables that something reads in floating point: nodes that stay, bodies
/// of control flow, or the caller.
fn read_as_floats(work: &Work, nodes: &[NodeProto], found: &[Option<Found<Layer8>>]) -> BTreeSet<String> {
    let mut rest = Vec::new();
    for (node, found) in nodes.iter().zip(found) {
        let mut node = node.clone();
        // A recurrent layer quantizes its input itself.
        if matches!(found, Some(Ok(layer)) if layer.rule != Rule::Lstm) {
            // What remains of a layer's inputs is the bias or the indices.
            node.input.remove(0);
        }
        rest.push(node);
    }
    let mut floats = reads(&rest);
    floats.extend(work.outputs.iter().cloned());
    floats
}

/// The values that are there as codes.
struct Quantized {
    values: BTreeMap<String, Codes>,
    floats: BTreeSet<String>,
    options: DynamicOptions,
}

impl Quantized {
    /// The codes of a value. The first reader quantizes it for all.
    fn input(&mut self, work: &mut Work, value: &str) -> Codes {
        if let Some(codes) = self.values.get(value) {
            return codes.clone();
        }
        let draft = &mut work.draft;
        let codes = Codes {
            codes: draft.value_name(&format!("{value}_quantized")),
            scale: draft.value_name(&format!("{value}_scale")),
            zero_point: draft.value_name(&format!("{value}_zero_point")),
        };
        let name = draft.node_name(&format!("{value}_QuantizeLinear"));
        let outputs = [codes.codes.as_str(), codes.scale.as_str(), codes.zero_point.as_str()];
        draft.nodes.push(node(("", "DynamicQuantizeLinear"), name, &[value], &outputs, Vec::new()));
        self.values.insert(value.to_string(), codes.clone());
        codes
    }

    /// The codes of the weight of a layer.
    fn weight(&self, work: &mut Work, old: &NodeProto, layer: &Layer8) -> Result<Option<Codes>> {
        let name = old.input.get(usize::from(layer.rule != Rule::Gather)).map(String::as_str);
        let Some(weight) = name.and_then(|name| work.draft.constant(name)).cloned() else { return Ok(None) };
        let rank = layer.shape.len();
        let axis = match layer.rule {
            Rule::Gather => None,
            Rule::Conv => Some(0),
            Rule::Lstm => Some(2),
            // The output channels of a stack of matrices differ from one to the next.
            Rule::MatMul | Rule::Gemm => (rank == 2).then_some(1),
        };
        let axis = axis.filter(|_| !self.options.per_tensor);
        let ty = if layer.rule == Rule::Gather { QuantType::UInt8 } else { QuantType::Int8 };
        let grid = GridOptions {
            reduce_range: self.options.reduce_range,
            ..GridOptions::new(ty, layer.rule != Rule::Gather)
        };
        let channels: Vec<usize> = axis.and_then(|axis| layer.shape.get(axis)).copied().into_iter().collect();
        let mut scales = channels.clone();
        // Behind the channels of the output come its spatial dimensions.
        if layer.rule == Rule::Conv && axis.is_some() {
            scales.resize(rank - 1, 1);
        }
        // The zero points of channels are all 0, and few runtimes take more than one for
        // ConvInteger.
        let has_one_point = layer.rule == Rule::Conv;
        let points = if has_one_point { Vec::new() } else { channels };
        let job = Job {
            weight,
            codes: String::new(),
            is_transposed: layer.is_transposed,
            shape: layer.shape.clone(),
            is_half: false,
            has_one_point,
            scales: None,
            bias: None,
            importance: None,
            ready: None,
            form: Form::Linear(LinearQuantizer { grid, axis }),
        };
        let results = [
            ("_scale", DType::F32, scales),
            ("_zero_point", ty.dtype(), points),
            ("_quantized", ty.dtype(), layer.shape.clone()),
        ];
        let (names, added) = work.add_weight(job, &results)?;
        let before = if added == 0 { 0 } else { layer.before };
        let grouping = if axis.is_some() { "per channel" } else { "per tensor" };
        let kind = if ty.is_signed() { "int8" } else { "uint8" };
        let [scale, zero_point, codes] = &names[..] else { return Ok(None) };
        let (codes, scale, zero_point) = (codes.clone(), scale.clone(), zero_point.clone());
        let precision = format!("{kind}, {grouping}");
        let outcome = Outcome::Quantized { precision, before, after: added, codes: codes.clone() };
        work.note(old, layer.shape.clone(), outcome);
        Ok(Some(Codes { codes, scale, zero_point }))
    }

    /// `DynamicQuantizeLinear`, `MatMulInteger`, `Cast`, and two `Mul`; a `Gemm` has an `Add`
    /// behind that.
    fn product(&mut self, work: &mut Work, old: &NodeProto, layer: &Layer8) -> Result<()> {
        let Some(weight) = self.weight(work, old, layer)? else { return Ok(()) };
        let input = self.input(work, old.input.first().map(String::as_str).unwrap_or_default());
        let output = old.output.first().map(String::as_str).unwrap_or_default();
        let title = title(old);
        let bias = old.input.get(2).filter(|name| layer.rule == Rule::Gemm && !name.is_empty());
        let (base, product) = match layer.rule {
            Rule::Gemm => (format!("{title}_MatMul"), work.draft.value_name(&format!("{output}_MatMul"))),
            _ => (title.clone(), output.to_string()),
        };
        let scaled = if bias.is_some() || layer.rule != Rule::Gemm { product } else { output.to_string() };
        let values = Operands { input: &input, weight: &weight };
        integer_node(work, values, (&base, &scaled), old);
        if let Some(bias) = bias {
            let name = work.draft.node_name(&format!("{title}_Add"));
            work.draft.nodes.push(node(("", "Add"), name, &[&scaled, bias], &[output], Vec::new()));
        }
        Ok(())
    }

    /// The same with `ConvInteger`, and the bias in the shape of the output's channels.
    fn conv(&mut self, work: &mut Work, old: &NodeProto, layer: &Layer8) -> Result<()> {
        let Some(weight) = self.weight(work, old, layer)? else { return Ok(()) };
        let input = self.input(work, old.input.first().map(String::as_str).unwrap_or_default());
        let output = old.output.first().map(String::as_str).unwrap_or_default();
        let title = title(old);
        let Some(bias) = old.input.get(2).filter(|name| !name.is_empty()) else {
            integer_node(work, Operands { input: &input, weight: &weight }, (&title, output), old);
            return Ok(());
        };
        let scaled = work.draft.value_name(&format!("{output}quant_scaled_output"));
        integer_node(work, Operands { input: &input, weight: &weight }, (&title, &scaled), old);
        let draft = &mut work.draft;
        let shape = draft.value_name(&format!("{output}_bias_reshape_shape"));
        let reshaped = draft.value_name(&format!("{output}_bias_reshape_output"));
        let mut sizes = vec![1_i64; layer.shape.len()];
        sizes.iter_mut().skip(1).take(1).for_each(|size| *size = -1);
        draft.initializers.push(TensorProto {
            name: Some(shape.clone()),
            data_type: Some(DType::I64.onnx_code()),
            dims: vec![sizes.len() as i64],
            int64_data: sizes,
            ..TensorProto::default()
        });
        draft.nodes.push(node(("", "Reshape"), String::new(), &[bias, &shape], &[&reshaped], Vec::new()));
        let name = draft.node_name(&format!("{output}_bias_add"));
        draft.nodes.push(node(("", "Add"), name, &[&scaled, &reshaped], &[output], Vec::new()));
        Ok(())
    }

    /// The rows of a table as codes, and as numbers for those that read them so.
    fn gather(&mut self, work: &mut Work, old: &NodeProto, layer: &Layer8) -> Result<()> {
        let Some(table) = self.weight(work, old, layer)? else { return Ok(()) };
        let output = old.output.first().map(String::as_str).unwrap_or_default();
        let codes = work.draft.value_name(&format!("{output}_quantized"));
        let mut gather = old.clone();
        gather.input.iter_mut().take(1).for_each(|input| input.clone_from(&table.codes));
        gather.output = vec![codes.clone()];
        work.draft.nodes.push(gather);
        if self.floats.contains(output) {
            let name = work.draft.node_name(&format!("{output}_DequantizeLinear"));
            let inputs = [codes.as_str(), table.scale.as_str(), table.zero_point.as_str()];
            work.draft.nodes.push(node(("", "DequantizeLinear"), name, &inputs, &[output], Vec::new()));
        }
        self.values.insert(output.to_string(), Codes { codes, ..table });
        Ok(())
    }
}

/// Replaces a recurrent layer. Its weights lie with their channels last, with a scale for each
/// channel of each direction.
fn lstm(work: &mut Work, old: &NodeProto, options: &DynamicOptions) -> Result<()> {
    let grid = GridOptions { reduce_range: options.reduce_range, ..GridOptions::new(QuantType::Int8, true) };
    let mut new = old.clone();
    new.input.resize(8, String::new());
    let mut grids = Vec::new();
    for place in [1, 2] {
        let name = old.input.get(place).map(String::as_str).unwrap_or_default();
        let Some(proto) = work.draft.constant(name).cloned() else { return Ok(()) };
        let Ok(WeightOf { shape, .. }) = work.weight(name) else { return Ok(()) };
        let [directions, gates, inputs] = shape[..] else { return Ok(()) };
        let stored = vec![directions, inputs, gates];
        let axis = (!options.per_tensor).then_some(2);
        let scales = if options.per_tensor { vec![directions] } else { vec![directions, gates] };
        let job = Job {
            weight: proto,
            codes: String::new(),
            is_transposed: true,
            shape: stored.clone(),
            is_half: false,
            has_one_point: false,
            scales: None,
            bias: None,
            importance: None,
            ready: None,
            form: Form::Linear(LinearQuantizer { grid, axis }),
        };
        let before = 4 * directions * gates * inputs;
        let results = [
            ("_scale", DType::F32, scales.clone()),
            ("_zero_point", QuantType::Int8.dtype(), scales),
            ("_quantized", QuantType::Int8.dtype(), stored),
        ];
        let (names, added) = work.add_weight(job, &results)?;
        let [scale, zero_point, codes] = &names[..] else { return Ok(()) };
        new.input.iter_mut().skip(place).take(1).for_each(|input| input.clone_from(codes));
        grids.extend([scale.clone(), zero_point.clone()]);
        let grouping = if options.per_tensor { "per direction" } else { "per channel" };
        let before = if added == 0 { 0 } else { before };
        let precision = format!("int8, {grouping}");
        work.note(old, shape, Outcome::Quantized { precision, before, after: added, codes: codes.clone() });
    }
    new.input.extend(grids);
    new.op_type = Some("DynamicQuantizeLSTM".to_string());
    new.domain = Some(MICROSOFT.to_string());
    new.name = Some(work.draft.node_name(&format!("{}_quant", title(old))));
    // The layout is that of the operator, which has no such attribute.
    new.attribute.retain(|attribute| attribute.name() != "layout");
    work.draft.import(MICROSOFT, 1);
    work.draft.nodes.push(new);
    Ok(())
}

/// The codes that a product reads.
struct Operands<'c> {
    input: &'c Codes,
    weight: &'c Codes,
}

/// The integer product of a node, its conversion to float32, and the scaling.
fn integer_node(
    work: &mut Work,
    Operands { input, weight }: Operands<'_>,
    (title, output): (&str, &str),
    old: &NodeProto,
) {
    let operator = if is_standard(old, "Conv") { "ConvInteger" } else { "MatMulInteger" };
    let draft = &mut work.draft;
    // Named after the value that the product had, as by the peer.
    let base = match old.output.first() {
        Some(name) if operator == "ConvInteger" => name.clone(),
        _ => output.to_string(),
    };
    let product = draft.value_name(&format!("{base}_output_quantized"));
    let floats = draft.value_name(&format!("{base}_output_quantized_cast_output"));
    let scale = draft.value_name(&format!("{title}_quant_scales_mul:0"));
    let name = draft.node_name(&format!("{title}_quant_scales_mul"));
    draft.nodes.push(node(("", "Mul"), name, &[&input.scale, &weight.scale], &[&scale], Vec::new()));
    let name = draft.node_name(&format!("{title}_quant"));
    let inputs: [&str; 4] = [&input.codes, &weight.codes, &input.zero_point, &weight.zero_point];
    let attributes = if operator == "ConvInteger" { old.attribute.clone() } else { Vec::new() };
    draft.nodes.push(node(("", operator), name, &inputs, &[&product], attributes));
    let name = draft.node_name(&format!("{base}_output_quantized_cast"));
    let to = vec![integer("to", i64::from(DType::F32.onnx_code()))];
    draft.nodes.push(node(("", "Cast"), name, &[&product], &[&floats], to));
    let name = draft.node_name(&format!("{title}_quant_output_scale_mul"));
    draft.nodes.push(node(("", "Mul"), name, &[&floats, &scale], &[output], Vec::new()));
}
