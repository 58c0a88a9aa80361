//! Values whose size only the run tells: an arena holds them, counts in the budget, and goes back.

use crate::support::{axis, floats, ints};
use ort_runtime::ir::{Graph, GraphBuilder};
use ort_runtime::{
    AllocatorStats, ArenaConfig, DType, DeviceId, ErrorKind, Model, Result, Session, SessionBuilder, Tensor,
    Value,
};

/// The places of what is not zero, and twice their squares.
fn found() -> Result<Graph> {
    let mut builder = GraphBuilder::new("found");
    let x = builder.input("x", DType::F32, &["n"]);
    let places = builder.node("NonZero", &[x], &[])?;
    let squares = builder.node("Mul", &[places, places], &[])?;
    let line = builder.constant(ints(&[-1])?);
    let squares = builder.node("Reshape", &[squares, line], &[])?;
    let both = builder.node("Concat", &[squares, squares], &axis(0))?;
    let doubled = builder.node("Add", &[both, both], &[])?;
    builder.finish(&[places, doubled])
}

/// A sequence of what is not zero, and its parts joined.
fn sequence() -> Result<Graph> {
    let mut builder = GraphBuilder::new("sequence");
    let x = builder.input("x", DType::F32, &["n"]);
    let places = builder.node("NonZero", &[x], &[])?;
    let squares = builder.node("Mul", &[places, places], &[])?;
    let all = builder.node("SequenceConstruct", &[places, squares], &[])?;
    let more = builder.node("SequenceInsert", &[all, squares], &[])?;
    let joined = builder.node("ConcatFromSequence", &[more], &axis(0))?;
    builder.finish(&[more, joined])
}

fn input(n: usize) -> Result<Value> {
    let elements: Vec<f32> = (0..n).map(|index| (index % 3) as f32).collect();
    Ok(floats(&[n], &elements)?.into())
}

fn builder(graph: Graph) -> SessionBuilder {
    Session::builder(&Model::from_graph(graph)).threads(1)
}

fn host(session: &Session) -> AllocatorStats {
    let stats = session.allocator_stats();
    stats.iter().find(|(device, _)| *device == DeviceId::HOST).map(|(_, stats)| *stats).unwrap_or_default()
}

/// All tensors of a value.
fn tensors(value: &Value) -> Vec<Tensor> {
    match value {
        Value::Tensor(tensor) => vec![tensor.clone()],
        Value::Sequence(sequence) => sequence.elements.iter().flat_map(tensors).collect(),
        _ => Vec::new(),
    }
}

fn elements(outputs: &[(String, Value)]) -> Result<Vec<Vec<i64>>> {
    outputs.iter().flat_map(|(_, value)| tensors(value)).map(|tensor| tensor.to_vec::<i64>()).collect()
}

#[test]
fn an_arena_changes_no_result_and_no_output_keeps_a_region() -> Result<()> {
    let configs = [None, Some(ArenaConfig::lean()), Some(ArenaConfig::default())];
    for graph in [found, sequence] {
        let mut all = Vec::new();
        for config in &configs {
            let session = builder(graph()?).arena(config.clone()).build()?;
            let mut kept = Vec::new();
            for n in [30_000, 9000, 30_000, 4] {
                kept.push(session.run(&[("x", input(n)?)])?);
            }
            let stats = host(&session);
            assert_eq!(stats.num_allocs > 0, config.is_some(), "{stats}");
            assert_eq!(stats.in_use, 0, "the outputs are alive, and none of them in the arena");
            session.trim();
            assert_eq!(host(&session).total_allocated, 0);
            all.push(kept.iter().map(|outputs| elements(outputs)).collect::<Result<Vec<_>>>()?);
        }
        assert!(all.iter().all(|outputs| *outputs == all[0]));
    }
    Ok(())
}

#[test]
fn sizes_that_differ_do_not_add_up() -> Result<()> {
    const KEPT: usize = 4 << 20;
    let largest = {
        let alone = builder(found()?).build()?;
        drop(alone.run(&[("x", input(1_000_000)?)])?);
        alone.memory().activations_peak
    };
    let session = builder(found()?).build()?;
    for index in 0..60 {
        drop(session.run(&[("x", input(1000 + index * 791_900 % 999_000)?)])?);
        assert!(host(&session).total_allocated <= KEPT, "{}", host(&session));
    }
    let peak = session.memory().activations_peak;
    assert!(peak <= largest + largest / 20 + KEPT, "{peak} {largest}");
    // What no run needs goes on its own.
    for _ in 0..3 {
        drop(session.run(&[("x", input(10)?)])?);
    }
    assert_eq!(host(&session).total_allocated, 0);
    Ok(())
}

#[test]
fn regions_count_in_the_budget() -> Result<()> {
    let free = builder(found()?).arena(Some(ArenaConfig::default())).build()?;
    drop(free.run(&[("x", input(30_000)?)])?);
    let regions = host(&free).total_allocated;
    assert!(regions >= 1 << 20 && free.memory().activations >= regions, "{}", host(&free));

    // What free regions hold makes room for a run of another size, and for outputs.
    let limit = 3 << 20;
    let session = builder(found()?).memory_limit(limit).build()?;
    for n in [30_000, 60_000, 30_000, 50_000, 60_000, 100] {
        drop(session.run(&[("x", input(n)?)])?);
        assert!(session.memory().activations_peak <= limit);
    }
    let refused = session.run(&[("x", input(1_000_000)?)]).err();
    assert_eq!(refused.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    drop(session.run(&[("x", input(60_000)?)])?);
    session.trim();
    assert_eq!(session.memory().activations, 0);
    Ok(())
}

#[test]
fn callers_share_an_arena() -> Result<()> {
    let session = builder(sequence()?).build()?;
    let expected = elements(&session.run(&[("x", input(20_000)?)])?)?;
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    for _ in 0..10 {
                        let outputs = session.run(&[("x", input(20_000)?)])?;
                        assert_eq!(elements(&outputs)?, expected);
                    }
                    Ok(())
                })
            })
            .collect();
        callers
            .into_iter()
            .try_for_each(|caller| caller.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    assert_eq!(host(&session).in_use, 0);
    Ok(())
}
