//! GEMM problems as the kernels take them: strides, addends, and the parameters of the epilogue.

use ort_core::dtype::DType;
use ort_core::ops::fused::activation::Activation;
use ort_core::{Result, ensure, error};
use ort_gpu::gemm::{Gemm, StridedTensor};

use super::epilogue::finish;
use crate::launch::{Launch, Operand, Walk};

/// The most batch axes, as in `cu/gemm_tiles.cuh`.
const MOST_BATCHES: usize = 6;
/// The most rows for which a GEMM runs as GEMV.
pub(super) const FEW_ROWS: usize = 4;

/// `y = activation(alpha * lhs * rhs + beta * c + d)` for each matrix of a batch.
#[derive(Clone, Debug)]
pub(in crate::kernels) struct Product {
    pub(super) gemm: Gemm,
    /// The addends in order; the first one is multiplied by `beta`.
    pub(super) addends: Vec<StridedTensor>,
    pub(in crate::kernels) alpha: f32,
    pub(in crate::kernels) beta: f32,
    pub(in crate::kernels) activation: Option<Activation>,
    /// Whether the GEMM may use the node's whole workspace.
    pub(in crate::kernels) has_workspace: bool,
}

impl Product {
    /// Creates the plain product of two operands.
    pub(in crate::kernels) fn new(gemm: Gemm) -> Product {
        let (addends, activation, has_workspace) = (Vec::new(), None, false);
        Product { gemm, addends, alpha: 1.0, beta: 1.0, activation, has_workspace }
    }

    /// Adds an addend that broadcasts to the result; `shape` replaces its own shape if given.
    pub(in crate::kernels) fn add(&mut self, tensor: &Operand, shape: Option<&[usize]>) -> Result<()> {
        ensure!(self.addends.len() < 2, Fail, "a product has two addends at most");
        let (shape, whole) = (shape.unwrap_or(&tensor.shape), self.gemm.result_sizes());
        self.addends.push(StridedTensor::broadcast("an addend", tensor, shape, &whole)?);
        Ok(())
    }

    fn tensors(&mut self) -> impl Iterator<Item = &mut StridedTensor> {
        [&mut self.gemm.lhs, &mut self.gemm.rhs, &mut self.gemm.result].into_iter().chain(&mut self.addends)
    }

    /// Returns the walk over the batch. If the last batch axes share one matrix on the right, they
    /// are folded into the rows.
    pub(super) fn fold(&mut self) -> Walk {
        let sizes: Vec<usize> = self.gemm.batch.iter().copied().chain([self.gemm.rows]).collect();
        let steps = |part: &mut StridedTensor| {
            part.batch.iter().chain([&part.row]).map(|step| *step as i64).collect()
        };
        let steps: Vec<Vec<i64>> = self.tensors().map(steps).collect();
        let mut walk = Walk::new(&sizes, &steps);
        // `tensors` lists the right operand second. Rows do not move it, so a last axis that does
        // is one of the batch, and there is one row.
        let folds = matches!(walk.steps.get(1).map(|steps| steps.last()), Some(Some(0)));
        self.gemm.rows = if folds { walk.sizes.pop().unwrap_or(1) } else { 1 };
        for (part, steps) in self.tensors().zip(&mut walk.steps) {
            part.row = if folds { steps.pop().unwrap_or(0) as usize } else { 0 };
        }
        walk
    }

    /// Transposes the GEMM: exchanges its operands, and rows with columns.
    pub(super) fn transpose(&mut self) {
        std::mem::swap(&mut self.gemm.rows, &mut self.gemm.columns);
        std::mem::swap(&mut self.gemm.lhs, &mut self.gemm.rhs);
        self.tensors().for_each(|part| std::mem::swap(&mut part.row, &mut part.column));
    }

    pub(super) fn addend(&self, index: usize) -> Option<&Operand> {
        self.addends.get(index).map(|part| &part.tensor)
    }

    /// Whether `many` adjacent elements of each operand can be read at once.
    pub(super) fn in_vectors(&self, walk: &Walk, many: usize) -> [bool; 2] {
        let steps = |index: usize| walk.steps.get(index).map_or(&[][..], Vec::as_slice);
        [
            reads_vectors(
                &self.gemm.lhs,
                (self.gemm.rows, self.gemm.lhs.row),
                self.gemm.depth,
                steps(0),
                many,
            ),
            reads_vectors(
                &self.gemm.rhs,
                (self.gemm.columns, self.gemm.rhs.column),
                self.gemm.depth,
                steps(1),
                many,
            ),
        ]
    }

    /// Appends the kernels' structures `Product` and `Finish` to a launch.
    pub(super) fn with_epilogue(
        &self,
        launch: Launch,
        walk: &Walk,
        tiles: [usize; 2],
        in_vectors: [bool; 2],
    ) -> Result<Launch> {
        ensure!(
            walk.sizes.len() <= MOST_BATCHES,
            NotImplemented,
            "a batch of {} axes where a kernel has {MOST_BATCHES}",
            walk.sizes.len()
        );
        let of = |index: usize| self.addends.get(index).map_or([0, 0], |part| [part.row, part.column]);
        let ([c_row, c_column], [d_row, d_column]) = (of(0), of(1));
        let mut product = vec![self.gemm.rows, self.gemm.columns, self.gemm.depth];
        product.extend(tiles);
        product.extend([self.gemm.lhs.row, self.gemm.lhs.depth, self.gemm.rhs.depth, self.gemm.rhs.column]);
        product.extend([c_row, c_column, d_row, d_column, self.gemm.result.row, self.gemm.result.column]);
        product.extend(in_vectors.map(usize::from));
        product.push(walk.sizes.len());
        let padded = |numbers: &mut dyn Iterator<Item = usize>| {
            numbers.chain(std::iter::repeat(0)).take(MOST_BATCHES).collect::<Vec<usize>>()
        };
        product.extend(padded(&mut walk.sizes.iter().copied()));
        for index in [0, 1, 3, 4] {
            let steps = walk.steps.get(index).map_or(&[][..], Vec::as_slice);
            product.extend(padded(&mut steps.iter().map(|step| *step as usize)));
        }
        let launch = launch.uints::<{ 18 + 5 * MOST_BATCHES }>(&product)?;
        Ok(launch.bytes(&finish(self.activation.as_ref(), self.alpha, self.beta)?))
    }
}

/// Whether `many` adjacent elements can be read at once. The smaller of the row and depth strides
/// must be 1, and the contiguous size and all other strides must be multiples of `many`.
fn reads_vectors(
    tensor: &StridedTensor,
    outer: (usize, usize),
    depth: usize,
    batch: &[i64],
    many: usize,
) -> bool {
    let (count, outer) = outer;
    // A single row is never stepped over, so its stride does not matter.
    let outer = if count == 1 { 0 } else { outer };
    let (size, near, far) = if count == 1 || tensor.depth <= outer {
        (depth, tensor.depth, outer)
    } else {
        (count, outer, tensor.depth)
    };
    let whole = |step: usize| step.is_multiple_of(many);
    near == 1 && whole(size) && whole(far) && batch.iter().all(|step| whole(step.unsigned_abs() as usize))
}

/// Returns the type suffix in entry names. Unsigned integers share the kernels of signed ones,
/// since wrapping products have the same bits.
pub(super) fn suffix_of(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "f64",
        DType::I32 | DType::U32 => "i32",
        DType::I64 | DType::U64 => "i64",
        other => return Err(error!(NotImplemented, "a product of {other} is not supported")),
    })
}
