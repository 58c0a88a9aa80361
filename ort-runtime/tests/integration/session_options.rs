//! Each setting under ONNX Runtime's names does what it says.

use crate::support;

use std::sync::atomic::Ordering;

use ort_runtime::ir::{Graph, GraphBuilder};
use ort_runtime::rewrite::Level;
use ort_runtime::{
    DType, DeviceId, ErrorKind, ExecutionMode, Model, Result, RunOptions, Session, SessionOptions, Value,
};
use support::{Without, branch, counter, inputs_of, numbers, run};

/// A chain with a product, whose values do not all live at once.
fn chain() -> Result<Graph> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let weight = builder.constant(numbers(&[64, 64], 1)?);
    let mut value = x;
    for _ in 0..4 {
        value = builder.node("MatMul", &[value, weight], &[])?;
        value = builder.node("Softmax", &[value], &support::axis(-1))?;
    }
    builder.finish(&[value])
}

/// A branch on a condition.
fn branches() -> Result<Graph> {
    let mut builder = GraphBuilder::new("branches");
    let x = builder.input("x", DType::F32, &["n", "8"]);
    let condition = builder.input("c", DType::Bool, &[]);
    let a = builder.node("Neg", &[x], &[])?;
    let then = branch("then_branch", a, |b, a| {
        let c = b.node("Exp", &[a], &[])?;
        b.node("Mul", &[c, a], &[])
    })?;
    let otherwise = branch("else_branch", a, |b, a| b.node("Abs", &[a], &[]))?;
    let chosen = builder.add(("", "If"), &[Some(condition)], &[], 1, vec![then, otherwise])?;
    let sum = builder.node("Add", &[chosen[0], x], &[])?;
    builder.finish(&[sum])
}

fn with(graph: Graph, options: &SessionOptions) -> Result<Session> {
    Session::builder(&Model::from_graph(graph)).threads(1).options(options).build()
}

/// Options with entries by string.
fn entries(entries: &[(&str, &str)]) -> Result<SessionOptions> {
    let mut options = SessionOptions { intra_op_num_threads: 1, ..SessionOptions::default() };
    entries.iter().try_for_each(|(key, value)| options.add_session_config_entry(key, value))?;
    Ok(options)
}

fn bytes(outputs: &[(String, Value)]) -> Vec<Vec<u8>> {
    let bytes =
        outputs.iter().filter_map(|(_, value)| value.tensor().ok()?.bytes().map(|bytes| bytes.to_vec()));
    bytes.collect()
}

fn total(session: &Session) -> Option<usize> {
    let stats = session.allocator_stats();
    stats.iter().find(|(device, _)| *device == DeviceId::HOST).map(|(_, stats)| stats.total_allocated)
}

