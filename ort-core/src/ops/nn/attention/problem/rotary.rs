//! `RotaryEmbedding` of the standard and of `com.microsoft`.

use super::HeadLayout;
use crate::ir::Attributes;
use crate::{Result, ensure, error};

/// The attributes of a `RotaryEmbedding` node.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Whether the elements of a pair are adjacent.
    pub is_interleaved: bool,
    /// The heads of a tensor of rank 3; 0 if the node has no such count.
    pub heads: usize,
    /// How many leading elements of a head are rotated; 0 if the node does not say.
    pub width: usize,
}

/// Where the positions of tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPositions {
    /// The input at this index holds one per token.
    ByToken(usize),
    /// The input at this index holds the position of the first token of every sequence.
    First(usize),
    /// Tokens are numbered through all batches.
    Numbered,
}

/// The layout of a `RotaryEmbedding` node.
#[derive(Clone, Copy, Debug)]
pub struct RotaryProblem {
    /// The layout of the heads.
    pub heads: HeadLayout,
    /// The rotated pairs of a head.
    pub half: usize,
    /// The rows of the caches.
    pub cache_rows: usize,
    /// The inputs with cosines and sines.
    pub caches: [usize; 2],
    /// The positions.
    pub positions: RotaryPositions,
}

impl Rotary {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A size is negative.
    pub fn new(attrs: &Attributes) -> Result<Rotary> {
        let size = |name: &str| {
            let value = attrs.find_int(name).unwrap_or(0);
            usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
        };
        Ok(Rotary {
            is_interleaved: attrs.find_int("interleaved").unwrap_or(0) != 0,
            heads: size("num_heads")?,
            width: size("rotary_embedding_dim")?,
        })
    }

    /// Reads the shapes of a node of the standard: X, caches and, optionally, positions.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn standard<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<RotaryProblem> {
        let heads = HeadLayout::new(shape(0).unwrap_or_default(), self.heads)?;
        let positions = match shape(3) {
            Some(_) => RotaryPositions::ByToken(3),
            None => RotaryPositions::Numbered,
        };
        let width = if self.width > 0 { self.width } else { heads.size };
        RotaryProblem::new(heads, width, [1, 2], positions, shape)
    }

    /// Reads the shapes of a node of `com.microsoft`: X, positions and caches.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn microsoft<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<RotaryProblem> {
        let cos = shape(2).unwrap_or_default();
        let &[_, half] = cos else {
            return Err(error!(InvalidArgument, "cos_cache has shape {cos:?}, expected rank 2"));
        };
        let width = half.saturating_mul(2);
        let asked = self.width;
        ensure!(asked == 0 || asked == width, InvalidArgument, "caches of {width} for {asked} elements");
        let x = shape(0).unwrap_or_default();
        let heads = match (self.heads, x) {
            // Without `num_heads`, a head is as wide as the caches cover.
            (0, [_, _, hidden]) => hidden.checked_div(width).unwrap_or(0),
            (heads, _) => heads,
        };
        let positions = match shape(1).unwrap_or_default() {
            [] | [_] => RotaryPositions::First(1),
            _ => RotaryPositions::ByToken(1),
        };
        RotaryProblem::new(HeadLayout::new(x, heads)?, width, [2, 3], positions, shape)
    }
}

impl RotaryProblem {
    fn new<'s>(
        heads: HeadLayout,
        width: usize,
        caches: [usize; 2],
        positions: RotaryPositions,
        shape: impl Fn(usize) -> Option<&'s [usize]>,
    ) -> Result<RotaryProblem> {
        let (half, size) = (width / 2, heads.size);
        let count = |index: usize| shape(index).unwrap_or_default().iter().product::<usize>();
        let [cos, sin] = caches.map(|cache| shape(cache).unwrap_or_default());
        let fits = width <= size && width.is_multiple_of(2) && cos == sin && cos.last() == Some(&half);
        ensure!(fits, InvalidArgument, "caches {cos:?} and {sin:?} for {width} of {size} elements");
        let tokens = heads.batch.saturating_mul(heads.rows);
        // [positions, half] with positions, else [batch, positions, half].
        let cache_rows = cos.iter().product::<usize>().checked_div(half).unwrap_or(0);
        let (given, expected) = match positions {
            RotaryPositions::ByToken(ids) => (count(ids), tokens),
            RotaryPositions::First(ids) => (count(ids), 1),
            // Caches without pairs have no rows to count.
            RotaryPositions::Numbered => (if half == 0 { tokens } else { cache_rows }, tokens),
        };
        ensure!(
            given == expected,
            InvalidArgument,
            "got {given} positions, expected one for each of the {tokens} tokens"
        );
        ensure!(cache_rows > 0 || half == 0, InvalidArgument, "the caches are empty");
        Ok(RotaryProblem { heads, half, cache_rows, caches, positions })
    }
}
