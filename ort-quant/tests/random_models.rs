//! Random models in every mode: files load, run, and keep the names and types of the ends; codes
//! are within their types, and nothing changes by more than rounding explains.
//!
//! The models and the bounds are fixed, so that a failure is always the same one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;

use ort_core::dtype::DType;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, attribute_proto, type_proto,
};
use ort_core::onnx::{ExternalData, Weights, tensor_from_proto};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{
    Bits, BlockMethod, BlockOptions, Calibration, DynamicOptions, GridOptions, HalfOptions, HalfType,
    LastProduct, Mode, Outcome, Quantizer, RangeRule, Scope, StaticFormat, StaticOptions, StaticType,
    TunedWeights,
};
use prost::Message;

mod support;

use support::{floats, node, random, save, source, unit};

const MODELS: usize = 24;
const ROWS: usize = 5;

/// What the order of sums changes in the outputs.
const ROUNDING: f64 = 1e-5;

/// Random choices of a seed.
struct Draw(usize);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        self.0 += 1;
        (((unit(self.0) + 0.5) * count as f32) as usize).min(count - 1)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// A value of the model: rows of this many channels.
#[derive(Clone)]
struct Rows {
    name: String,
    channels: usize,
}

/// A model in the making.
struct Net {
    draw: Draw,
    nodes: Vec<NodeProto>,
    weights: Vec<TensorProto>,
    values: Vec<Rows>,
    inputs: Vec<ValueInfoProto>,
}

fn typed(name: &str, code: i32, sizes: &[usize]) -> ValueInfoProto {
    let rows = dimension::Value::DimParam("n".into());
    let others = sizes.iter().map(|size| dimension::Value::DimValue(*size as i64));
    let dims = std::iter::once(rows).chain(others);
    let dim = dims.map(|value| Dimension { value: Some(value), ..Dimension::default() }).collect();
    let tensor = type_proto::Tensor { elem_type: Some(code), shape: Some(TensorShapeProto { dim }) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

fn with(mut node: NodeProto, name: &str, value: i64) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.into()),
        i: Some(value),
        r#type: Some(attribute_proto::AttributeType::Int as i32),
        ..AttributeProto::default()
    });
    node
}

impl Net {
    fn new(seed: usize) -> Net {
        let mut net = Net {
            draw: Draw(seed * 100_003),
            nodes: Vec::new(),
            weights: Vec::new(),
            values: Vec::new(),
            inputs: Vec::new(),
        };
        match net.draw.below(3) {
            0 => net.pictures(),
            1 => net.tokens(),
            _ => net.input(),
        }
        for _ in 0..1 + net.draw.below(5) {
            net.layer();
        }
        net.product();
        net
    }

    fn add(&mut self, op: &str, inputs: &[&str], channels: usize) -> usize {
        let name = format!("v{}", self.nodes.len());
        self.nodes.push(node(op, inputs, &name));
        self.values.push(Rows { name, channels });
        self.nodes.len() - 1
    }

    /// A weight of one of the kinds that make ranges special.
    fn weight(&mut self, shape: &[usize]) -> String {
        let (name, from) = (format!("W{}", self.weights.len()), self.draw.below(1 << 20));
        let count: usize = shape.iter().product();
        let factor = 2.0 / ((count / shape[0].max(1)).max(1) as f32).sqrt();
        let values = (from..from + count).map(unit);
        let values: Vec<f32> = match self.draw.below(10) {
            0 => vec![0.125; count],
            1 => vec![0.0; count],
            2 => values.map(|value| factor * (value + 0.5)).collect(),
            3 => values.map(|value| factor * (value - 0.5)).collect(),
            4 => values.map(|value| 1e-6 * value).collect(),
            5 => values.enumerate().map(|(at, value)| if at == 3 { 8.0 } else { factor * value }).collect(),
            _ => values.map(|value| factor * value).collect(),
        };
        self.weights.push(floats(&name, shape, &values));
        name
    }

    fn constant(&mut self, shape: &[usize]) -> String {
        let (name, from) = (format!("C{}", self.weights.len()), self.draw.below(1 << 20));
        self.weights.push(random(&name, shape, from, 1.0));
        name
    }

