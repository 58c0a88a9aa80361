//! GEMM of 8-bit quantized values with zero points, int32 accumulators and a fused requantization
//! epilogue.
//!
//! A scale or zero point is a scalar, or has one value per row of the left operand or per column of
//! the right one, shared by a batch or not.

use ort_core::{Result, ensure, error};

use super::codes::{code_kind, float_kind};
use super::gemm::Side;
use crate::launch::{Launch, OpCx, Operand, Walk, strides};
use crate::modules::TENSOR_CORES;

/// The most batch axes, as in `cu/integer.cuh`.
const MOST_BATCHES: usize = 6;
/// The most rows for which a product runs as GEMV.
const FEW_ROWS: usize = 4;
/// Columns of a block in GEMV.
const COLUMNS: usize = 32;

/// Everything besides the two operands that a result depends on, in the order of `cu/integer.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    LeftZero,
    RightZero,
    LeftScale,
    RightScale,
    Scale,
    Zero,
    /// Added to the accumulators before scaling, or to float results after it.
    Addend,
}

const PLACES: usize = 7;

/// The epilogue: what becomes of the accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Sums,
    Codes,
    Numbers,
}

/// A tensor with its strides, in elements.
#[derive(Clone, Debug)]
struct Part {
    tensor: Operand,
    batch: Vec<usize>,
    row: usize,
    column: usize,
}

impl Part {
    /// Broadcasts a tensor with these sizes and strides to a batch of matrices.
    fn new(tensor: &Operand, sizes: &[usize], steps: &[usize], whole: &[usize]) -> Result<Part> {
        let missing = whole.len().checked_sub(sizes.len());
        let missing = missing.ok_or_else(|| error!(InvalidArgument, "{sizes:?} has too many axes"))?;
        let mut batch = vec![0; missing];
        for ((size, step), whole) in sizes.iter().zip(steps).zip(whole.iter().skip(missing)) {
            ensure!(
                size == whole || *size == 1,
                InvalidArgument,
                "a scale, a zero point or a bias of shape {sizes:?} has size {size} where the output has {whole}"
            );
            batch.push(if *size == 1 { 0 } else { *step });
        }
        let column = batch.pop().unwrap_or(0);
        let row = batch.pop().unwrap_or(0);
        Ok(Part { tensor: tensor.clone(), batch, row, column })
    }
}

/// A batched GEMM of quantized values.
#[derive(Clone, Debug)]
pub(super) struct CodeProduct {
    batch: Vec<usize>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    depth: usize,
    /// The left operand with its row stride, and the right one with its column stride.
    sides: [Part; 2],
    /// Their strides along the depth.
    depths: [usize; 2],
    parts: [Option<Part>; PLACES],
    y: Operand,
    ending: Ending,
    /// A factor of all scales.
    pub(super) alpha: f32,
}

impl CodeProduct {
    /// Creates the product of two operands. Without [`Self::ending`] it returns the accumulators.
    pub(super) fn new([a, b]: [&Operand; 2], [left, right]: [Side; 2], y: &Operand) -> Result<CodeProduct> {
        let ([a_batch @ .., rows, depth], [b_batch @ .., steps, columns]) = (&*left.sizes, &*right.sizes)
        else {
            return Err(error!(Fail, "an operand of the matrix product is not a matrix"));
        };
        ensure!(
            depth == steps,
            InvalidArgument,
            "the inner sizes of the matrix product differ: {depth} and {steps}"
        );
        let batch = ort_core::spec::broadcast::shapes(&[a_batch, b_batch])?.to_vec();
        let (mut sides, mut depths) = (Vec::new(), Vec::new());
        for (tensor, of_batch, side, is_left) in [(a, a_batch, &left, true), (b, b_batch, &right, false)] {
            let [.., first, second] = &*side.steps else { return Err(error!(Fail, "a side has no steps")) };
            let whole: Vec<usize> = batch.iter().copied().chain([1, 1]).collect();
            let sizes: Vec<usize> = of_batch.iter().copied().chain([1, 1]).collect();
            let part = Part::new(tensor, &sizes, &side.steps, &whole)?;
            sides.push(if is_left { Part { row: *first, ..part } } else { Part { column: *second, ..part } });
            depths.push(if is_left { *second } else { *first });
        }
        let sides = <[Part; 2]>::try_from(sides).map_err(|_| error!(Fail, "a product has two sides"))?;
        let depths = <[usize; 2]>::try_from(depths).map_err(|_| error!(Fail, "a product has two sides"))?;
        let (parts, y) = ([const { None }; PLACES], y.clone());
        let (rows, columns, depth) = (*rows, *columns, *depth);
        let (ending, alpha) = (Ending::Sums, 1.0);
        Ok(CodeProduct { batch, rows, columns, depth, sides, depths, parts, y, ending, alpha })
    }

