//! Pruning: which elements of a weight become zero.
//!
//! Magnitude and Wanda remove the elements of least score and leave the others as they are;
//! SparseGPT changes the others to make up for the removed ones. All of them work on a matrix with
//! a row for each output of the layer, see [`MatrixView`].

mod matrix;
mod patches;
mod scores;
mod sparsegpt;
mod statistics;

pub(crate) use self::matrix::MatrixView;
pub(crate) use self::patches::{AutoPad, InputView, Patches};
pub use self::scores::Zeros;
pub(crate) use self::scores::{each_least, prune_by_score, removed};
pub(crate) use self::sparsegpt::prune_with_update;
pub(crate) use self::statistics::{GroupStatistics, OutputEnergy};
pub use self::statistics::{PruneCalibration, PruneInput, PruneStatistics};

/// How many elements become zero, and among which others they are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sparsity {
    /// This share of the elements, from 0 to 1. It is exact: the share of the number of elements,
    /// rounded to the nearest integer, and to the even one of two.
    Share {
        /// The share.
        share: f64,
        /// Where it holds.
        scope: PruneScope,
    },
    /// All but some of each group of neighbours along the input channels of an output: 2:4 keeps
    /// the 2 best of each 4.
    Pattern {
        /// The elements that stay.
        kept: usize,
        /// The length of a group.
        of: usize,
    },
}

/// Among which elements those to remove are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PruneScope {
    /// All of the weight.
    #[default]
    Layer,
    /// Those of the same output, so that each output keeps as many.
    Row,
}

/// How the elements to remove are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PruneMethod {
    /// The least magnitudes. It needs no samples.
    #[default]
    Magnitude,
    /// The least products of magnitude and norm of the input channel. See "A Simple and Effective
    /// Pruning Approach for Large Language Models", arXiv:2306.11695.
    Wanda,
    /// The least increase of the layer's error, in blocks of channels; the channels after a removed
    /// element make up for it. See "SparseGPT: Massive Language Models Can Be Accurately Pruned in
    /// One-Shot", arXiv:2301.00774.
    SparseGpt,
}
