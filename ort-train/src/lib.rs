//! Training of ONNX models: training graphs, losses, optimizers, activation checkpointing.
//!
//! A plain inference model becomes one graph: its forward pass, a loss, the backward pass, and an
//! optimizer update for each parameter. A session plans and runs that graph like any other, so the
//! peak memory of a training step is known before the first step runs.
//!
//! ```no_run
//! use ort_core::session::Model;
//! use ort_core::tensor::Tensor;
//! use ort_train::{Loss, Optimizer, Trainer, TrainingOptions};
//!
//! let options = TrainingOptions {
//!     loss: Loss::cross_entropy(),
//!     optimizer: Optimizer::adamw(),
//!     ..TrainingOptions::default()
//! };
//! let mut trainer = Trainer::new(&Model::load("model.onnx")?, options)?;
//! for _ in 0..10 {
//!     let images = Tensor::from_slice(&[8, 64], &[0.0f32; 512])?;
//!     let labels = Tensor::from_slice(&[8], &[0i64; 8])?;
//!     let loss = trainer.train_step(&[("image", images.into()), ("labels", labels.into())])?;
//!     println!("{loss}");
//! }
//! trainer.export("trained.onnx")?;
//! # Ok::<(), ort_core::Error>(())
//! ```

#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![forbid(unsafe_code)]

pub mod api;
mod artifacts;
mod assemble;
mod attention;
mod checkpoint;
mod equal_tensors;
mod forward;
mod graph;
mod kept_outputs;
mod loss;
mod mixed;
mod normalization;
mod optimizer;
mod options;
mod recompute;
mod schedule;
mod stage;
mod state;
mod trainer;
mod values;
mod weights;

pub use artifacts::{ArtifactOptions, Artifacts, generate_artifacts};
pub use graph::{Parameter, TrainingGraph};
pub use loss::Loss;
pub use mixed::{LossScale, MixedPrecision, OperatorPrecision};
pub use optimizer::{AdamForm, Optimizer};
pub use options::TrainingOptions;
pub use recompute::{
    ActivationPattern, PatternOption, PlanRequest, PlanRow, Recompute, RecomputeReport, StashedActivation,
    Strategy, memory_insight, memory_table,
};
pub use schedule::Schedule;
pub use trainer::{StepMemory, Trainer};
pub use weights::{EqualWeights, SharedWeight};
