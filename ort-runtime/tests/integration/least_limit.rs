//! Under a memory limit a model runs exactly if the limit is at least the least one, sizes that
//! only the run tells included: more memory never fails where less ran, the bits are the same, and
//! whoever follows what refusals name comes to the least limit.

use crate::support::{axis, floats, ints, numbers};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::onnx::{ModelInfo, Weights, save};
use ort_runtime::{Budget, DType, Model, Result, Session, Tensor, Value};

/// Two products whose weights are packed.
fn products(builder: &mut GraphBuilder, x: ValueId, sizes: [usize; 3]) -> Result<ValueId> {
    let mut value = x;
    for pair in sizes.windows(2) {
        let weight = builder.constant(numbers(pair, pair[1])?);
        let product = builder.node("MatMul", &[value, weight], &[])?;
        value = builder.node("Tanh", &[product], &[])?;
    }
    Ok(value)
}

/// Weights, then as many rows as some number is positive, then weights again.
fn chosen_rows() -> Result<Graph> {
    let mut builder = GraphBuilder::new("chosen rows");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let hidden = products(&mut builder, x, [64, 256, 128])?;
    let positive = builder.node("Relu", &[hidden], &[])?;
    let places = builder.node("NonZero", &[positive], &[])?;
    let first = builder.constant(ints(&[0])?);
    let rows = builder.node("Gather", &[places, first], &axis(0))?;
    let line = builder.constant(ints(&[-1])?);
    let rows = builder.node("Reshape", &[rows, line], &[])?;
    let picked = builder.node("Gather", &[hidden, rows], &axis(0))?;
    let last = products(&mut builder, picked, [128, 512, 16])?;
    let sum = builder.node("ReduceMax", &[last], &[])?;
    builder.finish(&[sum])
}

/// Distinct numbers of a product, sorted, and their places.
fn distinct() -> Result<Graph> {
    let mut builder = GraphBuilder::new("distinct");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let hidden = products(&mut builder, x, [64, 512, 96])?;
    let rounded = builder.node("Round", &[hidden], &[])?;
    let all = builder.add(("", "Unique"), &[Some(rounded)], &[], 4, Vec::new())?;
    let places = builder.node("Gather", &[all[0], all[2]], &axis(0))?;
    let back = products(&mut builder, hidden, [96, 300, 8])?;
    builder.finish(&[places, back])
}

/// A sequence of parts of a product, joined again.
fn parts() -> Result<Graph> {
    let mut builder = GraphBuilder::new("parts");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let hidden = products(&mut builder, x, [64, 400, 200])?;
    let parts = builder.node("SplitToSequence", &[hidden], &axis(0))?;
    let joined = builder.node("ConcatFromSequence", &[parts], &axis(1))?;
    let turned = builder.node("Transpose", &[joined], &[])?;
    let width = builder.constant(ints(&[-1, 200])?);
    let rows = builder.node("Reshape", &[turned, width], &[])?;
    let last = products(&mut builder, rows, [200, 300, 32])?;
    builder.finish(&[last])
}

/// Numbers as texts, joined, and split again.
fn texts() -> Result<Graph> {
    let mut builder = GraphBuilder::new("texts");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let hidden = products(&mut builder, x, [64, 400, 40])?;
    let texts = builder.node("Cast", &[hidden], &[("to", Attribute::Int(8))])?;
    let joined = builder.node("StringConcat", &[texts, texts], &[])?;
    let delimiter = [("delimiter", Attribute::String(".".into()))];
    let split = builder.add(("", "StringSplit"), &[Some(joined)], &delimiter, 2, Vec::new())?;
    builder.finish(&[split[1], hidden])
}

/// A weight that folding turns, which is packed then.
fn folded() -> Result<Graph> {
    let mut builder = GraphBuilder::new("folded");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let weight = builder.constant(numbers(&[256, 64], 3)?);
    let turned = builder.node("Transpose", &[weight], &[])?;
    let scaled = builder.constant(floats(&[1, 256], &[0.5; 256])?);
    let turned = builder.node("Mul", &[turned, scaled], &[])?;
    let product = builder.node("MatMul", &[x, turned], &[])?;
    let last = products(&mut builder, product, [256, 128, 64])?;
    builder.finish(&[last])
}

/// What all sizes are known of before the run.
fn known() -> Result<Graph> {
    let mut builder = GraphBuilder::new("known");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let last = products(&mut builder, x, [64, 300, 200])?;
    let soft = builder.node("Softmax", &[last], &axis(1))?;
    builder.finish(&[soft])
}

/// Sums along the second axis, one column after the other: the columns are moved to the front
/// before.
fn columns() -> Result<Graph> {
    let mut builder = GraphBuilder::new("columns");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let start = builder.constant(floats(&[16], &[1.5; 16])?);
    let mut body = GraphBuilder::new("column");
    let sum = body.typed_input("sum", ValueType::Unknown);
    let column = body.typed_input("column", ValueType::Unknown);
    let total = body.node("ReduceMax", &[column], &[])?;
    let next = body.node("Add", &[sum, total], &[])?;
    let scaled = body.node("Mul", &[column, total], &[])?;
    let body = Subgraph { attr: "body", graph: body.finish_subgraph(&[next, scaled]), captures: Vec::new() };
    let attrs = [("num_scan_inputs", Attribute::Int(1)), ("scan_input_axes", Attribute::Ints(vec![1]))];
    let outputs = builder.add(("", "Scan"), &[Some(start), Some(x)], &attrs, 2, vec![body])?;
    builder.finish(&outputs)
}

