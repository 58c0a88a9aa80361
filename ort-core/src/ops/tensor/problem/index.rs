//! Gather and scatter: the geometry of indices, index tuples and updates.

use crate::dtype::DType;
use crate::ir::Attributes;
use crate::ops::tensor::geometry::{around_axis, contiguous_strides, kernel_axis, product};
use crate::{Result, ensure, error};

/// The most elements of a tensor whose places a device counts in 31 bits.
const MOST_PLACES: usize = i32::MAX as usize;

/// Returns the sizes around the attribute `axis`, as [`around_axis`].
///
/// # Errors
///
/// If the axis is out of range.
pub fn axis_extents(attrs: &Attributes, shape: &[usize]) -> Result<[usize; 3]> {
    Ok(around_axis(shape, kernel_axis(attrs.int("axis")?, shape.len())?))
}

/// Refuses a source without elements for a result that has some, and one whose elements cannot be
/// counted in 31 bits.
pub fn check_source(source: &[usize], result: &[usize]) -> Result<()> {
    let (from, to) = (product(source), product(result));
    ensure!(from > 0 || to == 0, InvalidArgument, "{result:?} elements of a tensor {source:?}");
    ensure!(from <= MOST_PLACES, NotImplemented, "a tensor {source:?} is beyond 31 bits");
    Ok(())
}

/// Whether a scatter node combines updates with the elements that they meet (attribute
/// `reduction`).
pub fn combines(attrs: &Attributes) -> bool {
    attrs.find_string("reduction").unwrap_or("none") != "none"
}

/// The places that the indices of `GatherElements` and `ScatterElements` address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementTargets {
    /// The shape of the indices.
    pub indices: Vec<usize>,
    /// The stride of the data along each axis, in elements; 0 along the indexed axis.
    pub steps: Vec<i64>,
    /// The data's size along the indexed axis.
    pub size: usize,
    /// The data's stride along the indexed axis, in elements.
    pub step: usize,
}

impl ElementTargets {
    /// Reads the attribute `axis` of a node on data and indices of these shapes.
    ///
    /// # Errors
    ///
    /// If the axis is out of range, or indices lie outside of the data along another axis.
    pub fn new(attrs: &Attributes, data: &[usize], indices: &[usize]) -> Result<ElementTargets> {
        let axis = kernel_axis(attrs.int("axis")?, data.len())?;
        ensure!(
            data.len() == indices.len(),
            InvalidArgument,
            "data of shape {data:?} do not match indices of shape {indices:?}"
        );
        let mut sizes = data.iter().zip(indices).enumerate();
        // The standard lets indices be smaller than the data along other axes.
        let inside = sizes.all(|(other, (size, picked))| other == axis || picked <= size);
        let empty = indices.contains(&0);
        ensure!(
            inside || empty,
            InvalidArgument,
            "indices of shape {indices:?} are out of range for data of shape {data:?}"
        );
        let [_, size, step] = around_axis(data, axis);
        let mut steps: Vec<i64> = contiguous_strides(data).iter().map(|step| *step as i64).collect();
        steps.get_mut(axis).into_iter().for_each(|step| *step = 0);
        Ok(ElementTargets { indices: indices.to_vec(), steps, size, step })
    }
}

/// The index tuples of `GatherND` and `ScatterND`: each addresses a slice of the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexTuples {
    /// The sizes of the axes that a tuple indexes.
    pub sizes: Vec<usize>,
    /// The strides along those axes, in slices.
    pub steps: Vec<usize>,
    /// The elements of a slice.
    pub run: usize,
    /// The number of tuples.
    pub count: usize,
    /// The number of tuples of each batch.
    pub per_batch: usize,
}

impl IndexTuples {
    /// Reads a `GatherND` node, whose attribute `batch_dims` is the number of leading axes that
    /// data and indices share.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other.
    pub fn of_gather(attrs: &Attributes, data: &[usize], indices: &[usize]) -> Result<IndexTuples> {
        // A negative number becomes one that no shape has, which `new` refuses.
        let batch = usize::try_from(attrs.int("batch_dims")?).unwrap_or(usize::MAX);
        IndexTuples::new(data, indices, batch)
    }

