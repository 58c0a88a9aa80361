//! `NonZero`, `Compress` and `Unique`, whose output sizes only the run determines: the results have
//! the CPU's bits, and all of it runs on the device.

use std::sync::Arc;

use half::{bf16, f16};
use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, Graph, GraphBuilder, ValueId, ValueType};
use ort_core::rewrite::Level;
use ort_core::session::{Model, RunOptions, Session, SessionBuilder};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result, Within, ensure, error};

use super::control::Body;
use super::{cpu, numbers};
use crate::device_limits::Open;

const TYPES: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

/// Shapes of few elements, of none, and of several kernel blocks.
const SHAPES: [&[usize]; 8] = [&[], &[0], &[1], &[3, 0, 2], &[5, 7, 3], &[2, 1, 3, 4], &[2049], &[70, 61]];

/// One node, its inputs, and which of its outputs are used.
struct SelectCase {
    op: &'static str,
    inputs: Vec<Tensor>,
    attrs: Vec<(&'static str, Attribute)>,
    outputs: usize,
    wanted: Vec<usize>,
}

fn case(op: &'static str, inputs: Vec<Tensor>, attrs: &[(&'static str, i64)]) -> SelectCase {
    let attrs = attrs.iter().map(|(name, value)| (*name, Attribute::Int(*value))).collect();
    SelectCase { op, inputs, attrs, outputs: 1, wanted: vec![0] }
}

/// Converts numbers to elements of a type; floats are a quarter of the number.
fn elements(dtype: DType, shape: &[usize], numbers: &[i64]) -> Result<Tensor> {
    let float = |number: &i64| *number as f32 / 4.0;
    let bytes: Vec<u8> = match dtype {
        DType::F32 => numbers.iter().flat_map(|number| float(number).to_le_bytes()).collect(),
        DType::F16 => numbers.iter().flat_map(|number| f16::from_f32(float(number)).to_le_bytes()).collect(),
        DType::BF16 => {
            numbers.iter().flat_map(|number| bf16::from_f32(float(number)).to_le_bytes()).collect()
        }
        DType::F64 => numbers.iter().flat_map(|number| f64::from(float(number)).to_le_bytes()).collect(),
        // Only the imaginary parts are set, which a kernel that reads real parts takes for zeros.
        DType::C64 => {
            numbers.iter().flat_map(|number| [0.0, float(number)].map(f32::to_le_bytes)).flatten().collect()
        }
        DType::Bool => numbers.iter().map(|number| u8::from(*number != 0)).collect(),
        integer => {
            let bytes = integer.byte_size().ok_or_else(|| error!(Fail, "elements of {}", integer.name()))?;
            // The low bytes of a little-endian integer are the same number in a narrower type.
            numbers.iter().flat_map(|number| number.to_le_bytes().into_iter().take(bytes)).collect()
        }
    };
    Tensor::from_bytes(dtype, shape, bytes.into())
}

/// Pseudo-random integers below `most`; about one in `most` is zero.
fn below(most: usize, count: usize, seed: usize) -> Vec<i64> {
    numbers(count, seed).iter().map(|number| ((number + 1.0) / 2.0 * most as f32) as i64).collect()
}

/// Positive and negative zeros, NaNs, infinities, and the smallest subnormals.
fn edges(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let bits: [u64; 11] = match dtype {
        DType::F32 => [
            0,
            1 << 31,
            0x7fc0_0000,
            0xffc0_0001,
            0x7f80_0000,
            0xff80_0000,
            1,
            1 << 31 | 1,
            0x3f80_0000,
            0,
            1 << 31,
        ],
        DType::F64 => [
            0,
            1 << 63,
            0x7ff8 << 48,
            0xfff8 << 48 | 1,
            0x7ff << 52,
            0xfff << 52,
            1,
            1 << 63 | 1,
            0x3ff << 52,
            0,
            1 << 63,
        ],
        DType::F16 => [0, 1 << 15, 0x7e00, 0xfe01, 0x7c00, 0xfc00, 1, 0x8001, 0x3c00, 0, 1 << 15],
        _ => [0, 1 << 15, 0x7fc0, 0xffc1, 0x7f80, 0xff80, 1, 0x8001, 0x3f80, 0, 1 << 15],
    };
    let (count, width) = (shape.iter().product(), dtype.byte_size().unwrap_or(0));
    let all = bits.iter().cycle().take(count).flat_map(|bits| bits.to_le_bytes().into_iter().take(width));
    Tensor::from_bytes(dtype, shape, all.collect::<Vec<u8>>().into())
}

