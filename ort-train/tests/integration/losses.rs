//! Losses and their gradients against PyTorch's, and schedules of the learning rate.

use crate::support::json;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_train::{Loss, Schedule, Trainer, TrainingOptions};
use serde_json::Value as Json;

/// What float32 results may be off, as a share of the largest number.
const TOLERANCE: f64 = 1e-6;

fn floats(json: &Json) -> Vec<f64> {
    json.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn shape_of(json: &Json) -> Vec<usize> {
    json["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect()
}

fn tensor(json: &Json) -> Result<Tensor> {
    Tensor::from_vec(&shape_of(json), floats(&json["values"]).iter().map(|number| *number as f32).collect())
}

/// The loss of a case; `None` if it is of sums or of weighted classes, which no loss here has.
fn loss_of(case: &Json) -> Option<Loss> {
    let options = &case["options"];
    if options["reduction"] == "sum" || !options["weight"].is_null() {
        return None;
    }
    Some(match case["kind"].as_str().unwrap() {
        "mse" => Loss::Mse,
        "l1" => Loss::L1,
        "cross_entropy" => Loss::CrossEntropy {
            label_smoothing: options["label_smoothing"].as_f64().unwrap_or(0.0) as f32,
            ignore_index: options["ignore_index"].as_i64(),
            class_axis: Some(-1),
        },
        "bce_with_logits" => Loss::BceWithLogits,
        "kl_divergence" => {
            Loss::KlDivergence { temperature: options["temperature"].as_f64().unwrap() as f32 }
        }
        other => panic!("no loss {other}"),
    })
}

/// A model whose output is its only weight.
fn weight_alone(weight: &Tensor) -> Result<Model> {
    let mut builder = GraphBuilder::new("weight");
    let zero = builder.input("zero", DType::F32, &["1"]);
    let weight = builder.constant(weight.clone());
    let output = builder.node("Add", &[weight, zero], &[])?;
    Ok(Model::from_graph(builder.finish(&[output])?))
}

#[test]
fn losses_and_their_gradients() -> Result<()> {
    let (mut problems, mut tried) = (Vec::new(), 0);
    for case in json("losses.json").as_array().unwrap() {
        let Some(loss) = loss_of(case) else { continue };
        tried += 1;
        let target: Value = match loss.input() {
            Some("labels") => {
                let labels = floats(&case["target"]["values"]).iter().map(|label| *label as i64).collect();
                Tensor::from_vec(&shape_of(&case["target"]), labels)?.into()
            }
            _ => tensor(&case["target"])?.into(),
        };
        let name = loss.input().unwrap();
        let options = TrainingOptions { loss, accumulate: 2, ..TrainingOptions::default() };
        let mut trainer = Trainer::new(&weight_alone(&tensor(&case["logits"])?)?, options)?;
        let zero = Tensor::from_slice(&[1], &[0.0f32])?.into();
        let loss = f64::from(trainer.accumulate(&[("zero", zero), (name, target)])?);
        let expected = case["loss"].as_f64().unwrap();
        let off = (loss - expected).abs() / expected.abs().max(1.0);
        if off.is_nan() || off > TOLERANCE {
            problems.push(format!("{}: {loss}, expected {expected}", case["name"]));
        }
        let (_, gradient) = trainer.grads()?.remove(0);
        let expected = floats(&case["gradient"]);
        let largest = expected.iter().fold(0.0, |most: f64, number| most.max(number.abs()));
        for (index, (number, expected)) in gradient.to_vec::<f32>()?.iter().zip(expected).enumerate() {
            let off = (f64::from(*number) - expected).abs() / largest;
            if off.is_nan() || off > TOLERANCE {
                problems.push(format!("{}: gradient {index} is {number}, expected {expected}", case["name"]));
            }
        }
    }
    assert_eq!(tried, 18, "cases");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn schedules() {
    let mut tried = 0;
    for case in json("schedules.json").as_array().unwrap() {
        let options = &case["options"];
        let number = |name: &str| options[name].as_u64().unwrap_or(0);
        let (warmup, total) = (number("warmup_steps"), number("total_steps"));
        let schedule = match case["kind"].as_str().unwrap() {
            "constant" if warmup == 0 => Schedule::Constant,
            "linear" => Schedule::Linear { warmup, total },
            "cosine" if options["cycles"] == 0.5 => Schedule::Cosine { warmup, total },
            "step_decay" => {
                Schedule::Step { every: number("step_size"), factor: options["gamma"].as_f64().unwrap() }
            }
            _ => continue,
        };
        tried += 1;
        for (update, expected) in floats(&case["factors"]).into_iter().enumerate() {
            let factor = schedule.factor(update as u64);
            assert!((factor - expected).abs() < 1e-12, "{schedule:?} at {update}: {factor}, not {expected}");
        }
    }
    assert_eq!(tried, 8, "cases");
}

#[test]
fn an_evaluation_has_the_loss_and_the_output_that_it_is_of() -> Result<()> {
    let weight = Tensor::from_slice(&[2, 3], &[1.0f32, 2.0, 3.0, 6.0, 5.0, 4.0])?;
    let mut trainer = Trainer::new(&weight_alone(&weight)?, TrainingOptions::default())?;
    let inputs = || -> Result<[(&str, Value); 2]> {
        let zero = Tensor::from_slice(&[1], &[0.0f32])?;
        Ok([("zero", zero.into()), ("labels", Tensor::from_slice(&[2], &[2i64, 0])?.into())])
    };
    let alone = trainer.eval_step(&inputs()?)?;
    let (loss, output) = trainer.evaluate(&inputs()?)?;
    assert_eq!(loss.to_bits(), alone.to_bits());
    assert_eq!(output.tensor()?.to_vec::<f32>()?, weight.to_vec::<f32>()?);
    assert_eq!(trainer.training_graph().inputs(), ["zero", "labels"]);
    // What was held by the caller stays as it was when parameters change.
    trainer.train_step(&inputs()?)?;
    assert_eq!(output.tensor()?.to_vec::<f32>()?, weight.to_vec::<f32>()?);
    let (later, _) = trainer.evaluate(&inputs()?)?;
    assert!(later < loss);
    assert!(trainer.measured().activations > 0 && trainer.pending() == 0);
    Ok(())
}
