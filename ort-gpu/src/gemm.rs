//! Batched, strided GEMM: its operands, sizes and broadcast terms, without an epilogue.

use ort_core::spec::broadcast;
use ort_core::{Result, ensure, error};

use crate::operand::{OpCx, Operand};
use crate::walk::strides;

/// The side of an operand. A vector is a row on the left and a column on the right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmSide {
    /// The left operand.
    Lhs,
    /// The right operand.
    Rhs,
}

/// Which axes of the operands a node may transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transposes {
    /// None.
    Nothing,
    /// Those of the matrices, by the attributes `transA` and `transB`.
    Matrices,
    /// Also those of the batch, by the attributes `transBatchA` and `transBatchB`.
    MatricesAndBatches,
}

/// The sizes and strides of an operand, in elements. The last two are those of its matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// The sizes of the batch, the rows and the columns.
    pub sizes: Vec<usize>,
    /// The strides along them.
    pub steps: Vec<usize>,
}

/// A tensor of a GEMM and its strides, in elements.
#[derive(Clone, Debug)]
pub struct StridedTensor {
    /// The tensor.
    pub tensor: Operand,
    /// The stride along each batch axis.
    pub batch: Vec<usize>,
    /// The stride between rows.
    pub row: usize,
    /// The stride between columns.
    pub column: usize,
    /// The stride along the depth.
    pub depth: usize,
}

/// `result = lhs * rhs` for each matrix of a batch.
#[derive(Clone, Debug)]
pub struct Gemm {
    /// The sizes of the batch.
    pub batch: Vec<usize>,
    /// The rows of the left operand and the result.
    pub rows: usize,
    /// The columns of the right operand and the result.
    pub columns: usize,
    /// The columns of the left operand, which are the rows of the right one.
    pub depth: usize,
    /// The left operand.
    pub lhs: StridedTensor,
    /// The right operand.
    pub rhs: StridedTensor,
    /// The result.
    pub result: StridedTensor,
}

/// Returns the axis order of an operand. `batch` moves its first axis behind the other batch axes,
/// `matrix` swaps the last two.
fn axis_order(rank: usize, matrix: bool, batch: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rank).collect();
    if batch && rank > 2 {
        // `transBatchA` of `FusedMatMul`: the first axis holds the rows, axes 1 to rank - 2 the
        // batch.
        order.get_mut(..rank - 1).into_iter().for_each(|axes| axes.rotate_left(1));
    }
    if matrix && rank > 1 {
        order.swap(rank - 1, rank - 2);
    }
    order
}

impl MatrixLayout {
    /// Reads a tensor as it is, or with its matrices transposed.
    ///
    /// # Errors
    ///
    /// The tensor is a scalar.
    pub fn new(tensor: &Operand, transposed: bool, side: GemmSide) -> Result<MatrixLayout> {
        MatrixLayout::permuted(tensor, &axis_order(tensor.rank(), transposed, false), side)
    }

    fn permuted(tensor: &Operand, order: &[usize], side: GemmSide) -> Result<MatrixLayout> {
        let own = strides(&tensor.shape);
        let mut sizes: Vec<usize> = order.iter().map(|axis| tensor.size(*axis)).collect();
        let mut steps: Vec<usize> = order.iter().filter_map(|axis| own.get(*axis)).copied().collect();
        // As in `numpy.matmul`: a vector on the left is one row, on the right one column.
        if sizes.len() == 1 {
            let place = if side == GemmSide::Lhs { 0 } else { 1 };
            sizes.insert(place, 1);
            steps.insert(place, 0);
        }
        ensure!(
            sizes.len() >= 2,
            InvalidArgument,
            "an operand of the matrix product has rank {}",
            tensor.rank()
        );
        Ok(MatrixLayout { sizes, steps })
    }

