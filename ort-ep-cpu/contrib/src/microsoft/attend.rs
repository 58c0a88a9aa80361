//! Scaled dot-product attention for the attention operators of `com.microsoft`: what they make of
//! masks, cache lengths and scores, in the terms of [`ort_cpu_attention`].

use std::ops::Range;

use ort_core::ops::nn::attention::problem::{BroadcastMask, HeadRows, ScoreStage, SdpaSizes};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_attention::{self as attention, Attention, Elements, HiddenKeys, KeptScores, ScoreMask, Scores};
use ort_cpu_gemm::Cpu;

/// Rows of heads in a slice, with the strides of batches, heads and rows.
#[derive(Clone, Copy)]
pub(super) struct HeadSlice<'a> {
    pub(super) values: &'a [f32],
    pub(super) strides: [usize; 3],
    /// Elements per row.
    pub(super) size: usize,
}

impl<'a> HeadSlice<'a> {
    /// Rows of a layout in a tensor.
    pub(super) fn new(
        values: &'a [f32],
        HeadRows { first, strides }: HeadRows,
        size: usize,
    ) -> HeadSlice<'a> {
        HeadSlice { values: values.get(first..).unwrap_or(&[]), strides, size }
    }

    /// A (batch, heads, rows, size) tensor.
    pub(super) fn by_head(values: &'a [f32], [heads, rows, size]: [usize; 3]) -> HeadSlice<'a> {
        HeadSlice { values, strides: [heads * rows * size, rows * size, size], size }
    }

    /// Returns the elements of a row.
    pub(super) fn row(&self, place: [usize; 3]) -> Result<&'a [f32]> {
        let start: usize = place.iter().zip(self.strides).map(|(at, stride)| at * stride).sum();
        let row = self.values.get(start..).and_then(|rest| rest.get(..self.size));
        row.ok_or_else(|| error!(Fail, "row {place:?} is outside its tensor"))
    }

    /// Converts to the rows of [`ort_cpu_attention`].
    pub(super) fn rows(&self) -> attention::Rows<'a> {
        attention::Rows { elements: Elements::Full(self.values), strides: self.strides }
    }
}

/// The keys of one batch: their count, and how many precede the first query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) keys: usize,
    pub(super) before: usize,
}

/// One span per batch.
pub(super) type Spans = SmallVec<[Span; 8]>;

/// The padding mask.
pub(super) struct Padding<'a> {
    pub(super) mask: PaddingMask<'a>,
    /// The value added to the scores of padded keys.
    pub(super) added: f32,
}

/// Which keys are padding.
pub(super) enum PaddingMask<'a> {
    /// Keys outside a range, one range per batch.
    Ranges(Vec<Range<usize>>),
    /// Keys whose element is not positive, with the strides of batches and queries.
    Elements(&'a [i32], [usize; 2]),
}

impl Padding<'_> {
    /// Whether the mask differs from query to query.
    fn is_by_query(&self) -> bool {
        matches!(self.mask, PaddingMask::Elements(_, [_, queries]) if queries != 0)
    }

    /// Adds the mask to a query's scores, for the keys from `first` on.
    fn add(&self, batch: usize, query: usize, first: usize, scores: &mut [f32]) {
        match &self.mask {
            PaddingMask::Ranges(ranges) => {
                let Some(range) = ranges.get(batch) else { return };
                for (key, score) in scores.iter_mut().enumerate() {
                    if !range.contains(&(first + key)) {
                        *score += self.added;
                    }
                }
            }
            PaddingMask::Elements(elements, [batches, queries]) => {
                let row = elements.get(batch * batches + query * queries + first..).unwrap_or(&[]);
                for (score, element) in scores.iter_mut().zip(row) {
                    if *element <= 0 {
                        *score += self.added;
                    }
                }
            }
        }
    }
}

/// A tensor added to the scores, broadcast over batches and heads.
pub(super) struct Bias<'a> {
    values: &'a [f32],
    strides: [usize; 3],
    /// For each batch the column of its first key; empty if that is 0 for all.
    bases: SmallVec<[usize; 8]>,
}

impl<'a> Bias<'a> {
    /// Wraps a tensor of `shape` (batch or 1, heads or 1, queries, at least the keys).
    pub(super) fn new(values: &'a [f32], shape: &[usize], sizes: &SdpaSizes) -> Result<Bias<'a>> {
        let BroadcastMask { strides, .. } = BroadcastMask::bias(shape, sizes)?;
        Ok(Bias { values, strides, bases: SmallVec::new() })
    }

    /// Returns the same tensor for keys that start at a column of their own in each batch.
    pub(super) fn starting_at(self, bases: SmallVec<[usize; 8]>) -> Bias<'a> {
        Bias { bases, ..self }
    }

