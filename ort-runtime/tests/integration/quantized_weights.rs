//! Constant quantized values stay quantized: a plan has no dequantized copy of a table or matrix,
//! and a run has the bits of a run with the dequantized constant.

use crate::support::axis;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{DType, Error, ErrorKind, Model, Result, Session, Tensor, Value, Within};

/// A constant of quantized values, and what its scales belong to.
#[derive(Clone, Copy, Debug)]
struct Weight {
    dtype: DType,
    shape: [usize; 2],
    /// The shape of scales and zero points; the axis and the block of `DequantizeLinear`.
    scales: &'static [usize],
    axis: i64,
    block: i64,
    has_zeros: bool,
}

/// Numbers of no pattern, from 0 to `count - 1`.
fn spread(index: usize, count: usize) -> usize {
    (index * 2_654_435_761 % 1_000_003) % count
}

/// Packed integers of any narrow type, over their whole range.
fn integers(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let (bits, count) = (dtype.bits().expect("bits") as usize, shape.iter().product::<usize>());
    let bytes: Vec<u8> = (0..(count * bits).div_ceil(8)).map(|at| spread(at + 1, 256) as u8).collect();
    Tensor::from_bytes(dtype, shape, bytes.into())
}

impl Weight {
    /// The dequantized constant.
    fn floats(self, b: &mut GraphBuilder) -> Result<ValueId> {
        let scales: usize = self.scales.iter().product();
        let scales = (0..scales).map(|at| (spread(at, 50) + 1) as f32 / 512.0).collect();
        let mut inputs = vec![
            Some(b.constant(integers(self.dtype, &self.shape)?)),
            Some(b.constant(Tensor::from_vec(self.scales, scales)?)),
        ];
        if self.has_zeros {
            inputs.push(Some(b.constant(integers(self.dtype, self.scales)?)));
        }
        let attrs = [("axis", Attribute::Int(self.axis)), ("block_size", Attribute::Int(self.block))];
        Ok(b.add(("", "DequantizeLinear"), &inputs, &attrs, 1, Vec::new())?[0])
    }
}

/// A graph over a constant.
type Build = fn(&mut GraphBuilder, ValueId) -> Result<ValueId>;

struct Case {
    name: &'static str,
    weight: Weight,
    build: Build,
    /// The bytes by which the plan may exceed that of a float constant.
    more: usize,
}

/// The planned bytes, and the outputs of a run.
fn planned(graph: GraphBuilder, output: ValueId, level: Level) -> Result<(usize, Vec<(String, Value)>)> {
    let model = Model::from_graph(graph.finish(&[output])?);
    let session = Session::builder(&model).threads(2).opt_level(level).build()?;
    let inputs: Vec<(String, Value)> = model
        .inputs()
        .into_iter()
        .map(|input| {
            let dims = input.ty.shape().into_iter().flatten();
            let shape: Vec<usize> = dims.map(|dim| dim.as_constant().expect("a size") as usize).collect();
            let count = shape.iter().product();
            let tensor = match input.ty.dtype() {
                Some(DType::I64) => {
                    Tensor::from_vec(&shape, (0..count).map(|at| spread(at, 16) as i64 - 8).collect())
                }
                _ => Tensor::from_vec(
                    &shape,
                    (0..count).map(|at| spread(at, 101) as f32 / 50.0 - 1.0).collect::<Vec<f32>>(),
                ),
            };
            Ok((input.name.clone(), tensor?.into()))
        })
        .collect::<Result<_>>()?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let plan = session.plan_for_inputs(&given)?;
    let bytes = plan.peak_bytes.ok_or_else(|| Error::new(ErrorKind::Fail, "no size is unknown"))?;
    Ok((bytes, session.run(&given)?))
}

