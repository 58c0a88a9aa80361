//! Any bytes as the description of a checkpoint, or as its tensors: it is loaded, or is an error;
//! and saving into its folder touches nothing outside.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::train::{Loss, Optimizer, Trainer, TrainingOptions};
use ort_runtime::{DType, Model, Tensor};
use serde_json::Map;
use tempfile::TempDir;

struct Known {
    top: TempDir,
    folder: PathBuf,
    trainer: Trainer,
}

fn known() -> Known {
    let top = tempfile::tempdir().expect("a folder");
    let mut builder = GraphBuilder::new("layer");
    let x = builder.input("x", DType::F32, &["rows", "2"]);
    let weight = builder.constant(Tensor::from_slice(&[2, 2], &[1f32, 2.0, 3.0, 4.0]).expect("a tensor"));
    let y = builder.node("MatMul", &[x, weight], &[]).expect("a node");
    let model = Model::from_graph(builder.finish(&[y]).expect("a graph"));
    let options = TrainingOptions {
        loss: Loss::Mse,
        optimizer: Optimizer::adamw(),
        threads: Some(1),
        ..TrainingOptions::default()
    };
    let trainer = Trainer::new(&model, options).expect("a trainer");
    let folder = top.path().join("checkpoint");
    // A save that leaves its folder would change this file.
    fs::write(top.path().join("outside"), "kept").expect("a file");
    Known { top, folder, trainer }
}

fuzz_target!(|data: &[u8]| {
    static KNOWN: OnceLock<Mutex<Known>> = OnceLock::new();
    // A panic ends the process of the fuzzer, so the lock is never poisoned.
    let mut known = KNOWN.get_or_init(|| Mutex::new(known())).lock().expect("no panic before");
    let Known { top, folder, trainer } = &mut *known;
    let _ = fs::remove_dir_all(&*folder);
    trainer.save_checkpoint(&*folder, &Map::new()).expect("a checkpoint");
    let Some((first, rest)) = data.split_first() else { return };
    let name = if first % 2 == 0 {
        "training.json".to_string()
    } else {
        let files = fs::read_dir(&*folder).expect("a folder").map(|file| file.expect("a file").file_name());
        let names = files.map(|name| name.to_string_lossy().into_owned());
        names.into_iter().find(|name| name.ends_with(".safetensors")).expect("tensors")
    };
    fs::write(folder.join(name), rest).expect("a file");
    let _ = trainer.load_checkpoint(&*folder);
    trainer.save_checkpoint(&*folder, &Map::new()).expect("a checkpoint");
    assert_eq!(fs::read(top.path().join("outside")).expect("a file"), b"kept");
});
