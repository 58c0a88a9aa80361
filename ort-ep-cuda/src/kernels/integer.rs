//! GEMM of 8-bit quantized values with zero points, int32 accumulators and a fused requantization
//! epilogue.
//!
//! A scale or zero point is a scalar, or has one value per row of the left operand or per column of
//! the right one, shared by a batch or not.

use ort_core::{Result, ensure};
use ort_gpu::gemm::{Gemm, StridedTensor};

use super::type_tags::{quantized_tag, scale_tag};
use crate::driver::TENSOR_CORES;
use crate::launch::{Launch, OpCx, Operand, Walk};

/// The most batch axes, as in `cu/integer.cuh`.
const MOST_BATCHES: usize = 6;
/// The most rows for which a product runs as GEMV.
const FEW_ROWS: usize = 4;
/// Columns of a block in GEMV.
const COLUMNS: usize = 32;

/// Everything besides the two operands that a result depends on, in the order of `cu/integer.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Term {
    LhsZero,
    RhsZero,
    LhsScale,
    RhsScale,
    Scale,
    Zero,
    /// Added to the accumulators before scaling, or to float results after it.
    Addend,
}

const TERMS: usize = 7;

/// The epilogue: what becomes of the accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntegerEpilogue {
    /// They are the result.
    Accumulators,
    /// They are requantized.
    Quantized,
    /// They are scaled to floats.
    Floats,
}

/// A batched GEMM of quantized values.
#[derive(Clone, Debug)]
pub(super) struct QuantizedGemm {
    pub(super) gemm: Gemm,
    /// By [`Term`].
    terms: [Option<StridedTensor>; TERMS],
    epilogue: IntegerEpilogue,
    /// A factor of all scales.
    pub(super) alpha: f32,
}

impl QuantizedGemm {
    /// Creates the product of two operands. Without [`Self::with_epilogue`] it returns the
    /// accumulators.
    pub(super) fn new(gemm: Gemm) -> QuantizedGemm {
        let (terms, epilogue) = ([const { None }; TERMS], IntegerEpilogue::Accumulators);
        QuantizedGemm { gemm, terms, epilogue, alpha: 1.0 }
    }

    /// Sets the epilogue.
    pub(super) fn with_epilogue(mut self, epilogue: IntegerEpilogue) -> QuantizedGemm {
        self.epilogue = epilogue;
        self
    }