/// Checks the plan of a case and its results.
fn check(case: &Case) -> Result<()> {
    let graph = |level: Level, constant: Option<&Tensor>| -> Result<(usize, Vec<(String, Value)>)> {
        let mut b = GraphBuilder::new(case.name);
        let weight = match constant {
            Some(floats) => b.constant(floats.clone()),
            None => case.weight.floats(&mut b)?,
        };
        let output = (case.build)(&mut b, weight)?;
        planned(b, output, level)
    };
    let mut b = GraphBuilder::new("dequantized");
    let dequantized = case.weight.floats(&mut b)?;
    let (_, dequantized) = planned(b, dequantized, Level::Disabled)?;
    let (of_floats, expected) = graph(Level::All, Some(dequantized[0].1.tensor()?))?;
    let (bytes, actual) = graph(Level::All, None)?;
    let (without, _) = graph(Level::Disabled, None)?;
    let table = 4 * case.weight.shape.iter().product::<usize>();
    let fail = |text: String| Err(Error::new(ErrorKind::Fail, text));
    if without < table {
        return fail(format!("the graph without rules plans {without} bytes, its floats have {table}"));
    }
    if bytes > of_floats + case.more {
        return fail(format!("{bytes} bytes are planned, {of_floats} of the float graph"));
    }
    if actual[0].1.tensor()?.to_vec::<f32>()? != expected[0].1.tensor()?.to_vec::<f32>()? {
        return fail("the bits differ from those of the float graph".to_string());
    }
    Ok(())
}

fn check_all(cases: &[Case]) {
    let problems: Vec<String> = cases
        .iter()
        .filter_map(|case| check(case).within(|| format!("{} {:?}", case.name, case.weight)).err())
        .map(|problem| problem.to_string())
        .collect();
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// Gathers 6 rows of 64 values, so 384 quantized values wait for their scales.
const GATHERED: usize = 384 + 64;

#[test]
fn a_table_is_gathered_before_it_is_dequantized() {
    let rows: Build = |b, table| {
        let indices = b.input("indices", DType::I64, &["2", "3"]);
        b.node("Gather", &[table, indices], &axis(0))
    };
    let elements: Build = |b, table| {
        let indices = b.input("indices", DType::I64, &["6", "64"]);
        b.node("GatherElements", &[table, indices], &axis(0))
    };
    let shape = [512, 64];
    let weight = |dtype, scales, axis, block| Weight { dtype, shape, scales, axis, block, has_zeros: true };
    let weights = [
        weight(DType::U8, &[], 0, 0),
        weight(DType::I8, &[1], 1, 0),
        weight(DType::U8, &[512], 0, 0),
        weight(DType::I8, &[64], 1, 0),
        weight(DType::I8, &[512, 3], -1, 24),
        weight(DType::U4, &[512, 4], 1, 16),
        weight(DType::I4, &[512], 0, 0),
        Weight { has_zeros: false, ..weight(DType::I4, &[512, 2], 1, 32) },
        Weight { has_zeros: false, ..weight(DType::I8, &[512], -2, 0) },
    ];
    // Scales and zero points of a block are gathered, too.
    let cases = weights.map(|weight| Case { name: "rows", weight, build: rows, more: GATHERED + 5 * 64 });
    check_all(&cases);
    let weight = weight(DType::I8, &[], 0, 0);
    check_all(&[Case { name: "elements", weight, build: elements, more: GATHERED }]);
}

/// Two threads dequantize a panel each: at most 384 k steps of 48 columns, or 16 for a single row.
const PANELS: usize = 2 * 384 * 48 * 4;
const PANELS_OF_A_ROW: usize = 2 * 384 * 16 * 4;

#[test]
fn a_matrix_is_multiplied_before_it_is_dequantized() {
    let rows: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["50", "512"]);
        b.node("MatMul", &[a, matrix], &[])
    };
    let row: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["1", "512"]);
        b.node("MatMul", &[a, matrix], &[])
    };
    let transposed: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["2", "25", "512"]);
        let matrix = b.node("Transpose", &[matrix], &[])?;
        b.node("MatMul", &[a, matrix], &[])
    };
    let layer: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["50", "512"]);
        let columns = (0..512).map(|at| spread(at, 9) as f32 - 4.0).collect();
        let bias = b.constant(Tensor::from_vec(&[512], columns)?);
        let sum = b.node("Gemm", &[a, matrix, bias], &[("transB", Attribute::Int(1))])?;
        let positive = b.node("Relu", &[sum], &[])?;
        b.node("Add", &[positive, a], &[])
    };
    let block: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["50", "512"]);
        let bias = b.constant(Tensor::from_vec(&[512], vec![0.25_f32; 512])?);
        let product = b.node("MatMul", &[a, matrix], &[])?;
        let sum = b.node("Add", &[product, bias], &[])?;
        b.node("Add", &[sum, a], &[])
    };
    let shape = [512, 512];
    let weight = |dtype, scales, axis, block| Weight { dtype, shape, scales, axis, block, has_zeros: true };
    let weights = [
        weight(DType::I8, &[], 1, 0),
        weight(DType::U8, &[512], 1, 0),
        weight(DType::I8, &[512], 0, 0),
        weight(DType::I4, &[16, 512], 0, 32),
        weight(DType::U4, &[512, 4], 1, 128),
        weight(DType::U2, &[11, 512], 0, 50),
        Weight { has_zeros: false, ..weight(DType::I8, &[512], -1, 0) },
    ];
    let builds: [(&str, Build, usize); 5] = [
        ("rows", rows, PANELS),
        ("row", row, PANELS_OF_A_ROW),
        ("transposed", transposed, PANELS),
        ("layer", layer, PANELS),
        ("block", block, PANELS),
    ];
    let cases: Vec<Case> = weights
        .iter()
        .flat_map(|weight| builds.map(|(name, build, more)| Case { name, weight: *weight, build, more }))
        .collect();
    check_all(&cases);
}