fn ints(shape: &[usize], most: usize, seed: usize) -> Result<Tensor> {
    elements(DType::I32, shape, &below(most, shape.iter().product(), seed))
}

fn non_zero_cases() -> Result<Vec<SelectCase>> {
    let mut cases = Vec::new();
    for dtype in TYPES.into_iter().chain([DType::C64]) {
        for shape in [&[5, 7, 3][..], &[4500]] {
            let found = below(3, shape.iter().product(), cases.len());
            cases.push(case("NonZero", vec![elements(dtype, shape, &found)?], &[]));
        }
    }
    for shape in SHAPES {
        for number in [0, 1] {
            let all = vec![number; shape.iter().product()];
            cases.push(case("NonZero", vec![elements(DType::F32, shape, &all)?], &[]));
        }
        cases.push(case("NonZero", vec![ints(shape, 2, 3)?], &[]));
    }
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        cases.push(case("NonZero", vec![edges(dtype, &[11])?], &[]));
    }
    // More blocks than one step of the scan over their counts covers.
    let many: Vec<u8> = (0..1100 * 2048 + 5).map(|index| u8::from(index % 977 == 5)).collect();
    cases.push(case("NonZero", vec![Tensor::from_slice(&[many.len()], &many)?], &[]));
    Ok(cases)
}

fn compress_cases() -> Result<Vec<SelectCase>> {
    let mut cases = Vec::new();
    let condition = |count: usize, most: usize| -> Result<Tensor> {
        elements(DType::Bool, &[count], &below(most, count, count + most))
    };
    for dtype in TYPES.into_iter().chain([DType::C64]) {
        let x = elements(dtype, &[6, 50, 4], &below(100, 1200, 2))?;
        cases.push(case("Compress", vec![x.clone(), condition(50, 2)?], &[("axis", 1)]));
        cases.push(case("Compress", vec![x, condition(1200, 3)?], &[]));
    }
    for shape in [&[5, 7, 3][..], &[2049, 2], &[3, 4100], &[3, 0, 2]] {
        let x = elements(DType::F32, shape, &below(100, shape.iter().product(), 2))?;
        for axis in 0..shape.len() {
            // The condition may be shorter than the axis (ONNX, `Compress`).
            for (count, most) in [(shape[axis], 2), (shape[axis] / 2, 2), (shape[axis] + 9, 3), (0, 2)] {
                let inputs = vec![x.clone(), condition(count, most)?];
                cases.push(case("Compress", inputs, &[("axis", axis as i64 - shape.len() as i64)]));
            }
        }
        for number in [0, 1] {
            let all = elements(DType::Bool, &[x.element_count()], &vec![number; x.element_count()])?;
            cases.push(case("Compress", vec![x.clone(), all], &[]));
            let all = elements(DType::Bool, &[shape[0]], &vec![number; shape[0]])?;
            cases.push(case("Compress", vec![x.clone(), all], &[("axis", 0)]));
        }
    }
    Ok(cases)
}

fn unique(x: Tensor, axis: Option<i64>, sorted: i64) -> SelectCase {
    let attrs: Vec<(&str, i64)> =
        axis.map(|axis| ("axis", axis)).into_iter().chain([("sorted", sorted)]).collect();
    SelectCase { outputs: 4, wanted: vec![0, 1, 2, 3], ..case("Unique", vec![x], &attrs) }
}

