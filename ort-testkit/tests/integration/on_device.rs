//! Inputs and outputs in memory of a device: what stays there, what is copied, and what is refused.

use std::sync::Arc;

use crate::support::{branch, floats, ints};
use ort_alloc::{Budget, DeviceId};
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::session::{IoBinding, Model, OutputTarget, RunOptions, Session, SessionOptions};
use ort_core::tensor::{Tensor, TensorBuffer, Value};
use ort_core::{ErrorKind, Result};
use ort_testkit::{OpaqueDevice, Target, Transfers};

fn run(session: &Session, binding: &mut IoBinding) -> Result<()> {
    session.run_with_binding(binding, &RunOptions::default())
}

fn transfers(uploads: usize, downloads: usize, within: usize) -> Transfers {
    Transfers { uploads, downloads, within, bytes: 0 }
}

/// What was copied since `before`.
fn since(device: &OpaqueDevice, before: Transfers) -> Transfers {
    let now = device.transfers();
    transfers(now.uploads - before.uploads, now.downloads - before.downloads, now.within - before.within)
}

/// `next = relu(x * weight) - 0.5 x`, of the shape of x.
fn step() -> Result<Graph> {
    let mut builder = GraphBuilder::new("step");
    let x = builder.input("x", DType::F32, &["rows", "2"]);
    let weight = builder.constant(floats(&[2, 2], &[1.0, -0.5, 0.25, 1.5])?);
    let half = builder.constant(floats(&[1], &[0.5])?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let positive = builder.node("Relu", &[product], &[])?;
    let part = builder.node("Mul", &[x, half], &[])?;
    let next = builder.node("Sub", &[positive, part], &[])?;
    builder.finish(&[next])
}

/// How a chain of runs hands its state on.
#[derive(Clone, Copy, Debug)]
enum Chain {
    /// Outputs of the session, bound as inputs.
    Bound,
    /// The same with two sessions in turn.
    TwoSessions,
    /// Two buffers of the caller on the device, each input and output in turn.
    Buffers,
    /// Plain runs, whose outputs come to the host.
    Plain,
}

/// Five runs from `x`; returns the last state on the host.
fn chain(way: Chain, sessions: [&Session; 2], device: DeviceId, x: &Tensor) -> Result<Vec<f32>> {
    let output = sessions[0].outputs()[0].name.clone();
    let mut bindings = sessions.map(Session::io_binding);
    let mut state = sessions[0].upload(x, device)?;
    let mut other = Some(sessions[0].buffer_on(device, x.dtype(), x.shape())?);
    for round in 0..5 {
        let turn = if matches!(way, Chain::TwoSessions) { round % 2 } else { 0 };
        let (session, binding) = (sessions[turn], &mut bindings[turn]);
        if matches!(way, Chain::Plain) {
            let value = session.run(&[("x", state.into())])?.remove(0).1;
            state = session.upload(value.tensor()?, device)?;
            continue;
        }
        binding.clear_binding_outputs();
        match (way, other.take()) {
            (Chain::Buffers, Some(buffer)) => binding.bind_output(&output, buffer)?,
            _ => binding.bind_output(&output, device)?,
        }
        binding.bind_input("x", state)?;
        run(session, binding)?;
        state = binding.get_outputs()?.remove(0).1.tensor()?.clone();
        assert_eq!(state.memory(), device, "{way:?}");
    }
    sessions[0].to_host(&state.into())?.tensor()?.to_vec()
}

#[test]
fn a_chain_of_runs_stays_on_the_device() -> Result<()> {
    let model = Model::from_graph(step()?);
    let x = floats(&[3, 2], &[1.0, -2.0, 3.0, 0.5, 0.25, -1.0])?;
    let host = Target::cpu()?.session(&model)?;
    for x in [x, floats(&[0, 2], &[])?] {
        check_chains(&model, &host, &x)?;
    }
    Ok(())
}

fn check_chains(model: &Model, host: &Session, x: &Tensor) -> Result<()> {
    let mut expected = Value::from(x.clone());
    for _ in 0..5 {
        expected = host.run(&[("x", expected)])?.remove(0).1;
    }
    let expected = expected.tensor()?.to_vec::<f32>()?;
    // (way, tensors up, down, within)
    for (way, up, down) in
        [(Chain::Bound, 1, 1), (Chain::TwoSessions, 1, 1), (Chain::Buffers, 1, 1), (Chain::Plain, 6, 6)]
    {
        let device = OpaqueDevice::new(None);
        let sessions = [Target::opaque(&device).session(model)?, Target::mixed(&device)?.session(model)?];
        let before = device.transfers();
        let last = chain(way, [&sessions[0], &sessions[1]], device.memory(), x)?;
        assert_eq!(last, expected, "{way:?}");
        assert_eq!(since(&device, before), transfers(up, down, 0), "{way:?}");
        assert_eq!(device.waits(), 0, "{way:?}");
        drop(sessions);
        assert_eq!(device.stats().in_use, 0, "{way:?}: nothing is left");
    }
    Ok(())
}

/// Readers and outputs on both sides, an input, a constant and one value twice among the outputs,
/// and a capture.
fn both_sides() -> Result<Graph> {
    let mut builder = GraphBuilder::new("both_sides");
    let x = builder.input("x", DType::F32, &["rows", "2"]);
    let constant = builder.constant(floats(&[2, 2], &[1.0, 0.0, 10.0, 20.0])?);
    let product = builder.node("MatMul", &[x, constant], &[])?;
    let power = builder.node("Exp", &[x], &[])?;
    let mixed = builder.node("Mul", &[product, power], &[])?;
    let root = builder.node("Sqrt", &[product], &[])?;
    let yes = builder.input("yes", DType::Bool, &[]);
    let then = branch("then_branch", x, |b, x| b.node("Neg", &[x], &[]))?;
    let otherwise = branch("else_branch", x, |b, x| b.node("Abs", &[x], &[]))?;
    let chosen = builder.add(("", "If"), &[Some(yes)], &[], 1, vec![then, otherwise])?;
    let twin = builder.node("Identity", &[product], &[])?;
    builder.finish(&[mixed, product, x, constant, root, twin, chosen[0], power])
}

/// Where an input or output of a run is bound to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Host,
    HostBuffer,
    Device,
    DeviceBuffer,
    /// On a device without a kernel.
    Other,
}

