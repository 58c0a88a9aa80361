//! GEMM kernels for any strides and batches, with a fused epilogue: addends and activations.

mod few;
mod lt;
mod maps;

use std::sync::OnceLock;

use ort_core::dtype::DType;
use ort_core::ops::fused::activation::Activation;
use ort_core::{Result, ensure, error};
use rustc_hash::FxHashMap;

use super::warpgroups;
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand, Walk, strides};
use crate::modules::TENSOR_CORES;

/// The most batch axes, as in `cu/gemm_tiles.cuh`.
const MOST_BATCHES: usize = 6;
/// The most rows for which a GEMM runs as GEMV.
const FEW_ROWS: usize = 4;

/// A tensor of a GEMM with its strides, in elements.
#[derive(Clone, Debug)]
pub(super) struct Part {
    tensor: Operand,
    /// The stride along each batch axis.
    batch: Vec<usize>,
    row: usize,
    column: usize,
    /// The stride along the depth.
    depth: usize,
}

/// `y = activation(alpha * a * b + beta * c + d)` for each matrix of a batch.
#[derive(Clone, Debug)]
pub(super) struct Product {
    batch: Vec<usize>,
    rows: usize,
    columns: usize,
    depth: usize,
    a: Part,
    b: Part,
    y: Part,
    /// The addends in order; the first one is multiplied by `beta`.
    addends: Vec<Part>,
    pub(super) alpha: f32,
    pub(super) beta: f32,
    pub(super) activation: Option<Activation>,
    /// Whether the GEMM may use the node's whole workspace.
    pub(super) has_workspace: bool,
}

/// One operand of a GEMM: its sizes and strides, of which the last two are those of its matrix.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) sizes: Vec<usize>,
    pub(super) steps: Vec<usize>,
}

impl Side {
    /// Creates an operand from a tensor with permuted axes. A single axis becomes a row on the left
    /// and a column on the right.
    pub(super) fn new(tensor: &Operand, order: &[usize], is_left: bool) -> Result<Side> {
        let own = strides(&tensor.shape);
        let mut sizes: Vec<usize> = order.iter().map(|axis| tensor.size(*axis)).collect();
        let mut steps: Vec<usize> = order.iter().filter_map(|axis| own.get(*axis)).copied().collect();
        if sizes.len() == 1 {
            let place = if is_left { 0 } else { 1 };
            sizes.insert(place, 1);
            steps.insert(place, 0);
        }
        ensure!(
            sizes.len() >= 2,
            InvalidArgument,
            "an operand of the matrix product has rank {}",
            tensor.rank()
        );
        Ok(Side { sizes, steps })
    }

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
        steps.extend(sizes_and_steps.map(|(size, step)| if *size == 1 { 0 } else { *step }));
        Ok(steps)
    }
}

impl Part {
    /// Broadcasts a tensor to `whole`, the batch and matrix sizes of a GEMM. `shape` is its own
    /// shape, or that with axes of size 1 added.
    fn broadcast(tensor: &Operand, shape: &[usize], whole: &[usize]) -> Result<Part> {
        let missing = whole.len().checked_sub(shape.len());
        let missing = missing.ok_or_else(|| error!(InvalidArgument, "an addend has rank {}", shape.len()))?;
        let mut steps = vec![0; missing];
        for ((size, stride), whole) in shape.iter().zip(strides(shape)).zip(whole.iter().skip(missing)) {
            ensure!(
                size == whole || *size == 1,
                InvalidArgument,
                "an addend of shape {shape:?} has size {size} where the output has {whole}"
            );
            steps.push(if *size == 1 { 0 } else { stride });
        }
        let column = steps.pop().unwrap_or(0);
        let row = steps.pop().unwrap_or(0);
        Ok(Part { tensor: tensor.clone(), batch: steps, row, column, depth: 0 })
    }

    /// Whether `many` adjacent elements can be read at once. The smaller of the row and depth
    /// strides must be 1, and the contiguous size and all other strides must be multiples of
    /// `many`.
    fn in_vectors(&self, line: (usize, usize), depth: usize, batch: &[i64], many: usize) -> bool {
        let (lines, line) = line;
        // A single row is never stepped over, so its stride does not matter.
        let line = if lines == 1 { 0 } else { line };
        let (size, near, far) = if lines == 1 || self.depth <= line {
            (depth, self.depth, line)
        } else {
            (lines, line, self.depth)
        };
        let whole = |step: usize| step.is_multiple_of(many);
        near == 1 && whole(size) && whole(far) && batch.iter().all(|step| whole(step.unsigned_abs() as usize))
    }
}

