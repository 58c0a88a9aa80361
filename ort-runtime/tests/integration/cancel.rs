//! A run ends early when it is cancelled or late, between nodes and inside loops.

use std::time::{Duration, Instant};

use crate::support::{LAYER_OF_ONES, counter, floats, layer, session};
use ort_runtime::ep::CancelToken;
use ort_runtime::{ErrorKind, Profile, Result, RunOptions, Tensor, Value};

fn rows(count: usize) -> Result<Value> {
    Ok(floats(&[count, 3], &vec![1.0; count * 3])?.into())
}

#[test]
fn a_cancelled_token_ends_a_run_before_its_first_node() -> Result<()> {
    let session = session(layer()?)?;
    let (cancel, profile) = (CancelToken::new(), Profile::default());
    cancel.cancel();
    let options = RunOptions { cancel, profile: Some(&profile), ..RunOptions::default() };
    let problem = session.run_with(&[("x", rows(1)?)], &options).expect_err("the run was cancelled");
    assert_eq!(problem.to_string(), "cancelled: the run was cancelled");
    assert!(profile.events().is_empty());
    let outputs = session.run(&[("x", rows(1)?)])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, LAYER_OF_ONES);
    Ok(())
}

#[test]
fn a_deadline_that_passed_ends_a_run() -> Result<()> {
    let session = session(layer()?)?;
    let options = RunOptions { deadline: Some(Instant::now()), ..RunOptions::default() };
    let problem = session.run_with(&[("x", rows(1)?)], &options).expect_err("the run is late");
    assert_eq!(problem.kind(), ErrorKind::Cancelled);
    assert!(problem.to_string().contains("passed its deadline"), "{problem}");
    let later = Some(Instant::now() + Duration::from_secs(600));
    let options = RunOptions { deadline: later, ..RunOptions::default() };
    assert!(session.run_with(&[("x", rows(1)?)], &options).is_ok());
    Ok(())
}

/// Inputs for a loop that would run for years.
fn endless() -> Result<[(&'static str, Value); 2]> {
    Ok([("count", Tensor::scalar(i64::MAX)?.into()), ("x", floats(&[1], &[0.0])?.into())])
}

#[test]
fn a_loop_ends_at_its_deadline() -> Result<()> {
    let session = session(counter()?)?;
    let start = Instant::now();
    let options = RunOptions { deadline: Some(start + Duration::from_millis(50)), ..RunOptions::default() };
    let problem = session.run_with(&endless()?, &options).expect_err("the loop has no end");
    assert_eq!(problem.kind(), ErrorKind::Cancelled);
    assert!(start.elapsed() < Duration::from_secs(30));
    session.trim();
    assert_eq!(session.memory().activations, 0, "what the run held is given back");
    Ok(())
}

#[test]
fn another_thread_cancels_a_loop() -> Result<()> {
    let session = session(counter()?)?;
    let cancel = CancelToken::new();
    let options = RunOptions { cancel: cancel.clone(), ..RunOptions::default() };
    let inputs = endless()?;
    let outcome = std::thread::scope(|scope| {
        let run = scope.spawn(|| session.run_with(&inputs, &options).map(|_| ()));
        std::thread::sleep(Duration::from_millis(30));
        cancel.cancel();
        run.join().expect("the run does not panic")
    });
    assert_eq!(outcome.err().map(|problem| problem.kind()), Some(ErrorKind::Cancelled));
    Ok(())
}

#[test]
fn a_function_that_the_run_asks_ends_it() -> Result<()> {
    thread_local!(static ASKED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    let session = session(counter()?)?;
    let cancel = CancelToken::new().polling(|| ASKED.replace(ASKED.get() + 1) > 100);
    let options = RunOptions { cancel, ..RunOptions::default() };
    let problem = session.run_with(&endless()?, &options).expect_err("the loop has no end");
    assert_eq!(problem.kind(), ErrorKind::Cancelled);
    assert!(ASKED.get() > 100);
    Ok(())
}