    fn channels(&mut self) -> usize {
        self.draw.pick(&[1, 3, 16, 32, 33, 64, 100])
    }

    fn input(&mut self) {
        let channels = self.channels();
        self.inputs.push(typed("x", 1, &[channels]));
        self.values.push(Rows { name: "x".into(), channels });
    }

    fn pictures(&mut self) {
        self.inputs.push(typed("x", 1, &[3, 8, 8]));
        let (channels, kernel) = (self.channels(), self.draw.pick(&[1, 3]));
        let weight = self.weight(&[channels, 3, kernel, kernel]);
        let bias = self.constant(&[channels]);
        let (inputs, count) = (["x", &weight, &bias], 2 + self.draw.below(2));
        self.add("Conv", &inputs[..count], channels);
        self.follow("Relu");
        let depthwise = self.weight(&[channels, 1, 3, 3]);
        let last = self.last().name;
        let at = self.add("Conv", &[&last, &depthwise], channels);
        self.nodes[at] = with(self.nodes[at].clone(), "group", channels as i64);
        self.follow("GlobalAveragePool");
        self.follow("Flatten");
        // Only the last of them has rows.
        self.values.drain(..self.values.len() - 1);
    }

    fn tokens(&mut self) {
        self.inputs.push(typed("ids", 7, &[]));
        let channels = self.draw.pick(&[32, 64, 100]);
        let table = self.weight(&[40, channels]);
        self.add("Gather", &[&table, "ids"], channels);
    }

    fn last(&self) -> Rows {
        self.values.last().unwrap().clone()
    }

    fn follow(&mut self, op: &str) {
        let Rows { name, channels } = self.last();
        self.add(op, &[&name], channels);
    }

    fn product(&mut self) {
        let Rows { name, channels } = self.draw_value();
        // Never square, so that a transposed weight is known by its shape.
        let others = [1, 16, 24, 48, 65].map(|size| if size == channels { size + 1 } else { size });
        let columns = self.draw.pick(&others);
        match self.draw.below(3) {
            0 => {
                let (weight, bias) = (self.weight(&[columns, channels]), self.constant(&[columns]));
                let (inputs, count) = ([name.as_str(), &weight, &bias], 2 + self.draw.below(2));
                let at = self.add("Gemm", &inputs[..count], columns);
                self.nodes[at] = with(self.nodes[at].clone(), "transB", 1);
            }
            _ => {
                let weight = self.weight(&[channels, columns]);
                self.add("MatMul", &[&name, &weight], columns);
            }
        }
    }

    fn draw_value(&mut self) -> Rows {
        let at = self.draw.below(self.values.len());
        self.values[at].clone()
    }

    fn layer(&mut self) {
        let Rows { name, channels } = self.draw_value();
        match self.draw.below(8) {
            0..=2 => self.product(),
            3 => {
                let op = self.draw.pick(&["Relu", "Tanh", "Sigmoid", "Identity"]);
                self.add(op, &[&name], channels);
            }
            4 => {
                let constant = self.constant(&[channels]);
                let op = self.draw.pick(&["Add", "Mul"]);
                self.add(op, &[&name, &constant], channels);
            }
            5 => drop(self.add("Softmax", &[&name], channels)),
            // A weight of two products.
            6 => {
                let weight = self.weight(&[channels, channels + 1]);
                let one = self.add("MatMul", &[&name, &weight], channels + 1);
                let other = self.add("MatMul", &[&name, &weight], channels + 1);
                let names = [one, other].map(|at| self.nodes[at].output[0].clone());
                self.add("Add", &[&names[0], &names[1]], channels + 1);
            }
            _ => drop(self.add("Add", &[&name, &name], channels)),
        }
    }

    /// Writes the model. Its outputs are the values that no node reads, and one that some may read.
    fn save(&mut self, folder: &Path) -> std::path::PathBuf {
        let one = self.draw_value().name;
        let is_read = |name: &String| self.nodes.iter().any(|node| node.input.contains(name));
        let is_made = |name: &String| self.nodes.iter().any(|node| node.output.contains(name));
        let is_output = |rows: &&Rows| is_made(&rows.name) && (!is_read(&rows.name) || rows.name == one);
        let outputs = self.values.iter().filter(is_output);
        let output = outputs.map(|rows| typed(&rows.name, 1, &[rows.channels])).collect();
        let (node, input, initializer) = (self.nodes.clone(), self.inputs.clone(), self.weights.clone());
        save(folder, GraphProto { node, input, output, initializer, ..GraphProto::default() })
    }

