//! Updates of large weights by rows of their gradients: fewer bytes, the same bits.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_ep_cpu as _;
use ort_train::{Loss, Optimizer, Recompute, RecomputeReport, Trainer, TrainingOptions};

const BATCH: usize = 4;

fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let number = |index: usize| (((index * 37 + seed * 11) % 101) as f32 - 50.0) / 500.0;
    Tensor::from_vec(shape, (0..shape.iter().product()).map(number).collect())
}

/// A net whose weights are far larger than what it computes: a wide convolution, a convolution in
/// groups, two products.
fn model() -> Result<Model> {
    let mut b = GraphBuilder::new("wide");
    let weight = |b: &mut GraphBuilder, shape: &[usize], seed| -> Result<ValueId> {
        Ok(b.constant(numbers(shape, seed)?))
    };
    let x = b.input("x", DType::F32, &["batch", "32", "4", "4"]);
    let wide = weight(&mut b, &[256, 32, 3, 3], 1)?;
    let groups = weight(&mut b, &[128, 64, 3, 3], 2)?;
    let mut y = b.node("Conv", &[x, wide], &[])?;
    y = b.node("Relu", &[y], &[])?;
    let attrs = [("group", Attribute::Int(4)), ("pads", Attribute::Ints(vec![1; 4]))];
    y = b.node("Conv", &[y, groups], &attrs)?;
    y = b.node("Flatten", &[y], &[])?;
    let (tall, bias) = (weight(&mut b, &[512, 384], 3)?, weight(&mut b, &[384], 4)?);
    y = b.node("Gemm", &[y, tall, bias], &[])?;
    y = b.node("Tanh", &[y], &[])?;
    let last = weight(&mut b, &[384, 8], 5)?;
    y = b.node("MatMul", &[y, last], &[])?;
    Ok(Model::from_graph(b.finish(&[y])?))
}

/// What some steps come to: their losses and all parameters, in bits.
fn train(model: &Model, options: TrainingOptions) -> Result<(RecomputeReport, Vec<Vec<u32>>)> {
    let mut trainer = Trainer::new(model, TrainingOptions { loss: Loss::Mse, ..options })?;
    let report = trainer.optimize_memory(&[("batch", BATCH as i64)])?;
    let mut losses = Vec::new();
    for step in 0..3 {
        let (x, target) = (numbers(&[BATCH, 32, 4, 4], step)?, numbers(&[BATCH, 8], step + 9)?);
        losses.push(trainer.train_step(&[("x", x.into()), ("target", target.into())])?.to_bits());
    }
    let names: Vec<String> =
        trainer.training_graph().parameters().iter().map(|parameter| parameter.name.clone()).collect();
    let mut bits = vec![losses];
    for name in names {
        let elements = trainer.parameter(&name)?.to_vec::<f32>()?;
        bits.push(elements.into_iter().map(f32::to_bits).collect());
    }
    Ok((report, bits))
}

#[test]
fn gradients_of_large_weights_are_never_whole() -> Result<()> {
    let model = model()?;
    let momentum = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };
    for optimizer in [Optimizer::sgd(), momentum, Optimizer::adamw(), Optimizer::adam()] {
        let whole = TrainingOptions { optimizer, ..TrainingOptions::default() };
        let (_, expected) = train(&model, whole.clone())?;
        for threads in [1, 2] {
            let least =
                TrainingOptions { recompute: Recompute::Most, threads: Some(threads), ..whole.clone() };
            let (report, bits) = train(&model, least)?;
            assert!(bits == expected, "{optimizer:?} with {threads} threads has other bits: {report:?}");
            // The wide convolution and the tall product; the gradient of weights in groups stays
            // whole.
            assert_eq!(report.sliced, 2, "{optimizer:?}: {report:?}");
            assert!(report.peak < report.peak_before, "{optimizer:?}: {report:?}");
        }
    }
    Ok(())
}

#[test]
fn what_reads_whole_gradients_keeps_them() -> Result<()> {
    let model = model()?;
    let least = TrainingOptions { recompute: Recompute::Most, ..TrainingOptions::default() };
    let lamb = Optimizer::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 };
    for options in [
        TrainingOptions { clip_norm: Some(1.0), ..least.clone() },
        TrainingOptions { optimizer: lamb, ..least.clone() },
    ] {
        let whole = TrainingOptions { recompute: Recompute::AsLimited, ..options.clone() };
        let ((report, bits), (_, expected)) = (train(&model, options)?, train(&model, whole)?);
        assert_eq!(report.sliced, 0, "{report:?}");
        assert!(bits == expected, "other bits: {report:?}");
    }
    Ok(())
}

#[test]
fn a_limit_below_the_largest_gradient_is_kept_to() -> Result<()> {
    let model = model()?;
    let sizes = [("batch", BATCH as i64)];
    let options = TrainingOptions { loss: Loss::Mse, ..TrainingOptions::default() };
    let memory = Trainer::new(&model, options.clone())?.memory(&sizes)?;
    let largest = 512 * 384 * 4;
    let limit = memory.total() - memory.activations + largest;
    let options = TrainingOptions { memory_limit: Some(limit), ..options };
    let mut trainer = Trainer::new(&model, options)?;
    let report = trainer.optimize_memory(&sizes)?;
    let measured = trainer.memory(&sizes)?;
    assert!(measured.activations < largest && measured.total() <= limit, "{measured:?}: {report:?}");
    assert!(report.sliced > 0, "{report:?}");
    Ok(())
}
