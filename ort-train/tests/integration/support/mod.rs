//! Recorded trainings: a model, its batches, and what PyTorch made of them.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses some of it, and fails where a file is not as it should be"
)]

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Seek};
use std::path::PathBuf;

use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_numpy::Archive;
use ort_train::{AdamForm, Loss, Optimizer, TrainingOptions};
use serde_json::Value as Json;

/// The models with a recording.
pub(crate) const MODELS: [&str; 6] = ["bert", "gpt", "lstm", "mobilenet_v3", "resnet18", "unet"];

/// A recorded training.
pub(crate) struct Recording {
    pub(crate) name: &'static str,
    pub(crate) model: Model,
    pub(crate) reference: Json,
    pub(crate) arrays: BTreeMap<String, Tensor>,
}

/// The files of a recording. Programs hold them, as those of some crates also run where there is no
/// repository.
struct Files {
    model: &'static [u8],
    arrays: &'static [u8],
    reference: &'static str,
}

fn files(of: &str) -> Files {
    macro_rules! held {
        ($($name:literal),*) => {
            match of {
                $($name => Files {
                    model: include_bytes!(concat!("../../data/", $name, "/model.onnx")),
                    arrays: include_bytes!(concat!("../../data/", $name, "/data.npz")),
                    reference: include_str!(concat!("../../data/", $name, "/reference.json")),
                },)*
                other => panic!("no recording {other}"),
            }
        };
    }
    held!["bert", "gpt", "lstm", "mobilenet_v3", "resnet18", "unet"]
}

pub(crate) fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

pub(crate) fn json(path: &str) -> Json {
    serde_json::from_str(&std::fs::read_to_string(data(path)).unwrap()).unwrap()
}

pub(crate) fn read_npz(path: &str) -> BTreeMap<String, Tensor> {
    arrays_of(std::fs::File::open(data(path)).unwrap())
}

fn arrays_of(archive: impl Read + Seek) -> BTreeMap<String, Tensor> {
    Archive::open(archive).unwrap().read_all(1 << 30).unwrap().into_iter().collect()
}

impl Recording {
    pub(crate) fn load(name: &'static str) -> Recording {
        let files = files(name);
        let model = Model::from_bytes(files.model).unwrap();
        let arrays = arrays_of(Cursor::new(files.arrays));
        Recording { name, model, reference: serde_json::from_str(files.reference).unwrap(), arrays }
    }

    /// The sizes of a batch, by name.
    pub(crate) fn sizes(&self) -> Vec<(&'static str, i64)> {
        let batch = self.batch(0);
        let (_, value) = batch.iter().find(|(name, _)| name != "labels" && name != "target").unwrap();
        let shape = value.tensor().unwrap().shape().to_vec();
        let mut sizes = vec![("batch", shape[0] as i64)];
        if shape.len() == 2 {
            sizes.push(("sequence", shape[1] as i64));
        }
        sizes
    }

    /// The options of the recorded training.
    pub(crate) fn options(&self) -> TrainingOptions {
        let optimizer = &self.reference["optimizer"];
        let number = |key: &str| optimizer[key].as_f64().unwrap() as f32;
        let steps = match optimizer["kind"].as_str().unwrap() {
            "adamw" => Optimizer::Adam {
                beta1: number("beta1"),
                beta2: number("beta2"),
                epsilon: number("epsilon"),
                weight_decay: number("weight_decay"),
                correct_bias: true,
                form: AdamForm::Torch,
            },
            "sgd" => Optimizer::Sgd {
                momentum: number("momentum"),
                nesterov: false,
                weight_decay: number("weight_decay"),
            },
            other => panic!("no optimizer {other}"),
        };
        let loss = match self.reference["loss"]["kind"].as_str().unwrap() {
            "cross_entropy" => Loss::CrossEntropy {
                label_smoothing: 0.0,
                ignore_index: self.reference["loss"]["ignore_index"].as_i64(),
                class_axis: None,
            },
            "bce_with_logits" => Loss::BceWithLogits,
            other => panic!("no loss {other}"),
        };
        TrainingOptions {
            loss,
            output: self.reference["output"].as_str().map(str::to_string),
            optimizer: steps,
            learning_rate: number("learning_rate"),
            dropout: false,
            ..TrainingOptions::default()
        }
    }

    /// The inputs of a batch; batches repeat.
    pub(crate) fn batch(&self, index: usize) -> Vec<(String, Value)> {
        let count = self.reference["batches"].as_u64().unwrap() as usize;
        let given = self.arrays.iter().filter(|(name, _)| !name.starts_with("gradient."));
        given.map(|(name, array)| (name.clone(), part(array, index % count).into())).collect()
    }
}

/// Element `index` of the first axis.
pub(crate) fn part(array: &Tensor, index: usize) -> Tensor {
    let shape = &array.shape()[1..];
    let bytes = array.bytes().unwrap();
    let size = bytes.len() / array.shape()[0];
    Tensor::from_bytes(array.dtype(), shape, bytes.slice(index * size..(index + 1) * size)).unwrap()
}

/// Inputs as a step takes them.
pub(crate) fn given(batch: &[(String, Value)]) -> Vec<(&str, Value)> {
    batch.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}