fn unique_cases() -> Result<Vec<SelectCase>> {
    let mut cases = Vec::new();
    for sorted in [0, 1] {
        for dtype in TYPES {
            let x =
                elements(dtype, &[40, 3, 2], &below(3, 240, 9).iter().map(|x| x - 1).collect::<Vec<_>>())?;
            for axis in [None, Some(0), Some(1), Some(-1)] {
                cases.push(unique(x.clone(), axis, sorted));
            }
        }
        // Lengths that are counted, sorted within a block, and merged once and twice.
        for (count, most) in [(1, 5), (64, 20), (65, 20), (2049, 100), (5000, 4000), (20_000, 9000)] {
            cases.push(unique(ints(&[count], most, 1)?, None, sorted));
            cases.push(unique(ints(&[count], 1, 1)?, None, sorted));
            cases.push(unique(elements(DType::I64, &[count], &below(most, count, 4))?, None, sorted));
            cases.push(unique(ints(&[count, 2], 1 + most / 90, 7)?, Some(0), sorted));
        }
        for shape in SHAPES {
            cases.push(unique(ints(shape, 4, 3)?, None, sorted));
            for axis in 0..shape.len() {
                cases.push(unique(ints(shape, 2, 3)?, Some(axis as i64), sorted));
            }
        }
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            cases.push(unique(edges(dtype, &[99])?, None, sorted));
            cases.push(unique(edges(dtype, &[33, 3])?, Some(0), sorted));
        }
        for wanted in [&[0][..], &[1], &[2], &[3], &[0, 2], &[1, 3]] {
            for axis in [None, Some(1)] {
                let own = unique(ints(&[9, 70], 2, 6)?, axis, sorted);
                cases.push(SelectCase { wanted: wanted.to_vec(), ..own });
            }
        }
    }
    Ok(cases)
}

/// Finishes a graph whose last node has only the outputs in `wanted`; the others are omitted.
fn finish(mut builder: GraphBuilder, made: &[ValueId], wanted: &[usize]) -> Result<Graph> {
    let node = builder.graph_mut().nodes.last_mut();
    let node = node.ok_or_else(|| error!(Fail, "a graph without nodes"))?;
    for (index, output) in node.outputs.iter_mut().enumerate() {
        *output = output.filter(|_| wanted.contains(&index));
    }
    let wanted: Vec<ValueId> = wanted.iter().map(|index| made[*index]).collect();
    builder.finish(&wanted)
}

impl SelectCase {
    fn graph(&self) -> Result<Graph> {
        let mut builder = GraphBuilder::new("case");
        let mut ids = Vec::new();
        for (index, tensor) in self.inputs.iter().enumerate() {
            let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
            let ty = ValueType::tensor(tensor.dtype(), Some(shape));
            ids.push(Some(builder.typed_input(&format!("x{index}"), ty)));
        }
        let made = builder.add(("", self.op), &ids, &self.attrs, self.outputs, Vec::new())?;
        finish(builder, &made, &self.wanted)
    }

    fn check(&self, device: &Arc<dyn Device>) -> Result<()> {
        let model = Model::from_graph(self.graph()?);
        let names: Vec<String> = (0..self.inputs.len()).map(|index| format!("x{index}")).collect();
        let values = names.iter().map(String::as_str).zip(self.inputs.iter().cloned().map(Value::from));
        let values: Vec<(&str, Value)> = values.collect();
        // Without the CPU as fallback, so that nothing can run there.
        let own = Session::builder(&model).device(device.clone()).opt_level(Level::Disabled).build()?;
        let alone = Session::builder(&model).device(cpu()?).opt_level(Level::Disabled).build()?;
        for _ in 0..2 {
            same(&run(&own, &values)?, &run(&alone, &values)?)?;
        }
        Ok(())
    }
}

fn run(session: &Session, values: &[(&str, Value)]) -> Result<Vec<Value>> {
    Ok(session.run(values)?.into_iter().map(|(_, value)| value).collect())
}

/// Fails unless all values have the same types, shapes and bits.
fn same(found: &[Value], expected: &[Value]) -> Result<()> {
    ensure!(found.len() == expected.len(), Fail, "{} outputs, not {}", found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (found, expected) = (found.tensor()?, expected.tensor()?);
        let (is, should) = ((found.dtype(), found.shape()), (expected.dtype(), expected.shape()));
        ensure!(is == should, Fail, "output {index} is {is:?}, expected {should:?}");
        // These operators move elements and count them, so nothing is rounded.
        let differs = found.bytes().zip(expected.bytes()).and_then(|(found, expected)| {
            found.iter().zip(expected).position(|(found, expected)| found != expected)
        });
        ensure!(differs.is_none(), Fail, "output {index} differs at byte {differs:?}");
    }
    Ok(())
}

