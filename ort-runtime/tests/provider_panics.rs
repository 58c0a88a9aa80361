//! A provider that is linked into the process and panics, in each of its calls: an error that names
//! it, never a panic of the caller. And an operator that panics: the run's binding stays whole.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::ep::KernelDef;
use ort_core::ops;
use ort_core::spec::{OP, OpSpec, one, var};
use ort_ep_cpu::cpu_kernels;
use ort_runtime::dtype::TypeSet;
use ort_runtime::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, IoShapes, NodeView, ProviderOptions,
    RunCx, new_device_id, provider,
};
use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueType};
use ort_runtime::onnx::{Weights, save};
use ort_runtime::tensor::{TensorBuffer, TensorMut, TensorView};
use ort_runtime::{DType, Error, ErrorKind, Model, Result, RunOptions, Session, Tensor};
use support::{LAYER_OF_ONES, floats, layer, numbers};

/// The CPU, but for one call.
struct Panicking {
    cpu: Arc<dyn Device>,
    info: DeviceInfo,
    memory: DeviceId,
    call: &'static str,
    armed: Arc<AtomicBool>,
}

impl Panicking {
    fn open(call: &'static str) -> Result<(Arc<dyn Device>, Arc<AtomicBool>)> {
        let cpu = provider("cpu")?.open(0, &ProviderOptions::new())?;
        let info = DeviceInfo { provider: "panicking", ..cpu.info().clone() };
        let (memory, armed) = (cpu.memory(), Arc::new(AtomicBool::new(true)));
        Ok((Arc::new(Panicking { cpu, info, memory, call, armed: armed.clone() }), armed))
    }

    /// [`Self::open`] for a device with memory of its own.
    fn apart(call: &'static str) -> Result<Arc<dyn Device>> {
        let cpu = provider("cpu")?.open(0, &ProviderOptions::new())?;
        let info = DeviceInfo { provider: "panicking", ..cpu.info().clone() };
        let armed = Arc::new(AtomicBool::new(true));
        Ok(Arc::new(Panicking { cpu, info, memory: new_device_id(), call, armed }))
    }

    fn enter(&self, call: &str) {
        assert!(self.call != call || !self.armed.load(Ordering::Relaxed), "told to panic in {call}");
    }
}

impl Device for Panicking {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.memory
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.enter("allocator");
        match self.memory {
            DeviceId::HOST => self.cpu.allocator(),
            id => Arc::new(PanickingMemory { id, call: self.call }),
        }
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.enter("claim");
        self.cpu.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        self.enter("compile");
        let operator = cx.node.node.spec.name;
        let (kernel, call, armed) = (self.cpu.compile(cx)?, self.call, self.armed.clone());
        Ok(Box::new(PanickingKernel { kernel, operator, call, armed }))
    }

    fn check(&self) -> Result<()> {
        self.enter("check");
        Ok(())
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.enter("fingerprint");
        self.cpu.fingerprint()
    }

    fn synchronize(&self) -> Result<()> {
        self.enter("synchronize");
        self.cpu.synchronize()
    }

    fn prefers_channels_last(&self) -> bool {
        self.enter("prefers_channels_last");
        self.cpu.prefers_channels_last()
    }

    fn vector_bytes(&self) -> usize {
        self.enter("vector_bytes");
        self.cpu.vector_bytes()
    }

    fn end_of_build(&self) {
        self.enter("end_of_build");
    }

    fn end_of_run(&self) {
        self.enter("end_of_run");
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.cpu.copy(from, to)
    }
}

/// Device memory that the host cannot access. Nothing is ever written to it.
struct PanickingMemory {
    id: DeviceId,
    call: &'static str,
}

impl Allocator for PanickingMemory {
    fn device(&self) -> DeviceId {
        assert_ne!(self.call, "device", "told to panic in device");
        self.id
    }

    fn allocate(&self, bytes: usize, _: usize) -> Result<Buffer, AllocError> {
        assert_ne!(self.call, "allocate", "told to panic in allocate");
        Ok(Buffer::opaque(self.id, bytes, 1, Box::new(|_| {})))
    }

    fn stats(&self) -> Stats {
        assert_ne!(self.call, "stats", "told to panic in stats");
        Stats::default()
    }

    fn trim(&self) -> usize {
        0
    }
}

struct PanickingKernel {
    kernel: Box<dyn Executable>,
    operator: &'static str,
    call: &'static str,
    armed: Arc<AtomicBool>,
}

impl PanickingKernel {
    fn enter(&self, call: &str) {
        assert!(self.call != call || !self.armed.load(Ordering::Relaxed), "told to panic in {call}");
    }
}

impl Executable for PanickingKernel {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.enter("workspace");
        let told = |kind| Err(Error::new(kind, "told to fail in workspace"));
        match (self.operator, self.call) {
            ("Sqrt", "panic of Sqrt") => self.enter(self.call),
            ("Sqrt", "memory of Sqrt") => return told(ErrorKind::OutOfMemory),
            ("Sqrt", "sizes of Sqrt") => return told(ErrorKind::Fail),
            _ => {}
        }
        self.kernel.workspace(shapes)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        self.enter("run");
        self.kernel.run(cx)
    }
}