    /// Returns the sizes of the batch, the rows and columns, and the strides along these.
    fn split(&self) -> Result<(&[usize], [usize; 2], [usize; 2])> {
        match (&*self.sizes, &*self.steps) {
            ([batch @ .., rows, columns], [.., row, column]) => {
                Ok((batch, [*rows, *columns], [*row, *column]))
            }
            _ => Err(error!(Fail, "an operand of the matrix product is not a matrix")),
        }
    }

    /// Returns the strides along a batch to which the operand broadcasts.
    fn batch_steps(&self, batch: &[usize]) -> Result<Vec<usize>> {
        let own = self.sizes.len().saturating_sub(2);
        let missing = batch.len().checked_sub(own);
        let missing = missing.ok_or_else(|| error!(Fail, "an operand has more batches than the output"))?;
        let mut steps = vec![0; missing];
        let sizes_and_steps = self.sizes.iter().zip(&self.steps).take(own);
        // A batch of 1 broadcasts: each matrix of the result reads the same one.
        steps.extend(sizes_and_steps.map(|(size, step)| if *size == 1 { 0 } else { *step }));
        Ok(steps)
    }
}

impl StridedTensor {
    /// Broadcasts a tensor to `whole`, the batch and matrix sizes of a GEMM. `shape` is its own
    /// shape, or one with axes of size 1 added; `name` is for errors.
    ///
    /// # Errors
    ///
    /// The shape does not broadcast.
    pub fn broadcast(
        name: &str,
        tensor: &Operand,
        shape: &[usize],
        whole: &[usize],
    ) -> Result<StridedTensor> {
        let missing = whole.len().checked_sub(shape.len());
        let missing = missing.ok_or_else(|| error!(InvalidArgument, "{name} has rank {}", shape.len()))?;
        let mut steps = vec![0; missing];
        for ((size, stride), whole) in shape.iter().zip(strides(shape)).zip(whole.iter().skip(missing)) {
            ensure!(
                size == whole || *size == 1,
                InvalidArgument,
                "{name} of shape {shape:?} has size {size} where the output has {whole}"
            );
            steps.push(if *size == 1 { 0 } else { stride });
        }
        // [batch.., row, column], as in `whole`.
        let column = steps.pop().unwrap_or(0);
        let row = steps.pop().unwrap_or(0);
        Ok(StridedTensor { tensor: tensor.clone(), batch: steps, row, column, depth: 0 })
    }
}

impl Gemm {
    /// Reads `MatMul`, `Gemm` or one of their fused forms: the product of the first two inputs.
    ///
    /// # Errors
    ///
    /// As [`Gemm::new`].
    pub fn of_node<L>(cx: &OpCx<'_, L>, transposes: Transposes) -> Result<Gemm> {
        let flags = |names: [&str; 2], applies: bool| -> Result<[bool; 2]> {
            let [lhs, rhs] = names;
            if applies { Ok([cx.attrs.flag(lhs)?, cx.attrs.flag(rhs)?]) } else { Ok([false; 2]) }
        };
        let matrices = flags(["transA", "transB"], transposes != Transposes::Nothing)?;
        let batches = flags(["transBatchA", "transBatchB"], transposes == Transposes::MatricesAndBatches)?;
        let tensors = [cx.input(0)?, cx.input(1)?];
        let layout = |tensor: &Operand, matrix, batch, side| {
            MatrixLayout::permuted(tensor, &axis_order(tensor.rank(), matrix, batch), side)
        };
        let layouts = [
            layout(tensors[0], matrices[0], batches[0], GemmSide::Lhs)?,
            layout(tensors[1], matrices[1], batches[1], GemmSide::Rhs)?,
        ];
        Gemm::new(tensors, layouts, cx.output(0)?)
    }