    fn sample(&self, index: usize) -> Value {
        let from = 7919 * index + 13;
        let numbers = |count: usize| (from..from + count).map(|step| 2.0 * unit(step)).collect::<Vec<f32>>();
        match self.inputs[0].name() {
            "ids" => {
                let ids: Vec<i64> =
                    (from..from + ROWS).map(|step| ((unit(step) + 0.5) * 39.0) as i64).collect();
                Tensor::from_slice(&[ROWS], &ids).unwrap().into()
            }
            _ if self.nodes[0].op_type() == "Conv" => {
                Tensor::from_slice(&[ROWS, 3, 8, 8], &numbers(ROWS * 192)).unwrap().into()
            }
            _ => {
                let channels = self.first_channels();
                Tensor::from_slice(&[ROWS, channels], &numbers(ROWS * channels)).unwrap().into()
            }
        }
    }

    fn first_channels(&self) -> usize {
        self.values[0].channels
    }
}

fn dynamic(per_tensor: bool, reduce_range: bool) -> Mode {
    Mode::Dynamic(DynamicOptions { per_tensor, reduce_range })
}

fn blocks(bits: Bits, method: BlockMethod, is_symmetric: bool, block_size: usize) -> Mode {
    let tuned = TunedWeights::default();
    Mode::Blocks(BlockOptions { bits, block_size, is_symmetric, method, last: LastProduct::AsOthers, tuned })
}

fn half(ty: HalfType) -> Mode {
    Mode::Half(HalfOptions { ty, ..HalfOptions::default() })
}

/// The modes, and the share of the outputs that each may change: up to twice what it changes here.
/// Blocks round weights alone, so that their outputs are those of a model with the decoded weights.
fn modes() -> Vec<(&'static str, Mode, f64)> {
    let statics = StaticOptions::default;
    vec![
        ("dynamic", dynamic(false, false), 0.03),
        ("dynamic, per tensor", dynamic(true, false), 0.1),
        ("dynamic, 7 bits", dynamic(false, true), 0.05),
        ("static", Mode::Static(statics()), 0.03),
        ("static, symmetric", Mode::Static(StaticOptions { is_symmetric: true, ..statics() }), 0.03),
        ("static, per tensor", Mode::Static(StaticOptions { per_tensor: true, ..statics() }), 0.1),
        ("static, all", Mode::Static(StaticOptions { scope: Scope::All, ..statics() }), 0.03),
        ("qoperator", Mode::Static(StaticOptions { format: StaticFormat::QOperator, ..statics() }), 0.03),
        ("float8", Mode::Static(StaticOptions { ty: StaticType::Float8, ..statics() }), 0.07),
        ("float16", half(HalfType::Float16), 0.001),
        ("bfloat16", half(HalfType::BFloat16), 0.01),
        ("8 bits", blocks(Bits::Eight, BlockMethod::MinMax, false, 32), ROUNDING),
        ("4 bits", blocks(Bits::Four, BlockMethod::MinMax, false, 16), ROUNDING),
        ("4 bits, symmetric", blocks(Bits::Four, BlockMethod::MinMax, true, 32), ROUNDING),
        ("4 bits, least squares", blocks(Bits::Four, BlockMethod::SquaredError, false, 32), ROUNDING),
        ("4 bits, k-quant", blocks(Bits::Four, BlockMethod::KQuant, false, 32), ROUNDING),
        ("4 bits, hqq", blocks(Bits::Four, BlockMethod::HalfQuadratic, false, 64), ROUNDING),
        ("2 bits", blocks(Bits::Two, BlockMethod::MinMax, false, 16), ROUNDING),
    ]
}

