//! What waits for the next run is bounded, and goes back once a session has not run for a while.

use crate::support;

use std::time::Duration;

use ort_runtime::ir::{Graph, GraphBuilder};
use ort_runtime::{DType, IdleMemory, Model, Result, Session, release_idle_memory};
use support::{inputs_of, run};

fn chain() -> Result<Graph> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let exponential = builder.node("Exp", &[x], &[])?;
    let sums = builder.node("Softmax", &[exponential], &support::axis(0))?;
    let sum = builder.node("Add", &[exponential, sums], &[])?;
    builder.finish(&[sum])
}

fn session(idle: IdleMemory) -> Result<Session> {
    Session::builder(&Model::from_graph(chain()?)).threads(1).idle_memory(idle).build()
}

/// Runs once and lets go of the outputs.
fn once(session: &Session, n: usize) -> Result<()> {
    run(session, &inputs_of(session, n)?).map(drop)
}

#[test]
fn no_more_waits_than_was_agreed() -> Result<()> {
    const BOUND: usize = 300_000;
    let unbounded = session(IdleMemory::default())?;
    let bounded = session(IdleMemory { most_bytes: BOUND, ..IdleMemory::default() })?;
    for n in [500, 5000, 100, 2000] {
        once(&unbounded, n)?;
        once(&bounded, n)?;
        assert!(bounded.memory().idle <= BOUND, "{n}: {:?}", bounded.memory());
    }
    assert!(unbounded.memory().idle > BOUND, "{:?}", unbounded.memory());
    let none = session(IdleMemory { most_bytes: 0, ..IdleMemory::default() })?;
    once(&none, 1000)?;
    assert_eq!((none.memory().idle, none.memory().activations), (0, 0));
    Ok(())
}

#[test]
fn a_session_that_does_not_run_gives_back() -> Result<()> {
    const WAIT: Duration = Duration::from_millis(200);
    let soon = IdleMemory { after: Some(WAIT), ..IdleMemory::default() };
    let (idle, kept) = (session(soon)?, session(IdleMemory { after: None, ..IdleMemory::default() })?);
    for session in [&idle, &kept] {
        once(session, 1000)?;
        assert!(session.memory().idle > 0);
    }
    std::thread::sleep(2 * WAIT);
    once(&kept, 1000)?;
    assert_eq!(idle.memory().idle, 0, "the end of the other session's run");
    assert!(kept.memory().idle > 0, "it keeps its memory for ever");

    once(&idle, 1000)?;
    assert!(idle.memory().idle > 0);
    std::thread::sleep(2 * WAIT);
    // Other tests of this process may have run meanwhile and have done it.
    release_idle_memory();
    assert_eq!(idle.memory().idle, 0);
    Ok(())
}