fn check_all(device: &Arc<dyn Device>, cases: &[SelectCase]) {
    let mut problems = Vec::new();
    for case in cases {
        if let Err(problem) = case.check(device) {
            let inputs = case.inputs.iter().map(|tensor| format!("{}{:?}", tensor.dtype(), tensor.shape()));
            let inputs: Vec<String> = inputs.collect();
            problems.push(format!(
                "{} of {}, {:?}, {:?}: {problem}",
                case.op,
                inputs.join(", "),
                case.attrs,
                case.wanted
            ));
        }
    }
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), cases.len(), problems.join("\n"));
}

/// Checks each operator alone.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn results(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, &non_zero_cases()?);
    check_all(device, &compress_cases()?);
    check_all(device, &unique_cases()?);
    Ok(())
}

/// Builds a chain behind such nodes: the non-zero elements of `x` index another tensor; the rows of
/// `x` that a condition keeps go through a MatMul, whose signs go through `Unique`.
fn chain() -> Result<Graph> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["n", "8"]);
    let y = builder.input("y", DType::F32, &["n", "8"]);
    let keep = builder.input("keep", DType::Bool, &["n"]);
    let positive = builder.node("Relu", &[x], &[])?;
    let found = builder.node("NonZero", &[positive], &[])?;
    let found = builder.node("Transpose", &[found], &[])?;
    let gathered = builder.node("GatherND", &[y, found], &[])?;
    let gathered = builder.node("Neg", &[gathered], &[])?;
    let kept = builder.node("Compress", &[x, keep], &[("axis", Attribute::Int(0))])?;
    let kept = builder.node("Relu", &[kept], &[])?;
    let weights = builder.constant(Tensor::from_slice(&[8, 3], &numbers(24, 5))?);
    let product = builder.node("MatMul", &[kept, weights], &[])?;
    let signs = builder.node("Sign", &[product], &[])?;
    let unique =
        builder.add(("", "Unique"), &[Some(signs)], &[("axis", Attribute::Int(0))], 4, Vec::new())?;
    let rows = builder.node("Sub", &[unique[0], unique[0]], &[])?;
    builder.finish(&[gathered, product, rows, unique[2]])
}

/// Inputs of the chain that keep `kept` rows, with a varying number of zeros.
fn chain_inputs(rows: usize, kept: usize, seed: usize) -> Result<Vec<(&'static str, Value)>> {
    let [x, y] = [seed, seed + 1].map(|seed| numbers(rows * 8, seed));
    let keep: Vec<bool> = (0..rows).map(|row| row * 7 % rows < kept).collect();
    let x: Vec<f32> = x.iter().map(|x| x - kept as f32 / rows as f32 + 0.5).collect();
    let shape = [rows, 8];
    Ok(vec![
        ("x", Tensor::from_slice(&shape, &x)?.into()),
        ("y", Tensor::from_slice(&shape, &y)?.into()),
        ("keep", Tensor::from_bools(&[rows], &keep)?.into()),
    ])
}

fn builder(graph: Graph, device: &Arc<dyn Device>) -> Result<SessionBuilder> {
    let model = Model::from_graph(graph);
    Ok(Session::builder(&model).device(device.clone()).device(cpu()?).threads(1).batch_split(false))
}

/// Checks that nodes behind such nodes read the results on the device, for several counts in a row.
///
/// # Panics
///
/// A node is not on the device, or results are copied between nodes.
pub fn chains(device: &Arc<dyn Device>) -> Result<()> {
    let session = builder(chain()?, device)?.build()?;
    let own = device.info().provider;
    let steps = session.steps();
    assert!(steps.iter().all(|(.., provider)| *provider == own || provider.is_empty()), "{steps:?}");
    let copies = steps.iter().filter(|(_, op, _)| op == "Copy").count();
    assert_eq!(copies, 3 + 4, "what is given and what is returned: {steps:?}");
    let host = cpu()?;
    let alone = Session::builder(&Model::from_graph(chain()?)).device(host).threads(1).build()?;
    for (rows, kept, seed) in
        // A size comes again after a run that kept nothing.
        [(9, 4, 1), (9, 9, 2), (300, 20, 3), (300, 0, 3), (300, 20, 3), (9, 1, 4), (300, 299, 5)]
    {
        let values = chain_inputs(rows, kept, seed)?;
        let what = || format!("{kept} of {rows} rows");
        let (found, expected) = (run(&session, &values).within(what)?, run(&alone, &values)?);
        for (output, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Only the MatMul is not exact.
            match output {
                1 => super::assert_close(found, expected, 1e-5, &what())?,
                _ => same(std::slice::from_ref(found), std::slice::from_ref(expected)).within(what)?,
            }
        }
    }
    Ok(())
}

