//! Tables that are keyed by what a model or an input holds: keys that all fell into one place of an
//! unseeded table take no longer than others, and very many names take time in proportion.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;

use std::time::{Duration, Instant};

use hostile_support::text;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::onnx::Source;
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};
use prost::Message;

/// How long a case may take; those that collided took minutes.
const PATIENCE: Duration = Duration::from_secs(5);

const KEYS: u64 = 200_000;

/// Keys whose products with the multiplier of the hash `rustc-hash` are the first numbers, so that
/// all have one place in its tables.
fn colliding() -> Vec<i64> {
    const MULTIPLIER: u64 = 0xf135_7aea_2e62_a9c5;
    // Newton's iteration doubles the bits that are right.
    let inverse = (0..6).fold(1u64, |x, _| x.wrapping_mul(2u64.wrapping_sub(MULTIPLIER.wrapping_mul(x))));
    assert_eq!(inverse.wrapping_mul(MULTIPLIER), 1);
    (1..=KEYS).map(|number| inverse.wrapping_mul(number) as i64).collect()
}

fn session(lines: &str) -> Result<Session> {
    let model = Model::from_source(Source::from_bytes(text::model(lines).encode_to_vec()))?;
    Session::builder(&model).threads(1).build()
}

/// Runs a node that is given all keys.
fn run(lines: &str, keys: &[i64]) -> Result<Vec<(String, Value)>> {
    let x = Tensor::from_slice(&[keys.len()], keys)?;
    session(lines)?.run(&[("x", x.into())])
}

#[test]
fn keys_that_collide_take_no_longer() -> Result<()> {
    let keys = colliding();
    let listed = |keys: &mut dyn Iterator<Item = String>| keys.collect::<Vec<_>>().join(",");
    let ints = listed(&mut keys.iter().map(i64::to_string));
    let places = listed(&mut (0..KEYS).map(|place| place.to_string()));
    let names = listed(&mut (0..KEYS).map(|place| format!("'n{place}'")));
    let head = "domain ai.onnx.ml 4\ninput x int64[n]\n";
    let start = Instant::now();
    let outputs = run(
        &format!(
            "{head}y = ai.onnx.ml.LabelEncoder(x) keys_int64s=[{ints}] values_int64s=[{places}]\noutput y"
        ),
        &keys,
    )?;
    assert!(outputs[0].1.tensor()?.to_vec::<i64>()?.into_iter().eq(0..KEYS as i64));
    println!("LabelEncoder {:?}", start.elapsed());
    let start_of_others = Instant::now();
    run(
        &format!(
            "{head}y = ai.onnx.ml.CategoryMapper(x) cats_int64s=[{ints}] cats_strings=[{names}]\noutput y"
        ),
        &keys,
    )?;
    println!("CategoryMapper {:?}", start_of_others.elapsed());
    // The output has a column for each category.
    run(
        &format!("{head}y = ai.onnx.ml.OneHotEncoder(x) cats_int64s=[{ints}] zeros=1\noutput y"),
        &keys[..4],
    )?;
    println!("OneHotEncoder {:?}", start_of_others.elapsed());
    run(
        &format!(
            "{head}y = TfIdfVectorizer(x) mode='TF' min_gram_length=1 max_gram_length=1 max_skip_count=0 ngram_counts=[0] ngram_indexes=[{places}] pool_int64s=[{ints}]\noutput y"
        ),
        &keys,
    )?;
    println!("TfIdfVectorizer {:?}", start_of_others.elapsed());
    assert!(start.elapsed() < 4 * PATIENCE, "{:?}", start.elapsed());
    Ok(())
}

/// As many inputs and outputs, each of its own name.
fn many(count: usize) -> Result<Session> {
    let mut builder = GraphBuilder::new("many");
    let inputs: Vec<_> =
        (0..count).map(|index| builder.input(&format!("x{index}"), DType::F32, &["1"])).collect();
    let outputs: Result<Vec<_>> = inputs.iter().map(|input| builder.node("Neg", &[*input], &[])).collect();
    let graph = builder.finish(&outputs?)?;
    Session::builder(&Model::from_graph(graph)).threads(1).build()
}

#[test]
fn very_many_inputs_and_outputs_take_time_in_proportion() -> Result<()> {
    const COUNT: usize = 50_000;
    let session = many(COUNT)?;
    let names: Vec<String> = (0..COUNT).map(|index| format!("x{index}")).collect();
    let value = |index: usize| -> Result<Value> { Ok(Tensor::from_slice(&[1], &[index as f32])?.into()) };
    // The last input first: what is looked for from the beginning is found at the end.
    let inputs: Result<Vec<(&str, Value)>> =
        names.iter().enumerate().rev().map(|(index, name)| Ok((name.as_str(), value(index)?))).collect();
    let start = Instant::now();
    let outputs = session.run(&inputs?)?;
    println!("run {:?}", start.elapsed());
    for (index, (_, output)) in outputs.iter().enumerate() {
        assert_eq!(output.tensor()?.to_vec::<f32>()?, [-(index as f32)]);
    }
    let mut binding = session.io_binding();
    for (index, name) in names.iter().enumerate().rev() {
        binding.bind_input(name, value(index)?)?;
    }
    println!("bound {:?}", start.elapsed());
    assert!(start.elapsed() < 4 * PATIENCE, "{:?}", start.elapsed());
    let twice = [("x1", value(1)?), ("x1", value(1)?)];
    assert!(session.run(&twice).expect_err("given twice").to_string().contains("given twice"));
    let mut unknown: Vec<(&str, Value)> = Vec::new();
    for name in names.iter().take(20).map(String::as_str).chain(["z"]) {
        unknown.push((name, value(0)?));
    }
    let said = session.run(&unknown).expect_err("there is no z").to_string();
    assert!(said.contains("no input 'z'"), "{said}");
    Ok(())
}
