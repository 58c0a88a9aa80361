//! Gradients against those of PyTorch's autograd, which `xtask/python/gradient_reference.py`
//! records, in both precisions.

use crate::support::session;
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::pass::add_backward;
use ort_runtime::{DType, Error, ErrorKind, Result, Tensor, Value};
use serde_json::Value as Json;

const CASES: &str = include_str!("../data/torch_gradients.json");

/// Relative to the greatest number of each tensor.
const PRECISIONS: [(DType, f64); 2] = [(DType::F64, 1e-10), (DType::F32, 1e-5)];

fn array<'a>(json: &'a Json, name: &str) -> &'a [Json] {
    json[name].as_array().map_or(&[], Vec::as_slice)
}

fn numbers(json: &Json) -> Vec<f64> {
    array(json, "values").iter().filter_map(Json::as_f64).collect()
}

fn shape(json: &Json) -> Vec<usize> {
    array(json, "shape").iter().filter_map(|size| usize::try_from(size.as_u64()?).ok()).collect()
}

/// A recorded tensor; floats in the precision asked for.
fn tensor(json: &Json, dtype: DType) -> Result<Tensor> {
    let (shape, values) = (shape(json), numbers(json));
    match (json["type"].as_str(), dtype) {
        (Some("int64"), _) => {
            Tensor::from_vec(&shape, values.into_iter().map(|value| value as i64).collect::<Vec<_>>())
        }
        (_, DType::F64) => Tensor::from_vec(&shape, values),
        _ => Tensor::from_vec(&shape, values.into_iter().map(|value| value as f32).collect::<Vec<_>>()),
    }
}

fn attribute(json: &Json) -> Attribute {
    match json {
        Json::String(text) => Attribute::String(text.clone()),
        Json::Array(list) => Attribute::Ints(list.iter().filter_map(Json::as_i64).collect()),
        Json::Number(number) => match number.as_i64() {
            Some(int) => Attribute::Int(int),
            None => Attribute::Float(number.as_f64().unwrap_or(f64::NAN) as f32),
        },
        other => Attribute::String(other.to_string()),
    }
}

/// The node's first output, then the gradients of its weighted sum by the wanted inputs.
///
/// Says for each of them whether there is one: where the output does not depend on an input, it is
/// zero.
fn graph_of(case: &Json, dtype: DType) -> Result<(Graph, Vec<bool>)> {
    let mut b = GraphBuilder::new("case");
    let wanted: Vec<u64> = array(case, "wanted").iter().filter_map(Json::as_u64).collect();
    let (mut inputs, mut xs): (Vec<Option<ValueId>>, Vec<ValueId>) = (Vec::new(), Vec::new());
    for (index, input) in array(case, "inputs").iter().enumerate() {
        if input.is_null() {
            inputs.push(None);
            continue;
        }
        let value = if wanted.contains(&(index as u64)) {
            let sizes: Vec<String> = shape(input).iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let value = b.input(&format!("x{index}"), dtype, &sizes);
            xs.push(value);
            value
        } else {
            b.constant(tensor(input, dtype)?)
        };
        inputs.push(Some(value));
    }
    let names = case["attributes"].as_object().into_iter().flatten();
    let attrs: Vec<(&str, Attribute)> =
        names.map(|(name, value)| (name.as_str(), attribute(value))).collect();
    let y = b.add(("", case["op"].as_str().unwrap_or_default()), &inputs, &attrs, 1, vec![])?;
    let weights = b.constant(tensor(&case["weights"], dtype)?);
    let weighted = b.node("Mul", &[y[0], weights], &[])?;
    let loss = b.node("ReduceSum", &[weighted], &[("keepdims", Attribute::Int(0))])?;
    let mut graph = b.finish(&[y[0], loss])?;
    let gradients = add_backward(&mut graph, loss, &xs)?;
    let there = gradients.iter().map(Option::is_some).collect();
    graph.outputs = std::iter::once(y[0]).chain(gradients.into_iter().flatten()).collect();
    Ok((graph, there))
}

fn held(what: &str, actual: &Value, expected: &Json, tolerance: f64) -> Result<()> {
    let problem = |text: String| Err(Error::new(ErrorKind::Fail, format!("{what}: {text}")));
    let actual = actual.tensor()?;
    if actual.shape() != shape(expected) {
        return problem(format!("shape {:?}, PyTorch has {:?}", actual.shape(), shape(expected)));
    }
    let values: Vec<f64> = match actual.dtype() {
        DType::F64 => actual.to_vec()?,
        _ => actual.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
    };
    let expected = numbers(expected);
    let size = expected.iter().fold(1.0f64, |size, value| size.max(value.abs()));
    for (place, (actual, expected)) in values.iter().zip(&expected).enumerate() {
        let near = (actual - expected).abs() <= tolerance * size;
        if !near {
            return problem(format!("element {place} is {actual}, PyTorch has {expected}"));
        }
    }
    Ok(())
}

fn check(case: &Json, (dtype, tolerance): (DType, f64)) -> Result<()> {
    let (graph, there) = graph_of(case, dtype)?;
    let session = session(graph)?;
    let (inputs, wanted) = (array(case, "inputs"), array(case, "wanted"));
    let mut given: Vec<(String, Value)> = Vec::new();
    for index in wanted.iter().filter_map(Json::as_u64) {
        given.push((format!("x{index}"), tensor(&inputs[index as usize], dtype)?.into()));
    }
    let given: Vec<(&str, Value)> =
        given.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let outputs = session.run(&given)?;
    held("the output", &outputs[0].1, &case["output"], tolerance)?;
    let mut rest = outputs.iter().skip(1);
    for ((index, gradient), there) in wanted.iter().zip(array(case, "gradients")).zip(there) {
        let what = format!("the gradient of input {index}");
        match there.then(|| rest.next()).flatten() {
            Some((_, actual)) => held(&what, actual, gradient, tolerance)?,
            None => assert!(numbers(gradient).iter().all(|value| *value == 0.0), "{what} is missing"),
        }
    }
    Ok(())
}

#[test]
fn as_pytorch_has_them() -> Result<()> {
    let cases: Json =
        serde_json::from_str(CASES).map_err(|problem| Error::new(ErrorKind::Fail, problem.to_string()))?;
    let cases = cases.as_array().map_or(&[][..], Vec::as_slice);
    assert!(cases.len() > 60, "{} cases", cases.len());
    let mut problems = Vec::new();
    for case in cases {
        for precision in PRECISIONS {
            if let Err(problem) = check(case, precision) {
                let (op, name) = (case["op"].as_str(), case["name"].as_str());
                let (op, name) = (op.unwrap_or_default(), name.unwrap_or_default());
                problems.push(format!("{op}, {name}, {}: {problem}", precision.0.name()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}
