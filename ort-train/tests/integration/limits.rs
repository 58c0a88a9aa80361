//! Memory limits of a training: kept to with the same bits, or refused with the smallest limit that
//! is.

use crate::captured_weights::{models, options};
use crate::support::{MODELS, Recording, given};
use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder, ValueType};
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_core::{Error, ErrorKind, Result};
use ort_train::{Recompute, Trainer, TrainingOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Limits for each model: 240 in all.
const LIMITS: u32 = 40;

/// What a first step leaves: the loss, and all parameters, in bits.
type Bits = Vec<Vec<u32>>;

fn limited(recording: &Recording, limit: Option<usize>) -> TrainingOptions {
    TrainingOptions { memory_limit: limit, ..recording.options() }
}

/// A step with a memory limit; if the limit is refused, the least that is not.
fn step(recording: &Recording, limit: Option<usize>) -> Result<std::result::Result<Bits, usize>> {
    let mut trainer = Trainer::new(&recording.model, limited(recording, limit))?;
    let sizes = recording.sizes();
    let report = match trainer.optimize_memory(&sizes) {
        Err(problem) if problem.kind() == ErrorKind::OutOfMemory => {
            return Ok(Err(problem.shortage().unwrap().needed));
        }
        report => report?,
    };
    let memory = trainer.memory(&sizes)?;
    assert_eq!(memory.activations, report.peak);
    assert!(limit.is_none_or(|limit| memory.total() <= limit), "{memory:?} for {limit:?}");
    let loss = trainer.train_step(&given(&recording.batch(0)))?;
    let mut bits = vec![vec![loss.to_bits()]];
    let parameters = trainer.training_graph().parameters().iter();
    let names: Vec<String> = parameters.map(|parameter| parameter.name.clone()).collect();
    for name in names {
        let elements = trainer.parameter(&name)?.to_vec::<f32>()?;
        bits.push(elements.into_iter().map(f32::to_bits).collect());
    }
    Ok(Ok(bits))
}

/// Tries limits of one model.
fn any_limit_is_kept_to_or_refused_with_one_that_is(name: &'static str) {
    let recording = Recording::load(name);
    let expected = step(&recording, None).unwrap().unwrap();
    let whole = Trainer::new(&recording.model, recording.options()).unwrap();
    let whole = { whole }.memory(&recording.sizes()).unwrap();
    // From what is held from step to step to a little more than all of it.
    let bounds = whole.total() - whole.activations..whole.total() + whole.activations / 8;
    let mut runner = TestRunner::new(Config { cases: LIMITS, ..Config::default() });
    let check = |limit: usize| {
        let taken = match step(&recording, Some(limit)).map_err(fail)? {
            Ok(bits) => bits,
            Err(needed) => {
                prop_assert!(needed > limit, "{limit} is refused, and {needed} would do");
                let taken = step(&recording, Some(needed)).map_err(fail)?;
                taken.map_err(|more| TestCaseError::fail(format!("{needed} is refused for {more}")))?
            }
        };
        prop_assert!(taken == expected, "other bits within {limit}");
        Ok(())
    };
    check(bounds.start).unwrap_or_else(|problem| panic!("{name}, no room for activations: {problem}"));
    let least = step(&recording, Some(bounds.start)).unwrap().unwrap_err();
    let below = step(&recording, Some(least - 1)).unwrap();
    assert_eq!(below.err(), Some(least), "{name}: a byte less than the least limit");
    assert!(step(&recording, Some(whole.total())).unwrap() == Ok(expected.clone()), "{name}: the whole need");
    runner.run(&bounds, check).unwrap_or_else(|problem| panic!("{name}: {problem}"));
}

/// A test for each model: they run side by side.
macro_rules! any_limit {
    ($($name:ident),*) => {
        mod any_limit {
            $(#[test]
            fn $name() {
                super::any_limit_is_kept_to_or_refused_with_one_that_is(stringify!($name));
            })*

            #[test]
            fn of_each_model() {
                assert_eq!([$(stringify!($name)),*], super::MODELS);
            }
        }
    };
}

any_limit!(bert, gpt, lstm, mobilenet_v3, resnet18, unet);

fn fail(problem: ort_core::Error) -> TestCaseError {
    TestCaseError::fail(problem.to_string())
}

#[test]
fn a_limit_between_the_least_and_the_whole_takes_some_recomputation() -> Result<()> {
    for name in ["bert", "gpt", "mobilenet_v3", "unet"] {
        let recording = Recording::load(name);
        let sizes = recording.sizes();
        let whole = Trainer::new(&recording.model, recording.options())?.memory(&sizes)?;
        let least = TrainingOptions { recompute: Recompute::Most, ..recording.options() };
        let least = Trainer::new(&recording.model, least)?.optimize_memory(&sizes)?;
        let limit = whole.total() - (whole.activations - least.peak) / 2;
        let report = Trainer::new(&recording.model, limited(&recording, Some(limit)))?;
        let report = { report }.optimize_memory(&sizes)?;
        assert!(report.values > 0 && report.values < least.values, "{name}: {report:?} beside {least:?}");
        assert!(report.extra_time <= least.extra_time, "{name}: {report:?} beside {least:?}");
    }
    Ok(())
}

/// How a first step with a memory limit ends.
enum Outcome {
    Runs,
    /// Refused before anything ran.
    Refused(Error),
    /// Refused midway.
    Ends(Error),
}

fn first_step(model: &Model, limit: usize) -> Result<Outcome> {
    let options = TrainingOptions { memory_limit: Some(limit), ..options() };
    let trainer = Trainer::new(model, options).and_then(|mut trainer| {
        trainer.optimize_memory(&[])?;
        Ok(trainer)
    });
    let mut trainer = match trainer {
        Ok(trainer) => trainer,
        Err(problem) if problem.shortage().is_some() => return Ok(Outcome::Refused(problem)),
        Err(problem) => return Err(problem),
    };
    let tensor = |at: f32| -> Result<Value> {
        Ok(Tensor::from_slice(&[2, 2], &[0.5 + at, at - 1.25, 2.0 - at, 0.75])?.into())
    };
    match trainer.train_step(&[("x", tensor(0.0)?), ("target", tensor(0.5)?)]) {
        Ok(_) => Ok(Outcome::Runs),
        Err(problem) if problem.shortage().is_some() => Ok(Outcome::Ends(problem)),
        Err(problem) => Err(problem),
    }
}

#[test]
fn the_least_limit_of_control_flow_is_the_least_that_works() -> Result<()> {
    for (name, model) in models()? {
        let Outcome::Refused(problem) = first_step(&model, 1)? else { panic!("{name} runs in a byte") };
        let least = problem.shortage().unwrap().needed;
        assert!(matches!(first_step(&model, least)?, Outcome::Runs), "{name}: {least} bytes do not do");
        let Outcome::Refused(problem) = first_step(&model, least - 1)? else {
            panic!("{name}: a byte less than {least} is not refused before the step");
        };
        assert_eq!(problem.shortage().unwrap().needed, least, "{name}");
    }
    Ok(())
}

/// A model that sums those elements that are above zero.
fn sum_of_some() -> Result<Model> {
    let mut b = GraphBuilder::new("some");
    let x = b.typed_input("x", ValueType::tensor(DType::F32, Some(vec![Dim::constant(2); 2])));
    let w = b.graph_mut().add_constant("w", Tensor::from_slice(&[1, 2], &[0.5f32, 0.25])?);
    let product = b.node("Mul", &[x, w], &[])?;
    let (zero, flat) = (b.constant(Tensor::scalar(0.0f32)?), b.constant(Tensor::from_slice(&[1], &[-1i64])?));
    let above = b.node("Greater", &[x, zero], &[])?;
    let above = b.node("Reshape", &[above, flat], &[])?;
    let some = b.node("Compress", &[product, above], &[])?;
    let sum = b.node("ReduceSum", &[some], &[("keepdims", Attribute::Int(0))])?;
    let y = b.node("Mul", &[x, sum], &[])?;
    Ok(Model::from_graph(b.finish(&[y])?))
}

#[test]
fn a_refusal_says_that_sizes_depend_on_data() -> Result<()> {
    let model = sum_of_some()?;
    let mut limit = 1;
    let mut refusals = 0;
    loop {
        let needed = match first_step(&model, limit)? {
            Outcome::Runs => break,
            Outcome::Refused(problem) => {
                let text = problem.to_string();
                assert!(text.contains("sizes of some values depend on data"), "{limit}: {text}");
                problem.shortage().unwrap().needed
            }
            Outcome::Ends(problem) => {
                assert!(problem.to_string().contains("at least"), "{limit}: {problem}");
                problem.shortage().unwrap().needed
            }
        };
        assert!(needed > limit && refusals < 10, "{needed} after {refusals} refusals, {limit} the last");
        (limit, refusals) = (needed, refusals + 1);
    }
    assert!(refusals > 1, "the step takes no more than is known before it");
    Ok(())
}
