//! `Attention` of the standard.

use super::{Causal, HeadLayout, SdpaSizes};
use crate::ir::Attributes;
use crate::ops::nn::HIDDEN_IS_NAN;
use crate::{Result, ensure, error};

/// The stage at which scores are output, in the order of `qk_matmul_output_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreStage {
    /// The scaled scores.
    Scaled,
    /// After the softcap.
    Capped,
    /// After mask and bias.
    Masked,
    /// After the softmax.
    Weights,
}

/// The attributes of an `Attention` node.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The heads of queries in a tensor of rank 3; 0 if the node has no such count.
    pub query_heads: usize,
    /// The heads of keys and values in tensors of rank 3; 0 if the node has no such count.
    pub key_heads: usize,
    /// The scale of the scores, if given.
    pub scale: Option<f32>,
    /// If above 0, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The causal mask.
    pub causal: Causal,
    /// How many keys before and after its own position a query sees; -1 for no limit.
    pub windows: [i64; 2],
    /// The stage of the scores that the node may output.
    pub stage: ScoreStage,
    /// Whether a query whose scores are all -inf yields NaN rather than 0.
    pub hidden_is_nan: bool,
}

/// Reads a head count that tensors of rank 4 need not have, because their shape has the heads.
pub(super) fn count_of_heads(attrs: &Attributes, name: &str) -> Result<usize> {
    let count = attrs.find_int(name).unwrap_or(0);
    usize::try_from(count).map_err(|_| error!(InvalidGraph, "{name} is {count}, expected 0 or more"))
}

impl Attention {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A value is out of range.
    pub fn new(attrs: &Attributes) -> Result<Attention> {
        let windows = [attrs.int("left_window_size")?, attrs.int("right_window_size")?];
        ensure!(
            windows.iter().all(|size| *size >= -1),
            InvalidGraph,
            "window sizes are {windows:?}, expected -1 or more"
        );
        Ok(Attention {
            query_heads: count_of_heads(attrs, "q_num_heads")?,
            key_heads: count_of_heads(attrs, "kv_num_heads")?,
            scale: attrs.find_float("scale"),
            softcap: attrs.float("softcap")?,
            causal: if attrs.flag("is_causal")? { Causal::Yes } else { Causal::No },
            windows,
            stage: match attrs.int("qk_matmul_output_mode")? {
                0 => ScoreStage::Scaled,
                1 => ScoreStage::Capped,
                2 => ScoreStage::Masked,
                3 => ScoreStage::Weights,
                mode => return Err(error!(InvalidGraph, "qk_matmul_output_mode is {mode}, expected 0 to 3")),
            },
            hidden_is_nan: attrs.find_int(HIDDEN_IS_NAN) == Some(1),
        })
    }

    /// Reads the shapes of the inputs, by position.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn problem<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<AttentionProblem> {
        let layout = |index: usize, heads| HeadLayout::new(shape(index).unwrap_or_default(), heads);
        let (q, k, v) =
            (layout(0, self.query_heads)?, layout(1, self.key_heads)?, layout(2, self.key_heads)?);
        // A past of other heads would be read with wrong strides.
        let past = match shape(4) {
            None => 0,
            Some(&[batch, heads, rows, size]) if [batch, heads, size] == [k.batch, k.heads, k.size] => rows,
            Some(shape) => {
                let [batch, heads, size] = [k.batch, k.heads, k.size];
                return Err(error!(
                    InvalidArgument,
                    "past_key has shape {shape:?}, expected [{batch}, {heads}, rows of the past, {size}]"
                ));
            }
        };
        if let Some(shape) = shape(5) {
            let expected = [v.batch, v.heads, past, v.size];
            ensure!(
                *shape == expected,
                InvalidArgument,
                "past_value has shape {shape:?}, expected {expected:?}"
            );
        }
        let fits = q.batch == k.batch
            && k.batch == v.batch
            && q.size == k.size
            && k.rows == v.rows
            && k.heads == v.heads
            // Without key heads there is no remainder, so no query heads fit.
            && q.heads.checked_rem(k.heads) == Some(0);
        ensure!(fits, InvalidArgument, "queries, keys and values do not match");
        Ok(AttentionProblem { q, k, v, past })
    }
}

/// The layouts of an `Attention` node.
#[derive(Clone, Copy, Debug)]
pub struct AttentionProblem {
    /// The queries.
    pub q: HeadLayout,
    /// The new keys.
    pub k: HeadLayout,
    /// The new values.
    pub v: HeadLayout,
    /// The rows of the past.
    pub past: usize,
}

impl AttentionProblem {
    /// The sizes of the attention, over past and new keys.
    pub fn sizes(&self) -> SdpaSizes {
        SdpaSizes {
            batch: self.q.batch,
            heads: self.q.heads,
            key_heads: self.k.heads,
            queries: self.q.rows,
            keys: self.past.saturating_add(self.k.rows),
            size: self.q.size,
            value_size: self.v.size,
        }
    }

    /// Checks that `nonpad_kv_seqlen` has a value for each batch.
    ///
    /// # Errors
    ///
    /// It has another count.
    pub fn check_lengths(&self, count: usize) -> Result<()> {
        let enough = count == self.q.batch;
        ensure!(enough, InvalidArgument, "nonpad_kv_seqlen does not have a value for each batch");
        Ok(())
    }
}