fn run(session: &Session) -> Result<Vec<f32>> {
    let input = floats(&[1, 3], &[1.0; 3])?;
    session.run(&[("x", input.into())])?.remove(0).1.tensor()?.to_vec()
}

/// How a call that panics ends.
enum Ends {
    Build,
    Run,
    /// Nothing depends on it any more.
    Well,
}

#[test]
fn each_call_that_panics_is_an_error_that_names_the_provider() -> Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let model = Model::from_graph(layer()?);
    let calls = [
        ("claim", Ends::Build),
        ("compile", Ends::Build),
        ("check", Ends::Build),
        ("allocator", Ends::Build),
        ("prefers_channels_last", Ends::Build),
        ("vector_bytes", Ends::Build),
        ("end_of_build", Ends::Build),
        ("workspace", Ends::Run),
        ("run", Ends::Run),
        ("end_of_run", Ends::Well),
    ];
    for (call, ends) in calls {
        for limit in [None, Some(1 << 20)] {
            let (device, armed) = Panicking::open(call)?;
            let builder = Session::builder(&model).device(device).threads(1);
            let session = match limit {
                None => builder.build(),
                Some(limit) => builder.memory_limit(limit).build(),
            };
            let problem = match (&ends, session) {
                (Ends::Build, session) => session.err().expect("the session is not built"),
                (Ends::Run, Err(problem)) => problem,
                (Ends::Run, Ok(session)) => {
                    let problem = run(&session).expect_err("the run fails");
                    armed.store(false, Ordering::Relaxed);
                    assert_eq!(run(&session)?, LAYER_OF_ONES, "the next run is right");
                    problem
                }
                (Ends::Well, session) => {
                    assert_eq!(run(&session?)?, LAYER_OF_ONES);
                    continue;
                }
            };
            let text = problem.to_string();
            assert!(text.contains("panicking"), "{call}: {text}");
            assert!(text.contains(&format!("told to panic in {call}")), "{call}: {text}");
        }
    }
    Ok(())
}

/// A panic in an allocator's counters must not be taken for memory without a limit.
#[test]
fn memory_that_panics_is_an_error_that_names_the_provider() -> Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let mut builder = GraphBuilder::new("sum");
    let x = builder.input("x", DType::F32, &["2048"]);
    let constant = builder.constant(numbers(&[2048], 1)?);
    let sum = builder.node("Add", &[x, constant], &[])?;
    let model = Model::from_graph(builder.finish(&[sum])?);
    for call in ["device", "stats", "allocate"] {
        // Without a limit the build uploads the constant. With one the run does.
        for limit in [None, Some(1 << 20)] {
            let builder = Session::builder(&model).device(Panicking::apart(call)?).threads(1);
            let session = match limit {
                None => builder.build(),
                Some(limit) => builder.memory_limit(limit).build(),
            };
            assert_eq!(session.is_ok(), limit.is_some() && call != "device", "{call}");
            let x = numbers(&[2048], 2)?;
            let problem = session.and_then(|session| session.run(&[("x", x.into())])).expect_err("it fails");
            let text = problem.to_string();
            assert!(
                text.contains("panicking") && text.contains(&format!("told to panic in {call}")),
                "{text}"
            );
            assert!(text.contains("bug of the provider"), "{text}");
            assert_eq!(problem.kind(), ErrorKind::RuntimeException, "{text}");
        }
    }
    Ok(())
}

#[test]
fn waiting_and_fingerprints_that_panic_are_errors() -> Result<()> {
    let model = Model::from_graph(layer()?);
    let (device, _) = Panicking::open("synchronize")?;
    let binding = Session::builder(&model).device(device).threads(1).build()?.io_binding();
    let waiting = binding.synchronize_outputs().expect_err("it panics");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    save(model.graph(), model.info(), &path, &Weights::Inside)?;
    let (device, _) = Panicking::open("fingerprint")?;
    let model = Model::load(&path)?;
    let cached = Session::builder(&model).device(device).cache_dir(folder.path()).build();
    for (call, problem) in
        [("synchronize", waiting), ("fingerprint", cached.err().expect("the session is not built"))]
    {
        let text = problem.to_string();
        assert!(text.contains("panicking") && text.contains(&format!("told to panic in {call}")), "{text}");
    }
    Ok(())
}

