//! AdamW with moments of 8 bits: the codes of a straight implementation
//! (`xtask/python/dynamic_code_reference.py`), and a regression that ends where that with moments
//! of 32 bits ends.

use crate::optimizer_support::{Given, Step, doubles, name, numbers, replace, take_over, tensor};
use ort_runtime::ir::Attribute;
use ort_runtime::{DType, Result, Tensor};
use serde_json::Value as Json;

const REFERENCE: &str = include_str!("../data/dynamic_codes.json");

fn list(json: &Json) -> Vec<f64> {
    json.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// A step with states of zero.
fn given(op: &'static str, parameter: Tensor, rate: f32) -> Result<Given> {
    let (dtype, shape, count) = (parameter.dtype(), parameter.shape().to_vec(), parameter.element_count());
    let zeros = |dtype| tensor(dtype, &shape, &vec![0.0; count]);
    let mut given = vec![
        ("parameter", parameter.clone()),
        ("gradient", zeros(dtype)?),
        ("learning_rate", Tensor::scalar(rate)?),
        ("step", Tensor::scalar(1i64)?),
    ];
    if op == "AdamW" {
        given.extend([("first_moment", zeros(dtype)?), ("second_moment", zeros(dtype)?)]);
        return Ok(given);
    }
    for state in ["first", "second"] {
        let codes = Tensor::from_vec(&shape, vec![0u8; count])?;
        let blocks = count.div_ceil(256);
        given.push((name(op, &format!("{state}_codes")), codes));
        given
            .push((name(op, &format!("{state}_scales")), tensor(DType::F32, &[blocks], &vec![0.0; blocks])?));
    }
    Ok(given)
}

#[test]
fn codes_are_those_of_a_straight_implementation() -> Result<()> {
    let file: Json = serde_json::from_str(REFERENCE).expect("the file is JSON");
    let initial = list(&file["initial"]);
    let count = initial.len();
    let rate = file["rate"].as_f64().expect("a rate") as f32;
    let attrs: Vec<(&str, Attribute)> = ["beta1", "beta2", "epsilon", "weight_decay"]
        .map(|name| (name, Attribute::Float(file["attrs"][name].as_f64().expect("a number") as f32)))
        .into();
    let mut given = given("AdamW8bit", tensor(DType::F32, &[count], &initial)?, rate)?;
    let step = Step::new("AdamW8bit", &attrs, &given)?;
    for (number, expected) in file["steps"].as_array().expect("steps").iter().enumerate() {
        replace(&mut given, "gradient", tensor(DType::F32, &[count], &list(&expected["gradient"]))?);
        replace(&mut given, "step", Tensor::scalar(number as i64 + 1)?);
        let new = step.run(&given)?;
        for (name, actual) in &new {
            // Floats are written as doubles, whose last digit a reader may lose.
            let expected: Vec<f32> = list(&expected[*name]).into_iter().map(|x| x as f32).collect();
            let actual: Vec<f32> = match actual.dtype() {
                DType::U8 => actual.to_vec::<u8>()?.into_iter().map(f32::from).collect(),
                _ => actual.to_vec()?,
            };
            assert_eq!(actual, expected, "{name} after step {}", number + 1);
        }
        take_over(&mut given, new);
    }
    Ok(())
}

const FEATURES: usize = 520;
const ROWS: usize = 1040;

/// A linear regression with noise: features, and what they give.
fn problem() -> (Vec<f64>, Vec<f64>) {
    let draw = |index: usize, seed: usize| ((index * 2_654_435 + seed) as f64 * 0.618).sin();
    let features: Vec<f64> = (0..ROWS * FEATURES).map(|index| draw(index, 1)).collect();
    let weights: Vec<f64> = (0..FEATURES).map(|index| draw(index, 7) * 0.3).collect();
    let targets = features.chunks(FEATURES).enumerate().map(|(row, features)| {
        let exact: f64 = features.iter().zip(&weights).map(|(x, w)| x * w).sum();
        exact + 3.0 * draw(row, 13)
    });
    let targets = targets.collect();
    (features, targets)
}

/// The mean of the squared differences, and its gradient.
fn loss(features: &[f64], targets: &[f64], weights: &[f64]) -> (f64, Vec<f64>) {
    let mut gradient = vec![0.0; FEATURES];
    let mut loss = 0.0;
    for (row, target) in features.chunks(FEATURES).zip(targets) {
        let difference = row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() - target;
        loss += difference * difference / ROWS as f64;
        gradient.iter_mut().zip(row).for_each(|(g, x)| *g += 2.0 * difference * x / ROWS as f64);
    }
    (loss, gradient)
}

/// The losses before and after 200 steps.
fn train(op: &'static str) -> Result<[f64; 2]> {
    let (features, targets) = problem();
    let mut given = given(op, tensor(DType::F32, &[FEATURES], &numbers(FEATURES, 5))?, 0.01)?;
    let step = Step::new(op, &[], &given)?;
    let losses =
        |given: &Given| -> Result<(f64, Vec<f64>)> { Ok(loss(&features, &targets, &doubles(&given[0].1)?)) };
    let first = losses(&given)?.0;
    for number in 1..=200i64 {
        let (_, gradient) = losses(&given)?;
        replace(&mut given, "gradient", tensor(DType::F32, &[FEATURES], &gradient)?);
        replace(&mut given, "step", Tensor::scalar(number)?);
        let new = step.run(&given)?;
        take_over(&mut given, new);
    }
    Ok([first, losses(&given)?.0])
}

#[test]
fn a_regression_ends_where_that_of_32_bits_ends() -> Result<()> {
    let ([before, wide], [_, narrow]) = (train("AdamW")?, train("AdamW8bit")?);
    println!("loss {before} at first, {wide} with 32 bits, {narrow} with 8 bits");
    assert!(wide < 0.2 * before, "AdamW brings the loss from {before} to {wide} only");
    assert!((narrow / wide - 1.0).abs() < 0.02, "{narrow} with 8 bits, {wide} with 32");
    Ok(())
}