/// A loop that keeps in each iteration the rows whose first number is positive, and decrements
/// them.
fn shrinking() -> Result<Graph> {
    let mut main = GraphBuilder::new("shrinking");
    let x = main.input("x", DType::F32, &["n", "8"]);
    let mut body = Body::new();
    let (_, holds, state) = (body.input("number"), body.input("holds"), body.input("state"));
    let builder = &mut body.builder;
    let first = builder.constant(Tensor::scalar(0i64)?);
    let firsts = builder.node("Gather", &[state, first], &[("axis", Attribute::Int(1))])?;
    let zero = builder.constant(Tensor::scalar(0.0f32)?);
    let keep = builder.node("Greater", &[firsts, zero], &[])?;
    let kept = builder.node("Compress", &[state, keep], &[("axis", Attribute::Int(0))])?;
    let step = builder.constant(Tensor::scalar(0.25f32)?);
    let next = builder.node("Sub", &[kept, step], &[])?;
    let body = body.finish("body", &[holds, next]);
    let trips = main.constant(Tensor::scalar(3i64)?);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x)], &[], 1, vec![body])?;
    let found = main.node("Neg", &[outputs[0]], &[])?;
    main.finish(&[found])
}

/// Checks such nodes in the bodies of control flow.
///
/// # Panics
///
/// The loop is not on the device, or a result differs.
pub fn bodies(device: &Arc<dyn Device>) -> Result<()> {
    let session = builder(shrinking()?, device)?.build()?;
    let own = device.info().provider;
    let placed = session.placement();
    assert!(placed.iter().all(|placed| placed.provider == own), "{placed:?}");
    let alone = Session::builder(&Model::from_graph(shrinking()?)).device(cpu()?).build()?;
    for rows in [40, 3, 0, 200] {
        let x: Value = Tensor::from_slice(&[rows, 8], &numbers(rows * 8, rows))?.into();
        let values = [("x", x)];
        same(&run(&session, &values)?, &run(&alone, &values)?).within(|| format!("{rows} rows"))?;
    }
    Ok(())
}

/// A constant condition, with which all sizes are known.
fn constant_condition() -> Result<Graph> {
    let mut builder = GraphBuilder::new("constant");
    let x = builder.input("x", DType::F32, &["n", "4"]);
    let keep = builder.constant(Tensor::from_bools(&[3], &[true, false, true])?);
    let kept = builder.node("Compress", &[x, keep], &[("axis", Attribute::Int(1))])?;
    let found = builder.node("Neg", &[kept], &[])?;
    builder.finish(&[found, kept])
}

/// Checks results that stay on the device for the caller, and one whose size is known before the
/// run.
///
/// # Panics
///
/// A result differs, or is not on the device.
pub fn bound(device: &Arc<dyn Device>) -> Result<()> {
    let only = |op: &str, outputs: usize| -> Result<Graph> {
        let mut builder = GraphBuilder::new("only");
        let x = builder.input("x", DType::F32, &["n", "4"]);
        let found = builder.add(("", op), &[Some(x)], &[], outputs, Vec::new())?;
        finish(builder, &found, &[outputs - 1])
    };
    // Only the inverse indices: their shape is that of the input, independent of the count.
    let groups = only("Unique", 3)?;
    for graph in [only("NonZero", 1)?, groups, constant_condition()?] {
        let session = builder(graph.clone(), device)?.build()?;
        let alone = Session::builder(&Model::from_graph(graph)).device(cpu()?).build()?;
        let mut binding = session.io_binding();
        for output in session.outputs() {
            binding.bind_output(&output.name, device.memory())?;
        }
        for (rows, most) in [(50, 2), (50, 5), (7, 1), (700, 3)] {
            let all = below(most, rows * 4, rows);
            let x = elements(DType::F32, &[rows, 4], &all)?;
            binding.bind_input("x", x.clone())?;
            session.run_with_binding(&mut binding, &RunOptions::default())?;
            let mut found = Vec::new();
            for (name, value) in binding.get_outputs()? {
                assert_eq!(value.tensor()?.memory(), device.memory(), "{name}");
                found.push(session.to_host(&value)?);
            }
            same(&found, &run(&alone, &[("x", x.into())])?).within(|| format!("{rows} rows"))?;
        }
    }
    Ok(())
}