/// One row times a matrix of 2048 by 2048: 16.8 MB of floats.
#[test]
fn a_large_matrix_takes_a_panel() -> Result<()> {
    let build: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["1", "2048"]);
        b.node("MatMul", &[a, matrix], &[])
    };
    for (dtype, scales, block) in [(DType::I8, &[2048][..], 0), (DType::I4, &[64, 2048], 32)] {
        let axis = if block == 0 { 1 } else { 0 };
        let mut b = GraphBuilder::new("large");
        let shape = [2048, 2048];
        let matrix = Weight { dtype, shape, scales, axis, block, has_zeros: false }.floats(&mut b)?;
        let output = build(&mut b, matrix)?;
        let (bytes, _) = planned(b, output, Level::All)?;
        assert!(bytes <= 100_000, "{dtype}: {bytes} bytes are planned");
    }
    Ok(())
}

/// Graphs over x of [4, 6], which is quantized first.
const QUANTIZED_GRAPHS: &[(&str, &[&str], Build)] = &[
    ("three parts", &["qdq_concat"], |b, x| {
        let parts = [
            quantize(b, x, 0.011, 100, true)?,
            quantize(b, x, 0.017, 3, true)?,
            quantize(b, x, 0.005, 128, true)?,
        ];
        let all = b.node("Concat", &parts, &axis(1))?;
        quantize(b, all, 0.013, 90, false)
    }),
    ("split and joined", &["dequantized_split", "qdq_nothing", "qdq_concat"], |b, x| {
        let whole = quantize(b, x, 0.011, 100, true)?;
        let attrs = [&axis(1)[..], &[("num_outputs", Attribute::Int(3))]].concat();
        let parts = b.add(("", "Split"), &[Some(whole)], &attrs, 3, Vec::new())?;
        let first = quantize(b, parts[0], 0.011, 100, true)?;
        let second = quantize(b, parts[2], 0.02, 7, true)?;
        let all = b.node("Concat", &[first, parts[1], second], &axis(0))?;
        quantize(b, all, 0.013, 90, false)
    }),
    ("another scale", &["qdq_requantize"], |b, x| {
        let first = quantize(b, x, 0.011, 100, true)?;
        quantize(b, first, 0.007, 130, false)
    }),
    ("a quantized bias", &["qdq_conv_bias"], |b, x| {
        let shape = b.constant(Tensor::from_vec(&[3], vec![1_i64, 4, 6])?);
        let x = b.node("Reshape", &[x, shape], &[])?;
        let x = quantize(b, x, 0.011, 100, true)?;
        let scale = b.constant(Tensor::scalar(0.02_f32)?);
        let zero = b.constant(Tensor::scalar(0_i8)?);
        let weight = b.constant(integers(DType::I8, &[5, 4, 3])?);
        let weight = b.node("DequantizeLinear", &[weight, scale, zero], &[])?;
        // Tools write a zero point for each filter.
        let steps = b.constant(Tensor::from_vec(&[5], vec![900, -2000, 0, 31, 4000])?);
        let scales = b.constant(Tensor::from_vec(&[5], vec![0.02_f32 * 0.011; 5])?);
        let zeros = b.constant(Tensor::from_vec(&[5], vec![0; 5])?);
        let bias = b.node("DequantizeLinear", &[steps, scales, zeros], &axis(0))?;
        let y = b.node("Conv", &[x, weight, bias], &[])?;
        quantize(b, y, 0.05, 90, false)
    }),
    ("the greatest", &["dequantized_arg"], |b, x| {
        let first = quantize(b, x, 0.3, 100, true)?;
        b.node("ArgMax", &[first], &axis(1))
    }),
];

