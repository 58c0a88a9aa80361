//! What changes the scores before the softmax, and what else reads scores and weights.

use std::ops::Range;

use ort_core::ops::nn::attention::problem::ScoreStage;
use ort_cpu_matmul::real::Real;

use super::grid::GridBias;

/// A change of the scores before the softmax, such as a mask or a bias.
pub trait ScoreMask<T: Real>: Sync {
    /// Whether it differs between the queries of one head.
    fn is_by_query(&self) -> bool;

    /// Changes the scores of a range of keys, for a (batch, head, query). A score of -inf hides its
    /// key.
    fn apply(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [T]);

    /// Writes what is added to the scores of a range of keys, if they are streamed.
    fn write(&self, place: [usize; 3], keys: Range<usize>, added: &mut [T]) {
        added.fill(T::ZERO);
        self.apply(place, keys, added);
    }

    /// Returns the bias that this is, if it is one over a grid of keys. Panels of queries then add
    /// it without writing it out for each key.
    fn grid(&self) -> Option<GridBias<'_, T>> {
        None
    }

    /// Clears the gradients of scores that it replaced. A mask that only adds replaces none.
    fn clear_gradients(&self, _place: [usize; 3], _gradients: &mut [T]) {}
}

impl<T: Real> ScoreMask<T> for GridBias<'_, T> {
    fn is_by_query(&self) -> bool {
        true
    }

    fn apply(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [T]) {
        self.add(place, keys, scores);
    }

    fn grid(&self) -> Option<GridBias<'_, T>> {
        Some(*self)
    }
}

/// What becomes of keys that a query does not see by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HiddenKeys {
    /// They are not in the softmax. A query whose scores are all -inf yields 0.
    Excluded,
    /// They are not in the softmax. A query whose scores are all -inf yields NaN, as the formula of
    /// the softmax does.
    ExcludedOrNan,
    /// `f32::MIN` is added to the scores of keys after the visible ones. They weigh in beside
    /// scores that are as low, as in ONNX Runtime.
    Lowered,
}

/// Changes a row of weights of a (batch, head, query) after the softmax.
pub type WeightMap<'s, T> = dyn Fn([usize; 3], &mut [T]) + Sync + 's;

/// What else happens to the scores.
pub enum Scores<'s, T> {
    /// Nothing: they need not be in memory.
    Unread,
    /// An output keeps them.
    Kept(KeptScores<'s, T>),
    /// The weights are computed in the order in which [`Attention::gradients`] computes them again,
    /// and may then change (dropout).
    ///
    /// [`Attention::gradients`]: crate::Attention::gradients
    Trained(Option<&'s WeightMap<'s, T>>),
}

/// An output that keeps the scores.
pub struct KeptScores<'s, T> {
    /// The stage at which they are kept.
    pub stage: ScoreStage,
    /// (batch, heads, queries, keys).
    pub values: &'s mut [T],
    /// The value at [`ScoreStage::Masked`] of keys that the softmax excludes.
    pub excluded: T,
}

/// What happens to a row of scores on its way to weights. The rows that keep them are apart,
/// because each task writes its own.
#[derive(Clone, Copy)]
pub(crate) enum ScoreSink<'s, T> {
    /// Nothing.
    None,
    /// They are kept at a stage.
    Keep { stage: ScoreStage, excluded: T },
    /// The weights change.
    Map(&'s WeightMap<'s, T>),
}

impl<'s, T: Real> Scores<'s, T> {
    /// Splits into what tasks share and the output that they divide.
    pub(crate) fn split(self) -> (ScoreUse<'s, T>, &'s mut [T]) {
        match self {
            Scores::Unread => (ScoreUse { sink: ScoreSink::None, is_trained: false }, &mut []),
            Scores::Kept(KeptScores { stage, values, excluded }) => {
                (ScoreUse { sink: ScoreSink::Keep { stage, excluded }, is_trained: false }, values)
            }
            Scores::Trained(map) => {
                let sink = map.map_or(ScoreSink::None, ScoreSink::Map);
                (ScoreUse { sink, is_trained: true }, &mut [])
            }
        }
    }
}

/// The part of [`Scores`] that all tasks share.
#[derive(Clone, Copy)]
pub(crate) struct ScoreUse<'s, T> {
    pub(crate) sink: ScoreSink<'s, T>,
    /// Whether blocks are those of the gradient.
    pub(crate) is_trained: bool,
}

impl<T: Real> ScoreSink<'_, T> {
    /// Whether scores are kept.
    pub(crate) fn keeps(&self) -> bool {
        matches!(self, ScoreSink::Keep { .. })
    }

    /// Whether excluded keys need scores too, because they are kept before the mask.
    pub(crate) fn needs_all(&self) -> bool {
        matches!(self, ScoreSink::Keep { stage: ScoreStage::Scaled | ScoreStage::Capped, .. })
    }

    /// Takes a row of scores at a stage, of which `counted` are not excluded. `kept` is the row of
    /// the output that keeps them.
    pub(crate) fn take(
        &self,
        at: ScoreStage,
        place: [usize; 3],
        (scores, counted): (&mut [T], Range<usize>),
        kept: &mut [T],
    ) {
        match *self {
            ScoreSink::Keep { stage, excluded } if stage == at => {
                let excluded = if at == ScoreStage::Masked { excluded } else { T::ZERO };
                let counted = counted.start.min(kept.len())..counted.end.min(kept.len());
                kept[..counted.start].fill(excluded);
                kept[counted.end..].fill(excluded);
                kept[counted.clone()].copy_from_slice(&scores[counted]);
            }
            ScoreSink::Map(map) if at == ScoreStage::Weights => map(place, scores),
            _ => {}
        }
    }
}