    /// Reads tuples from the shapes of data and indices, which share `batch` leading axes.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other.
    pub fn new(data: &[usize], indices: &[usize], batch: usize) -> Result<IndexTuples> {
        let invalid =
            || error!(InvalidArgument, "data of shape {data:?} do not match indices of shape {indices:?}");
        let (depth, outer) = indices.split_last().ok_or_else(invalid)?;
        ensure!(
            data.get(..batch) == outer.get(..batch),
            InvalidArgument,
            "data of shape {data:?} do not match indices of shape {indices:?}"
        );
        let rest = data.get(batch..).ok_or_else(invalid)?;
        // [batch axes, indexed axes, axes of a slice].
        let (sizes, inner) = rest.split_at_checked(*depth).ok_or_else(invalid)?;
        Ok(IndexTuples {
            sizes: sizes.to_vec(),
            steps: contiguous_strides(sizes).iter().map(|step| step.unsigned_abs()).collect(),
            run: product(inner),
            count: product(outer),
            per_batch: outer.get(batch..).map_or(1, product),
        })
    }

    /// The number of slices that a tuple can address.
    pub fn slots(&self) -> usize {
        product(&self.sizes)
    }
}

/// The updates of `ScatterElements` and `ScatterND`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scatter {
    /// The number of updates.
    pub tuples: usize,
    /// The elements of an update.
    pub run: usize,
    /// The number of places, of `run` elements each, that an update can address.
    pub slots: usize,
    /// Where updates go.
    pub targets: ScatterTargets,
}

/// The geometry of a scatter's indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScatterTargets {
    /// Each index is a place along one axis.
    Elements(ElementTargets),
    /// Each tuple of indices is the place of a slice.
    Tuples(IndexTuples),
}

impl Scatter {
    /// Reads a `ScatterElements` or `ScatterND` node on data and indices of these shapes.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other, or the data cannot be counted in 31 bits.
    pub fn new(op: &str, attrs: &Attributes, data: &[usize], indices: &[usize]) -> Result<Scatter> {
        let count = product(data);
        ensure!(count <= MOST_PLACES, NotImplemented, "data {data:?} are beyond 31 bits");
        if op == "ScatterElements" {
            let targets = ScatterTargets::Elements(ElementTargets::new(attrs, data, indices)?);
            return Ok(Scatter { tuples: product(indices), run: 1, slots: count, targets });
        }
        let tuples = IndexTuples::new(data, indices, 0)?;
        let (count, run, slots) = (tuples.count, tuples.run, tuples.slots());
        Ok(Scatter { tuples: count, run, slots, targets: ScatterTargets::Tuples(tuples) })
    }

    /// Returns the number of elements of all updates, which must be that of the node's.
    ///
    /// # Errors
    ///
    /// If it is not.
    pub fn check_updates(&self, updates: usize) -> Result<usize> {
        let count = self.tuples.saturating_mul(self.run);
        ensure!(updates == count, InvalidArgument, "{updates} updates, expected {count}");
        Ok(count)
    }
}

/// The update of a cache by `TensorScatter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorScatter {
    /// The prefixes, products of the axes before the updated one, of each sequence of the batch.
    pub per_batch: usize,
    /// The cache's size along the updated axis.
    pub size: usize,
    /// The update's size along that axis.
    pub length: usize,
    /// The elements after that axis.
    pub run: usize,
    /// Whether an update wraps around at the end of the cache.
    pub circular: bool,
}

