//! Decision trees: how a model's nodes become arrays, and how rows of features are led through
//! them.
//!
//! `test` turns every comparison into `x <= split`, `layout` puts the nodes into arrays, `walk`
//! leads rows and trees through them several at a time, `shallow` evaluates trees of few levels
//! without following a branch, and `run` shares rows out over threads.
//!
//! The leaves of a row are summed in doubles and in the order of the trees, whatever way was taken
//! through them, so that the bits depend neither on the number of threads nor on the rows that a
//! row comes with.

mod layout;
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

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) features: usize,
    pub(super) targets: usize,
}

impl Shape {
    /// The sizes by the shapes of features and scores.
    pub(super) fn new(input: &[usize], output: &[usize]) -> Result<Shape> {
        let (rows, features) = matrix(input)?;
        let targets = output.last().copied().unwrap_or(0);
        Ok(Shape { rows, features, targets })
    }
}

/// How the weights of leaves become one score.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Aggregate {
    Average,
    Sum,
    Min,
    Max,
}

impl Aggregate {
    /// Takes the weight of a leaf into a score; `seen` is whether there was one before.
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