/// Quantizes to uint8, and back unless the values are asked for.
fn quantize(b: &mut GraphBuilder, x: ValueId, scale: f32, zero: u8, back: bool) -> Result<ValueId> {
    let (scale, zero) = (b.constant(Tensor::scalar(scale)?), b.constant(Tensor::scalar(zero)?));
    let quantized = b.node("QuantizeLinear", &[x, scale, zero], &[])?;
    if back { b.node("DequantizeLinear", &[quantized, scale, zero], &[]) } else { Ok(quantized) }
}

#[test]
fn movement_between_quantizations_changes_no_value() -> Result<()> {
    for (name, rules, build) in QUANTIZED_GRAPHS {
        let graph = || -> Result<(GraphBuilder, ValueId)> {
            let mut b = GraphBuilder::new(name);
            let x = b.input("x", DType::F32, &["4", "6"]);
            let output = build(&mut b, x)?;
            Ok((b, output))
        };
        let (b, output) = graph()?;
        let session = Session::builder(&Model::from_graph(b.finish(&[output])?)).threads(1).build()?;
        let hits = session.rewrites();
        let has_hit = |rule: &&str| hits.hits().iter().any(|(hit, _)| hit == rule);
        assert!(rules.iter().all(has_hit), "{name}: {:?}", hits.hits());
        let run = |level: Level| -> Result<Vec<i64>> {
            let (b, output) = graph()?;
            planned(b, output, level)?.1[0].1.tensor()?.view().to_ints()
        };
        assert_eq!(run(Level::All)?, run(Level::Disabled)?, "{name}");
    }
    Ok(())
}

/// Matmuls of values that the model quantizes, without a `QuantizeLinear` behind them: sums of
/// integers instead of floats, whose plan has no dequantized operand.
#[test]
fn a_matmul_of_quantized_values_stays_one() -> Result<()> {
    let matmul: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["50", "512"]);
        let a = quantize(b, a, 0.01, 100, true)?;
        b.node("MatMul", &[a, matrix], &[])
    };
    let gemm: Build = |b, matrix| {
        let a = b.input("a", DType::F32, &["50", "512"]);
        let a = quantize(b, a, 0.01, 100, true)?;
        let bias = b.constant(Tensor::from_vec(&[512], vec![0.25_f32; 512])?);
        b.node("Gemm", &[a, matrix, bias], &[("transB", Attribute::Int(1))])
    };
    let shape = [512, 512];
    let weight = |scales, axis| Weight { dtype: DType::I8, shape, scales, axis, block: 0, has_zeros: true };
    let cases: [(&str, Weight, Build); 4] = [
        ("dequantized_matmul", weight(&[], 1), matmul),
        ("dequantized_matmul", weight(&[512], 1), matmul),
        ("dequantized_gemm", weight(&[], 1), gemm),
        ("dequantized_gemm", weight(&[512], 0), gemm),
    ];
    for (rule, weight, build) in cases {
        let graph = |level: Level| -> Result<(usize, Vec<(String, Value)>)> {
            let mut b = GraphBuilder::new(rule);
            let matrix = weight.floats(&mut b)?;
            let output = build(&mut b, matrix)?;
            planned(b, output, level)
        };
        let (bytes, actual) = graph(Level::All)?;
        let (_, expected) = graph(Level::Disabled)?;
        // A as bytes, the result, and the workspace of an integer GEMM.
        let most = 50 * 512 + 50 * 512 * 4 + (32 << 10);
        assert!(bytes <= most, "{rule} {weight:?}: {bytes} bytes are planned, more than {most}");
        // Sums of 512 products of up to 1.5 times 127.
        let tolerance = Tolerance { relative: 1e-5, absolute: 1e-2 };
        compare(&actual[0].1, &expected[0].1, tolerance).within(|| format!("{rule} {weight:?}"))?;
    }
    Ok(())
}

