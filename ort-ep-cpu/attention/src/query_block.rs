//! The queries of a task.

use std::ops::Range;

use ort_cpu_threads::parallel::RowBlock;

/// The batch, heads and queries of a block, as rows in the order head, query.
#[derive(Clone)]
pub(crate) struct QueryBlock {
    pub(crate) batch: usize,
    pub(crate) heads: Range<usize>,
    pub(crate) queries: Range<usize>,
}

impl QueryBlock {
    pub(crate) fn new<T>(block: &RowBlock<'_, T>) -> QueryBlock {
        let [heads, queries] = block.ranges.clone();
        QueryBlock { batch: block.outer, heads, queries }
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.heads.len() * self.queries.len()
    }

    /// Returns the (batch, head, query) of a row.
    pub(crate) fn at(&self, row: usize) -> [usize; 3] {
        let queries = self.queries.len().max(1);
        [self.batch, self.heads.start + row / queries, self.queries.start + row % queries]
    }
}
