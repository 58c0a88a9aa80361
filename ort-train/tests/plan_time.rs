//! The time to plan a training step is linear in the size of the model, at every recomputation
//! level.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

use std::time::{Duration, Instant};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_ep_cpu as _;
use ort_train::{Loss, MixedPrecision, Recompute, Trainer, TrainingOptions};

/// The nodes of the small model, and how many times as many the large one has.
const NODES: usize = 1_000;
const GROWTH: usize = 4;
/// How far the ratio of the times may exceed `GROWTH`. Quadratic work exceeds it by another factor
/// of `GROWTH`.
const SLACK: f64 = 2.5;

const SIZES: [(&str, i64); 1] = [("n", 8)];

/// A name, and the planning to time.
type Case = (&'static str, fn(&Model) -> Result<()>);

const CASES: &[Case] = &[
    ("a step", |model| planned(model, TrainingOptions::default())),
    ("sums of gradients", |model| {
        planned(model, TrainingOptions { accumulate: 2, ..TrainingOptions::default() })
    }),
    ("mixed precision", |model| {
        let mixed_precision = Some(MixedPrecision::Bf16);
        planned(model, TrainingOptions { mixed_precision, ..TrainingOptions::default() })
    }),
    ("the tables of what may be computed again", |model| {
        let mut trainer = trainer(model, TrainingOptions::default())?;
        trainer.recompute_plans(&SIZES)?;
        trainer.activation_patterns(&SIZES).map(drop)
    }),
    ("level 1", |model| recomputing(model, Recompute::Layers)),
    ("level 2", |model| recomputing(model, Recompute::Most)),
];

fn trainer(model: &Model, options: TrainingOptions) -> Result<Trainer> {
    Trainer::new(model, TrainingOptions { loss: Loss::Mse, threads: Some(1), ..options })
}

fn planned(model: &Model, options: TrainingOptions) -> Result<()> {
    trainer(model, options)?.plan(&SIZES).map(drop)
}

fn recomputing(model: &Model, recompute: Recompute) -> Result<()> {
    let options = TrainingOptions { recompute, ..TrainingOptions::default() };
    trainer(model, options)?.optimize_memory(&SIZES).map(drop)
}

/// Blocks of MatMul, bias and activation. All weights have zeros in their corners, so that a search
/// for equal weights cannot tell them apart by those.
fn chain(nodes: usize) -> Result<Model> {
    let mut builder = GraphBuilder::new("chain");
    let mut value = builder.input("x", DType::F32, &["n", "4"]);
    for block in 0..nodes / 3 {
        let number = |place: usize| ((block * 31 + place * 17) % 257) as f32 / 257.0 + block as f32 / 1e4;
        let mut weight: [f32; 16] = std::array::from_fn(number);
        (weight[0], weight[15]) = (0.0, 0.0);
        let weight = builder.constant(Tensor::from_slice(&[4, 4], &weight)?);
        let bias = builder.constant(Tensor::from_slice(&[4], &[block as f32; 4])?);
        value = builder.node("MatMul", &[value, weight], &[])?;
        value = builder.node("Add", &[value, bias], &[])?;
        value = builder.node("Tanh", &[value], &[])?;
    }
    Ok(Model::from_graph(builder.finish(&[value])?))
}

#[test]
fn planning_takes_time_in_proportion_to_the_nodes() -> Result<()> {
    let models = (chain(NODES)?, chain(NODES * GROWTH)?);
    for (name, plan) in CASES {
        let small = fastest(&models.0, *plan, 2)?;
        let large = fastest(&models.1, *plan, 1)?;
        let ratio = large.as_secs_f64() / small.as_secs_f64();
        println!("{name}: {small:?} and {large:?}, {ratio:.1} times for {GROWTH} times the nodes");
        assert!(ratio < GROWTH as f64 * SLACK, "{name}: {ratio:.1} times the time");
    }
    Ok(())
}

/// The minimum of several runs, because other processes may slow some of them.
fn fastest(model: &Model, plan: fn(&Model) -> Result<()>, tries: usize) -> Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..tries {
        let start = Instant::now();
        plan(model)?;
        best = best.min(start.elapsed());
    }
    Ok(best)
}