/// The mode with the ranges of the values in some samples.
fn calibrated(mode: Mode, path: &Path, samples: &[Value]) -> Quantizer {
    let mut quantizer = Quantizer { mode, only: Vec::new(), exclude: Vec::new() };
    if let Mode::Static(options) = &quantizer.mode {
        let grid = options.activations();
        let ranges = ranges(&quantizer, path, samples, &grid);
        let Mode::Static(options) = &mut quantizer.mode else { panic!("the mode is static") };
        options.ranges = ranges;
    }
    quantizer
}

fn ranges(
    quantizer: &Quantizer,
    path: &Path,
    samples: &[Value],
    grid: &GridOptions,
) -> BTreeMap<String, ort_quant::ValueRange> {
    let model = Model::load(path).unwrap();
    let session = Calibration::session(Session::builder(&model)).unwrap();
    let input = model.inputs()[0].name.clone();
    let calibration =
        Calibration::new(quantizer.activations(&source(path)).unwrap(), RangeRule::MinMax.wanted());
    for sample in samples {
        calibration.run(&session, &[(input.as_str(), sample.clone())]).unwrap();
    }
    let observers = calibration.into_observers().into_iter();
    let ranges = observers.map(|(name, seen)| (name, RangeRule::MinMax.range(&seen, grid).unwrap()));
    ranges.filter_map(|(name, range)| Some((name, range?))).collect()
}

/// The outputs of all samples, by name.
fn outputs(model: &Model, samples: &[Value]) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let session = Session::builder(model).build().unwrap();
    let input = model.inputs()[0].name.clone();
    let runs = samples.iter().flat_map(|sample| session.run(&[(input.as_str(), sample.clone())]).unwrap());
    let found = runs.map(|(name, value)| {
        let tensor = value.tensor().unwrap();
        (name, tensor.shape().to_vec(), tensor.to_vec::<f32>().unwrap())
    });
    found.collect()
}

/// Numbers of a tensor of any type that codes, scales and points have.
fn numbers(tensor: &TensorProto) -> (Vec<usize>, Vec<f64>) {
    let tensor = tensor_from_proto(tensor.clone(), &mut ExternalData::unavailable()).unwrap();
    let shape = tensor.shape().to_vec();
    let values = tensor
        .to_vec::<f32>()
        .map(|values| values.into_iter().map(f64::from).collect())
        .or_else(|_| tensor.to_vec::<i8>().map(|values| values.into_iter().map(f64::from).collect()))
        .or_else(|_| tensor.to_vec::<u8>().map(|values| values.into_iter().map(f64::from).collect()));
    (shape, values.unwrap())
}

/// The tensors of a model by name.
fn tensors(path: &Path) -> (ModelProto, BTreeMap<String, TensorProto>) {
    let model = ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap();
    let tensors = model.graph.as_ref().unwrap().initializer.iter();
    let tensors = tensors.map(|tensor| (tensor.name().to_string(), tensor.clone())).collect();
    (model, tensors)
}

/// Checks codes of 8 bits against the weights: no code beyond its type's range, and no element
/// further from its value than half a step, or a step if the zero point was rounded, too.
fn check_codes(what: &str, before: &BTreeMap<String, TensorProto>, after: &BTreeMap<String, TensorProto>) {
    let bytes = [DType::I8, DType::U8].map(DType::onnx_code);
    for (name, weight) in before {
        let ty = after.get(&format!("{name}_quantized")).map(TensorProto::data_type);
        // Biases have 32 bits, and float8 is rounded to steps of other widths.
        if ty.is_none_or(|ty| !bytes.contains(&ty)) {
            continue;
        }
        let part = |suffix: &str| after.get(&format!("{name}{suffix}")).map(numbers);
        let (Some((shape, codes)), Some((_, scales)), Some((_, points))) =
            (part("_quantized"), part("_scale"), part("_zero_point"))
        else {
            continue;
        };
        let (own, weights) = numbers(weight);
        let is_transposed = own != shape;
        let is_symmetric = ty == Some(DType::I8.onnx_code());
        let most = if what.contains("7 bits") { 64.0 } else { 127.0 };
        assert!(!is_symmetric || codes.iter().all(|code| code.abs() <= most), "{what}: {name}");
        // Channels are the columns of a matrix, and the first axis of others.
        for (at, code) in codes.iter().enumerate() {
            let place = if is_transposed { at % shape[1] * shape[0] + at / shape[1] } else { at };
            let last = at % shape[shape.len() - 1];
            let first = at / (codes.len() / shape[0]);
            let channel = match scales.len() {
                1 => 0,
                count if count == shape[shape.len() - 1] && shape.len() == 2 => last,
                _ => first,
            };
            let point = points[channel.min(points.len() - 1)];
            let step = scales[channel];
            let error = (weights[place] - step * (code - point)).abs();
            let most = if is_symmetric { 0.5001 } else { 1.0001 } * step;
            assert!(error <= most + 1e-12, "{what}: {name} {own:?} at {place}: {error} of {step}");
        }
    }
}

