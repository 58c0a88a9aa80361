//! Scaled dot-product attention over heads with arbitrary strides.
//!
//! One engine computes the attention of all operators. A task is a block of queries of one head, or
//! the queries of all heads that share a few keys. What else happens to the scores decides how the
//! block is computed ([`Scores`]):
//!
//! - If nothing reads them, no matrix of scores is in memory (FlashAttention). The keys and values
//!   are streamed in blocks that fit the near caches. For each query the task keeps the running
//!   maximum score, the running sum of weights and the weighted sum of values; see
//!   [`simd::attention`](ort_cpu_vector::simd::attention) for the loops and the references. A few
//!   queries (a decoding step) take another path: the KV cache is read once, a row at a time.
//! - If scores are an output, or weights must be those of the gradient bit for bit, the block's
//!   rows of scores are whole in memory, between two GEMMs. So are they in double precision.
//!
//! In [`Precision::Bf16`](ort_cpu_gemm::Precision), streamed queries, keys, values and weights are
//! rounded to bfloat16, while scores and accumulators are `f32`. Keys and values are converted to
//! pairs block by block. The path for few queries stays in `f32`, because it is bound by reading
//! and not by multiplying.
//!
//! The caller brings the scratch. A result has the same bits for any number of threads, because a
//! query depends only on its own keys, in their order.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![allow(
    clippy::indexing_slicing,
    reason = "rows are checked against their slices before the first one is read, and scratch is cut by the same sizes that it is planned with"
)]

mod attention;
mod blocks;
mod compute;
mod failure;
mod few;
mod gradient;
mod grid;
mod panels;
mod quantized;
mod query_block;
mod rows;
mod score_rows;
mod scores;
mod streaming;
#[cfg(test)]
mod tests;

pub use attention::Attention;
pub use compute::{Compute, StreamBlock, grid_scratch_len, scratch_len};
pub use gradient::{Gradients, training_scratch_len};
pub use grid::GridBias;
pub use ort_core::ops::nn::attention::problem::{ScoreStage, SdpaSizes};
pub use quantized::{CacheCodec, CacheScales};
pub use rows::{Elements, Rows};
pub use scores::{HiddenKeys, KeptScores, ScoreMask, Scores, WeightMap};
