//! The layout of attention heads in a tensor.

use crate::{Result, error};

/// The rows of heads in a tensor, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// The offset of the first element.
    pub first: usize,
    /// The strides of batch, head and row.
    pub strides: [usize; 3],
}

impl HeadRows {
    /// Head-major rows: (batch, heads, rows, size).
    pub fn by_head([heads, rows, size]: [usize; 3]) -> HeadRows {
        let head = rows.saturating_mul(size);
        HeadRows { first: 0, strides: [heads.saturating_mul(head), head, size] }
    }

    /// Token-major rows: (batch, rows, heads, size).
    pub fn by_token(sizes: [usize; 3]) -> HeadRows {
        HeadRows::packed(sizes, 0, 1)
    }

    /// Token-major rows whose heads pack `parts` tensors, of which this is number `part`: (batch,
    /// rows, heads, parts, size).
    pub fn packed([heads, rows, size]: [usize; 3], part: usize, parts: usize) -> HeadRows {
        let head = parts.saturating_mul(size);
        let row = heads.saturating_mul(head);
        HeadRows { first: part.saturating_mul(size), strides: [rows.saturating_mul(row), head, row] }
    }
}

/// The layout of queries, keys or values: token-major (rank 3), or head-major (rank 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// The batches.
    pub batch: usize,
    /// The heads.
    pub heads: usize,
    /// The rows of a head.
    pub rows: usize,
    /// The elements of a row.
    pub size: usize,
    /// Whether it is token-major: (batch, rows, heads * size).
    pub is_token_major: bool,
}

impl HeadLayout {
    /// Reads a shape: (batch, heads, rows, size), or (batch, rows, heads * size) with `heads` from
    /// an attribute.
    ///
    /// # Errors
    ///
    /// Another rank, or a width that does not divide into the heads.
    pub fn new(shape: &[usize], heads: usize) -> Result<HeadLayout> {
        match *shape {
            [batch, heads, rows, size] => Ok(HeadLayout { batch, heads, rows, size, is_token_major: false }),
            [batch, rows, width] if heads > 0 && width.is_multiple_of(heads) => {
                Ok(HeadLayout { batch, heads, rows, size: width / heads, is_token_major: true })
            }
            _ => Err(error!(InvalidArgument, "shape {shape:?} does not split into {heads} heads")),
        }
    }

    /// The sizes as (batch, heads, rows, size).
    pub fn sizes(&self) -> [usize; 4] {
        [self.batch, self.heads, self.rows, self.size]
    }

    /// The rows of a tensor of this layout, with rows of `size` elements.
    pub fn rows_of(&self, size: usize) -> HeadRows {
        let sizes = [self.heads, self.rows, size];
        if self.is_token_major { HeadRows::by_token(sizes) } else { HeadRows::by_head(sizes) }
    }
}