impl Product {
    /// Creates the plain product of two operands.
    pub(super) fn new([a, b]: [&Operand; 2], [left, right]: [Side; 2], y: &Operand) -> Result<Product> {
        let ((a_batch, [rows, depth], a_steps), (b_batch, [steps, columns], b_steps)) =
            (left.split()?, right.split()?);
        ensure!(
            depth == steps,
            InvalidArgument,
            "the inner sizes of the matrix product differ: {depth} and {steps}"
        );
        let batch = ort_core::spec::broadcast::shapes(&[a_batch, b_batch])?.to_vec();
        let [a_row, a_depth] = a_steps;
        let [b_depth, b_column] = b_steps;
        let a_batch = left.batch_steps(&batch)?;
        let b_batch = right.batch_steps(&batch)?;
        let a = Part { tensor: a.clone(), batch: a_batch, row: a_row, column: 0, depth: a_depth };
        let b = Part { tensor: b.clone(), batch: b_batch, row: 0, column: b_column, depth: b_depth };
        let whole: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
        let y = Part::broadcast(y, &whole, &whole)?;
        let (addends, activation) = (Vec::new(), None);
        let (alpha, beta) = (1.0, 1.0);
        let has_workspace = false;
        Ok(Product { batch, rows, columns, depth, a, b, y, addends, alpha, beta, activation, has_workspace })
    }

    /// Adds an addend that broadcasts to the result; `shape` replaces its own shape if given.
    pub(super) fn add(&mut self, tensor: &Operand, shape: Option<&[usize]>) -> Result<()> {
        let whole: Vec<usize> = self.batch.iter().copied().chain([self.rows, self.columns]).collect();
        ensure!(self.addends.len() < 2, Fail, "a product has two addends at most");
        self.addends.push(Part::broadcast(tensor, shape.unwrap_or(&tensor.shape), &whole)?);
        Ok(())
    }

    /// Returns the launches of the GEMM.
    pub(super) fn launches(mut self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        if self.batch.contains(&0) || self.rows == 0 || self.columns == 0 {
            return Ok(Vec::new());
        }
        let mut walk = self.fold();
        // In order of preference: the library, GEMV, TMA, warpgroups, tiles.
        if let Some(launches) = lt::launches(&self, cx, &walk)? {
            return Ok(launches);
        }
        // A result of few columns is transposed, so that it runs as GEMV too.
        if self.columns <= FEW_ROWS && self.columns < self.rows {
            self.transpose();
            // The strides of `a` and `b` are the first two of the walk.
            walk.steps.swap(0, 1);
        }
        let matrices = walk.sizes.iter().product::<usize>();
        if let Some(launch) = self.of_few(cx, &walk, matrices)? {
            return Ok(vec![launch]);
        }
        if let Some(launch) = self.by_maps(cx, &walk, matrices)? {
            return Ok(vec![launch]);
        }
        if let Some(launches) = self.by_warpgroups(cx, &walk, matrices)? {
            return Ok(launches);
        }
        Ok(vec![self.launch(cx, &walk, matrices)?])
    }

    fn parts(&mut self) -> impl Iterator<Item = &mut Part> {
        [&mut self.a, &mut self.b, &mut self.y].into_iter().chain(&mut self.addends)
    }

    /// Returns the walk over the batch. If the last batch axes share one matrix on the right, they
    /// are folded into the rows.
    fn fold(&mut self) -> Walk {
        let sizes: Vec<usize> = self.batch.iter().copied().chain([self.rows]).collect();
        let steps = |part: &mut Part| part.batch.iter().chain([&part.row]).map(|step| *step as i64).collect();
        let steps: Vec<Vec<i64>> = self.parts().map(steps).collect();
        let mut walk = Walk::new(&sizes, &steps);
        let folds = matches!(walk.steps.get(1).map(|steps| steps.last()), Some(Some(0)));
        self.rows = if folds { walk.sizes.pop().unwrap_or(1) } else { 1 };
        for (part, steps) in self.parts().zip(&mut walk.steps) {
            part.row = if folds { steps.pop().unwrap_or(0) as usize } else { 0 };
        }
        walk
    }

    /// Transposes the GEMM: exchanges its operands, and rows with columns.
    fn transpose(&mut self) {
        std::mem::swap(&mut self.rows, &mut self.columns);
        std::mem::swap(&mut self.a, &mut self.b);
        self.parts().for_each(|part| std::mem::swap(&mut part.row, &mut part.column));
    }