    /// Adds a part under a shape that broadcasts to the products.
    pub(super) fn add(&mut self, term: Term, tensor: Option<&Operand>, shape: &[usize]) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        // A single value broadcasts, whatever its shape.
        let shape = if tensor.count() == 1 { &[] } else { shape };
        let name = "a scale, a zero point or a bias";
        let strided = StridedTensor::broadcast(name, tensor, shape, &self.gemm.result_sizes())?;
        self.terms.get_mut(term as usize).into_iter().for_each(|to| *to = Some(strided.clone()));
        Ok(())
    }

    /// Adds a part with one value per row: a vector, or matrices of one column.
    pub(super) fn add_of_rows(&mut self, term: Term, tensor: Option<&Operand>) -> Result<()> {
        let mut shape = tensor.map_or_else(Vec::new, |tensor| tensor.shape.to_vec());
        // A vector of row values is a column.
        if shape.len() == 1 {
            shape.push(1);
        }
        self.add(term, tensor, &shape)?;
        let column = self.terms.get(term as usize).and_then(Option::as_ref).map_or(0, |part| part.column);
        ensure!(column == 0, InvalidArgument, "a scale or a zero point of rows has the shape {shape:?}");
        Ok(())
    }

    /// Adds a part with one value per column: a vector, or matrices of one row.
    pub(super) fn add_of_columns(&mut self, term: Term, tensor: Option<&Operand>) -> Result<()> {
        let shape = tensor.map_or_else(Vec::new, |tensor| tensor.shape.to_vec());
        self.add(term, tensor, &shape)?;
        let row = self.terms.get(term as usize).and_then(Option::as_ref).map_or(0, |part| part.row);
        ensure!(row == 0, InvalidArgument, "a scale or a zero point of columns has the shape {shape:?}");
        Ok(())
    }

    /// Returns the tensors that are read.
    fn sources(&mut self) -> impl Iterator<Item = &mut StridedTensor> {
        [&mut self.gemm.lhs, &mut self.gemm.rhs].into_iter().chain(self.terms.iter_mut().flatten())
    }

    /// Merges batch axes that all tensors walk alike. If the last batch axes share one right
    /// operand, they are folded into the rows.
    fn fold(&mut self) {
        let sizes: Vec<usize> = self.gemm.batch.iter().copied().chain([self.gemm.rows]).collect();
        let steps = |part: &mut StridedTensor| {
            part.batch.iter().chain([&part.row]).map(|step| *step as i64).collect()
        };
        let steps: Vec<Vec<i64>> = self.sources().map(steps).collect();
        let mut walk = Walk::new(&sizes, &steps);
        // `sources` lists the right operand second.
        let folds = matches!(walk.steps.get(1).map(|steps| steps.last()), Some(Some(0)));
        self.gemm.rows = if folds { walk.sizes.pop().unwrap_or(1) } else { 1 };
        for (part, steps) in self.sources().zip(&mut walk.steps) {
            part.row = if folds { steps.pop().unwrap_or(0) as usize } else { 0 };
            part.batch = steps.iter().map(|step| *step as usize).collect();
        }
        self.gemm.batch = walk.sizes;
    }

    /// Returns the launches of the product.
    pub(super) fn launches(mut self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        if self.gemm.result.tensor.count() == 0 {
            return Ok(Vec::new());
        }
        self.fold();
        let (entry, [rows, columns]) = self.entry(cx);
        let blocks = [self.gemm.rows.div_ceil(rows), self.gemm.columns.div_ceil(columns)];
        Ok(vec![self.launch(entry, blocks)?])
    }

    /// Returns the entry, and the rows and columns of its tile.
    fn entry(&self, cx: &OpCx<'_>) -> (&'static str, [usize; 2]) {
        // GEMV reads both operands along contiguous rows.
        if self.gemm.rows <= FEW_ROWS && self.gemm.lhs.depth == 1 && self.gemm.rhs.column == 1 {
            return ("product_rows", [FEW_ROWS, COLUMNS]);
        }
        let tiles =
            [self.gemm.rows, self.gemm.columns].map(|size| size.div_ceil(128)).iter().product::<usize>();
        let matrices = self.gemm.batch.iter().product::<usize>();
        // A large tile that is half empty, or fewer large tiles than multiprocessors, would be
        // slower than small tiles.
        let busy = tiles.saturating_mul(matrices) >= cx.limits.processors as usize;
        let is_large = busy && self.gemm.rows > 64 && self.gemm.columns > 64;
        let has_mma = cx.limits.capability >= TENSOR_CORES;
        match (has_mma, is_large) {
            (true, true) => ("product_cores_large", [128, 128]),
            (true, false) => ("product_cores_small", [64, 64]),
            (false, true) => ("product_dots_large", [128, 128]),
            (false, false) => ("product_dots_small", [64, 64]),
        }
    }

    /// Returns a launch of an entry of `cu/integer.cu` with the given blocks down and across, and
    /// with all parameters of the product.
    pub(super) fn launch(&self, entry: &str, [down, across]: [usize; 2]) -> Result<Launch> {
        self.launch_of("integer", entry, [down, across])
    }

    /// The same for an entry of another family.
    pub(super) fn launch_of(
        &self,
        family: &'static str,
        entry: &str,
        [down, across]: [usize; 2],
    ) -> Result<Launch> {
        let Gemm { lhs, rhs, result, .. } = &self.gemm;
        let matrices = self.gemm.batch.iter().product::<usize>();
        let fits = [lhs, rhs, result].iter().all(|own| own.tensor.count() <= i32::MAX as usize);
        ensure!(fits, NotImplemented, "a product of quantized values of more than 2^31 - 1 elements");
        let blocks = matrices.saturating_mul(down).saturating_mul(across);
        let launch = Launch::new(family, entry).grid([blocks, 1, 1])?;
        let mut launch = launch.tensor(&lhs.tensor).tensor(&rhs.tensor);
        for part in &self.terms {
            launch = launch.find_tensor(part.as_ref().map(|part| &part.tensor));
        }
        launch
            .tensor(&result.tensor)
            .ints::<{ 18 + 3 * MOST_BATCHES + TERMS * (2 + MOST_BATCHES) }>(&self.words([down, across])?)
    }

    /// Fills the structure `Product` of `cu/integer.cuh`.
    fn words(&self, [down, across]: [usize; 2]) -> Result<Vec<i64>> {
        let Gemm { lhs, rhs, result, .. } = &self.gemm;
        let whole = |numbers: &[usize]| numbers.iter().map(|number| *number as i64).collect::<Vec<_>>();
        let mut words = whole(&[self.gemm.rows, self.gemm.columns, self.gemm.depth, down, across]);
        words.extend(whole(&[lhs.row, lhs.depth, rhs.column, rhs.depth]));
        words.extend(whole(&[many(lhs.row, lhs.depth), many(rhs.column, rhs.depth)]));
        let y_kind = match self.epilogue {
            IntegerEpilogue::Quantized => quantized_tag(result.tensor.dtype)?,
            IntegerEpilogue::Accumulators | IntegerEpilogue::Floats => 0,
        };
        let scale = self.terms.get(Term::RhsScale as usize).and_then(Option::as_ref);
        let scale_kind = scale.map_or(Ok(0), |scale| scale_tag(scale.tensor.dtype))?;
        let kinds = [quantized_tag(lhs.tensor.dtype)?, quantized_tag(rhs.tensor.dtype)?, y_kind, scale_kind];
        words.extend(whole(&kinds));
        let epilogue = match self.epilogue {
            IntegerEpilogue::Accumulators => 0,
            IntegerEpilogue::Quantized => 1,
            IntegerEpilogue::Floats => 2,
        };
        words.extend([epilogue, i64::from(self.alpha.to_bits() as i32), self.gemm.batch.len() as i64]);
        ensure!(
            self.gemm.batch.len() <= MOST_BATCHES,
            NotImplemented,
            "a batch of {} axes",
            self.gemm.batch.len()
        );
        let padded = |numbers: &[usize]| -> Vec<i64> {
            whole(numbers).into_iter().chain(std::iter::repeat(0)).take(MOST_BATCHES).collect()
        };
        words.extend([&self.gemm.batch, &lhs.batch, &rhs.batch].into_iter().flat_map(|list| padded(list)));
        for part in &self.terms {
            let steps = part.as_ref().map_or([0, 0], |part| [part.row, part.column]);
            words.extend(whole(&steps));
            words.extend(padded(part.as_ref().map_or(&[][..], |part| part.batch.as_slice())));
        }
        Ok(words)
    }
}

/// Returns how many bytes of an operand its strides allow to be read at once.
fn many(outer: usize, depth: usize) -> usize {
    let far = if depth == 1 { outer } else { depth };
    match () {
        () if depth == 1 && far.is_multiple_of(16) => 16,
        () if far.is_multiple_of(4) => 4,
        () => 1,
    }
}
