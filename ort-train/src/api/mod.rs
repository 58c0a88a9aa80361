//! On-device training with ONNX Runtime's API (`onnxruntime.training.api`).
//!
//! A [`Module`] computes losses and gradients, an [`Optimizer`] applies them, and a
//! [`CheckpointState`] holds the parameters.
//!
//! The three share one training run ([`Trainer`](crate::Trainer)), which is planned before it runs.
//! Results match ONNX Runtime: gradients since [`Module::lazy_reset_grad`] are summed, not
//! averaged, and [`Optimizer::step`] keeps them. The differences are:
//!
//! - Files are this runtime's own. Artifacts that ONNX Runtime wrote are rejected and must be
//!   generated again with [`generate_artifacts`](crate::generate_artifacts).
//! - The loss is the output `loss`.
//! - Running statistics of normalizations are updated during training. The checkpoint stores them
//!   next to the parameters, like frozen ones.
//! - [`LinearLRScheduler`] takes its counts in the documented order. ONNX Runtime 1.19 swaps them.
//!
//! ```no_run
//! use ort_core::tensor::Tensor;
//! use ort_train::api::{CheckpointState, Module, ModuleOptions, Optimizer};
//!
//! let state = CheckpointState::load_checkpoint("artifacts/checkpoint")?;
//! let eval = Some("artifacts/eval_model.onnx".as_ref());
//! let mut module = Module::new("artifacts/training_model.onnx", &state, eval, ModuleOptions::default())?;
//! let optimizer = Optimizer::new("artifacts/optimizer_model.onnx", &module)?;
//! for _ in 0..10 {
//!     let images = Tensor::from_slice(&[8, 64], &[0.0f32; 512])?;
//!     let labels = Tensor::from_slice(&[8], &[0i64; 8])?;
//!     println!("{}", module.call(&[images.into(), labels.into()])?);
//!     optimizer.step()?;
//!     module.lazy_reset_grad();
//! }
//! module.export_model_for_inferencing("trained.onnx", &["scores"])?;
//! state.save_checkpoint("artifacts/checkpoint", true)?;
//! # Ok::<(), ort_core::Error>(())
//! ```

mod checkpoint;
mod files;
mod module;
mod optimizer;
mod shared;

pub use checkpoint::{CheckpointState, Parameter};
pub use module::{Module, ModuleOptions};
pub use optimizer::{LinearLRScheduler, Optimizer};
pub use shared::Property;
