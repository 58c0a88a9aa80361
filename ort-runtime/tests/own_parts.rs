//! What CONTRIBUTING.md builds: an operator of a domain of its own with a CPU kernel, one that is
//! decomposed, and a provider.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::{Arc, OnceLock};

use ort_alloc::{Allocator, DeviceId, HostAllocator};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, ExecutionProvider, KernelDef, KernelTable, NodeView,
    ProviderEntry, ProviderOptions, RunCx, check_options,
};
use ort_core::rewrite::Level;
use ort_core::spec::{Draft, InferCx, OP, OpSpec, ScalarExpr, Traits, attr, one, var};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, error, inventory, ops, pass};
use ort_ep_cpu::cpu_kernels;
use ort_runtime::dtype::TypeSet;
use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::{DType, Model, Session, Tensor};

// An operator.

static ROW_SUM: OpSpec = OpSpec {
    domain: "example",
    name: "RowSum",
    since: 1,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::float("scale", 1.0)],
    infer: infer_row_sum,
    ..OP
};

/// The input's shape without its last dimension.
fn infer_row_sum(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let Some((_, rows)) = shape.split_last() else {
        return Err(error!(InvalidGraph, "RowSum needs rank 1 or more, got a scalar"));
    };
    cx.set_shape(0, rows.to_vec())
}

/// x³: no provider needs a kernel for it, as it says how it is made of others.
static CUBE: OpSpec = OpSpec {
    domain: "example",
    name: "Cube",
    since: 1,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    infer: |cx| match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    },
    lower: Some(lower_cube),
    ..OP
};

fn lower_cube(draft: &mut Draft<'_>) -> Result<()> {
    let x = draft.required(0)?;
    let square = draft.emit("Mul", &[x, x], &[])?;
    let cube = draft.emit("Mul", &[square, x], &[])?;
    draft.replace(&[cube])
}

/// max(x, 0)²: no provider needs a kernel for it either, as its formula says all.
static SQUARED_RELU: OpSpec = OpSpec {
    domain: "example",
    name: "SquaredRelu",
    since: 1,
    inputs: &[one("input", "U")],
    outputs: &[one("output", "U")],
    types: &[var("U", TypeSet::FLOATS)],
    traits: Traits::ELEMENTWISE,
    infer: |cx| match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    },
    scalar: Some(|_| {
        let positive = || ScalarExpr::Input(0).max(0.0);
        Ok(positive() * positive())
    }),
    ..OP
};

ops![ROW_SUM, CUBE, SQUARED_RELU];

// A CPU kernel for it.

cpu_kernels![KernelDef {
    domain: "example",
    op: "RowSum",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    make: |cx| Ok(Box::new(RowSum { scale: cx.attrs().float("scale")? })),
    ..KernelDef::BASE
}];

struct RowSum {
    scale: f32,
}

impl Executable for RowSum {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.input(0)?;
        let width = input.shape().last().copied().unwrap_or(1);
        let elements = input.as_slice::<f32>()?;
        let sums = cx.output(0)?.as_mut_slice::<f32>()?;
        for (row, sum) in sums.iter_mut().enumerate() {
            let row = elements.get(row * width..(row + 1) * width);
            let row = row.ok_or_else(|| error!(Fail, "the output has more rows than the input"))?;
            *sum = row.iter().sum::<f32>() * self.scale;
        }
        Ok(())
    }
}

// A provider whose one kernel negates.

struct Example;

inventory::submit! { ProviderEntry(&Example) }

impl ExecutionProvider for Example {
    fn name(&self) -> &'static str {
        "example"
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![describe()])
    }

    fn open(&self, _index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        check_options("example", options, &[])?;
        Ok(Arc::new(ExampleDevice(describe())))
    }
}

fn describe() -> DeviceInfo {
    DeviceInfo { provider: "example", name: "abacus".to_string(), memory_bytes: None, facts: Vec::new() }
}

static NEGATE: KernelDef = KernelDef {
    op: "Neg",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    make: |_| Ok(Box::new(negate)),
    ..KernelDef::BASE
};

fn negate(cx: &mut RunCx<'_>) -> Result<()> {
    let from = cx.input(0)?.as_slice::<f32>()?;
    for (to, from) in cx.output(0)?.as_mut_slice::<f32>()?.iter_mut().zip(from) {
        *to = -from;
    }
    Ok(())
}

struct ExampleDevice(DeviceInfo);

fn table() -> &'static KernelTable {
    static TABLE: OnceLock<KernelTable> = OnceLock::new();
    TABLE.get_or_init(|| KernelTable::new([&NEGATE]))
}

impl Device for ExampleDevice {
    fn info(&self) -> &DeviceInfo {
        &self.0
    }

