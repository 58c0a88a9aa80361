//! Scaled dot-product attention as the GPU providers compute it.
//!
//! Each attention operator becomes an [`AttentionPlan`]: rows to place in caches, then one
//! attention over heads with any strides. A provider renders and launches these two.

pub mod group_query;
mod head_tensor;
pub mod multi_head;
mod placing;
pub mod rotary;
pub mod standard;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ops::nn::attention::problem::{BroadcastMask, Causal, PaddingMask, ScoreStage, SdpaSizes};

pub use head_tensor::{HeadTensor, KeyLengths};
pub use placing::{Placing, Positions, Rotation};

use crate::operand::{OpCx, Operand};

/// A mask added to the scores by broadcasting. A boolean mask hides keys where it is false.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The tensor.
    pub operand: &'a Operand,
    /// Its strides and keys.
    pub layout: BroadcastMask,
}

/// Padding keys, to whose scores a number is added.
#[derive(Clone, Copy, Debug)]
pub struct Padding<'a> {
    /// The tensor.
    pub operand: &'a Operand,
    /// Which keys are padding.
    pub mask: PaddingMask,
    /// The number.
    pub added: f32,
}

/// Attention sinks: additional scores in the softmax, without a value.
#[derive(Clone, Copy, Debug)]
pub enum Sinks<'a> {
    /// No sink.
    None,
    /// A score of zero.
    Zero,
    /// A score for each head.
    Each(&'a Operand),
}

/// An output that receives the scores.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// The output.
    pub operand: &'a Operand,
    /// The stage at which scores are written.
    pub stage: ScoreStage,
}

/// One scaled dot-product attention.
#[derive(Clone, Debug)]
pub struct Sdpa<'a> {
    /// The sizes.
    pub sizes: SdpaSizes,
    /// The queries.
    pub q: HeadTensor,
    /// The keys.
    pub k: HeadTensor,
    /// The values.
    pub v: HeadTensor,
    /// The result.
    pub y: HeadTensor,
    /// A bias for the queries of all heads.
    pub q_bias: Option<&'a Operand>,
    /// The factor of the scores.
    pub scale: f32,
    /// If above 0, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The causal mask.
    pub causal: Causal,
    /// The sliding window: how many keys before and after its own position a query sees; negative
    /// for no limit.
    pub windows: [i64; 2],
    /// The valid keys.
    pub lengths: KeyLengths<'a>,
    /// The additive or boolean mask.
    pub mask: Option<Mask<'a>>,
    /// The padding mask.
    pub padding: Option<Padding<'a>>,
    /// The attention sinks.
    pub sinks: Sinks<'a>,
    /// Whether a query whose scores are all -inf yields NaN rather than 0.
    pub hidden_is_nan: bool,
    /// An output for the scores.
    pub scores: Option<Scores<'a>>,
}

/// What an attention node computes for the shapes of a run.
#[derive(Clone, Debug)]
pub struct AttentionPlan<'a> {
    /// The rows to place, in any order.
    pub placings: Vec<Placing<'a>>,
    /// The rows to convert to another type once those are placed.
    pub conversions: Vec<Placing<'a>>,
    /// The attention, which reads what was placed and converted.
    pub sdpa: Sdpa<'a>,
    /// The bytes of the workspace that placed rows take. What the attention needs follows them.
    pub taken: usize,
}

/// What the workspace of an attention node depends on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionScratch {
    /// The sizes with the most keys that a run can have.
    pub sizes: SdpaSizes,
    /// The types of queries and of keys.
    pub types: [DType; 2],
    /// Whether scores are output.
    pub has_scores: bool,
    /// The bytes that placed rows take.
    pub taken: usize,
}

/// Reads the optional `attention_bias` of `com.microsoft`.
fn bias_of<'a, L>(cx: &'a OpCx<'_, L>, index: usize, sizes: &SdpaSizes) -> Result<Option<Mask<'a>>> {
    let Some(operand) = cx.find_input(index) else { return Ok(None) };
    Ok(Some(Mask { operand, layout: BroadcastMask::bias(&operand.shape, sizes)? }))
}