    /// Returns the type suffix, the entry, the rows and columns of its tile, and its threads.
    fn entry(&self, cx: &OpCx<'_>, matrices: usize) -> Result<(&'static str, String, [usize; 2], u32)> {
        let suffix = suffix_of(self.y.tensor.dtype)?;
        let a_near = self.a.depth <= self.a.row;
        let b_near = self.b.depth <= self.b.column;
        let tiles = |block: usize| {
            [self.rows, self.columns].map(|size| size.div_ceil(block)).iter().product::<usize>()
        };
        // A large tile that is half empty, or fewer large tiles than multiprocessors, would be
        // slower than small tiles.
        let busy = tiles(128).saturating_mul(matrices) >= cx.limits.processors as usize;
        let is_large = busy && self.rows > 64 && self.columns > 64;
        // Only these types have kernels with large tiles.
        let has_large = matches!(suffix, "f32" | "f16" | "bf16" | "i32");
        let size = if is_large && has_large { ("large", 128) } else { ("small", 64) };
        let (name, block) = size;
        if let Some(suffix) = of_cores(&cx.limits, self.y.tensor.dtype)? {
            let sides = [(a_near, "n", "t"), (!b_near, "n", "t")];
            let sides = sides.map(|(plain, is, is_not)| if plain { is } else { is_not }).concat();
            let threads = if block == 128 { 256 } else { 128 };
            return Ok((suffix, format!("gemm_cores_{name}_{sides}_{suffix}"), [block, block], threads));
        }
        Ok((suffix, format!("gemm_{name}_{suffix}"), [block, block], 256))
    }