/// The model with the weights that codes in blocks stand for. With zero points, a code of a whole
/// range is at most half a step from its element; without, the largest code is one below the range.
fn decoded(
    (model, options): (&ModelProto, &BlockOptions),
    after: &BTreeMap<String, TensorProto>,
    what: &str,
) -> ModelProto {
    let mut model = model.clone();
    for weight in &mut model.graph.as_mut().unwrap().initializer {
        let name = weight.name().to_string();
        let of_bits = |bits: usize| Some((bits, numbers(after.get(&format!("{name}_Q{bits}"))?)));
        let Some((bits, (codes_shape, codes))) = [2, 4, 8].into_iter().find_map(of_bits) else { continue };
        let (scales_shape, scales) = numbers(&after[&format!("{name}_scales")]);
        let points = after.get(&format!("{name}_zero_points"));
        let points = points.map(|points| (points.data_type() == DType::F32.onnx_code(), numbers(points).1));
        let (shape, weights) = numbers(weight);
        let (n, blocks) = (scales_shape[0], scales_shape[1]);
        let (k, block_size) = (weights.len() / n, codes.len() * 8 / bits / n / blocks);
        let code = |bytes: &[f64], column: usize, place: usize| {
            let (per_column, per_byte) = (bytes.len() / n, 8 / bits);
            let byte = bytes[column * per_column + place / per_byte] as usize;
            (byte >> (place % per_byte * bits) & ((1 << bits) - 1)) as f64
        };
        let is_table = codes_shape.len() == 2;
        let half = if options.is_symmetric || is_table { 1.0 } else { 0.5 };
        let mut values = vec![0.0_f32; weights.len()];
        for (column, row) in (0..n).flat_map(|column| (0..k).map(move |row| (column, row))) {
            let block = row / block_size;
            let scale = scales[column * blocks + block];
            let point = match &points {
                None => f64::from(1_u32 << (bits - 1)),
                Some((true, numbers)) => numbers[column * blocks + block],
                Some((false, bytes)) => code(bytes, column, block),
            };
            let value = (code(&codes, column, row) - point) * scale;
            let place = if shape[0] == n { column * k + row } else { row * n + column };
            let error = (value - weights[place]).abs();
            let is_within = error <= 1.001 * half * scale.abs() + 1e-12;
            assert!(options.method != BlockMethod::MinMax || is_within, "{what}: {name} {error} of {scale}");
            values[place] = value as f32;
        }
        *weight = floats(&name, &shape, &values);
    }
    model
}

