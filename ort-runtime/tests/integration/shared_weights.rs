//! Sessions built alike on one model share what is compiled, and sessions on one budget keep to it
//! together.

use crate::support::numbers;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::rewrite::Level;
use ort_runtime::{Budget, DType, ErrorKind, Model, Result, Session, Value};

/// A product of 256 x 256, whose weight is packed into 256 KiB at least.
fn product() -> Result<Model> {
    let mut builder = GraphBuilder::new("product");
    let x = builder.input("x", DType::F32, &["rows", "256"]);
    let weight = builder.constant(numbers(&[256, 256], 0)?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    Ok(Model::from_graph(builder.finish(&[product])?))
}

fn rows(count: usize) -> Result<[(&'static str, Value); 1]> {
    Ok([("x", numbers(&[count, 256], 1)?.into())])
}

#[test]
fn sessions_built_alike_pack_once() -> Result<()> {
    let model = product()?;
    let budget = Budget::new(None);
    let session = || Session::builder(&model).threads(1).budget(&budget).build();
    let first = session()?;
    first.run(&rows(1)?)?;
    let packed = budget.in_use();
    assert!(packed >= 256 << 10, "the weight is packed");
    let others = (0..7).map(|_| session()).collect::<Result<Vec<_>>>()?;
    assert_eq!(budget.in_use(), packed, "seven more sessions hold nothing");
    drop(first);
    assert_eq!(others[6].run(&rows(2)?)?[0].1.tensor()?.shape(), [2, 256]);
    drop(others);
    assert_eq!(budget.in_use(), 0);
    Ok(())
}

#[test]
fn sessions_built_otherwise_have_their_own() -> Result<()> {
    let model = product()?;
    let budget = Budget::new(None);
    let builder = || Session::builder(&model).budget(&budget);
    let builders = [
        builder().threads(1),
        builder().threads(2),
        builder().threads(1).opt_level(Level::Disabled),
        builder().threads(1).memory_limit(10 << 20),
        builder().threads(1).memory_limit(10 << 20),
    ];
    let mut sessions = Vec::new();
    for builder in builders {
        let before = budget.in_use();
        let session = builder.build()?;
        session.run(&rows(1)?)?;
        session.trim();
        assert!(budget.in_use() >= before + (256 << 10));
        sessions.push(session);
    }
    Ok(())
}

#[test]
fn the_memory_of_each_session_is_its_own() -> Result<()> {
    let model = product()?;
    let (one, other) = (Session::builder(&model).build()?, Session::builder(&model).build()?);
    let kept = one.run(&rows(100)?)?;
    assert!(one.memory().activations >= 100 * 256 * 4);
    assert_eq!(other.memory().activations, 0);
    drop(kept);
    Ok(())
}

#[test]
fn sessions_on_one_budget_keep_to_it_together() -> Result<()> {
    let (one, other) = (product()?, product()?);
    let session = |model: &Model, budget| Session::builder(model).threads(1).budget(budget).build();
    let alone = Budget::new(None);
    session(&one, &alone)?.run(&rows(64)?)?;
    // Both weights, and less than two runs.
    let limit = 2 * alone.peak() - 1024;
    let budget = Budget::new(Some(limit));
    let first = session(&one, &budget)?;
    let second = session(&other, &budget)?;
    let kept = first.run(&rows(64)?)?;
    let problem = second.run(&rows(64)?).err().map(|problem| problem.kind());
    assert_eq!(problem, Some(ErrorKind::OutOfMemory), "{} bytes are held", budget.in_use());
    drop(kept);
    first.trim();
    second.run(&rows(64)?)?;
    assert!(budget.peak() <= limit);
    Ok(())
}
