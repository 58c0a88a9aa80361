//! Weights that were copied out of a mapped file do not stay resident there.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

use std::path::Path;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_ep_cpu as _;
use ort_train::{Loss, Trainer, TrainingOptions};

/// What of a file is resident in this process, in KiB.
fn resident(file: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_of_file, mut sum) = (false, 0);
    for line in maps.lines() {
        if line.split_whitespace().next().unwrap().contains('-') {
            is_of_file = line.ends_with(file.to_str().unwrap());
        } else if let Some(size) = line.strip_prefix("Rss:").filter(|_| is_of_file) {
            sum += size.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    sum
}

#[test]
fn copied_weights_are_not_resident_twice() -> Result<()> {
    const SIZE: usize = 1024;
    let mut builder = GraphBuilder::new("wide");
    let x = builder.input("x", DType::F32, &["n", "1024"]);
    let weight = builder.constant(Tensor::from_slice(&[SIZE, SIZE], &vec![0.5f32; SIZE * SIZE])?);
    let y = builder.node("MatMul", &[x, weight], &[])?;
    let graph = builder.finish(&[y])?;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().canonicalize().unwrap().join("wide.onnx");
    save(&graph, &ModelInfo::default(), &path, &Weights::Inside)?;
    let model = Model::load(&path)?;
    let constants = model.graph().constants.values();
    let sum: f64 = constants.flat_map(|weight| weight.to_vec::<f32>().unwrap()).map(f64::from).sum();
    assert_eq!(sum, 0.5 * (SIZE * SIZE) as f64);
    let whole = SIZE * SIZE * 4 / 1024;
    assert!(resident(&path) >= whole, "{} KiB were read", resident(&path));
    let mut trainer = Trainer::new(&model, TrainingOptions { loss: Loss::Mse, ..Default::default() })?;
    let rest = resident(&path);
    assert!(rest < whole / 8, "{rest} of {whole} KiB stay");
    // The file is there all the same: what is exported has all that the model has.
    let values = Tensor::from_slice(&[1, SIZE], &[1.0f32; SIZE])?;
    trainer.train_step(&[("x", values.clone().into()), ("target", values.into())])?;
    trainer.export(folder.path().join("trained.onnx"))
}