#[test]
fn models_keep_their_ends_and_most_of_their_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.onnx");
    let mut quantized: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in 0..MODELS {
        let mut net = Net::new(seed);
        let path = net.save(folder.path());
        let samples: Vec<Value> = (0..6).map(|index| net.sample(index)).collect();
        let (original, weights) = tensors(&path);
        let given = outputs(&Model::load(&path).unwrap(), &samples);
        for (name, mode, bound) in modes() {
            let what = format!("model {seed}, {name}");
            let source = source(&path);
            let blocks = if let Mode::Blocks(options) = &mode { Some(options.clone()) } else { None };
            let quantization = match calibrated(mode, &path, &samples).quantize(&source) {
                Ok(quantization) => quantization,
                Err(problem) => {
                    assert!(problem.to_string().contains("no node of the model can be"), "{what}: {problem}");
                    continue;
                }
            };
            let is_quantized = |outcome: &Outcome| matches!(outcome, Outcome::Quantized { .. });
            assert!(quantization.layers().iter().any(|layer| is_quantized(&layer.outcome)), "{what}");
            let mut found = Vec::new();
            let mut check = |model: &Model| {
                found = outputs(model, &samples);
                Ok(())
            };
            quantization.write(&out, &Weights::Inside, &mut check).unwrap();
            *quantized.entry(name).or_default() += 1;
            let (after, codes) = tensors(&out);
            let ends = |model: &ModelProto| model.graph.clone().map(|graph| (graph.input, graph.output));
            assert_eq!(ends(&original), ends(&after), "{what}");
            check_codes(&what, &weights, &codes);
            let decoded = blocks.map(|options| {
                let model = decoded((&original, &options), &codes, &what);
                let path = folder.path().join("decoded.onnx");
                std::fs::write(&path, model.encode_to_vec()).unwrap();
                outputs(&Model::load(&path).unwrap(), &samples)
            });
            let expected = decoded.as_ref().unwrap_or(&given);
            let (mut signal, mut error) = (0.0, 0.0);
            assert_eq!(expected.len(), found.len(), "{what}");
            for (before, after) in expected.iter().zip(&found) {
                assert_eq!((&before.0, &before.1), (&after.0, &after.1), "{what}");
                for (before, after) in before.2.iter().zip(&after.2) {
                    assert!(after.is_finite(), "{what}");
                    signal += f64::from(*before).powi(2);
                    error += f64::from(before - after).powi(2);
                }
            }
            let error = if signal > 0.0 { (error / signal).sqrt() } else { error };
            assert!(error <= bound, "{what}: the outputs differ by {error}");
        }
    }
    // Small weights may stay, but no mode leaves everything.
    assert_eq!(quantized.len(), modes().len(), "{quantized:?}");
    assert!(quantized.values().all(|count| *count >= MODELS / 2), "{quantized:?}");
}

/// What samples are like, and how many of them there are.
fn degenerate(net: &Net) -> Vec<(&'static str, Vec<Value>)> {
    let channels = net.first_channels();
    let rows = |count: usize, value: f32| -> Value {
        Tensor::from_slice(&[count, channels], &vec![value; count * channels]).unwrap().into()
    };
    vec![
        ("one sample", vec![net.sample(0)]),
        ("a single row", vec![rows(1, 0.5)]),
        ("zeros", vec![rows(2, 0.0)]),
        ("a constant", vec![rows(2, -3.0); 3]),
        ("no rows", vec![rows(0, 0.0)]),
        ("subnormal numbers", vec![rows(2, 1e-40)]),
        ("NaN among others", vec![net.sample(0), rows(1, f32::NAN)]),
        ("an infinity among others", vec![net.sample(0), rows(1, f32::INFINITY)]),
        ("NaN alone", vec![rows(2, f32::NAN)]),
    ]
}

#[test]
fn degenerate_samples_make_models_that_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.onnx");
    let mut models = 0;
    for seed in 0..MODELS {
        let mut net = Net::new(seed);
        let path = net.save(folder.path());
        if net.inputs[0].name() != "x" || net.nodes[0].op_type() == "Conv" {
            continue;
        }
        models += 1;
        for (what, samples) in degenerate(&net) {
            for (name, mode, _) in modes() {
                let what = format!("model {seed}, {name}, {what}");
                let source = source(&path);
                let quantization = match calibrated(mode, &path, &samples).quantize(&source) {
                    Ok(quantization) => quantization,
                    // A value without a finite element has no range, and its layers stay.
                    Err(problem) => {
                        let text = problem.to_string();
                        assert!(text.contains("no node of the model can be"), "{what}: {text}");
                        continue;
                    }
                };
                let usual = [net.sample(1)];
                let mut found = Vec::new();
                let mut check = |model: &Model| {
                    found = outputs(model, &usual);
                    Ok(())
                };
                quantization.write(&out, &Weights::Inside, &mut check).unwrap();
                let is_finite = |output: &(String, Vec<usize>, Vec<f32>)| {
                    !output.2.is_empty() && output.2.iter().all(|number| number.is_finite())
                };
                assert!(found.iter().all(is_finite), "{what}");
            }
        }
    }
    assert!(models >= 4, "{models}");
}