const PLACES: [At; 5] = [At::Host, At::HostBuffer, At::Device, At::DeviceBuffer, At::Other];

/// The opaque device, one that has nothing to compute, and the CPU.
fn three_devices(graph: Graph, plans: bool) -> Result<(Session, [Arc<OpaqueDevice>; 2])> {
    let devices = [OpaqueDevice::new(None), OpaqueDevice::new(None)];
    let model = Model::from_graph(graph);
    let options = SessionOptions { enable_mem_pattern: plans, ..SessionOptions::default() };
    let mut builder = Session::builder(&model).options(&options).poison(true);
    builder = builder.device(devices[0].clone()).device(devices[1].clone());
    for device in Target::cpu()?.devices {
        builder = builder.device(device);
    }
    Ok((builder.build()?, devices))
}

fn bind(
    session: &Session,
    binding: &mut IoBinding,
    devices: &[Arc<OpaqueDevice>; 2],
    [input, output]: [At; 2],
    (x, expected): (&Tensor, &[(String, Value)]),
) -> Result<()> {
    let device = |at| match at {
        At::Host | At::HostBuffer => DeviceId::HOST,
        At::Device | At::DeviceBuffer => devices[0].memory(),
        At::Other => devices[1].memory(),
    };
    match input {
        At::HostBuffer | At::DeviceBuffer => {
            let mut buffer = session.buffer_on(device(input), x.dtype(), x.shape())?;
            session.update_inplace(&mut buffer, x)?;
            binding.bind_input("x", buffer)?;
        }
        _ => binding.bind_input("x", session.upload(x, device(input))?)?,
    }
    binding.clear_binding_outputs();
    for (name, value) in expected {
        let tensor = value.tensor()?;
        match output {
            At::HostBuffer | At::DeviceBuffer => {
                let buffer = session.buffer_on(device(output), tensor.dtype(), tensor.shape())?;
                binding.bind_output(name, buffer)?;
            }
            _ => binding.bind_output(name, device(output))?,
        }
    }
    Ok(())
}