    /// Sets the epilogue.
    pub(super) fn ending(mut self, ending: Ending) -> CodeProduct {
        self.ending = ending;
        self
    }

    /// Adds a part under a shape that broadcasts to the products.
    pub(super) fn add(&mut self, place: Place, tensor: Option<&Operand>, shape: &[usize]) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        let whole: Vec<usize> = self.batch.iter().copied().chain([self.rows, self.columns]).collect();
        // A single value broadcasts, whatever its shape.
        let shape = if tensor.count() == 1 { &[] } else { shape };
        let part = Part::new(tensor, shape, &strides(shape), &whole)?;
        self.parts.get_mut(place as usize).into_iter().for_each(|to| *to = Some(part.clone()));
        Ok(())
    }

    /// Adds a part with one value per row: a vector, or matrices of one column.
    pub(super) fn add_of_rows(&mut self, place: Place, tensor: Option<&Operand>) -> Result<()> {
        let mut shape = tensor.map_or_else(Vec::new, |tensor| tensor.shape.to_vec());
        // A vector of row values is a column.
        if shape.len() == 1 {
            shape.push(1);
        }
        self.add(place, tensor, &shape)?;
        let column = self.parts.get(place as usize).and_then(Option::as_ref).map_or(0, |part| part.column);
        ensure!(column == 0, InvalidArgument, "a scale or a zero point of rows has the shape {shape:?}");
        Ok(())
    }

    /// Adds a part with one value per column: a vector, or matrices of one row.
    pub(super) fn add_of_columns(&mut self, place: Place, tensor: Option<&Operand>) -> Result<()> {
        let shape = tensor.map_or_else(Vec::new, |tensor| tensor.shape.to_vec());
        self.add(place, tensor, &shape)?;
        let row = self.parts.get(place as usize).and_then(Option::as_ref).map_or(0, |part| part.row);
        ensure!(row == 0, InvalidArgument, "a scale or a zero point of columns has the shape {shape:?}");
        Ok(())
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Part> {
        self.sides.iter_mut().chain(self.parts.iter_mut().flatten())
    }

    /// Merges batch axes that all tensors walk alike. If the last batch axes share one right
    /// operand, they are folded into the rows.
    fn fold(&mut self) {
        let sizes: Vec<usize> = self.batch.iter().copied().chain([self.rows]).collect();
        let steps = |part: &mut Part| part.batch.iter().chain([&part.row]).map(|step| *step as i64).collect();
        let steps: Vec<Vec<i64>> = self.all().map(steps).collect();
        let mut walk = Walk::new(&sizes, &steps);
        let folds = matches!(walk.steps.get(1).map(|steps| steps.last()), Some(Some(0)));
        self.rows = if folds { walk.sizes.pop().unwrap_or(1) } else { 1 };
        for (part, steps) in self.all().zip(&mut walk.steps) {
            part.row = if folds { steps.pop().unwrap_or(0) as usize } else { 0 };
            part.batch = steps.iter().map(|step| *step as usize).collect();
        }
        self.batch = walk.sizes;
    }

    /// Returns the launches of the product.
    pub(super) fn launches(mut self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        if self.y.count() == 0 {
            return Ok(Vec::new());
        }
        self.fold();
        let (entry, [rows, columns]) = self.entry(cx);
        let blocks = [self.rows.div_ceil(rows), self.columns.div_ceil(columns)];
        Ok(vec![self.launch(entry, blocks)?])
    }

    /// Returns the entry, and the rows and columns of its tile.
    fn entry(&self, cx: &OpCx<'_>) -> (&'static str, [usize; 2]) {
        let [a_depth, _] = self.depths;
        let b_line = self.sides[1].column;
        // GEMV reads both operands along contiguous rows.
        if self.rows <= FEW_ROWS && a_depth == 1 && b_line == 1 {
            return ("product_rows", [FEW_ROWS, COLUMNS]);
        }
        let tiles = [self.rows, self.columns].map(|size| size.div_ceil(128)).iter().product::<usize>();
        let matrices = self.batch.iter().product::<usize>();
        // A large tile that is half empty, or fewer large tiles than multiprocessors, would be
        // slower than small tiles.
        let busy = tiles.saturating_mul(matrices) >= cx.limits.processors as usize;
        let is_large = busy && self.rows > 64 && self.columns > 64;
        let has_cores = cx.limits.capability >= TENSOR_CORES;
        match (has_cores, is_large) {
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
        let [a, b] = &self.sides;
        let matrices = self.batch.iter().product::<usize>();
        let fits = [&a.tensor, &b.tensor, &self.y].iter().all(|tensor| tensor.count() <= i32::MAX as usize);
        ensure!(fits, NotImplemented, "a product of codes of more than 2^31 - 1 elements");
        let blocks = matrices.saturating_mul(down).saturating_mul(across);
        let mut launch = Launch::new(family, entry).grid([blocks, 1, 1])?.tensor(&a.tensor).tensor(&b.tensor);
        for part in &self.parts {
            launch = launch.find_tensor(part.as_ref().map(|part| &part.tensor));
        }
        launch
            .tensor(&self.y)
            .ints::<{ 18 + 3 * MOST_BATCHES + PLACES * (2 + MOST_BATCHES) }>(&self.words([down, across])?)
    }

    /// Fills the structure `Product` of `cu/integer.cuh`.
    fn words(&self, [down, across]: [usize; 2]) -> Result<Vec<i64>> {
        let ([a, b], [a_depth, b_depth]) = (&self.sides, self.depths);
        let whole = |numbers: &[usize]| numbers.iter().map(|number| *number as i64).collect::<Vec<_>>();
        let mut words = whole(&[self.rows, self.columns, self.depth, down, across]);
        words.extend(whole(&[a.row, a_depth, b.column, b_depth]));
        words.extend(whole(&[many(a.row, a_depth), many(b.column, b_depth)]));
        let y_kind = if self.ending == Ending::Codes { code_kind(self.y.dtype)? } else { 0 };
        let scale = self.parts.get(Place::RightScale as usize).and_then(Option::as_ref);
        let scale_kind = scale.map_or(Ok(0), |scale| float_kind(scale.tensor.dtype))?;
        let kinds = [code_kind(a.tensor.dtype)?, code_kind(b.tensor.dtype)?, y_kind, scale_kind];
        words.extend(whole(&kinds));
        let ending = match self.ending {
            Ending::Sums => 0,
            Ending::Codes => 1,
            Ending::Numbers => 2,
        };
        words.extend([ending, i64::from(self.alpha.to_bits() as i32), self.batch.len() as i64]);
        ensure!(self.batch.len() <= MOST_BATCHES, NotImplemented, "a batch of {} axes", self.batch.len());
        let padded = |numbers: &[usize]| -> Vec<i64> {
            whole(numbers).into_iter().chain(std::iter::repeat(0)).take(MOST_BATCHES).collect()
        };
        words.extend([&self.batch, &a.batch, &b.batch].into_iter().flat_map(|list| padded(list)));
        for part in &self.parts {
            let steps = part.as_ref().map_or([0, 0], |part| [part.row, part.column]);
            words.extend(whole(&steps));
            words.extend(padded(part.as_ref().map_or(&[][..], |part| part.batch.as_slice())));
        }
        Ok(words)
    }
}

/// Returns how many bytes of an operand its strides allow to be read at once.
fn many(line: usize, depth: usize) -> usize {
    let far = if depth == 1 { line } else { depth };
    match () {
        () if depth == 1 && far.is_multiple_of(16) => 16,
        () if far.is_multiple_of(4) => 4,
        () => 1,
    }
}
