//! A run over the memory limit is a typed error before any node runs, and the session stays usable.

use crate::support::{LAYER_OF_ONES, axis, floats, layer, numbers};
use ort_runtime::ir::GraphBuilder;
use ort_runtime::{
    Budget, Category, DType, ErrorKind, Model, Profile, Result, RunOptions, Session, Value, exact_bytes,
};

fn rows(count: usize) -> Result<Value> {
    Ok(floats(&[count, 3], &vec![1.0; count * 3])?.into())
}

/// A session whose runs are not split (`batch_split.rs` has those that are).
fn limited(bytes: usize) -> Result<Session> {
    Session::builder(&Model::from_graph(layer()?)).threads(1).memory_limit(bytes).batch_split(false).build()
}

#[test]
fn it_is_refused_before_any_node_runs_and_names_what_is_large() -> Result<()> {
    let session = limited(8192)?;
    let needed = session.plan(&[("rows", 1000)])?.planned_bytes;
    let profile = Profile::default();
    let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
    let problem = session.run_with(&[("x", rows(1000)?)], &options).expect_err("it is over the limit");
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory);
    let text = problem.to_string();
    assert!(
        text.starts_with(&format!("out of memory: the run needs {}, but ", exact_bytes(needed))),
        "{text}"
    );
    for words in [
        " of the limit of 8192 bytes (8.0 KiB) are free (constants, outputs and other runs hold ",
        "); the largest at the peak are '",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert!(text.contains("' 16000 bytes"), "{text}");
    assert!(profile.events().is_empty(), "no node ran");
    assert_eq!(session.memory().activations, 0);
    let outputs = session.run(&[("x", rows(1)?)])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, LAYER_OF_ONES);
    Ok(())
}

#[test]
fn a_limit_of_exactly_the_plan_suffices() -> Result<()> {
    let free = limited(usize::MAX)?;
    let packed = free.memory().packed;
    let needed = free.plan(&[("rows", 100)])?.planned_bytes;
    let session = limited(needed + packed)?;
    assert!(session.run(&[("x", rows(100)?)]).is_ok());
    let session = limited(needed + packed - 1)?;
    assert_eq!(session.run(&[("x", rows(100)?)]).err().map(|e| e.kind()), Some(ErrorKind::OutOfMemory));
    Ok(())
}

#[test]
fn outputs_that_the_caller_keeps_count() -> Result<()> {
    let packed = limited(usize::MAX)?.memory().packed;
    let needed = limited(usize::MAX)?.plan(&[("rows", 100)])?.planned_bytes;
    let session = limited(needed + packed)?;
    let kept = session.run(&[("x", rows(100)?)])?;
    assert_eq!(session.run(&[("x", rows(100)?)]).err().map(|e| e.kind()), Some(ErrorKind::OutOfMemory));
    drop(kept);
    assert!(session.run(&[("x", rows(100)?)]).is_ok());
    Ok(())
}

#[test]
fn idle_slabs_make_room() -> Result<()> {
    let graph = || -> Result<_> {
        let mut builder = GraphBuilder::new("sums");
        let x = builder.input("x", DType::F32, &["n", "n"]);
        let a = builder.node("Exp", &[x], &[])?;
        let total = builder.node("Softmax", &[a], &axis(0))?;
        let b = builder.node("Add", &[a, total], &[])?;
        let c = builder.node("Mul", &[b, total], &[])?;
        builder.finish(&[c])
    };
    let builder = Session::builder(&Model::from_graph(graph()?)).threads(1);
    let needed = builder.clone().build()?.plan(&[("n", 600)])?.planned_bytes;
    let session = builder.memory_limit(needed).build()?;
    for n in [500usize, 600, 300, 600, 100, 600] {
        let x = numbers(&[n, n], 0)?;
        session.run(&[("x", x.into())])?;
    }
    Ok(())
}

/// Whichever limit is the tight one, its own or that of a budget shared with others.
#[test]
fn the_limit_that_is_named_is_the_one_that_is_short() -> Result<()> {
    let model = Model::from_graph(layer()?);
    for (shared, held, own) in [(20_000, 15_000, 10_000), (20_000, 0, 6_000), (20_000, 12_000, 8_100)] {
        let budget = Budget::new(Some(shared));
        let _held = budget.reserve(Category::Workspace, held)?;
        let session = Session::builder(&model)
            .threads(1)
            .budget(&budget)
            .memory_limit(own)
            .batch_split(false)
            .build()?;
        let problem = session.run(&[("x", rows(1000)?)]).expect_err("it does not fit");
        let shortage = problem.shortage().expect("the refusal has numbers");
        let tight = if shared - held < own { shared } else { own };
        assert_eq!(shortage.limit, tight, "{problem}");
        assert_eq!(shortage.available, (shared - held).min(own) - session.memory().packed, "{problem}");
    }
    Ok(())
}

#[test]
fn runs_at_the_same_time_do_not_fail_midway() -> Result<()> {
    let mut builder = GraphBuilder::new("outputs");
    let x = builder.input("x", DType::F32, &["n"]);
    // Each result is an output, so that most of the memory is taken during the run.
    let mut outputs = vec![builder.node("Exp", &[x], &[])?];
    for _ in 0..30 {
        let last = outputs[outputs.len() - 1];
        outputs.push(builder.node("Sigmoid", &[last], &[])?);
    }
    let model = Model::from_graph(builder.finish(&outputs)?);
    let needed = Session::builder(&model).build()?.plan(&[("n", 5000)])?.planned_bytes;
    let session = Session::builder(&model).threads(1).memory_limit(2 * needed + needed / 2).build()?;
    let refused = std::sync::atomic::AtomicUsize::new(0);
    let call = || -> Result<()> {
        for _ in 0..50 {
            let profile = Profile::default();
            let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
            if let Err(problem) = session.run_with(&[("x", numbers(&[5000], 0)?.into())], &options) {
                assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
                assert!(profile.events().is_empty(), "{problem}");
                refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let callers: Vec<_> = (0..6).map(|_| scope.spawn(call)).collect();
        callers.into_iter().try_for_each(|caller| caller.join().expect("no caller panics"))
    })?;
    let refused = refused.into_inner();
    assert!(refused < 300, "some of the runs fit");
    session.run(&[("x", numbers(&[5000], 0)?.into())])?;
    Ok(())
}

#[test]
fn packed_weights_over_the_limit_are_an_error_of_the_builder() -> Result<()> {
    let mut builder = GraphBuilder::new("weights");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let weight = builder.constant(numbers(&[64, 64], 0)?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let model = Model::from_graph(builder.finish(&[product])?);
    let packed = Session::builder(&model).build()?.memory().packed;
    assert!(packed > 0, "a constant right side is packed");
    let problem = Session::builder(&model).memory_limit(packed - 1).build().err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    Ok(())
}
