//! A session packs weights before the first run that needs them.

use std::sync::Barrier;
use std::time::Instant;

use crate::support;

use ort_runtime::ep::CancelToken;
use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::plan::MemoryKind;
use ort_runtime::{DType, ErrorKind, Result, RunOptions, Session, Value};
use support::{bits, mapped, numbers};

/// The sizes of the matrices, which are large enough to be deferred.
const MATRICES: [[usize; 2]; 3] = [[64, 400], [400, 301], [301, 64]];

/// Matrix products with bias and residual, one after the other, and a `Gemm` with a transposed
/// matrix.
fn layers() -> Result<Graph> {
    let mut builder = GraphBuilder::new("layers");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let mut value = x;
    for (index, sizes) in MATRICES.into_iter().enumerate() {
        let weight = builder.constant(numbers(&sizes, index)?);
        let bias = builder.constant(numbers(&[sizes[1]], index + 5)?);
        let product = builder.node("MatMul", &[value, weight], &[])?;
        let sum = builder.node("Add", &[product, bias], &[])?;
        value = builder.node("Sigmoid", &[sum], &[])?;
    }
    value = builder.node("Add", &[value, x], &[])?;
    let weight = builder.constant(numbers(&[300, 64], 9)?);
    value = builder.node("Gemm", &[value, weight], &[("transB", Attribute::Int(1))])?;
    builder.finish(&[value])
}

fn rows(count: usize) -> Result<Vec<(&'static str, Value)>> {
    Ok(vec![("x", numbers(&[count, 64], 3)?.into())])
}

/// The bytes of a kind in the plan of a run.
fn planned(session: &Session, kind: MemoryKind, rows: i64) -> Result<usize> {
    let plan = session.plan(&[("rows", rows)])?;
    Ok(plan.kinds.iter().filter(|of| of.kind == kind).map(|of| of.bytes).sum())
}

/// The bytes of all weights that are packed.
fn weight_bytes() -> usize {
    let matrices = MATRICES.iter().chain([&[300, 64]]);
    matrices.map(|[rows, columns]| rows * columns * 4).sum()
}

#[test]
fn the_first_run_packs_as_its_plan_says() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let session = Session::builder(&model).threads(2).build()?;
    let constants = session.constant_bytes();
    assert_eq!(session.memory().packed, 0, "a build packs nothing");
    let expected = planned(&session, MemoryKind::WeightsPacked, 3)?;
    assert!((weight_bytes()..=constants).contains(&expected), "{expected} bytes of {constants}");
    assert!(
        session.memory().weights_mapped >= weight_bytes() + planned(&session, MemoryKind::WeightsMapped, 3)?
    );
    for count in [3, 1] {
        bits(&session, &rows(count)?)?;
        assert_eq!(session.memory().packed, expected, "{count} rows");
    }
    assert_eq!(session.memory().weights_mapped, planned(&session, MemoryKind::WeightsMapped, 3)?);
    assert_eq!(session.constant_bytes(), constants, "they were set aside by the build");
    Ok(())
}

#[test]
fn a_cancelled_first_run_leaves_packing_to_the_next() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let session = Session::builder(&model).build()?;
    let cancel = CancelToken::new();
    cancel.cancel();
    for options in [
        RunOptions { cancel, ..RunOptions::default() },
        RunOptions { deadline: Some(Instant::now()), ..RunOptions::default() },
    ] {
        let problem = session.run_with(&rows(4)?, &options).expect_err("the run is over");
        assert_eq!(problem.kind(), ErrorKind::Cancelled, "{problem}");
    }
    let expected = bits(&Session::builder(&model).memory_limit(1 << 30).build()?, &rows(4)?)?;
    assert_eq!(bits(&session, &rows(4)?)?, expected);
    Ok(())
}

#[test]
fn runs_that_begin_together_pack_once() -> Result<()> {
    let (_folder, model) = mapped(&layers()?)?;
    let expected = bits(&Session::builder(&model).memory_limit(1 << 30).build()?, &rows(5)?)?;
    for _ in 0..8 {
        let session = Session::builder(&model).threads(1).build()?;
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            let run = || {
                barrier.wait();
                bits(&session, &rows(5)?)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            for thread in threads {
                assert_eq!(thread.join().expect("no panic")?, expected);
            }
            Ok::<(), ort_runtime::Error>(())
        })?;
        assert_eq!(session.memory().packed, planned(&session, MemoryKind::WeightsPacked, 5)?);
    }
    Ok(())
}