    fn launch(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Launch> {
        let (suffix, entry, [rows, columns], threads) = self.entry(cx, matrices)?;
        // Tensor core kernels load 16 bytes at once, the others four elements.
        let many = if entry.starts_with("gemm_cores") && suffix != "tf32" { 8 } else { 4 };
        let (down, across) = (self.rows.div_ceil(rows), self.columns.div_ceil(columns));
        let blocks = matrices.saturating_mul(down).saturating_mul(across);
        let launch = Launch::of_type("gemm", suffix, entry)?
            .grid([blocks, 1, 1])?
            .block([threads, 1, 1])
            .tensor(&self.a.tensor)
            .tensor(&self.b.tensor)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(&self.y.tensor);
        self.ending(launch, walk, [down, across], self.in_vectors(walk, many))
    }

    /// Returns the launches by warpgroups, or `None` if the device has none or cannot read the
    /// operands. The left one must be readable in vectors along the depth. The right one must be
    /// readable in vectors too, or be contiguous along its columns, in which case its rows need no
    /// alignment.
    fn by_warpgroups(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Option<Vec<Launch>>> {
        let y = &self.y.tensor;
        let Some(suffix) = warpgroups::suffix_of(&cx.limits, y.dtype) else { return Ok(None) };
        let in_vectors = self.in_vectors(walk, 8);
        let is_readable = in_vectors[0] && self.a.depth == 1 && (in_vectors[1] || self.b.column == 1);
        if self.rows <= FEW_ROWS || !is_readable {
            return Ok(None);
        }
        let sizes = [self.rows, self.columns, self.depth];
        let (side, tiles) = if self.b.column == 1 {
            ("nn", warpgroups::OF_NEAR_COLUMNS)
        } else {
            ("nt", warpgroups::OF_NEAR_STEPS)
        };
        let cut = warpgroups::cut(&cx.limits, tiles, matrices, sizes, self.has_workspace);
        let Some(cut) = cut else { return Ok(None) };
        let parts = (cut.parts > 1).then(|| cx.workspace(&mut 0, DType::F32, &[cut.parts, y.count()]));
        let (family, tile) = ("gemm_warpgroups", cut.tile);
        let launch = Launch::of_type(family, suffix, format!("{family}_{}_{side}_{suffix}", tile.name))?
            .grid([cut.blocks, cut.parts, 1])?
            .block([tile.threads, 1, 1])
            .shared(tile.shared())
            .tensor(&self.a.tensor)
            .tensor(&self.b.tensor)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(y)
            .find_tensor(parts.as_ref());
        let mut launches = vec![self.ending(launch, walk, [cut.down, cut.across], in_vectors)?];
        if let Some(parts) = &parts {
            let join = Launch::of_type(family, suffix, format!("gemm_join_{suffix}"))?;
            let join = join.threads(warpgroups::joining(y.count()))?;
            let join = join.tensor(parts).find_tensor(self.addend(0)).find_tensor(self.addend(1)).tensor(y);
            let join = self.ending(join, walk, [cut.down, cut.across], in_vectors)?;
            launches.push(join.uint(cut.parts)?.uint(y.count())?);
        }
        Ok(Some(launches))
    }

    fn addend(&self, index: usize) -> Option<&Operand> {
        self.addends.get(index).map(|part| &part.tensor)
    }

    /// Whether `many` adjacent elements of each operand can be read at once.
    fn in_vectors(&self, walk: &Walk, many: usize) -> [bool; 2] {
        let steps = |index: usize| walk.steps.get(index).map_or(&[][..], Vec::as_slice);
        [
            self.a.in_vectors((self.rows, self.a.row), self.depth, steps(0), many),
            self.b.in_vectors((self.columns, self.b.column), self.depth, steps(1), many),
        ]
    }

    /// Appends the kernels' structures `Product` and `Finish` to a launch.
    fn ending(
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
        let mut product = vec![self.rows, self.columns, self.depth];
        product.extend(tiles);
        product.extend([self.a.row, self.a.depth, self.b.depth, self.b.column]);
        product.extend([c_row, c_column, d_row, d_column, self.y.row, self.y.column]);
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
        Ok(launch.bytes(&finish(self.activation.as_ref(), self.alpha, self.beta)))
    }
}

/// Returns the type suffix in entry names. Unsigned integers share the kernels of signed ones,
/// since wrapping products have the same bits.
fn suffix_of(dtype: DType) -> Result<&'static str> {
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

/// Returns the type suffix of the tensor core kernels, if the device has them for the type.
pub(super) fn of_cores(limits: &Limits, dtype: DType) -> Result<Option<&'static str>> {
    Ok(match dtype {
        DType::F16 | DType::BF16 if limits.capability >= TENSOR_CORES => Some(suffix_of(dtype)?),
        DType::F32 if limits.tf32 => Some("tf32"),
        _ => None,
    })
}

/// Fills the structure `Finish` of `cu/gemm.cuh`.
pub(super) fn finish(activation: Option<&Activation>, alpha: f32, beta: f32) -> Vec<u8> {
    let (number, parameters) = activation.map_or((0, [0.0; 2]), number_of);
    let floats = [alpha, beta].into_iter().chain(parameters);
    let words = std::iter::once(number).chain(floats.map(f32::to_bits));
    words.flat_map(u32::to_ne_bytes).collect()
}

/// Returns the number of an activation in `cu/gemm.cuh`, and its parameters.
fn number_of(activation: &Activation) -> (u32, [f32; 2]) {
    let number = find_number(activation.name).unwrap_or(0);
    let given = |names: [&str; 2]| names.into_iter().find_map(|name| activation.parameter(name).ok());
    let [first, second] = [given(["alpha", "min"]), given(["beta", "gamma"]).or(given(["max", "max"]))];
    (number, [first.unwrap_or(0.0), second.unwrap_or(0.0)])
}

/// Returns whether the epilogues of `cu/gemm.cuh` have an activation.
pub(crate) fn has_activation(activation: &Activation) -> bool {
    find_number(activation.name).is_some()
}

fn find_number(name: &str) -> Option<u32> {
    numbers().get(&constant_name(name)).copied()
}

/// The numbers of the enumeration `Activation` in `cu/gemm.cuh`, by name.
fn numbers() -> &'static FxHashMap<String, u32> {
    static NUMBERS: OnceLock<FxHashMap<String, u32>> = OnceLock::new();
    NUMBERS.get_or_init(|| {
        let header = include_str!("../../cu/gemm.cuh");
        let body = header.split_once("enum Activation {").and_then(|(_, rest)| rest.split_once('}'));
        let lines = body.map_or("", |(body, _)| body).lines();
        let code = lines.filter(|line| !line.trim_start().starts_with("//"));
        let names = code.flat_map(|line| line.split(',')).map(str::trim).filter(|name| !name.is_empty());
        names.zip(0..).map(|(name, number)| (name.to_owned(), number)).collect()
    })
}

/// Returns `HARD_SWISH` for `HardSwish`.
fn constant_name(name: &str) -> String {
    let mut constant = String::new();
    for (index, letter) in name.char_indices() {
        if index > 0 && letter.is_ascii_uppercase() {
            constant.push('_');
        }
        constant.push(letter.to_ascii_uppercase());
    }
    constant
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_activation_has_a_number_and_its_parameters() {
        let mut found: Vec<u32> = Activation::names().filter_map(find_number).collect();
        found.sort_unstable();
        assert_eq!(found, (1..numbers().len() as u32).collect::<Vec<_>>());
        let clip = Activation::new("Clip", &[0.5, 6.0]).unwrap();
        assert_eq!(number_of(&clip), (2, [0.5, 6.0]));
        let selu = Activation::new("Selu", &[1.5, 1.25]).unwrap();
        assert_eq!(number_of(&selu), (13, [1.5, 1.25]));
        assert_eq!(number_of(&Activation::new("Tanh", &[]).unwrap()), (17, [0.0; 2]));
    }
}
