//! Memory limits of a training: kept to with the same bits, or refused with the smallest limit that is.

use crate::support::{MODELS, Recording, given};
use ort_core::{ErrorKind, Result};
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

/// A step with a memory limit; none where the limit is refused, with the smallest that is not.
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
