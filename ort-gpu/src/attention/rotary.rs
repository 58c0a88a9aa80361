//! `RotaryEmbedding` of the standard and of `com.microsoft`. A position out of range reads the
//! nearest row of the caches.

use ort_core::Result;
use ort_core::ops::nn::attention::problem::{HeadLayout, Rotary, RotaryPositions, RotaryProblem};

use super::{Positions, Rotation};
use crate::operand::OpCx;

/// The rotation of all rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct RotaryPlan<'a> {
    /// The layout of the heads.
    pub heads: HeadLayout,
    /// The rotation of a row.
    pub rotation: Rotation<'a>,
}

/// Reads a node of the standard; `None` if its tensor is empty.
///
/// # Errors
///
/// Shapes do not fit together.
pub fn standard<'a, L>(cx: &'a OpCx<'_, L>) -> Result<Option<RotaryPlan<'a>>> {
    plan(cx, |node| node.standard(|index| cx.find_shape(index)))
}

/// Reads a node of `com.microsoft`; `None` if its tensor is empty.
///
/// # Errors
///
/// Shapes do not fit together.
pub fn microsoft<'a, L>(cx: &'a OpCx<'_, L>) -> Result<Option<RotaryPlan<'a>>> {
    plan(cx, |node| node.microsoft(|index| cx.find_shape(index)))
}

fn plan<'a, L>(
    cx: &'a OpCx<'_, L>,
    read: impl FnOnce(&Rotary) -> Result<RotaryProblem>,
) -> Result<Option<RotaryPlan<'a>>> {
    if cx.input(0)?.count() == 0 {
        return Ok(None);
    }
    let node = Rotary::new(cx.attrs)?;
    let RotaryProblem { heads, half, cache_rows, caches: [cos, sin], positions } = read(&node)?;
    let rotation = Rotation {
        cos: cx.input(cos)?,
        sin: cx.input(sin)?,
        half,
        cache_rows,
        positions: match positions {
            RotaryPositions::ByToken(ids) => Positions::ByToken(cx.input(ids)?),
            RotaryPositions::First(ids) => Positions::First(cx.input(ids)?),
            RotaryPositions::Numbered => Positions::Numbered,
        },
        is_interleaved: node.is_interleaved,
    };
    Ok(Some(RotaryPlan { heads, rotation }))
}
