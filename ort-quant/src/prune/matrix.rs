//! Weights as matrices with a row for each output, whatever their layout in the file.
//!
//! The columns of a convolution are ordered by kernel position and then by input channel, as in
//! NHWC. The groups of an N:M pattern are then input channels, as GPUs with sparse tensor cores
//! want them.

/// An axis of a strided view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    count: usize,
    stride: usize,
}

impl Axis {
    const ONE: Axis = Axis { count: 1, stride: 0 };

    fn new(count: usize, stride: usize) -> Axis {
        Axis { count, stride }
    }
}

/// A strided view of a weight: two axes that make the rows, and two that make the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixView {
    rows: [Axis; 2],
    /// The second has the input channels.
    columns: [Axis; 2],
}

/// The rows that are gathered together: neighbours in a transposed weight share a cache line.
const ROWS: usize = 16;

impl MatrixView {
    /// The view of [N, K], as `Gemm` with `transB` has it.
    pub(crate) fn rows_first(rows: usize, columns: usize) -> MatrixView {
        MatrixView {
            rows: [Axis::ONE, Axis::new(rows, columns)],
            columns: [Axis::ONE, Axis::new(columns, 1)],
        }
    }

    /// The view of [.., K, N], as `MatMul` has it.
    pub(crate) fn columns_first(batch: usize, columns: usize, rows: usize) -> MatrixView {
        MatrixView {
            rows: [Axis::new(batch, columns * rows), Axis::new(rows, 1)],
            columns: [Axis::ONE, Axis::new(columns, rows)],
        }
    }

    /// The view of the filters of `Conv`: output channels, input channels, kernel positions.
    pub(crate) fn filters(outputs: usize, channels: usize, positions: usize) -> MatrixView {
        MatrixView {
            rows: [Axis::ONE, Axis::new(outputs, channels * positions)],
            columns: [Axis::new(positions, 1), Axis::new(channels, positions)],
        }
    }

    /// The view of the filters of `ConvTranspose`: input channels in groups, output channels of a
    /// group, kernel positions.
    pub(crate) fn transposed_filters(
        groups: usize,
        channels: usize,
        (outputs, positions): (usize, usize),
    ) -> MatrixView {
        let channel = outputs * positions;
        MatrixView {
            rows: [Axis::new(groups, channels * channel), Axis::new(outputs, positions)],
            columns: [Axis::new(positions, 1), Axis::new(channels, channel)],
        }
    }

    pub(crate) fn row_count(&self) -> usize {
        self.rows.iter().map(|axis| axis.count).product()
    }

    pub(crate) fn column_count(&self) -> usize {
        self.columns.iter().map(|axis| axis.count).product()
    }

    /// The input channels of an output at each kernel position.
    pub(crate) fn channel_count(&self) -> usize {
        let [_, channels] = self.columns;
        channels.count
    }

    /// The place of a row's first element.
    fn row(&self, row: usize) -> usize {
        let [outer, inner] = self.rows;
        row / inner.count.max(1) * outer.stride + row % inner.count.max(1) * inner.stride
    }

    /// The distance of a column from the first.
    fn column(&self, column: usize) -> usize {
        let [outer, inner] = self.columns;
        column / inner.count.max(1) * outer.stride + column % inner.count.max(1) * inner.stride
    }

    /// Calls a function with the place in the file and the place in the matrix of each element of
    /// some rows. The matrix begins with the first of these rows.
    fn each(&self, first: usize, count: usize, mut visit: impl FnMut(usize, usize)) {
        let columns = self.column_count();
        for block in (0..count).step_by(ROWS) {
            let block = block..count.min(block + ROWS);
            for column in 0..columns {
                let offset = self.column(column);
                for row in block.clone() {
                    visit(self.row(first + row) + offset, row * columns + column);
                }
            }
        }
    }

    /// Copies some rows out of the elements in the order of the file.
    pub(crate) fn gather(&self, elements: &[f32], first: usize, count: usize) -> Vec<f32> {
        let mut matrix = vec![0.0; count * self.column_count()];
        self.each(first, count, |from, to| {
            if let (Some(to), Some(from)) = (matrix.get_mut(to), elements.get(from)) {
                *to = *from;
            }
        });
        matrix
    }

    /// Copies some rows back.
    pub(crate) fn scatter(&self, matrix: &[f32], first: usize, elements: &mut [f32]) {
        let count = matrix.len() / self.column_count().max(1);
        self.each(first, count, |to, from| {
            if let (Some(to), Some(from)) = (elements.get_mut(to), matrix.get(from)) {
                *to = *from;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each view against the definition of its operator, by indices.
    #[test]
    fn views_are_the_matrices_of_their_operators() {
        let numbers: Vec<f32> = (0..48 * 5_u16).map(f32::from).collect();
        let index = |shape: &[usize], place: &[usize]| {
            shape.iter().zip(place).fold(0, |sum, (size, index)| sum * size + index) as f32
        };
        // [3, 5] as N = 3, K = 5.
        let view = MatrixView::rows_first(3, 5);
        assert_eq!(view.gather(&numbers, 1, 2), numbers[5..15]);
        // [2, 5, 3]: two matrices of K = 5, N = 3.
        let view = MatrixView::columns_first(2, 5, 3);
        let matrix = view.gather(&numbers, 0, 6);
        for (row, column) in (0..6).flat_map(|row| (0..5).map(move |column| (row, column))) {
            assert_eq!(matrix[row * 5 + column], index(&[2, 5, 3], &[row / 3, column, row % 3]));
        }
        // [4, 3, 2, 2]: by kernel position, then by channel.
        let view = MatrixView::filters(4, 3, 4);
        assert_eq!((view.row_count(), view.column_count(), view.channel_count()), (4, 12, 3));
        let matrix = view.gather(&numbers, 0, 4);
        for (row, column) in (0..4).flat_map(|row| (0..12).map(move |column| (row, column))) {
            assert_eq!(matrix[row * 12 + column], index(&[4, 3, 4], &[row, column % 3, column / 3]));
        }
        // [2 * 3, 5, 2]: 2 groups of 3 channels, 5 outputs each, 2 positions.
        let view = MatrixView::transposed_filters(2, 3, (5, 2));
        let matrix = view.gather(&numbers, 0, 10);
        for (row, column) in (0..10).flat_map(|row| (0..6).map(move |column| (row, column))) {
            let place = [row / 5 * 3 + column % 3, row % 5, column / 3];
            assert_eq!(matrix[row * 6 + column], index(&[6, 5, 2], &place));
        }
    }

    #[test]
    fn rows_that_are_scattered_are_where_they_were() {
        let numbers: Vec<f32> = (0..420_u16).map(f32::from).collect();
        for view in [
            MatrixView::rows_first(60, 7),
            MatrixView::columns_first(3, 7, 20),
            MatrixView::filters(35, 4, 3),
            MatrixView::transposed_filters(2, 3, (10, 7)),
        ] {
            let mut found = vec![-1.0; 420];
            for first in (0..view.row_count()).step_by(19) {
                let count = 19.min(view.row_count() - first);
                view.scatter(&view.gather(&numbers, first, count), first, &mut found);
            }
            assert_eq!(found, numbers, "{view:?}");
        }
    }
}