/// Convolutions of quantized values with a float result: the plan has no dequantized image and no
/// dequantized filters, whatever reads the result.
#[test]
fn a_convolution_of_quantized_values_stays_one() -> Result<()> {
    type Behind = fn(&mut GraphBuilder, ValueId) -> Result<ValueId>;
    let floats: Behind = |_, y| Ok(y);
    let rectified: Behind = |b, y| b.node("Relu", &[y], &[]);
    let joined: Behind = |b, y| {
        let residual = b.input("r", DType::F32, &["2", "16", "20", "20"]);
        let sum = b.node("Add", &[y, residual], &[])?;
        b.node("HardSwish", &[sum], &[])
    };
    let cases: [(&str, Behind); 3] = [("floats", floats), ("rectified", rectified), ("joined", joined)];
    for (group, per_channel, (name, behind)) in [1_i64, 4, 16]
        .into_iter()
        .flat_map(|group| [false, true].map(|per_channel| (group, per_channel)))
        .flat_map(|(group, per_channel)| cases.map(|case| (group, per_channel, case)))
    {
        let what = format!("{name}, group {group}, per channel: {per_channel}");
        let graph = |level: Level| -> Result<(usize, Vec<(String, Value)>)> {
            let mut b = GraphBuilder::new(name);
            let x = b.input("x", DType::F32, &["2", "16", "20", "20"]);
            let x = quantize(&mut b, x, 0.01, 100, true)?;
            let weight = integers(DType::I8, &[16, 16 / group as usize, 3, 3])?;
            let shape: &[usize] = if per_channel { &[16] } else { &[] };
            let count = shape.iter().product();
            let scales = (0..count).map(|at| (spread(at, 50) + 1) as f32 / 2048.0).collect();
            let inputs = [
                Some(b.constant(weight)),
                Some(b.constant(Tensor::from_vec(shape, scales)?)),
                Some(b.constant(integers(DType::I8, shape)?)),
            ];
            let weight = b.add(("", "DequantizeLinear"), &inputs, &axis(0), 1, Vec::new())?[0];
            let bias = b.constant(Tensor::from_vec(&[16], (0..16).map(|at| at as f32 - 7.5).collect())?);
            let attrs = [("pads", Attribute::Ints(vec![1; 4])), ("group", Attribute::Int(group))];
            let y = b.node("Conv", &[x, weight, bias], &attrs)?;
            let output = behind(&mut b, y)?;
            planned(b, output, level)
        };
        let (bytes, actual) = graph(Level::All)?;
        let (without, expected) = graph(Level::Disabled)?;
        // The image as bytes and its windows, the result, and the terms of the filters.
        let elements = 2 * 16 * 20 * 20;
        let most = elements + elements * 4 + (24 << 10);
        assert!(bytes <= most, "{what}: {bytes} bytes are planned, more than {most}");
        assert!(without > bytes + elements, "{what}: {without} bytes are planned without rules");
        // Sums of 144 products of up to 1.5 times 6.
        let tolerance = Tolerance { relative: 1e-5, absolute: 1e-3 };
        compare(&actual[0].1, &expected[0].1, tolerance).within(|| what)?;
    }
    Ok(())
}

/// A layer of an encoder over embeddings as tools quantize it: a table and matrices of 8 bits, and
/// every value between operators quantized and dequantized.
struct Encoder {
    b: GraphBuilder,
}

impl Encoder {
    /// A constant matrix, with a single scale.
    fn weight(&mut self, rows: usize, columns: usize) -> Result<ValueId> {
        let shape = [rows, columns];
        let weight = Weight { dtype: DType::I8, shape, scales: &[], axis: 1, block: 0, has_zeros: true };
        weight.floats(&mut self.b)
    }

    fn quantize(&mut self, x: ValueId) -> Result<ValueId> {
        quantize(&mut self.b, x, 0.02, 100, true)
    }

    fn node(&mut self, op: &str, inputs: &[ValueId]) -> Result<ValueId> {
        let y = self.b.node(op, inputs, &[])?;
        self.quantize(y)
    }

    /// A matmul with a constant matrix, plus a vector.
    fn linear(&mut self, x: ValueId, [rows, columns]: [usize; 2]) -> Result<ValueId> {
        let weight = self.weight(rows, columns)?;
        let bias = self.b.constant(Tensor::from_vec(&[columns], vec![0.25_f32; columns])?);
        let product = self.b.node("MatMul", &[x, weight], &[])?;
        self.node("Add", &[product, bias])
    }

