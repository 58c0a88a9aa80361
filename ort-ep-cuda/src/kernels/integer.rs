//! Products of 8-bit codes less their zero points, with sums of 32-bit integers, and what becomes
//! of the sums in the same launch.
//!
//! Scales and zero points are single, or one for each row of the left side and each column of the
//! right one, of all matrices of a batch or of each.

use ort_core::{Result, ensure, error};

use super::codes::{code_kind, float_kind};
use super::gemm::Side;
use crate::launch::{Launch, OpCx, Operand, Walk, strides};
use crate::modules::TENSOR_CORES;

/// The axes of a batch that kernels walk, of which `cu/integer.cuh` knows, too.
const MOST_BATCHES: usize = 6;
/// The rows up to which a product is one of vectors, and the columns of a block of such a product.
const FEW_ROWS: usize = 4;
const COLUMNS: usize = 32;

/// What a result is made of besides the two sides, in the order of `cu/integer.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    LeftZero,
    RightZero,
    LeftScale,
    RightScale,
    Scale,
    Zero,
    /// Added to sums before they are scaled, or to numbers behind it.
    Addend,
}

const PLACES: usize = 7;

/// What becomes of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Sums,
    Codes,
    Numbers,
}

/// A tensor with its steps, in elements.
#[derive(Clone, Debug)]
struct Part {
    tensor: Operand,
    batch: Vec<usize>,
    row: usize,
    column: usize,
}

impl Part {
    /// A tensor whose sizes and steps broadcast to a batch of matrices.
    fn new(tensor: &Operand, sizes: &[usize], steps: &[usize], whole: &[usize]) -> Result<Part> {
        let missing = whole.len().checked_sub(sizes.len());
        let missing = missing.ok_or_else(|| error!(InvalidArgument, "{sizes:?} has too many axes"))?;
        let mut batch = vec![0; missing];
        for ((size, step), whole) in sizes.iter().zip(steps).zip(whole.iter().skip(missing)) {
            ensure!(
                size == whole || *size == 1,
                InvalidArgument,
                "a scale, a zero point or a bias of shape {sizes:?} has {size} where the product has {whole}"
            );
            batch.push(if *size == 1 { 0 } else { *step });
        }
        let column = batch.pop().unwrap_or(0);
        let row = batch.pop().unwrap_or(0);
        Ok(Part { tensor: tensor.clone(), batch, row, column })
    }
}

/// A batch of products of codes.
#[derive(Clone, Debug)]
pub(super) struct CodeProduct {
    batch: Vec<usize>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    depth: usize,
    /// The left side with its steps from row to row, the right one with those from column to
    /// column.
    sides: [Part; 2],
    /// Their steps along the sums.
    depths: [usize; 2],
    parts: [Option<Part>; PLACES],
    y: Operand,
    ending: Ending,
    /// A factor of all scales.
    pub(super) alpha: f32,
}

impl CodeProduct {
    /// The product of two sides; it ends as the type of the result and the parts that are added
    /// say.
    pub(super) fn new([a, b]: [&Operand; 2], [left, right]: [Side; 2], y: &Operand) -> Result<CodeProduct> {
        let ([a_batch @ .., rows, depth], [b_batch @ .., steps, columns]) = (&*left.sizes, &*right.sizes)
        else {
            return Err(error!(Fail, "a side of a product is no matrix"));
        };
        ensure!(depth == steps, InvalidArgument, "the sums of the product differ: {depth} and {steps}");
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

    /// With sums that become codes or numbers.
    pub(super) fn ending(mut self, ending: Ending) -> CodeProduct {
        self.ending = ending;
        self
    }

    /// Adds a part that broadcasts to the products under a shape of as many elements.
    pub(super) fn add(&mut self, place: Place, tensor: Option<&Operand>, shape: &[usize]) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        let whole: Vec<usize> = self.batch.iter().copied().chain([self.rows, self.columns]).collect();
        let shape = if tensor.count() == 1 { &[] } else { shape };
        let part = Part::new(tensor, shape, &strides(shape), &whole)?;
        self.parts.get_mut(place as usize).into_iter().for_each(|to| *to = Some(part.clone()));
        Ok(())
    }

    /// Adds a part of each row: a list, or matrices of one column.
    pub(super) fn add_of_rows(&mut self, place: Place, tensor: Option<&Operand>) -> Result<()> {
        let mut shape = tensor.map_or_else(Vec::new, |tensor| tensor.shape.to_vec());
        if shape.len() == 1 {
            shape.push(1);
        }
        self.add(place, tensor, &shape)?;
        let column = self.parts.get(place as usize).and_then(Option::as_ref).map_or(0, |part| part.column);
        ensure!(column == 0, InvalidArgument, "a scale or a zero point of rows has the shape {shape:?}");
        Ok(())
    }

    /// Adds a part of each column: a list, or matrices of one row.
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

    /// Axes of the batch that all tensors walk as one become one. The last axis becomes rows where
    /// the right side is there for all of it.
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

    /// The launches that compute it.
    pub(super) fn launches(mut self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        if self.y.count() == 0 {
            return Ok(Vec::new());
        }
        self.fold();
        let (entry, [rows, columns]) = self.entry(cx);
        let blocks = [self.rows.div_ceil(rows), self.columns.div_ceil(columns)];
        Ok(vec![self.launch(entry, blocks)?])
    }

    /// The entry, and the rows and columns of a block of it.
    fn entry(&self, cx: &OpCx<'_>) -> (&'static str, [usize; 2]) {
        let [a_depth, _] = self.depths;
        let b_line = self.sides[1].column;
        if self.rows <= FEW_ROWS && a_depth == 1 && b_line == 1 {
            return ("product_rows", [FEW_ROWS, COLUMNS]);
        }
        let tiles = [self.rows, self.columns].map(|size| size.div_ceil(128)).iter().product::<usize>();
        let matrices = self.batch.iter().product::<usize>();
        // Half empty tiles, or too few for the device's processors, are slower than smaller ones.
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

    /// A launch of an entry of `cu/integer.cu` with so many blocks down and across, and with all of
    /// the product's parameters.
    pub(super) fn launch(&self, entry: &str, [down, across]: [usize; 2]) -> Result<Launch> {
        self.launch_of("integer", entry, [down, across])
    }

    /// The same of an entry of another family.
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

    /// The structure `Product` of `cu/integer.cuh`.
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

/// How many bytes of a side are read at once, as far as its steps go.
fn many(line: usize, depth: usize) -> usize {
    let far = if depth == 1 { line } else { depth };
    match () {
        () if depth == 1 && far.is_multiple_of(16) => 16,
        () if far.is_multiple_of(4) => 4,
        () => 1,
    }
}