#[test]
fn whatever_lies_where_the_results_are_those_of_the_host() -> Result<()> {
    let x = floats(&[2, 2], &[1.0, -2.0, 0.5, 3.0])?;
    for plans in [true, false] {
        let (session, devices) = three_devices(both_sides()?, plans)?;
        for yes in [true, false] {
            let yes = Tensor::from_bools(&[], &[yes])?;
            let expected = session.run(&[("x", x.clone().into()), ("yes", yes.clone().into())])?;
            for way in PLACES.into_iter().flat_map(|input| PLACES.map(|output| [input, output])) {
                let mut binding = session.io_binding();
                binding.bind_input("yes", yes.clone())?;
                bind(&session, &mut binding, &devices, way, (&x, &expected))?;
                for _ in 0..2 {
                    run(&session, &mut binding)?;
                    let outputs = binding.copy_outputs_to_cpu()?;
                    for ((name, value), (_, expected)) in outputs.iter().zip(&expected) {
                        let (one, other) = (value.tensor()?.bytes(), expected.tensor()?.bytes());
                        assert_eq!(one, other, "{name}, {way:?}, plans: {plans}");
                    }
                    let is_on_device = |(_, value): &(String, Value)| {
                        value.tensor().is_ok_and(|tensor| tensor.memory() != DeviceId::HOST)
                    };
                    let stays = matches!(way[1], At::Device | At::DeviceBuffer | At::Other);
                    assert!(
                        binding.get_outputs()?.iter().all(|output| is_on_device(output) == stays),
                        "{way:?}"
                    );
                }
            }
            for device in [devices[0].memory(), devices[1].memory()] {
                let given = session.upload(&x, device)?;
                let outputs = session.run(&[("x", given.into()), ("yes", yes.clone().into())])?;
                for ((name, value), (_, expected)) in outputs.iter().zip(&expected) {
                    assert_eq!(value.tensor()?.bytes(), expected.tensor()?.bytes(), "{name}");
                }
            }
        }
        drop(session);
        assert!(devices.iter().all(|device| device.stats().in_use == 0), "plans: {plans}");
    }
    Ok(())
}

/// The root of `s = x x`, which the host takes, and `s s`. Products stay on the device.
fn products() -> Result<Graph> {
    let mut builder = GraphBuilder::new("products");
    let x = builder.input("x", DType::F32, &["2", "2"]);
    let square = builder.node("MatMul", &[x, x], &[])?;
    let root = builder.node("Sqrt", &[square], &[])?;
    let fourth = builder.node("MatMul", &[square, square], &[])?;
    builder.finish(&[root, fourth])
}

#[test]
fn each_value_is_copied_where_another_memory_needs_it_and_once() -> Result<()> {
    // The square comes down for the root, whose result goes up where it is to be on the device.
    let table = [
        (At::Host, At::Host, transfers(1, 2, 0)),
        (At::Host, At::Device, transfers(2, 1, 0)),
        (At::Device, At::Host, transfers(0, 2, 0)),
        (At::Device, At::Device, transfers(1, 1, 0)),
        (At::DeviceBuffer, At::DeviceBuffer, transfers(1, 1, 0)),
        (At::DeviceBuffer, At::HostBuffer, transfers(0, 2, 0)),
        (At::Other, At::Device, transfers(2, 1, 0)),
        (At::Device, At::Other, transfers(0, 2, 0)),
    ];
    let x = floats(&[2, 2], &[2.0, 8.0, 0.5, 1.0])?;
    for (input, output, expected) in table {
        let (session, devices) = three_devices(products()?, true)?;
        let results = session.run(&[("x", x.clone().into())])?;
        let mut binding = session.io_binding();
        bind(&session, &mut binding, &devices, [input, output], (&x, &results))?;
        for _ in 0..2 {
            let before = devices[0].transfers();
            run(&session, &mut binding)?;
            assert_eq!(since(&devices[0], before), expected, "{input:?} {output:?}");
        }
    }
    Ok(())
}