    fn build(mut self) -> Result<(GraphBuilder, ValueId)> {
        const WIDTH: usize = 128;
        let ids = self.b.input("ids", DType::I64, &["1", "16"]);
        let table = self.weight(4096, WIDTH)?;
        let x = self.b.node("Gather", &[table, ids], &axis(0))?;
        let x = self.quantize(x)?;
        let [q, k, v] = [(); 3].map(|()| self.linear(x, [WIDTH, WIDTH]));
        let (q, k, v) = (q?, k?, v?);
        let keys = self.b.node("Transpose", &[k], &[("perm", Attribute::Ints(vec![0, 2, 1]))])?;
        let scores = self.node("MatMul", &[q, keys])?;
        let weights = self.node("Softmax", &[scores])?;
        let heads = self.node("MatMul", &[weights, v])?;
        let attention = self.linear(heads, [WIDTH, WIDTH])?;
        let x = self.node("Add", &[x, attention])?;
        let inner = self.linear(x, [WIDTH, 4 * WIDTH])?;
        let inner = self.node("Relu", &[inner])?;
        let outer = self.linear(inner, [4 * WIDTH, WIDTH])?;
        let y = self.b.node("Add", &[x, outer], &[])?;
        Ok((self.b, y))
    }
}

/// The plan has no dequantized constant: neither the table of 2 MiB nor a matrix.
#[test]
fn a_quantized_encoder_has_no_dequantized_constant() -> Result<()> {
    let run = |level: Level| -> Result<(usize, Vec<(String, Value)>)> {
        let (b, output) = Encoder { b: GraphBuilder::new("encoder") }.build()?;
        planned(b, output, level)
    };
    let ((bytes, actual), (without, expected)) = (run(Level::All)?, run(Level::Disabled)?);
    assert!(bytes < 4 * 128 * 128, "{bytes} bytes are planned, as many as the least matrix has");
    assert!(without >= 4 * 4096 * 128, "{without} bytes are planned without rules");
    // A quantized value that rounds the other way is 0.02 away, and others follow from it.
    let tolerance = Tolerance { relative: 0.0, absolute: 0.1 };
    compare(&actual[0].1, &expected[0].1, tolerance)
}

#[test]
fn a_quantized_matrix_that_does_not_fit_is_refused() {
    // The shapes of A, of B and of its scales; axis and block size; a part of the error.
    type Shapes = [&'static [usize]; 3];
    let cases: [(Shapes, [i64; 2], &str); 7] = [
        ([&[2, 4], &[5, 3], &[3]], [1, 0], "differ"),
        ([&[4], &[4, 3], &[3]], [1, 0], "A has rank 1"),
        ([&[2, 4], &[4, 3, 1], &[]], [1, 0], "B has rank 3"),
        ([&[2, 4], &[4, 3], &[4]], [1, 0], "do not fit axis 1"),
        ([&[2, 4], &[4, 3], &[3]], [2, 0], "axis 2"),
        ([&[2, 4], &[4, 3], &[3, 3]], [0, 3], "do not fit blocks"),
        ([&[2, 4], &[4, 3], &[2, 3]], [0, -2], "block size"),
    ];
    for ([a, b, scales], [axis, block], problem) in cases {
        let build = || -> Result<()> {
            let mut builder = GraphBuilder::new("one node");
            let sizes: Vec<String> = a.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let a = builder.input("a", DType::F32, &sizes);
            let b = builder.constant(integers(DType::I8, b)?);
            let count = scales.iter().product();
            let scales = builder.constant(Tensor::from_vec(scales, vec![0.5_f32; count])?);
            let attrs = [("axis", Attribute::Int(axis)), ("block_size", Attribute::Int(block))];
            let operator = ("ort-runtime", "DequantizeMatMul");
            let inputs = [Some(a), Some(b), Some(scales)];
            let outputs = builder.add(operator, &inputs, &attrs, 1, Vec::new())?;
            let model = Model::from_graph(builder.finish(&outputs)?);
            Session::builder(&model).threads(1).build().map(|_| ())
        };
        let error = build().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(problem), "{problem}: '{error}'");
    }
}