#[test]
fn no_setting_changes_a_result() -> Result<()> {
    for graph in [chain, branches, counter] {
        let standard = with(graph()?, &entries(&[])?)?;
        let inputs = inputs_of(&standard, 5)?;
        let expected = bytes(&run(&standard, &inputs)?);
        for setting in [
            ("session.enable_mem_pattern", "0"),
            ("session.enable_mem_reuse", "0"),
            ("session.enable_cpu_mem_arena", "0"),
            ("session.execution_mode", "ORT_PARALLEL"),
            ("session.inter_op_num_threads", "4"),
            ("arena_extend_strategy", "kNextPowerOfTwo"),
        ] {
            let session = with(graph()?, &entries(&[setting])?)?;
            for _ in 0..2 {
                assert_eq!(bytes(&run(&session, &inputs)?), expected, "{setting:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn what_is_planned_depends_on_the_settings() -> Result<()> {
    let plan = |settings: &[(&str, &str)]| with(chain()?, &entries(settings)?)?.plan(&[("n", 100)]);
    let shared = plan(&[])?.peak_bytes.unwrap_or_default();
    let apart = plan(&[("session.enable_mem_reuse", "0")])?;
    // Of the four products one is alive at a time, and the last one's memory is the output's; now
    // each has a place of its own.
    assert_eq!(apart.peak_bytes, Some(shared + 2 * 100 * 64 * 4));
    assert_eq!(plan(&[("session.enable_mem_pattern", "0")])?.peak_bytes, None);

    let unplanned = with(chain()?, &entries(&[("session.enable_mem_pattern", "0")])?)?;
    let planned = with(chain()?, &entries(&[])?)?;
    for session in [&unplanned, &planned] {
        drop(run(session, &inputs_of(session, 2000)?)?);
    }
    assert!(planned.memory().activations >= 2000 * 64 * 4, "the slab waits for the next run");
    assert_eq!(Some(unplanned.memory().activations), total(&unplanned), "nothing but the arena stays");
    let heap = entries(&[("session.enable_mem_pattern", "0"), ("session.enable_cpu_mem_arena", "0")])?;
    let heap = with(chain()?, &heap)?;
    drop(run(&heap, &inputs_of(&heap, 2000)?)?);
    assert_eq!((heap.memory().activations, total(&heap)), (0, None));
    Ok(())
}

#[test]
fn the_arena_grows_as_it_is_told() -> Result<()> {
    let none = ("session.enable_mem_pattern", "0");
    let held = |settings: &[(&str, &str)]| -> Result<Option<usize>> {
        let session = with(chain()?, &entries(&[&[none], settings].concat())?)?;
        drop(run(&session, &inputs_of(&session, 100)?)?);
        Ok(total(&session))
    };
    let powers = ("arena_extend_strategy", "kNextPowerOfTwo");
    assert_eq!(held(&[powers])?, Some(1 << 20));
    assert_eq!(held(&[powers, ("initial_chunk_size_bytes", "131072")])?, Some(131_072));
    let same = held(&[("arena_extend_strategy", "kSameAsRequested")])?;
    assert!(same < Some(131_072), "{same:?}");
    // Beyond its limit values come from the heap.
    assert_eq!(held(&[("max_mem", "1000")])?, Some(0));
    Ok(())
}

#[test]
fn a_limit_threads_and_levels_are_those_of_the_builder() -> Result<()> {
    let limited = with(chain()?, &entries(&[("memory_limit", "100000")])?)?;
    let refused = run(&limited, &inputs_of(&limited, 1000)?).err();
    assert_eq!(refused.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    assert_eq!(with(chain()?, &entries(&[("session.intra_op_num_threads", "2")])?)?.threads(), 2);
    assert!(with(chain()?, &SessionOptions::default())?.threads() >= 1);
    assert_eq!(SessionOptions::default().execution_mode, ExecutionMode::Sequential);

    let swish = || -> Result<Graph> {
        let mut builder = GraphBuilder::new("swish");
        let x = builder.input("x", DType::F32, &["n"]);
        let gate = builder.node("Sigmoid", &[x], &[])?;
        let product = builder.node("Mul", &[x, gate], &[])?;
        builder.finish(&[product])
    };
    let nodes =
        |options: &SessionOptions| Ok::<_, ort_runtime::Error>(with(swish()?, options)?.steps().len());
    assert_eq!(nodes(&SessionOptions::default())?, 1);
    let level = SessionOptions { graph_optimization_level: Level::Disabled, ..SessionOptions::default() };
    assert_eq!(nodes(&level)?, 2);
    let rule = "optimization.disable_specified_optimizers";
    assert!(with(swish()?, &entries(&[(rule, "no_such_rule")])?).is_err());
    let without = with(swish()?, &entries(&[(rule, "silu")])?)?;
    assert!(without.rewrites().hits().iter().all(|(name, _)| *name != "silu"));
    Ok(())
}

#[test]
fn a_run_may_shrink_arenas() -> Result<()> {
    const KEY: &str = "memory.enable_memory_arena_shrinkage";
    let session = with(chain()?, &entries(&[("session.enable_mem_pattern", "0")])?)?;
    let inputs = inputs_of(&session, 100)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let shrinking = |list: &str| -> Result<RunOptions<'_>> {
        let mut options = RunOptions::default();
        options.add_run_config_entry(KEY, list)?;
        Ok(options)
    };
    drop(session.run(&given)?);
    assert!(total(&session) > Some(0));
    drop(session.run_with(&given, &shrinking("cpu:0")?)?);
    assert_eq!(total(&session), Some(0));
    for (list, words) in [("gpu:0", "Did not find an arena based allocator"), ("cpu:1", "cpu:1")] {
        let refused = session.run_with(&given, &shrinking(list)?).err().map(|problem| problem.to_string());
        assert!(refused.as_ref().is_some_and(|text| text.contains(words)), "{refused:?}");
    }
    // Programs name every device that they know; one arena is enough.
    for list in ["cpu:0;gpu:0", "gpu:0;cpu:0", "cpu:0;cpu:1;"] {
        drop(session.run(&given)?);
        drop(session.run_with(&given, &shrinking(list)?)?);
        assert_eq!(total(&session), Some(0), "{list}");
    }
    let unknown = RunOptions::default().add_run_config_entry("memory.enable_shrinkage", "1");
    assert!(unknown.is_err_and(|problem| problem.to_string().contains(KEY)));
    Ok(())
}

/// Loading has threads of its own, and the session is the same on any number of them.
#[test]
fn load_threads_pack_and_change_nothing() -> Result<()> {
    let product = || -> Result<Graph> {
        let mut builder = GraphBuilder::new("product");
        let x = builder.input("x", DType::F32, &["rows", "300"]);
        let one = builder.constant(numbers(&[300, 200], 0)?);
        let other = builder.constant(numbers(&[200, 40], 1)?);
        let product = builder.node("MatMul", &[x, one], &[])?;
        let product = builder.node("MatMul", &[product, other], &[])?;
        builder.finish(&[product])
    };
    let mut results = Vec::new();
    for (threads, load_threads) in [(1, 3), (2, 1), (1, 1)] {
        let device = Without::new(&[])?;
        let options = SessionOptions {
            intra_op_num_threads: threads,
            ..entries(&[("load_threads", &load_threads.to_string())])?
        };
        let builder = Session::builder(&Model::from_graph(product()?)).options(&options);
        let session = builder.device(device.clone()).build()?;
        assert_eq!(device.pack_threads.load(Ordering::Relaxed), load_threads);
        assert_eq!(session.threads(), threads);
        results.push(bytes(&run(&session, &inputs_of(&session, 5)?)?));
    }
    assert!(results.iter().all(|result| *result == results[0]));
    let none = Session::builder(&Model::from_graph(product()?)).load_threads(0).build();
    assert_eq!(none.err().map(|problem| problem.kind()), Some(ErrorKind::InvalidArgument));
    Ok(())
}