    fn memory(&self) -> DeviceId {
        DeviceId::HOST
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        HostAllocator::global().clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        table().claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let kernel = table().find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        (kernel.make)(cx)
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        to.bytes_mut()?.copy_from_slice(from.bytes()?);
        Ok(())
    }
}

// All of it in one model.

/// y = -(RowSum(Cube(x)) / 2) for x float[n, 3].
fn graph() -> Result<Graph> {
    let mut builder = GraphBuilder::new("own parts");
    let x = builder.input("x", DType::F32, &["n", "3"]);
    let cube = builder.add(("example", "Cube"), &[Some(x)], &[], 1, Vec::new())?;
    let half = [("scale", Attribute::Float(0.5))];
    let sum = builder.add(("example", "RowSum"), &[Some(cube[0])], &half, 1, Vec::new())?;
    let y = builder.node("Neg", &[sum[0]], &[])?;
    builder.finish(&[y])
}

#[test]
fn own_parts_work_together() -> Result<()> {
    let model = Model::from_graph(graph()?);
    let session = Session::builder(&model).provider("example").provider("cpu").threads(1).build()?;
    let x = Tensor::from_slice(&[2, 3], &[1.0f32, 2.0, 3.0, -1.0, 0.0, 1.0])?;
    let outputs = session.run(&[("x", x.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [-18.0, 0.0]);
    let steps = session.steps();
    let placed: Vec<(&str, &str)> =
        steps.iter().map(|(_, op, provider)| (op.as_str(), provider.as_str())).collect();
    assert_eq!(placed, [("Mul", "cpu"), ("Mul", "cpu"), ("RowSum", "cpu"), ("Neg", "example")]);
    // The new operators are planned like all others: nothing is left to run time.
    assert!(session.plan(&[("n", 100)])?.peak_bytes.is_some());
    Ok(())
}

#[test]
fn a_formula_runs_fuses_and_has_a_gradient() -> Result<()> {
    let mut builder = GraphBuilder::new("formula");
    let x = builder.input("x", DType::F32, &["n"]);
    let square = builder.add(("example", "SquaredRelu"), &[Some(x)], &[], 1, Vec::new())?;
    let y = builder.node("Neg", &square, &[])?;
    let graph = builder.finish(&[y])?;
    let attrs = [
        ("xs", Attribute::Strings(vec!["x".to_string()])),
        ("y", Attribute::String(graph.value(y).name.to_string())),
    ];
    let fused = Session::builder(&Model::from_graph(graph.clone())).provider("cpu").build()?;
    let steps: Vec<String> = fused.steps().into_iter().map(|(_, op, _)| op).collect();
    assert_eq!(steps, ["FusedElementwise"]);
    let mut builder = GraphBuilder::extend(graph);
    let slope = builder.add(("ai.onnx.preview.training", "Gradient"), &[Some(x)], &attrs, 1, Vec::new())?;
    let mut graph = builder.finish(&[y, slope[0]])?;
    pass::expand_gradients(&mut graph)?;
    let model = Model::from_graph(graph);
    let x = Tensor::from_slice(&[3], &[-2.0f32, 0.5, 3.0])?;
    for level in [Level::Disabled, Level::All] {
        let session = Session::builder(&model).provider("cpu").opt_level(level).build()?;
        let outputs = session.run(&[("x", x.clone().into())])?;
        assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [0.0, -0.25, -9.0]);
        assert_eq!(outputs[1].1.tensor()?.to_vec::<f32>()?, [0.0, -1.0, -6.0]);
    }
    Ok(())
}

/// The GPU providers claim it, without a device.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
#[test]
fn a_formula_runs_on_gpus() -> Result<()> {
    let mut builder = GraphBuilder::new("formula");
    let x = builder.input("x", DType::F32, &["n", "4"]);
    let y = builder.add(("example", "SquaredRelu"), &[Some(x)], &[], 1, Vec::new())?;
    let graph = builder.finish(&y)?;
    let node = &graph.nodes[0];
    #[cfg(feature = "cuda")]
    assert!(ort_ep_cuda::kernel_table().claim(&NodeView { graph: &graph, node }).is_ok());
    #[cfg(feature = "wgpu")]
    assert!(ort_ep_wgpu::kernel_table().claim(&NodeView { graph: &graph, node }).is_ok());
    Ok(())
}

#[test]
fn what_a_kernel_does_not_cover_is_said() -> Result<()> {
    let mut builder = GraphBuilder::new("doubles");
    let x = builder.input("x", DType::F64, &["3"]);
    let sum = builder.add(("example", "RowSum"), &[Some(x)], &[], 1, Vec::new())?;
    let model = Model::from_graph(builder.finish(&sum)?);
    let problem = Session::builder(&model).build().err().map(|problem| problem.to_string()).unwrap();
    assert!(problem.contains("example.RowSum") && problem.contains("type double of T"), "{problem}");
    Ok(())
}
