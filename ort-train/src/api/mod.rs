//! Training by the calls of ONNX Runtime's on-device training (`onnxruntime.training.api`): a
//! [`Module`] computes losses and gradients, an [`Optimizer`] applies them, a [`CheckpointState`]
//! holds the parameters.
//!
//! The three share one training ([`Trainer`](crate::Trainer)), which is planned before it runs.
//! Numbers are those of ONNX Runtime: gradients of the batches since [`Module::lazy_reset_grad`]
//! are summed, not averaged, and [`Optimizer::step`] leaves them as they are. What differs:
//!
//! - Files are this runtime's own: artifacts that ONNX Runtime wrote are refused, and made anew by
//!   [`generate_artifacts`](crate::generate_artifacts).
//! - The loss is the output `loss`.
//! - Running statistics of normalizations are trained on, and are in the checkpoint beside the
//!   parameters, as frozen ones are.
//! - [`LinearLRScheduler`] takes its counts as documented; ONNX Runtime 1.19 exchanges them.
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

pub use checkpoint::{CheckpointState, Parameter, Property};
pub use module::{Module, ModuleOptions};
pub use optimizer::{LinearLRScheduler, Optimizer};
