//! Decision forests: layout of the nodes in memory, and inference over rows of features.
//!
//! - `test` turns every comparison into `x <= split`.
//! - `layout` packs the nodes into arrays.
//! - `walk` traverses deep trees, several traversals at a time.
//! - `shallow` evaluates trees of few levels without branches.
//! - `run` splits the rows over threads.
//!
//! Leaf weights are summed in `f64` and in the order of the trees, whichever traversal reached
//! them. So the result bits depend neither on the number of threads nor on the other rows of the
//! batch.

mod layout;
mod plan;
mod run;
mod shallow;
mod test;
#[cfg(test)]
mod tests;
mod walk;

use ort_core::Result;

use super::scores::matrix;

pub(super) use layout::{Branch, Forest, Leaves};
pub(super) use run::{Finish, Request};
pub(super) use test::{Comparison, Test};

/// The sizes of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) features: usize,
    pub(super) targets: usize,
}

impl Shape {
    /// Derives the sizes from the shapes of features and scores.
    pub(super) fn new(input: &[usize], output: &[usize]) -> Result<Shape> {
        let (rows, features) = matrix(input)?;
        let targets = output.last().copied().unwrap_or(0);
        Ok(Shape { rows, features, targets })
    }
}

/// How leaf weights combine into one score.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Aggregate {
    Average,
    Sum,
    Min,
    Max,
}

impl Aggregate {
    /// Adds a leaf weight to a score. `seen` says whether the score already has one.
    #[inline(always)]
    fn add(self, score: &mut f64, seen: &mut u8, weight: f64) {
        *score = match self {
            Aggregate::Sum | Aggregate::Average => *score + weight,
            Aggregate::Min if *seen != 0 => score.min(weight),
            Aggregate::Max if *seen != 0 => score.max(weight),
            Aggregate::Min | Aggregate::Max => weight,
        };
        *seen = 1;
    }
}
