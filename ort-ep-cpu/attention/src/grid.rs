//! A bias over keys that form a grid, such as decomposed relative positions (Li et al., *MViTv2*,
//! arXiv 2112.01526): it is never written out for each query and key.

use std::ops::Range;

use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_core::{Result, ensure};
use ort_cpu_matmul::real::Real;

/// The score of key `row * columns + column` gets the bias of that row plus that of that column.
#[derive(Debug, Clone, Copy)]
pub struct GridBias<'a, T = f32> {
    /// (batch, heads, queries, grid rows).
    rows: &'a [T],
    /// (batch, heads, queries, grid columns).
    columns: &'a [T],
    /// The rows and columns of the grid.
    grid: [usize; 2],
    /// Heads, and queries of a head.
    heads: usize,
    queries: usize,
}

impl<'a, T: Real> GridBias<'a, T> {
    /// Returns the bias of an attention.
    ///
    /// # Errors
    ///
    /// The keys do not form the grid, or there is no bias for each query.
    pub fn new(
        sizes: &SdpaSizes,
        grid: [usize; 2],
        [rows, columns]: [&'a [T]; 2],
    ) -> Result<GridBias<'a, T>> {
        let SdpaSizes { batch, heads, queries, keys, .. } = *sizes;
        let [height, width] = grid;
        ensure!(
            height.checked_mul(width) == Some(keys),
            InvalidArgument,
            "a grid of {height} x {width} does not hold {keys} keys"
        );
        let count = batch * heads * queries;
        ensure!(
            [rows.len(), columns.len()] == grid.map(|size| count * size),
            InvalidArgument,
            "the biases of {} rows and {} columns are not those of {count} queries on a grid of {height} x {width}",
            rows.len(),
            columns.len()
        );
        Ok(GridBias { rows, columns, grid, heads, queries })
    }

    /// Returns the rows and columns of the grid.
    pub(crate) fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// Returns the biases by row and by column from a (batch, head, query) on, each with the number
    /// of its values per query.
    pub(crate) fn from(&self, [batch, head, query]: [usize; 3]) -> [(&'a [T], usize); 2] {
        let index = (batch * self.heads + head) * self.queries + query;
        let [height, width] = self.grid;
        [(&self.rows[index * height..], height), (&self.columns[index * width..], width)]
    }

    /// Adds the biases of a range of keys to their scores.
    pub(crate) fn add(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [T]) {
        let [(rows, _), (columns, width)] = self.from(place);
        let mut key = keys.start;
        let mut rest = &mut scores[..keys.len()];
        while !rest.is_empty() {
            // The keys of one row of the grid.
            let (row, column) = (key / width, key % width);
            let (scores, others) = rest.split_at_mut((width - column).min(rest.len()));
            key += scores.len();
            for (score, column) in scores.iter_mut().zip(&columns[column..]) {
                *score = *score + (rows[row] + *column);
            }
            rest = others;
        }
    }
}
