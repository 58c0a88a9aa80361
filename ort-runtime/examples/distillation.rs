//! Knowledge distillation: a small student learns from the scores of a trained teacher, not from
//! labels.
//!
//!     cargo run -p ort-runtime --release --features train --example distillation

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::train::{Loss, Trainer, TrainingOptions};
use ort_runtime::{Result, Tensor, Value};

const BATCH: usize = 50;
const STEPS: usize = 120;
/// Pictures that neither network is trained on.
const HELD_OUT: usize = 100_000;

fn scores(outputs: Vec<(String, Value)>) -> Result<Option<Tensor>> {
    outputs.into_iter().next().map(|(_, value)| value.tensor().cloned()).transpose()
}

pub(crate) fn main() -> Result<()> {
    let mut teacher = Trainer::new(&stripes::model()?, TrainingOptions::default())?;
    for step in 0..STEPS {
        teacher.train_step(&stripes::batch(step * BATCH, BATCH)?)?;
    }
    let loss = Loss::KlDivergence { temperature: 2.0 };
    let options = TrainingOptions { loss, learning_rate: 5e-3, ..Default::default() };
    let mut student = Trainer::new(&stripes::small_model(24)?, options)?;
    let (mut first, mut last) = (None, 0.0);
    for step in 0..STEPS {
        let images = stripes::images(step * BATCH, BATCH)?;
        // The teacher's scores, as it is in use: nothing drops, running statistics.
        let (_, target) = teacher.evaluate(&stripes::batch(step * BATCH, BATCH)?)?;
        last = student.train_step(&[("image", images.into()), ("target", target)])?;
        first.get_or_insert(last);
    }
    println!("divergence from the teacher: {first:?} at first, {last} at last");
    assert!(first.is_some_and(|first| last < first / 5.0));
    let image = || stripes::images(HELD_OUT, 200).map(Value::from);
    for (name, trainer) in [("teacher", &mut teacher), ("student", &mut student)] {
        let Some(scores) = scores(trainer.predict(&[("image", image()?)])?)? else { continue };
        let numbers: usize =
            trainer.training_graph().parameters().iter().map(|it| it.tensor.element_count()).sum();
        println!("{name}: {numbers} weights, accuracy {:.3}", stripes::accuracy(&scores, HELD_OUT)?);
    }
    Ok(())
}