    fn add(&self, [batch, head, query]: [usize; 3], first: usize, scores: &mut [f32]) {
        let [batches, heads, queries] = self.strides;
        let first = first + self.bases.get(batch).copied().unwrap_or(0);
        let row = self.values.get(batch * batches + head * heads + query * queries + first..);
        for (score, bias) in scores.iter_mut().zip(row.unwrap_or(&[])) {
            *score += bias;
        }
    }
}

/// Bias and padding mask together.
#[derive(Default)]
pub(super) struct Additions<'a> {
    pub(super) padding: Option<Padding<'a>>,
    pub(super) bias: Option<Bias<'a>>,
}

impl ScoreMask<f32> for Additions<'_> {
    fn is_by_query(&self) -> bool {
        self.bias.is_some() || self.padding.as_ref().is_some_and(Padding::is_by_query)
    }

    fn apply(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [f32]) {
        if let Some(bias) = &self.bias {
            bias.add(place, keys.start, scores);
        }
        if let Some(padding) = &self.padding {
            padding.add(place[0], place[2], keys.start, scores);
        }
    }
}

/// Padding below this is so low that hidden keys weigh in beside padded ones.
const AS_LOW_AS_HIDDEN: f32 = -1e30;

/// Returns whether keys that a causal mask hides stay in the softmax, with `f32::MIN` added to
/// their scores, given the `padding` added to padded keys. Only low padding, and scores that are
/// kept, tell the difference.
pub(super) fn is_lowered(causal: bool, padding: f32, is_kept: bool) -> bool {
    is_kept || (causal && padding < AS_LOW_AS_HIDDEN)
}

/// One attention to compute.
pub(super) struct Problem<'a> {
    /// `keys` is the longest key sequence of a batch, and the columns of scores that are kept.
    pub(super) sizes: SdpaSizes,
    pub(super) q: HeadSlice<'a>,
    pub(super) k: attention::Rows<'a>,
    pub(super) v: attention::Rows<'a>,
    /// One per batch.
    pub(super) spans: Spans,
    pub(super) scale: f32,
    /// If positive, scores become `softcap * tanh(score / softcap)`.
    pub(super) softcap: f32,
    pub(super) causal: bool,
    /// Whether the last query sees all keys, as in ONNX Runtime. That differs from a causal mask
    /// only if more keys follow it.
    pub(super) last_sees_all: bool,
    /// Sliding window: the maximum number of keys that a query sees, its own included.
    pub(super) window: Option<usize>,
    pub(super) hidden: HiddenKeys,
    pub(super) additions: Additions<'a>,
    /// For each head, the logarithm of a term added to the softmax's sum (attention sink).
    pub(super) sinks: Option<&'a [f32]>,
    /// The stage of the scores that are kept.
    pub(super) stage: ScoreStage,
}

impl Problem<'_> {
    /// Computes the attention. `result` is (batch, queries, heads, value size), `scores` is (batch,
    /// heads, queries, keys).
    pub(super) fn run(
        &self,
        cpu: Cpu,
        result: &mut [f32],
        scores: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) -> Result<()> {
        let SdpaSizes { batch, heads, queries, value_size, .. } = self.sizes;
        ensure!(self.spans.len() == batch, Fail, "there are {} spans", self.spans.len());
        let has_mask = self.additions.bias.is_some() || self.additions.padding.is_some();
        let attention = Attention {
            sizes: self.sizes,
            queries: Some(self.q.rows()),
            keys: self.k,
            values: self.v,
            scale: f64::from(self.scale),
            softcap: self.softcap,
            visible: &|[batch, query]| self.visible(batch, query),
            mask: has_mask.then_some(&self.additions as &dyn ScoreMask<f32>),
            sinks: self.sinks,
            hidden: self.hidden,
        };
        let scores = match scores {
            // Keys that the softmax excludes have scores of 0, as in ONNX Runtime.
            Some(values) => Scores::Kept(KeptScores { stage: self.stage, values, excluded: 0.0 }),
            None => Scores::Unread,
        };
        let row = heads * value_size;
        attention.run(cpu, (result, [queries * row, value_size, row]), scores, scratch)
    }

    /// Returns the keys that a query may see by its position.
    fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let Some(Span { keys, before }) = self.spans.get(batch).copied() else { return 0..0 };
        let keys = keys.min(self.sizes.keys);
        if !self.causal || (self.last_sees_all && query + 1 == self.sizes.queries) {
            return 0..keys;
        }
        let end = before + query + 1;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        start.min(keys)..end.min(keys)
    }
}