/// Attention whose mask has a rank that only the run tells, and with it the memory that it works
/// in.
fn masked() -> Result<Graph> {
    let mut builder = GraphBuilder::new("masked");
    let x = builder.input("x", DType::F32, &["n", "64"]);
    let heads = builder.constant(ints(&[1, 4, -1, 16])?);
    let rows = builder.node("Reshape", &[x, heads], &[])?;
    let mask = builder.typed_input("mask", ValueType::tensor(DType::F32, None));
    let attention = builder.node("Attention", &[rows, rows, rows, mask], &[])?;
    builder.finish(&[attention])
}

/// The model from a file, so that its weights are mapped.
fn mapped(graph: &Graph, folder: &std::path::Path) -> Result<Model> {
    let file = folder.join(format!("{}.onnx", graph.name));
    save(graph, &ModelInfo::default(), &file, &Weights::Inside)?;
    Model::load(&file)
}

fn bits(outputs: &[(String, Value)]) -> Result<Vec<Vec<u8>>> {
    let bytes = |tensor: &Tensor| match tensor.strings() {
        Ok(texts) => texts.concat().into_bytes(),
        Err(_) => tensor.bytes().map(|bytes| bytes.to_vec()).unwrap_or_default(),
    };
    outputs.iter().map(|(_, value)| value.tensor().map(bytes)).collect()
}

enum Outcome {
    Ran(Vec<Vec<u8>>),
    Refused(usize),
}

/// A session with this limit that runs twice; its budget never holds more.
fn attempt(model: &Model, limit: usize, inputs: &[(&str, Value)]) -> Result<Outcome> {
    let budget = Budget::new(Some(limit));
    let run = || -> Result<Vec<Vec<u8>>> {
        let session = Session::builder(model).threads(2).batch_split(false).budget(&budget).build()?;
        let first = bits(&session.run(inputs)?)?;
        let second = bits(&session.run(inputs)?)?;
        assert_eq!(first, second, "the second run has other bits with a limit of {limit}");
        Ok(first)
    };
    let outcome = run();
    assert!(budget.peak() <= limit, "{} bytes of {limit} were in use", budget.peak());
    match outcome {
        Ok(bits) => Ok(Outcome::Ran(bits)),
        Err(problem) => {
            let named = problem.shortage().map(|shortage| shortage.sufficient_limit());
            let named = named.unwrap_or_else(|| panic!("no limit is named: {problem}"));
            assert!(named > limit, "{problem}");
            assert!(problem.to_string().contains(&format!("{named} bytes")), "{problem}");
            Ok(Outcome::Refused(named))
        }
    }
}

#[test]
fn every_limit_from_the_least_on_runs_with_the_same_bits() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut state = 7u64;
    let mut random = |range: std::ops::Range<usize>| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        range.start + (state >> 33) as usize % (range.end - range.start)
    };
    for graph in [chosen_rows, distinct, parts, texts, folded, known, columns] {
        let graph = graph()?;
        let (name, model) = (graph.name.clone(), mapped(&graph, folder.path())?);
        let inputs = [("x", numbers(&[30, 64], 5)?.into())];
        let everything = Budget::new(None);
        let session = Session::builder(&model).threads(2).budget(&everything).build()?;
        let expected = bits(&session.run(&inputs)?)?;
        let whole = everything.peak();
        drop(session);

        // What refusals name, from nothing on.
        let mut least = 1;
        for _ in 0..500 {
            match attempt(&model, least, &inputs)? {
                Outcome::Ran(_) => break,
                Outcome::Refused(named) => least = named,
            }
        }
        assert!(least <= whole, "{name}: {least} is named, {whole} do");
        let runs = |limit: usize| match attempt(&model, limit, &inputs)? {
            Outcome::Ran(found) => {
                assert_eq!(found, expected, "{name} with a limit of {limit} of {whole}");
                Ok::<bool, ort_runtime::Error>(true)
            }
            Outcome::Refused(_) => Ok(false),
        };
        assert!(runs(least)?, "{name}: the least limit of {least} is named, and does not do");
        assert!(!runs(least - 1)?, "{name}: {least} is named, and a byte less does");
        assert!(runs(whole)?, "{name}: what was held at most without a limit, {whole}, does not do");
        for _ in 0..8 {
            let limit = random(least..whole + whole / 10);
            assert!(runs(limit)?, "{name}: {least} does, and {limit} of {whole} does not");
            let limit = random(1..least);
            assert!(!runs(limit)?, "{name}: {limit} does, and {least} is named");
        }
    }
    Ok(())
}

/// A plan that says what a run needs is kept to: what it refuses is refused with the limit that
/// does, at once. One that cannot says so.
#[test]
fn a_refusal_of_a_known_need_names_a_limit_that_does() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    for (graph, is_known) in [(known()?, true), (columns()?, true), (masked()?, false)] {
        let (name, model) = (graph.name.clone(), mapped(&graph, folder.path())?);
        let mut inputs: Vec<(&str, Value)> = vec![("x", numbers(&[30, 64], 5)?.into())];
        if name == "masked" {
            inputs.push(("mask", numbers(&[30, 30], 3)?.into()));
        }
        let session = Session::builder(&model).threads(2).build()?;
        assert_eq!(session.plan_for_inputs(&inputs)?.peak_bytes.is_some(), is_known, "{name}");
        // A session may be refused before its run is.
        let (mut limit, mut refusals) = (1, 0);
        while let Outcome::Refused(named) = attempt(&model, limit, &inputs)? {
            (limit, refusals) = (named, refusals + 1);
            assert!(refusals < 20, "{name}: {refusals} refusals");
        }
        assert!(!is_known || refusals <= 2, "{name}: {refusals} refusals");
    }
    Ok(())
}