    /// Creates the product of two operands in these layouts.
    ///
    /// # Errors
    ///
    /// The sizes do not fit.
    pub fn new([a, b]: [&Operand; 2], [lhs, rhs]: [MatrixLayout; 2], y: &Operand) -> Result<Gemm> {
        // [.., rows, depth] times [.., depth, columns]
        let (lhs_batch, [rows, depth], [lhs_row, lhs_depth]) = lhs.split()?;
        let (rhs_batch, [rhs_rows, columns], [rhs_depth, rhs_column]) = rhs.split()?;
        ensure!(
            depth == rhs_rows,
            InvalidArgument,
            "the inner dimensions of the matrix multiplication differ: {depth} and {rhs_rows}"
        );
        let batch = broadcast::shapes(&[lhs_batch, rhs_batch])?.to_vec();
        let whole: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
        let (lhs_batch, rhs_batch) = (lhs.batch_steps(&batch)?, rhs.batch_steps(&batch)?);
        let lhs =
            StridedTensor { tensor: a.clone(), batch: lhs_batch, row: lhs_row, column: 0, depth: lhs_depth };
        let rhs = StridedTensor {
            tensor: b.clone(),
            batch: rhs_batch,
            row: 0,
            column: rhs_column,
            depth: rhs_depth,
        };
        // With the sizes of the product, because `y` has no axis for the side of a vector.
        let result = StridedTensor::broadcast("the result", y, &whole, &whole)?;
        Ok(Gemm { batch, rows, columns, depth, lhs, rhs, result })
    }

    /// Returns the sizes of the batch, followed by rows and columns.
    pub fn result_sizes(&self) -> Vec<usize> {
        self.batch.iter().copied().chain([self.rows, self.columns]).collect()
    }
}

#[cfg(test)]
mod tests {
    use ort_core::dtype::DType;

    use super::*;
    use crate::operand::Arg;

    fn tensor(shape: &[usize]) -> Operand {
        Operand { arg: Arg::Input(0), dtype: DType::F32, shape: shape.into() }
    }

    fn gemm(lhs: &[usize], rhs: &[usize], transposed: [bool; 2], y: &[usize]) -> Result<Gemm> {
        let [a, b, y] = [lhs, rhs, y].map(tensor);
        let layouts = [
            MatrixLayout::new(&a, transposed[0], GemmSide::Lhs)?,
            MatrixLayout::new(&b, transposed[1], GemmSide::Rhs)?,
        ];
        Gemm::new([&a, &b], layouts, &y)
    }

    #[test]
    fn vectors_are_a_row_and_a_column() {
        let found = gemm(&[3], &[3], [false; 2], &[]).unwrap();
        assert_eq!((found.rows, found.columns, found.depth), (1, 1, 3));
        assert_eq!((found.lhs.depth, found.rhs.depth), (1, 1));
        assert!(gemm(&[], &[3], [false; 2], &[]).is_err());
        assert!(gemm(&[2, 4], &[3, 5], [false; 2], &[2, 5]).is_err());
    }

    #[test]
    fn batches_broadcast_and_matrices_transpose() {
        let found = gemm(&[2, 1, 4, 3], &[5, 4, 6], [true, false], &[2, 5, 3, 6]).unwrap();
        assert_eq!(found.result_sizes(), [2, 5, 3, 6]);
        assert_eq!((&*found.lhs.batch, found.lhs.row, found.lhs.depth), (&[12, 0][..], 1, 3));
        assert_eq!((&*found.rhs.batch, found.rhs.column, found.rhs.depth), (&[0, 24][..], 1, 6));
    }

    #[test]
    fn batch_axes_rotate() {
        assert_eq!(axis_order(4, true, true), [1, 2, 3, 0]);
        assert_eq!(axis_order(4, false, true), [1, 2, 0, 3]);
        assert_eq!(axis_order(2, true, true), [1, 0]);
    }

    #[test]
    fn terms_broadcast_to_the_result() {
        let term = tensor(&[6]);
        let found = StridedTensor::broadcast("c", &term, &[6], &[2, 3, 6]).unwrap();
        assert_eq!((&*found.batch, found.row, found.column), (&[0][..], 0, 1));
        assert!(StridedTensor::broadcast("c", &term, &[6], &[2, 3, 5]).is_err());
    }
}
