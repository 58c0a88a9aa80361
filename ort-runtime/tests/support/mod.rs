//! Helpers that several tests of this crate share.

#![allow(dead_code, clippy::expect_used, reason = "each test uses some of it, and tests may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_runtime::ep::{Claim, CompileCx, Device, DeviceInfo, Executable, NodeView, provider};
use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::onnx::{ModelInfo, Weights, save};
use ort_runtime::tensor::{TensorMut, TensorView};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// A `float` tensor.
pub(crate) fn floats(shape: &[usize], elements: &[f32]) -> Result<Tensor> {
    Tensor::from_slice(shape, elements)
}

/// A `float` tensor of small whole numbers of either sign, each run the same.
pub(crate) fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let elements: Vec<f32> = (0..count).map(|index| ((index * 7 + seed * 5) % 13) as f32 - 6.0).collect();
    Tensor::from_vec(shape, elements)
}

/// A one-dimensional `int64` tensor.
pub(crate) fn ints(elements: &[i64]) -> Result<Tensor> {
    Tensor::from_slice(&[elements.len()], elements)
}

/// A model from a file in a folder of its own, so that its weights are mapped.
pub(crate) fn mapped(graph: &Graph) -> Result<(tempfile::TempDir, Model)> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.onnx");
    save(graph, &ModelInfo::default(), &file, &Weights::Inside)?;
    let model = Model::load(&file)?;
    Ok((folder, model))
}

/// The bits of the only output, of type `float`.
pub(crate) fn bits(session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<u32>> {
    let outputs = session.run(inputs)?;
    Ok(outputs[0].1.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
}

/// The attribute `axis`.
pub(crate) fn axis(axis: i64) -> [(&'static str, Attribute); 1] {
    [("axis", Attribute::Int(axis))]
}

/// A session of one thread on a graph.
pub(crate) fn session(graph: Graph) -> Result<Session> {
    Session::builder(&Model::from_graph(graph)).threads(1).build()
}

/// `Relu(x * weight + bias)` with x of [rows, 3] and a weight of [3, 4].
pub(crate) fn layer() -> Result<Graph> {
    let mut builder = GraphBuilder::new("layer");
    let x = builder.input("x", DType::F32, &["rows", "3"]);
    let weight = [1.0, 0.0, -1.0, 2.0, 0.5, 1.0, 0.0, -1.0, 2.0, -1.0, 1.0, 0.0];
    let weight = builder.constant(floats(&[3, 4], &weight)?);
    let bias = builder.constant(floats(&[4], &[0.25, -0.5, 1.0, 0.0])?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let sum = builder.node("Add", &[product, bias], &[])?;
    let result = builder.node("Relu", &[sum], &[])?;
    builder.finish(&[result])
}

/// What [`layer`] gives for an x of ones in every row.
pub(crate) const LAYER_OF_ONES: [f32; 4] = [3.75, 0.0, 1.0, 1.0];

/// A branch of `If` with one captured value and one output.
pub(crate) fn branch(
    attr: &'static str,
    outer: ValueId,
    build: fn(&mut GraphBuilder, ValueId) -> Result<ValueId>,
) -> Result<Subgraph> {
    let mut graph = Graph::new(attr);
    let inner = graph.add_value("captured", ValueType::Unknown);
    let mut builder = GraphBuilder::extend(graph);
    let result = build(&mut builder, inner)?;
    let graph = builder.finish_subgraph(&[result]);
    Ok(Subgraph { attr, graph, captures: vec![Capture { outer, inner }] })
}

/// `x + 1`, `count` times in a `Loop`; `count` and `x` are inputs.
pub(crate) fn counter() -> Result<Graph> {
    let mut builder = GraphBuilder::new("counter");
    let count = builder.input("count", DType::I64, &[]);
    let x = builder.input("x", DType::F32, &["n"]);
    let mut body = GraphBuilder::new("body");
    body.input("step", DType::I64, &[]);
    let more = body.input("more", DType::Bool, &[]);
    let value = body.typed_input("value", ValueType::Unknown);
    let one = body.constant(Tensor::scalar(1.0f32)?);
    let again = body.node("Identity", &[more], &[])?;
    let next = body.node("Add", &[value, one], &[])?;
    let body = body.finish_subgraph(&[again, next]);
    let body = Subgraph { attr: "body", graph: body, captures: Vec::new() };
    let outputs = builder.add(("", "Loop"), &[Some(count), None, Some(x)], &[], 1, vec![body])?;
    builder.finish(&outputs)
}

/// The inputs of a run where each symbolic size is `n`: numbers, ones and true.
pub(crate) fn inputs_of(session: &Session, n: usize) -> Result<Vec<(String, Value)>> {
    let mut inputs = Vec::new();
    for (seed, spec) in session.inputs().into_iter().enumerate() {
        let sizes = spec.ty.shape().unwrap_or_default();
        let shape: Vec<usize> =
            sizes.iter().map(|size| size.as_constant().map_or(n, |size| size as usize)).collect();
        let count: usize = shape.iter().product();
        let tensor = match spec.ty.dtype() {
            Some(DType::Bool) => Tensor::from_bools(&shape, &vec![true; count])?,
            Some(DType::I64) => Tensor::from_vec(&shape, vec![1i64; count])?,
            _ => numbers(&shape, seed)?,
        };
        inputs.push((spec.name, tensor.into()));
    }
    Ok(inputs)
}

/// Runs a session on inputs with owned names.
pub(crate) fn run(session: &Session, inputs: &[(String, Value)]) -> Result<Vec<(String, Value)>> {
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&inputs)
}

/// The CPU without some of its operators.
pub(crate) struct Without {
    cpu: Arc<dyn Device>,
    operators: &'static [&'static str],
    /// The most threads that it could pack with.
    pub(crate) pack_threads: AtomicUsize,
}

impl Without {
    pub(crate) fn new(operators: &'static [&'static str]) -> Result<Arc<Without>> {
        let cpu = provider("cpu")?.open(0, &Default::default())?;
        Ok(Arc::new(Without { cpu, operators, pack_threads: AtomicUsize::new(0) }))
    }
}

impl Device for Without {
    fn info(&self) -> &DeviceInfo {
        self.cpu.info()
    }

    fn memory(&self) -> ort_alloc::DeviceId {
        self.cpu.memory()
    }

    fn allocator(&self) -> Arc<dyn ort_alloc::Allocator> {
        self.cpu.allocator()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        if self.operators.contains(&node.node.spec.name) {
            return Err("this device is without it".to_string());
        }
        self.cpu.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        self.pack_threads.fetch_max(cx.threads, Ordering::Relaxed);
        self.cpu.compile(cx)
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.cpu.copy(from, to)
    }
}
