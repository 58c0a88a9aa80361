//! Devices and sessions on many threads at once, on whatever backend there is and on GL, whose
//! devices have one context each.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::{Arc, Barrier};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider, ProviderOptions};
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_wgpu::WgpuProvider;
use support::{also_on_gl, assert_close, cpu, numbers, open, outputs};

const THREADS: usize = 16;
const ROUNDS: usize = 2;

/// A product with weights, its softmax, and the sums of squares of the rows; the sizes follow from
/// the number of the model.
fn model(number: usize) -> Result<Model> {
    let width = 24 + number;
    let mut builder = GraphBuilder::new("threads");
    let x = builder.input("x", DType::F32, &["rows", "48"]);
    let weights = builder.constant(Tensor::from_slice(&[48, width], &numbers(48 * width, number))?);
    let product = builder.node("MatMul", &[x, weights], &[])?;
    let likely = builder.node("Softmax", &[product], &[])?;
    let axes = builder.constant(Tensor::from_slice(&[1], &[1i64])?);
    let sums = builder.node("ReduceSumSquare", &[likely, axes], &[])?;
    Ok(Model::from_graph(builder.finish(&[likely, sums])?))
}

fn inputs(seed: usize) -> Result<Vec<(String, Value)>> {
    // Staging buffers are of 16 KiB at least: some fit, others are allocated while threads wait for
    // theirs.
    let rows = 5 + seed % 5 * 120;
    Ok(vec![("x".to_owned(), Tensor::from_vec(&[rows, 48], numbers(rows * 48, seed))?.into())])
}

/// Runs a session on random inputs and compares with the CPU.
fn check(session: &Session, model: &Model, seed: usize) -> Result<()> {
    let given = inputs(seed)?;
    let named: Vec<(&str, Value)> =
        given.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let (actual, expected) = (session.run(&named)?, outputs(model, cpu()?, &given)?);
    assert_eq!(actual.len(), expected.len());
    for ((name, actual), expected) in actual.iter().zip(&expected) {
        assert_close(actual, expected, 1e-4, &format!("inputs {seed}: {name}"))?;
    }
    Ok(())
}

/// Calls `work` on many threads that begin together, each with its number.
fn on_threads(work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let (start, work) = (&Barrier::new(THREADS), &work);
    let run = move |number: usize| {
        start.wait();
        work(number)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || run(number))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread does not panic"))
    })
}

/// Runs models on the devices that `device` gives: the threads open and drop devices and sessions
/// in any order.
fn run_on_threads(device: impl Fn() -> Result<Arc<dyn Device>> + Sync) -> Result<()> {
    on_threads(|number| {
        let model = model(number % 4)?;
        for round in 0..ROUNDS {
            let session = Session::builder(&model).threads(2).device(device()?).device(cpu()?).build()?;
            check(&session, &model, number)?;
            check(&session, &model, number + round)?;
        }
        Ok(())
    })
}

/// A device for each session; then devices that sessions share, and lists of the adapters
/// meanwhile.
#[test]
fn sessions_on_many_threads_are_right() -> Result<()> {
    also_on_gl("sessions_on_many_threads_are_right", || {
        if open(&[]).is_none() {
            return Ok(());
        }
        run_on_threads(|| Ok(open(&[]).expect("there was an adapter")))?;
        run_on_threads(|| {
            assert!(!WgpuProvider.devices()?.is_empty());
            WgpuProvider.open(0, &ProviderOptions::new())
        })
    })
}

/// One session that many threads run, while it compiles ahead and waits for the device.
#[test]
fn one_session_on_many_threads_is_right() -> Result<()> {
    also_on_gl("one_session_on_many_threads_is_right", || {
        let Some(device) = open(&[]) else { return Ok(()) };
        let model = model(0)?;
        let session = Session::builder(&model).threads(2).device(device).device(cpu()?).build()?;
        on_threads(|number| (0..2 * ROUNDS).try_for_each(|round| check(&session, &model, number + round)))
    })
}
