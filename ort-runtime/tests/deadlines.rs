//! Deadlines and cancellation inside of kernels: a node that takes seconds ends within milliseconds.
//!
//! The nodes are in `golden/long_nodes.txt`. `DEADLINE_SLACK` is how many milliseconds a node may run on: a second where it is not
//! set, as the machine may do other work; an idle one needs 50. `DEADLINE_ONLY` takes the nodes whose names have that in them.
//! The times are printed.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;

use std::time::{Duration, Instant};

use hostile_support::text;
use ort_runtime::ep::CancelToken;
use ort_runtime::onnx::Source;
use ort_runtime::{DType, ErrorKind, Model, Result, RunOptions, Session, Tensor, Value};
use prost::Message;

const NODES: &str = include_str!("golden/long_nodes.txt");

/// When a run ends.
const DEADLINE: Duration = Duration::from_millis(100);

fn slack() -> Duration {
    let given = std::env::var("DEADLINE_SLACK").ok().and_then(|text| text.parse().ok());
    Duration::from_millis(given.unwrap_or(1000))
}

/// Numbers from 0 to 1 in no order, again and again.
fn spread<T: Clone>(count: usize, make: impl Fn(f64) -> T) -> Vec<T> {
    const PERIOD: usize = 65_537;
    let number = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64;
    let some: Vec<T> = (0..PERIOD.min(count) as u64).map(|index| make(number(index))).collect();
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        all.extend_from_slice(&some[..some.len().min(count - all.len())]);
    }
    all
}

fn made_up(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    match dtype {
        DType::F32 => Tensor::from_vec(shape, spread(count, |x| x as f32)),
        DType::F64 => Tensor::from_vec(shape, spread(count, |x| x)),
        DType::I64 => Tensor::from_vec(shape, spread(count, |x| (x * 100.0) as i64)),
        DType::U8 => Tensor::from_vec(shape, spread(count, |x| (x * 255.0) as u8)),
        DType::F16 => Tensor::from_vec(shape, spread(count, half::f16::from_f64)),
        other => panic!("no elements of {other}"),
    }
}

fn inputs(session: &Session) -> Result<Vec<(String, Value)>> {
    let mut inputs = Vec::new();
    for spec in session.inputs() {
        let sizes = spec.ty.shape().unwrap_or_default();
        let shape: Vec<usize> = sizes.iter().map(|size| size.as_constant().unwrap() as usize).collect();
        inputs.push((spec.name, made_up(spec.ty.dtype().unwrap(), &shape)?.into()));
    }
    Ok(inputs)
}

/// How long a node runs on once it should end; what is wrong, if anything.
fn overrun(session: &Session, inputs: &[(&str, Value)], is_cancelled: bool) -> (Duration, Option<String>) {
    let (cancel, start) = (CancelToken::new(), Instant::now());
    let deadline = (!is_cancelled).then(|| start + DEADLINE);
    let options = RunOptions { cancel: cancel.clone(), deadline, ..RunOptions::default() };
    let done = std::thread::scope(|scope| {
        if is_cancelled {
            scope.spawn(|| {
                std::thread::sleep(DEADLINE);
                cancel.cancel();
            });
        }
        session.run_with(inputs, &options).map(|_| ())
    });
    let late = start.elapsed().saturating_sub(DEADLINE);
    let wrong = match done {
        Ok(()) if late > slack() => Some(format!("is done {late:?} after its time")),
        Ok(()) => None,
        Err(problem) if problem.kind() != ErrorKind::Cancelled => Some(problem.to_string()),
        Err(_) if late > slack() => Some(format!("runs on for {late:?}")),
        Err(problem) => {
            let said = if is_cancelled { "was cancelled" } else { "passed its deadline" };
            (!problem.to_string().contains(said)).then(|| problem.to_string())
        }
    };
    (late, wrong)
}

#[test]
fn nodes_end_at_their_deadline_and_when_they_are_cancelled() -> Result<()> {
    let only = std::env::var("DEADLINE_ONLY").ok();
    let (mut wrong, mut worst, mut count, mut early) = (Vec::new(), Duration::ZERO, 0, 0);
    for case in NODES.split("## ").skip(1) {
        let (name, lines) = case.split_once('\n').unwrap();
        if only.as_ref().is_some_and(|only| !name.contains(only)) {
            continue;
        }
        let model = Model::from_source(Source::from_bytes(text::model(lines).encode_to_vec()))?;
        let inputs = inputs(&Session::builder(&model).threads(1).build()?)?;
        let inputs: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        for (threads, is_cancelled) in [(1, false), (2, false), (2, true)] {
            let session = Session::builder(&model).threads(threads).build()?;
            let (mut late, mut problem) = overrun(&session, &inputs, is_cancelled);
            if late > slack() {
                // What is late once, on a machine that does other work, may be so by chance.
                (late, problem) = overrun(&session, &inputs, is_cancelled);
            }
            println!("{late:>12.1?} {threads} {name}");
            worst = worst.max(late);
            early += usize::from(late.is_zero());
            wrong.extend(problem.map(|problem| format!("{name}, {threads} threads: {problem}")));
            session.trim();
            let held = session.memory().activations;
            if held != 0 {
                wrong.push(format!("{name}: holds {held} bytes"));
            }
        }
        count += 1;
    }
    println!("{count} nodes, the latest by {worst:?}");
    // A fast machine is done with some of them before their deadline, which tests nothing.
    assert!(
        early <= count,
        "{early} of {} runs were done before their deadline: make the nodes longer",
        3 * count
    );
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// The same kernels give answers where there is time.
#[test]
fn a_run_after_one_that_was_ended_is_right() -> Result<()> {
    let lines = "input a float[700,700]\ny = MatMul(a, a)\noutput y";
    let model = Model::from_source(Source::from_bytes(text::model(lines).encode_to_vec()))?;
    let session = Session::builder(&model).threads(2).build()?;
    let inputs = inputs(&session)?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let expected = session.run(&inputs)?;
    for micros in [1, 50, 200, 1000, 3000] {
        let deadline = Some(Instant::now() + Duration::from_micros(micros));
        let ended = session.run_with(&inputs, &RunOptions { deadline, ..RunOptions::default() });
        assert!(ended.is_ok() || ended.is_err_and(|problem| problem.kind() == ErrorKind::Cancelled));
        assert_eq!(session.run(&inputs)?[0].1.tensor()?.bytes(), expected[0].1.tensor()?.bytes());
    }
    Ok(())
}