/// `if c { sqrt(x) } else { -x }`, of which no run takes the first branch. A kernel that refuses
/// the sizes does no harm there. A defect or a lack of memory is not hidden.
#[test]
fn a_defect_in_a_branch_that_is_not_taken_is_an_error() -> Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let mut main = GraphBuilder::new("main");
    let (c, x) = (main.input("c", DType::Bool, &[]), main.input("x", DType::F32, &["n"]));
    let branch = |attr: &'static str, op: &str| -> Result<Subgraph> {
        let mut graph = Graph::new(attr);
        let inner = graph.add_value("captured", ValueType::Unknown);
        let mut builder = GraphBuilder::extend(graph);
        let result = builder.node(op, &[inner], &[])?;
        let graph = builder.finish_subgraph(&[result]);
        Ok(Subgraph { attr, graph, captures: vec![Capture { outer: x, inner }] })
    };
    let branches = vec![branch("then_branch", "Sqrt")?, branch("else_branch", "Neg")?];
    let y = main.add(("", "If"), &[Some(c)], &[], 1, branches)?;
    let model = Model::from_graph(main.finish(&y)?);
    let ends = [
        ("panic of Sqrt", Some(ErrorKind::RuntimeException)),
        ("memory of Sqrt", Some(ErrorKind::OutOfMemory)),
        ("sizes of Sqrt", None),
    ];
    for (call, kind) in ends {
        let (device, _) = Panicking::open(call)?;
        let ended = Session::builder(&model).device(device).threads(1).build().and_then(|session| {
            let (c, x) = (Tensor::from_bools(&[], &[false])?, floats(&[2], &[1.0, 4.0])?);
            session.run(&[("c", c.into()), ("x", x.into())])
        });
        assert_eq!(ended.as_ref().err().map(Error::kind), kind, "{call}: {ended:?}");
    }
    Ok(())
}

/// Negates `[1, 2, 3]` into a buffer of the caller, in runs of which some are told to panic.
fn check_binding(model: &Model, device: Option<Arc<dyn Device>>, panics: &AtomicBool) -> Result<()> {
    let builder = Session::builder(model).threads(1);
    let session = device.map_or_else(|| builder.clone(), |device| builder.clone().device(device)).build()?;
    let output = session.outputs()[0].name.clone();
    let mut binding = session.io_binding();
    binding.bind_input("x", floats(&[3], &[1.0, 2.0, 3.0])?)?;
    binding.bind_output(&output, TensorBuffer::new(DType::F32, &[3])?)?;
    // The first run makes the plan, so that the next one panics in its steps and not before.
    for is_panicking in [false, true, false, true, true, false] {
        panics.store(is_panicking, Ordering::Relaxed);
        let run = || session.run_with_binding(&mut binding, &RunOptions::default());
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(done) if !is_panicking => done?,
            done => {
                assert!(is_panicking && !matches!(done, Ok(Ok(()))), "the run panics or fails");
                continue;
            }
        }
        assert_eq!(binding.output(&output)?.tensor()?.as_slice::<f32>()?, [-1.0, -2.0, -3.0]);
    }
    Ok(())
}

#[test]
fn a_binding_survives_a_kernel_that_panics() -> Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let mut builder = GraphBuilder::new("negative");
    let x = builder.input("x", DType::F32, &["3"]);
    let negative = builder.node("Neg", &[x], &[])?;
    let model = Model::from_graph(builder.finish(&[negative])?);
    let (device, armed) = Panicking::open("run")?;
    armed.store(false, Ordering::Relaxed);
    check_binding(&model, Some(device), &armed)
}

static INFERENCE_PANICS: AtomicBool = AtomicBool::new(false);

/// Negates. Its inference panics if it is told to, which no guard around kernels catches.
static OPPOSITE: OpSpec = OpSpec {
    domain: "example",
    name: "Opposite",
    since: 1,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    infer: |cx| {
        assert!(!INFERENCE_PANICS.load(Ordering::Relaxed), "told to panic in inference");
        match cx.shape(0) {
            Some(shape) => cx.set_shape(0, shape.to_vec()),
            None => Ok(()),
        }
    },
    ..OP
};

ops![OPPOSITE];

cpu_kernels![KernelDef {
    domain: "example",
    op: "Opposite",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    make: |_| Ok(Box::new(|cx: &mut RunCx<'_>| {
        let from = cx.input(0)?.as_slice::<f32>()?;
        cx.output(0)?.as_mut_slice::<f32>()?.iter_mut().zip(from).for_each(|(to, x)| *to = -x);
        Ok(())
    })),
    ..KernelDef::BASE
}];

/// The operator's input has a size that only the run knows, so it is inferred between the step's
/// taking and returning the bound buffer.
#[test]
fn a_binding_survives_an_inference_that_panics() -> Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let mut builder = GraphBuilder::new("opposites");
    let x = builder.input("x", DType::F32, &["3"]);
    let zero = builder.constant(floats(&[], &[0.0])?);
    let all = builder.node("Greater", &[x, zero], &[])?;
    let chosen = builder.node("Compress", &[x, all], &[("axis", Attribute::Int(0))])?;
    let opposite = builder.add(("example", "Opposite"), &[Some(chosen)], &[], 1, Vec::new())?;
    let model = Model::from_graph(builder.finish(&opposite)?);
    check_binding(&model, None, &INFERENCE_PANICS)
}