#[test]
fn a_cache_on_the_device_is_updated_where_it_lies() -> Result<()> {
    let mut builder = GraphBuilder::new("cache");
    let past = builder.input("past", DType::F32, &["3"]);
    let x = builder.input("x", DType::F32, &["3"]);
    let present = builder.node("Add", &[past, x], &[])?;
    let model = Model::from_graph(builder.finish(&[present])?);
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&model)?;
    let output = session.outputs()[0].name.clone();
    let mut binding = session.io_binding();
    let mut cache = session.buffer_on(device.memory(), DType::F32, &[3])?;
    session.update_inplace(&mut cache, &floats(&[3], &[1.0, 2.0, 3.0])?)?;
    binding.bind_input("past", cache)?;
    binding.bind_input("x", session.upload(&floats(&[3], &[1.0, 10.0, 100.0])?, device.memory())?)?;
    binding.bind_output(&output, OutputTarget::Input("past".to_string()))?;
    let (before, in_use) = (device.transfers(), device.stats().in_use);
    for _ in 0..5 {
        run(&session, &mut binding)?;
    }
    assert_eq!(since(&device, before), transfers(0, 0, 0));
    assert_eq!(device.stats().in_use, in_use);
    assert_eq!(binding.copy_outputs_to_cpu()?[0].1.tensor()?.to_vec::<f32>()?, [6.0, 52.0, 503.0]);
    let held = binding.get_outputs()?;
    let problem = run(&session, &mut binding).expect_err("somebody holds the cache");
    assert!(problem.to_string().contains("still held by a tensor"), "{problem}");
    drop(held);
    run(&session, &mut binding)
}