impl TensorScatter {
    /// Reads a node on a cache and an update of these shapes. `starts` is the number of its write
    /// indices, if it has any.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other, or there is not one write index for each sequence.
    pub fn new(
        attrs: &Attributes,
        cache: &[usize],
        update: &[usize],
        starts: Option<usize>,
    ) -> Result<TensorScatter> {
        let axis = kernel_axis(attrs.int("axis")?, cache.len())?;
        let [prefixes, size, run] = around_axis(cache, axis);
        let [_, length, _] = around_axis(update, axis);
        let batch = cache.first().copied().unwrap_or(1);
        let mut sizes = cache.iter().zip(update).enumerate();
        let same = cache.len() == update.len() && sizes.all(|(other, (a, b))| other == axis || a == b);
        ensure!(
            // Axis 0 is the batch. An update longer than the cache would write an entry twice.
            axis > 0 && same && length <= size,
            InvalidArgument,
            "an update of shape {update:?} for a cache of shape {cache:?}"
        );
        if let Some(starts) = starts {
            ensure!(starts == batch, InvalidArgument, "got {starts} write indices, expected {batch}");
        }
        let circular = attrs.string("mode")? == "circular";
        let per_batch = prefixes.checked_div(batch).unwrap_or(0);
        Ok(TensorScatter { per_batch, size, length, run, circular })
    }
}

/// The result of `OneHot`, around its new axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneHot {
    /// The size of the new axis.
    pub depth: usize,
    /// The number of elements after it.
    pub inner: usize,
}

impl OneHot {
    /// Reads a node with this number of indices and values, whose result has this shape.
    ///
    /// # Errors
    ///
    /// If there are not two values, or the result does not have an axis for each index.
    pub fn new(attrs: &Attributes, indices: usize, values: usize, result: &[usize]) -> Result<OneHot> {
        ensure!(values == 2, InvalidArgument, "OneHot needs two values, got {values}");
        let [_, depth, inner] = axis_extents(attrs, result)?;
        let fits = product(result) == indices.saturating_mul(depth);
        ensure!(fits, Fail, "the output has shape {result:?}");
        Ok(OneHot { depth, inner })
    }
}

/// The table of `GatherBlockQuantized`: quantized values with a scale for each block along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherBlocks {
    /// The bits of a value packed into bytes; `None` for values of a 4-bit type.
    pub packed_bits: Option<usize>,
    /// The size of the gathered axis.
    pub size: usize,
    /// The values after the gathered axis.
    pub inner: usize,
    /// The size of the quantized axis.
    pub quantized: usize,
    /// The values after the quantized axis.
    pub behind: usize,
    /// The values of a block.
    pub block: usize,
    /// The blocks along the quantized axis.
    pub blocks: usize,
}

impl GatherBlocks {
    /// Reads a node on a table of this type and shape, with scales of this shape. A block size of 0
    /// means the whole axis.
    ///
    /// # Errors
    ///
    /// If an attribute is out of range, or the scales are not one for each block.
    pub fn new(attrs: &Attributes, dtype: DType, data: &[usize], scales: &[usize]) -> Result<GatherBlocks> {
        let mut shape = data.to_vec();
        let mut packed_bits = None;
        if dtype == DType::U8 {
            let bits = attrs.int("bits")?;
            let bits = usize::try_from(bits).ok().filter(|bits| matches!(bits, 2 | 4 | 8));
            let bits = bits.ok_or_else(|| error!(InvalidGraph, "codes of neither 2, 4 nor 8 bits"))?;
            // The last axis counts bytes; from here on it counts quantized values.
            shape.last_mut().into_iter().for_each(|last| *last = last.saturating_mul(8 / bits));
            packed_bits = Some(bits);
        }
        let axis = kernel_axis(attrs.int("gather_axis")?, shape.len())?;
        let quantized_axis = kernel_axis(attrs.int("quantize_axis")?, shape.len())?;
        let [_, size, inner] = around_axis(&shape, axis);
        let [_, quantized, behind] = around_axis(&shape, quantized_axis);
        let block = attrs.int("block_size")?;
        let block = usize::try_from(block).map_err(|_| error!(InvalidGraph, "a block size of {block}"))?;
        // A block that is longer than the axis covers it once.
        let block = if block == 0 { quantized } else { block.min(quantized) };
        let blocks = if block == 0 { 0 } else { quantized.div_ceil(block) };
        let mut expected = shape;
        expected.iter_mut().skip(quantized_axis).take(1).for_each(|size| *size = blocks);
        ensure!(*scales == *expected, InvalidArgument, "scales of shape {scales:?} fit no blocks");
        Ok(GatherBlocks { packed_bits, size, inner, quantized, behind, block, blocks })
    }
}
