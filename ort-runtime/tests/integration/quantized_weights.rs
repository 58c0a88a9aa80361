//! Constant quantized values stay quantized: a plan has no dequantized copy of a table or matrix,
//! and a run has the bits of a run with the dequantized constant.

use crate::support::axis;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
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