/// Returns `count` before and after a run of the chain.
pub fn counts<T>(device: &Arc<dyn Device>, count: impl Fn() -> T) -> Result<(T, T)> {
    let session = builder(chain()?, device)?.build()?;
    let values = chain_inputs(30, 11, 1)?;
    for _ in 0..3 {
        run(&session, &values)?;
    }
    let before = count();
    let outputs = run(&session, &values)?;
    ensure!(outputs.len() == 4, Fail, "{} outputs", outputs.len());
    Ok((before, count()))
}

/// The indices of non-zero elements: twice the bytes of the input, if none is zero.
fn places() -> Result<Graph> {
    let mut builder = GraphBuilder::new("places");
    let x = builder.input("x", DType::F32, &["n"]);
    let found = builder.node("NonZero", &[x], &[])?;
    let found = builder.node("Neg", &[found], &[])?;
    builder.finish(&[found])
}

/// Checks that a result which exceeds a memory limit is an error that names the node, and that the
/// session remains usable. The limit is the session's or the device's.
///
/// # Panics
///
/// A run within the limit fails, or one beyond it succeeds.
pub fn limits(open: Open<'_>) -> Result<()> {
    const COUNT: usize = 40_000;
    let x = |kept: usize| -> Result<Value> {
        let all: Vec<f32> = (0..COUNT).map(|index| if index < kept { 1.0 } else { 0.0 }).collect();
        Ok(Tensor::from_slice(&[COUNT], &all)?.into())
    };
    // Twice the bytes of the input: the result alone takes that if no element is zero.
    let limit = COUNT * 4 * 2;
    for is_of_device in [true, false] {
        let device = open(is_of_device.then_some(limit))?;
        let session = builder(places()?, &device)?;
        let session = if is_of_device { session } else { session.memory_limit(limit) }.build()?;
        for (kept, fits) in
            [(10, true), (COUNT, false), (11, true), (0, true), (COUNT - 1, false), (3000, true)]
        {
            let found = session.run(&[("x", x(kept)?)]);
            match found {
                Ok(found) if fits => assert_eq!(found[0].1.tensor()?.shape(), [1, kept]),
                Err(problem) if !fits => {
                    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
                    let said = problem.to_string();
                    assert!(said.contains("NonZero_0"), "{said}");
                }
                other => panic!("{kept} elements within {limit} bytes: {:?}", other.map(|found| found.len())),
            }
        }
        drop(session);
        device.synchronize()?;
        assert_eq!(device.allocator().stats().in_use, 0, "what a failed run had comes back");
    }
    Ok(())
}

/// Checks that the workspace is planned from the shapes of the inputs, so that a run which exceeds
/// a limit is refused before anything runs.
///
/// # Panics
///
/// The plan does not include the workspace.
pub fn planned(device: &Arc<dyn Device>) -> Result<()> {
    const COUNT: usize = 3000;
    let mut graph = GraphBuilder::new("planned");
    let x = graph.input("x", DType::F32, &["n"]);
    let found = graph.add(("", "Unique"), &[Some(x)], &[], 4, Vec::new())?;
    let graph = finish(graph, &found, &[2])?;
    let x = ints(&[COUNT], 50, 1)?.to_vec::<i32>()?.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let values: [(&str, Value); 1] = [("x", Tensor::from_slice(&[COUNT], &x)?.into())];
    let session = builder(graph.clone(), device)?.build()?;
    let plan = session.plan(&[("n", COUNT as i64)])?;
    let slab = plan.slabs.get(1).copied().unwrap_or(0);
    // The order of the elements, and two buffers of keys.
    assert!(slab >= COUNT * 8 * 3, "{:?}", plan.slabs);
    run(&session, &values)?;
    let problem = run(&builder(graph, device)?.memory_limit(slab).build()?, &values).err();
    let shortage = problem.as_ref().and_then(|problem| problem.shortage());
    assert!(shortage.is_some(), "{problem:?}");
    Ok(())
}
