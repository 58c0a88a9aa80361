//! Chains of runs whose state stays on the device.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, Graph, GraphBuilder};
use ort_core::session::{IoBinding, Model, OutputTarget, RunOptions, Session};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Tensor, Value};
use ort_testkit::on_device::{formulas, updates};
use support::{assert_close, cpu, numbers, open};

const ROUNDS: usize = 5;

fn session(model: &Model, device: Arc<dyn Device>) -> Result<Session> {
    Session::builder(model).threads(2).device(device).device(cpu()?).build()
}

fn run(session: &Session, binding: &mut IoBinding) -> Result<()> {
    session.run_with_binding(binding, &RunOptions::default())
}

/// `next = tanh(x * weight) + 0.5 x` with x of [rows, 48].
fn step() -> Result<Graph> {
    let mut builder = GraphBuilder::new("step");
    let x = builder.input("x", DType::F32, &["rows", "48"]);
    let weight = builder.constant(Tensor::from_vec(&[48, 48], numbers(48 * 48, 1))?);
    let half = builder.constant(Tensor::scalar(0.5f32)?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let bent = builder.node("Tanh", &[product], &[])?;
    let part = builder.node("Mul", &[x, half], &[])?;
    let next = builder.node("Add", &[bent, part], &[])?;
    builder.finish(&[next])
}

/// A chain in memory of the session's first device; the last state comes to the host.
fn chain(session: &Session, x: &Tensor) -> Result<Value> {
    let memory = session.devices()[0].memory();
    let mut binding = session.io_binding();
    binding.bind_output(&session.outputs()[0].name, memory)?;
    let mut state = session.upload(x, memory)?;
    for _ in 0..ROUNDS {
        binding.bind_input("x", state)?;
        run(session, &mut binding)?;
        state = binding.get_outputs()?.remove(0).1.tensor()?.clone();
        assert_eq!(state.memory(), memory);
    }
    session.to_host(&state.into())
}

#[test]
fn a_chain_of_runs_is_one_submission_and_makes_no_buffers() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let model = Model::from_graph(step()?);
    let (ours, host) = (session(&model, device.clone())?, session(&model, cpu()?)?);
    for rows in [7, 64] {
        let x = Tensor::from_vec(&[rows, 48], numbers(rows * 48, rows))?;
        let expected = chain(&host, &x)?;
        for _ in 0..3 {
            assert_close(&chain(&ours, &x)?, &expected, 1e-4, "a first chain")?;
        }
        let before = device.counters();
        assert_close(&chain(&ours, &x)?, &expected, 1e-4, "a later chain")?;
        let after = device.counters();
        assert_eq!(
            after.submissions - before.submissions,
            1,
            "{rows} rows: the state is read once, at the end"
        );
        assert_eq!(after.buffers, before.buffers, "{rows} rows");
        assert_eq!(after.bind_groups, before.bind_groups, "{rows} rows");
        assert!(after.dispatches >= before.dispatches + ROUNDS, "{rows} rows");
    }
    Ok(())
}

#[test]
fn outputs_are_waited_for_where_somebody_asks() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let session = session(&Model::from_graph(step()?), device.clone())?;
    let mut binding = session.io_binding();
    binding
        .bind_input("x", session.upload(&Tensor::from_vec(&[3, 48], numbers(144, 0))?, device.memory())?)?;
    binding.bind_output(&session.outputs()[0].name, device.memory())?;
    let before = device.counters().submissions;
    run(&session, &mut binding)?;
    assert_eq!(device.counters().submissions, before);
    binding.synchronize_outputs()?;
    assert_eq!(device.counters().submissions, before + 1);
    Ok(())
}

const LONGEST: usize = 12;
const CACHE: [usize; 4] = [1, 2, LONGEST, 16];

/// Attention of one token to the keys and values of those before it.
fn attention() -> Result<Graph> {
    let mut builder = GraphBuilder::new("attention");
    let q = builder.input("q", DType::F32, &["1", "1", "64"]);
    let k = builder.input("k", DType::F32, &["1", "1", "32"]);
    let v = builder.input("v", DType::F32, &["1", "1", "32"]);
    let cache = ["1", "2", "past", "16"];
    let (keys, values) =
        (builder.input("keys", DType::F32, &cache), builder.input("values", DType::F32, &cache));
    let lengths = builder.input("lengths", DType::I32, &["1"]);
    let total = builder.input("total", DType::I32, &["1"]);
    let inputs = [q, k, v, keys, values, lengths, total].map(Some);
    let attributes = [("num_heads", Attribute::Int(4)), ("kv_num_heads", Attribute::Int(2))];
    let outputs = builder.add((MICROSOFT, "GroupQueryAttention"), &inputs, &attributes, 3, Vec::new())?;
    builder.finish(&outputs)
}

/// Some tokens one after the other, over caches in memory of the session's first device; what each
/// attends to.
fn decode(session: &Session) -> Result<Vec<Value>> {
    let memory = session.devices()[0].memory();
    let outputs: Vec<String> = session.outputs().into_iter().map(|output| output.name).collect();
    let mut binding = session.io_binding();
    for (input, output) in [("keys", &outputs[1]), ("values", &outputs[2])] {
        let mut cache = session.buffer_on(memory, DType::F32, &CACHE)?;
        session.update_inplace(&mut cache, &Tensor::from_vec(&CACHE, vec![0f32; CACHE.iter().product()])?)?;
        binding.bind_input(input, cache)?;
        binding.bind_output(output, OutputTarget::Input(input.to_owned()))?;
    }
    binding.bind_output(&outputs[0], memory)?;
    let mut attended = Vec::new();
    for token in 0..ROUNDS {
        for (input, width) in [("q", 64), ("k", 32), ("v", 32)] {
            let numbers = Tensor::from_vec(&[1, 1, width], numbers(width, token * width))?;
            binding.bind_input(input, session.upload(&numbers, memory)?)?;
        }
        let length = Tensor::from_slice(&[1], &[token as i32])?;
        binding.bind_input("lengths", session.upload(&length, memory)?)?;
        binding.bind_input("total", Tensor::from_slice(&[1], &[token as i32 + 1])?)?;
        run(session, &mut binding)?;
        attended.push(binding.get_outputs()?.remove(0).1);
    }
    attended.extend(binding.get_outputs()?.into_iter().skip(1).map(|(_, cache)| cache));
    attended.iter().map(|value| session.to_host(value)).collect()
}

#[test]
fn caches_stay_in_one_buffer_of_the_device() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let model = Model::from_graph(attention()?);
    let (ours, host) = (session(&model, device.clone())?, session(&model, cpu()?)?);
    let placed = ours.placement().into_iter().find(|placed| placed.operator.ends_with("GroupQueryAttention"));
    assert_eq!(placed.map(|placed| placed.provider), Some("wgpu"));
    let (actual, expected) = (decode(&ours)?, decode(&host)?);
    assert_eq!(actual.len(), ROUNDS + 2);
    for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        assert_close(actual, expected, 1e-4, &format!("value {index}"))?;
    }
    Ok(())
}

#[test]
fn updates_are_in_place() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    updates::in_place(&device)?;
    updates::elsewhere(&device)
}

#[test]
fn an_operator_runs_and_differentiates_by_its_formula() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    formulas::gated_add(&device)
}
