//! Text generation with decoder models, within a memory budget that is known before loading.
//!
//! A [`ModelFolder`] is what onnxruntime-genai, optimum and Transformers.js write. A [`Decoder`]
//! runs the model over KV caches and knows the bytes of a context before it allocates them. A
//! [`Scheduler`] runs requests on it that join and leave one batch; a [`Generator`] answers prompts
//! with it. Prompts and answers are tokens: the crate `ort-text` has tokenizers and chat templates.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use ort_generate::{Decoder, DecoderOptions, GenerateOptions, Generator, ModelFolder};
//!
//! let folder = ModelFolder::open("model", None)?;
//! let options = DecoderOptions { memory_limit: Some(2 << 30), ..DecoderOptions::default() };
//! let mut generator = Generator::new(Decoder::open(&folder, &options)?);
//! let prompt = vec![1, 529, 310];
//! let options = GenerateOptions::default();
//! let answers = generator.generate(&[prompt], &options, &mut |_, _| Ok(ControlFlow::Continue(())))?;
//! for answer in answers {
//!     println!("{:?}", answer.tokens);
//! }
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

mod batch;
mod decoder;
mod folder;
mod generate;
mod last_row;
mod layout;
mod memory;
mod request;
mod sampling;
mod scheduler;

pub use decoder::{Decoder, DecoderOptions};
pub use folder::{FolderFormat, ModelFolder};
pub use generate::{Generated, Generator, MakeConstraint, OnToken};
pub use memory::{ContextMemory, ContextPlan};
pub use request::{Constraint, EndReason, Event, GenerateOptions, RequestId};
pub use sampling::{Sampler, Sampling};
pub use scheduler::{Scheduler, SchedulerOptions, Timing};
