//! `GridAttention`.

use super::attention::count_of_heads;
use super::{Attention, AttentionProblem, Causal, ScoreStage};
use crate::ir::Attributes;
use crate::ops::nn::HIDDEN_IS_NAN;
use crate::{Result, ensure};

/// The attributes of a `GridAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct GridAttention(Attention);

/// The layouts of a `GridAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct GridProblem {
    /// Queries, keys and values. There is no past.
    pub attention: AttentionProblem,
    /// The rows and columns of the grid of keys.
    pub grid: [usize; 2],
}

impl GridAttention {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A value is out of range.
    pub fn new(attrs: &Attributes) -> Result<GridAttention> {
        Ok(GridAttention(Attention {
            query_heads: count_of_heads(attrs, "q_num_heads")?,
            key_heads: count_of_heads(attrs, "kv_num_heads")?,
            scale: attrs.find_float("scale"),
            softcap: 0.0,
            causal: Causal::No,
            windows: [-1; 2],
            stage: ScoreStage::Scaled,
            hidden_is_nan: attrs.find_int(HIDDEN_IS_NAN) == Some(1),
        }))
    }

    /// The scale of the scores, if given.
    pub fn scale(&self) -> Option<f32> {
        self.0.scale
    }

    /// Whether a query whose scores are all -inf yields NaN rather than 0.
    pub fn hidden_is_nan(&self) -> bool {
        self.0.hidden_is_nan
    }

    /// Reads the shapes of the inputs, by position.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn problem<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<GridProblem> {
        let attention = self.0.problem(|index| if index < 3 { shape(index) } else { None })?;
        let sizes = attention.sizes();
        let expected = [sizes.batch, sizes.heads, sizes.queries];
        let mut grid = [0; 2];
        for (index, size) in (3..).zip(&mut grid) {
            let shape = shape(index).unwrap_or_default();
            ensure!(
                shape.len() == 4 && shape.starts_with(&expected),
                InvalidArgument,
                "a bias has shape {shape:?}, expected {expected:?} and a size of the grid"
            );
            *size = shape.last().copied().unwrap_or(0);
        }
        ensure!(
            grid[0].checked_mul(grid[1]) == Some(sizes.keys),
            InvalidArgument,
            "there are {} keys, expected those of a grid of {} x {}",
            sizes.keys,
            grid[0],
            grid[1]
        );
        Ok(GridProblem { attention, grid })
    }
}
