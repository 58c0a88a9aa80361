//! Placement of new rows in a cache, after those of a past.

use ort_core::ops::nn::attention::problem::HeadRows;

use super::head_tensor::{HeadTensor, KeyLengths};
use crate::operand::Operand;

/// How the position of a new row is determined.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// It is the row's index among all rows.
    ByPlace,
    /// A tensor holds it per token.
    ByToken(&'a Operand),
    /// A tensor holds the position of the first row.
    First(&'a Operand),
    /// Tokens are numbered through all batches.
    Numbered,
}

/// Rotary position embedding: rotates pairs of elements by the angles of a row's position.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// The cosines: one row for each position, one value for each pair.
    pub cos: &'a Operand,
    /// The sines.
    pub sin: &'a Operand,
    /// The rotated pairs of a row.
    pub half: usize,
    /// The rows of the caches.
    pub cache_rows: usize,
    /// The positions of new rows.
    pub positions: Positions<'a>,
    /// Whether the elements of a pair are adjacent.
    pub is_interleaved: bool,
}

/// A copy of new rows of heads after those of a past.
#[derive(Clone, Debug)]
pub struct Placing<'a> {
    /// The batches, heads, new rows, and the elements of a row.
    pub sizes: [usize; 4],
    /// The new rows.
    pub fresh: HeadTensor,
    /// The target.
    pub to: HeadTensor,
    /// The rows of the target per head.
    pub capacity: usize,
    /// A bias for the new rows of all heads, and its first element.
    pub bias: Option<(&'a Operand, usize)>,
    /// The rotary embedding.
    pub rotation: Option<Rotation<'a>>,
    /// The past rows, (batch, heads, rows, size) of the target's type. `None` if there are none, or
    /// if the target holds them already.
    pub past: Option<&'a Operand>,
    /// How many rows precede the new ones.
    pub lengths: KeyLengths<'a>,
    /// Whether new rows go to the front, whatever precedes them elsewhere.
    pub at_front: bool,
    /// Whether the target keeps its other rows, so that only new rows are written.
    pub keeps: bool,
}

impl<'a> Placing<'a> {
    /// Copies the new rows alone, unchanged, to the front of `to`, which becomes a tensor of shape
    /// (batch, heads, `capacity`, size).
    pub fn new(
        [batch, heads, rows, size]: [usize; 4],
        fresh: HeadTensor,
        to: &Operand,
        capacity: usize,
    ) -> Placing<'a> {
        let to = to.with_shape(&[batch, heads, capacity, size]);
        Placing {
            sizes: [batch, heads, rows, size],
            fresh,
            to: HeadTensor::new(&to, HeadRows::by_head([heads, capacity, size])),
            capacity,
            bias: None,
            rotation: None,
            past: None,
            lengths: KeyLengths::All { before: 0 },
            at_front: false,
            keeps: false,
        }
    }

    /// The rows per head that are written.
    pub fn written(&self) -> usize {
        let [_, _, fresh, _] = self.sizes;
        // A target that keeps nothing is written in full: its old content is undefined.
        if self.keeps { fresh } else { self.capacity }
    }

    /// The row counts per batch and what is added to them, if the new rows are the last ones.
    pub fn ends(&self) -> Option<(&'a Operand, usize)> {
        match self.lengths {
            KeyLengths::AtEnd { lengths, more } => Some((lengths, more)),
            _ => None,
        }
    }
}