/// A shape that the host reads, and results whose size only the run tells.
#[test]
fn sizes_that_only_the_run_tells() -> Result<()> {
    let mut builder = GraphBuilder::new("dynamic");
    let x = builder.input("x", DType::F32, &["1", "6"]);
    let shape = builder.input("shape", DType::I64, &["2"]);
    let weight: Vec<f32> = (0..36).map(|at| if at % 7 == 0 { -1.0 } else { 0.0 }).collect();
    let weight = builder.constant(floats(&[6, 6], &weight)?);
    let negative = builder.node("MatMul", &[x, weight], &[])?;
    let table = builder.node("Reshape", &[negative, shape], &[])?;
    let turned = builder.node("Transpose", &[table], &[])?;
    let root = builder.node("Exp", &[turned], &[])?;
    let (session, devices) = three_devices(builder.finish(&[table, turned, root])?, true)?;
    let x = floats(&[1, 6], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    let mut binding = session.io_binding();
    binding.bind_input("x", session.upload(&x, devices[0].memory())?)?;
    for output in session.outputs() {
        binding.bind_output(&output.name, devices[0].memory())?;
    }
    for shape in [[2, 3], [3, 2], [6, 1]] {
        let shape = ints(&shape)?;
        let expected = session.run(&[("x", x.clone().into()), ("shape", shape.clone().into())])?;
        binding.bind_input("shape", session.upload(&shape, devices[0].memory())?)?;
        run(&session, &mut binding)?;
        assert!(
            binding.get_outputs()?.iter().all(|(_, value)| value.view().tensor().is_ok_and(|t| !t.is_host()))
        );
        for ((name, value), (_, expected)) in binding.copy_outputs_to_cpu()?.iter().zip(&expected) {
            let (one, other) = (value.tensor()?, expected.tensor()?);
            assert_eq!((one.shape(), one.bytes()), (other.shape(), other.bytes()), "{name} {shape:?}");
        }
    }
    drop((binding, session));
    assert_eq!(devices[0].stats().in_use, 0);
    Ok(())
}

#[test]
fn the_budget_counts_what_is_left_on_the_device_until_it_is_dropped() -> Result<()> {
    let budget = Budget::new(Some(4096));
    let device = OpaqueDevice::new(None);
    let model = Model::from_graph(step()?);
    let session = Session::builder(&model).device(device.clone()).budget(&budget).build()?;
    let empty = budget.in_use();
    let mut binding = session.io_binding();
    binding.bind_input("x", session.upload(&floats(&[10, 2], &[1.0; 20])?, device.memory())?)?;
    binding.bind_output(&session.outputs()[0].name, device.memory())?;
    let mut held = Vec::new();
    let problem = loop {
        match run(&session, &mut binding) {
            Ok(()) => held.extend(binding.get_outputs()?),
            Err(problem) => break problem,
        }
        // Beside what waits for the next run.
        assert!(budget.in_use() >= empty + 80 + 80 * held.len(), "{} held", held.len());
    };
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
    assert!((20..51).contains(&held.len()), "{} outputs of 80 bytes", held.len());
    let most = device.stats().in_use;
    drop(binding);
    let before = budget.in_use();
    held.truncate(3);
    assert!(budget.in_use() < before && device.stats().in_use < most);
    let kept = held.remove(0);
    drop((held, session));
    assert_eq!((budget.in_use(), device.stats().in_use), (80, 80), "an output keeps its own bytes alone");
    drop(kept);
    assert_eq!((budget.in_use(), device.stats().in_use), (0, 0));
    Ok(())
}

#[test]
fn what_is_wrong_is_refused_before_anything_runs() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(products()?))?;
    let stranger = OpaqueDevice::new(None);
    let foreign = || Tensor::from_buffer(DType::F32, &[3], stranger.allocator().allocate(12, 64)?);
    let names = format!(
        "the session has no memory of {}; its memories are host, {} (opaque)",
        stranger.memory(),
        device.memory()
    );
    let mut binding = session.io_binding();
    let output = session.outputs()[1].name.clone();
    let short = session.buffer_on(device.memory(), DType::F32, &[2])?;
    let refused = [
        binding.bind_input("x", foreign()?).err(),
        binding.bind_output(&output, stranger.memory()).err(),
        session.run(&[("x", foreign()?.into())]).err(),
        session.upload(&foreign()?, device.memory()).err(),
        session.to_host(&foreign()?.into()).err(),
        session.buffer_on(stranger.memory(), DType::F32, &[3]).err(),
    ];
    for problem in refused {
        let problem = problem.map(|problem| problem.to_string());
        assert!(problem.as_ref().is_some_and(|problem| problem.contains(&names)), "{problem:?}");
    }
    let wrong: [(_, &str); 3] = [
        (binding.bind_output(&output, short).err(), "cannot be bound to shape [2]"),
        (session.upload(&Tensor::from_strings(&[1], vec!["a"])?, device.memory()).err(), "no fixed size"),
        (
            session
                .update_inplace(&mut TensorBuffer::new(DType::F32, &[2])?, &floats(&[3], &[0.0; 3])?)
                .err(),
            "cannot write float[3] to a buffer of float[2]",
        ),
    ];
    for (problem, said) in wrong {
        let problem = problem.map(|problem| problem.to_string());
        assert!(problem.as_ref().is_some_and(|problem| problem.contains(said)), "{problem:?}");
    }
    let uploaded = session.upload(&floats(&[3], &[0.0; 3])?, device.memory())?;
    let problem = uploaded.to_vec::<f32>().expect_err("the host cannot read it");
    assert!(problem.to_string().contains("Session::to_host"), "{problem}");
    Ok(())
}

/// A batch is split where the host can take parts out of it.
#[test]
fn what_is_given_on_a_device_runs_at_once_or_is_refused() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let model = Model::from_graph(step()?);
    let given = |rows: usize| {
        let memory = device.allocator().allocate(rows * 8, 64)?;
        let mut buffer = TensorBuffer::from_buffer(DType::F32, &[rows, 2], memory)?;
        let plain = Session::builder(&model).device(device.clone()).build()?;
        plain.update_inplace(&mut buffer, &floats(&[rows, 2], &vec![1.0; rows * 2])?)?;
        buffer.tensor()
    };
    let session = Session::builder(&model).device(device.clone()).memory_limit(16_000).build()?;
    let ones = floats(&[1000, 2], &[1.0; 2000])?;
    assert_eq!(session.run(&[("x", ones.into())])?[0].1.tensor()?.shape(), [1000, 2], "it is split");
    let problem = session.run(&[("x", given(1000)?.into())]).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    assert_eq!(session.run(&[("x", given(300)?.into())])?[0].1.tensor()?.shape(), [300, 2]);
    Ok(())
}
