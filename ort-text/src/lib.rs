//! Tokenizers and chat templates of model folders, and streams of text up to a stop string.
//!
//! A [`TextCodec`] has the tokenizer and the chat template of an [`ort_generate::ModelFolder`]. A
//! [`TextStream`] decodes the tokens of one answer as they arrive. The crate is apart from
//! `ort-generate`, which runs from tokens to tokens, so that bindings with a tokenizer of their own
//! link none of this.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use ort_generate::{Decoder, DecoderOptions, GenerateOptions, Generator, ModelFolder};
//! use ort_text::TextCodec;
//!
//! let folder = ModelFolder::open("model", None)?;
//! let text = TextCodec::open(&folder)?;
//! let mut generator = Generator::new(Decoder::open(&folder, &DecoderOptions::default())?);
//! let prompt = text.encode("Once upon a time", true)?;
//! let options = GenerateOptions::default();
//! let answers = generator.generate(&[prompt], &options, &mut |_, _| Ok(ControlFlow::Continue(())))?;
//! for answer in answers {
//!     println!("{}", text.decode(&answer.tokens)?);
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

mod chat;
mod codec;
mod stream;

pub use chat::{ChatTemplate, Message};
pub use codec::TextCodec;
pub use stream::TextStream;
