//! Gather and scatter kernels: `Gather`, `GatherElements`, `GatherND`, `OneHot`, `ScatterElements`,
//! `ScatterND` and `TensorScatter`.
//!
//! Unlike the CPU, the device cannot report an index out of range. Reads take the nearest valid
//! element, and writes are skipped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

use super::movement::{MOVED, by_bytes, copied, element_bytes, few_axes, unit};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, Walk, strides};

/// The index types.
const INDICES: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

const fn picking(op: &'static str, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
    let def = KernelDef { op, types: &[("T", MOVED)], when: few_axes, ..KernelDef::BASE };
    CudaKernel::new(def, launches)
}

const fn replacing(op: &'static str) -> CudaKernel {
    let def = KernelDef {
        op,
        types: &[("T", MOVED)],
        in_place: &[(0, 0)],
        when: |node| !reduces(node) && few_axes(node),
        ..KernelDef::BASE
    };
    CudaKernel { workspace: Some(owners_bytes), ..CudaKernel::new(def, replace) }
}

cuda_kernels![
    picking("Gather", gather),
    picking("GatherElements", gather_elements),
    picking("GatherND", gather_nd),
    CudaKernel::new(
        KernelDef {
            op: "OneHot",
            types: &[("T1", INDICES), ("T3", MOVED)],
            host_inputs: &[1],
            ..KernelDef::BASE
        },
        one_hot
    ),
    replacing("ScatterElements"),
    replacing("ScatterND"),
    CudaKernel::new(
        KernelDef { op: "TensorScatter", types: &[("T", MOVED)], in_place: &[(0, 0)], ..KernelDef::BASE },
        tensor_scatter
    ),
];

pub(super) fn reduces(node: &NodeView<'_>) -> bool {
    node.attrs().find_string("reduction").unwrap_or("none") != "none"
}

/// Whether indices have 64 bits, as a kernel parameter.
fn wide(indices: &Operand) -> Result<usize> {
    let dtype = indices.dtype;
    ensure!(INDICES.contains(dtype), InvalidArgument, "indices of type {}", dtype.name());
    Ok((dtype == DType::I64).into())
}

/// Returns the element count outside an axis, its size, and the element count inside it. A scalar
/// has one axis of size 1.
pub(super) fn around(shape: &[usize], axis: usize) -> [usize; 3] {
    let product = |sizes: &[usize]| sizes.iter().fold(1usize, |all, size| all.saturating_mul(*size));
    let (front, back) = shape.split_at_checked(axis).unwrap_or((shape, &[]));
    match back.split_first() {
        Some((size, back)) => [product(front), *size, product(back)],
        None => [product(front), 1, 1],
    }
}

/// Checks that elements can be gathered from a tensor: it is not empty, and its elements can be
/// counted in 31 bits.
fn check_source(source: &Operand, result: &Operand) -> Result<()> {
    let (from, to) = (&source.shape, &result.shape);
    ensure!(
        source.count() > 0 || result.count() == 0,
        InvalidArgument,
        "{to:?} elements of a tensor {from:?}"
    );
    ensure!(source.count() <= i32::MAX as usize, NotImplemented, "a tensor {from:?} is beyond 31 bits");
    Ok(())
}

fn gather(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let extents = around(&data.shape, cx.axis(cx.attrs.int("axis")?, data.rank())?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    Ok(vec![picked(data, extents, indices, y)?])
}

/// Returns the launch that gathers along the middle one of `outer`, `size` and `run`. The result is
/// not empty.
pub(super) fn picked(
    data: &Operand,
    [outer, size, run]: [usize; 3],
    indices: &Operand,
    y: &Operand,
) -> Result<Launch> {
    check_source(data, y)?;
    let (picks, count) = (indices.count(), y.count());
    let expected = outer.saturating_mul(picks).saturating_mul(run);
    ensure!(count == expected, Fail, "{expected} elements are picked for shape {:?}", y.shape);
    let bytes = element_bytes(data.dtype)?;
    let unit = unit(bytes, [run]);
    let launch = by_bytes("gather", "gather", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(data).tensor(indices).tensor(y).uint(wide(indices)?)?.uint(count / unit)?;
    launch.uint(size)?.uint(run / unit)?.uint(picks)
}

fn gather_elements(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let axis = cx.axis(cx.attrs.int("axis")?, data.rank())?;
    let (walk, count) = (elements_walk(&data.shape, &indices.shape, axis)?, y.count());
    ensure!(count == indices.count(), Fail, "{} indices for shape {:?}", indices.count(), y.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = by_bytes("gather", "gather_elements", element_bytes(data.dtype)?).threads(count)?;
    let launch = launch.tensor(data).tensor(indices).tensor(y).uint(wide(indices)?)?.uint(count)?;
    let launch = launch.uint(data.size(axis))?.uint(around(&data.shape, axis)[2])?;
    let launch = launch.uint(walk.sizes.len())?.uints::<MOST_AXES>(&walk.sizes)?;
    Ok(vec![launch.ints::<MOST_AXES>(walk.steps.first().map_or(&[], Vec::as_slice))?])
}

/// Returns the walk over the indices of `GatherElements` and `ScatterElements`: the offset of each
/// in the data, with stride 0 along the axis.
fn elements_walk(data: &[usize], indices: &[usize], axis: usize) -> Result<Walk> {
    ensure!(
        data.len() == indices.len(),
        InvalidArgument,
        "data of shape {data:?} do not match indices of shape {indices:?}"
    );
    let mut sizes = data.iter().zip(indices).enumerate();
    let inside = sizes.all(|(other, (size, picked))| other == axis || picked <= size);
    let empty = indices.contains(&0);
    ensure!(
        inside || empty,
        InvalidArgument,
        "indices of shape {indices:?} are out of range for data of shape {data:?}"
    );
    let steps = strides(data).into_iter().enumerate();
    let steps = steps.map(|(other, step)| if other == axis { 0 } else { step as i64 }).collect();
    Ok(Walk::new(indices, &[steps]))
}

/// The axes that an index tuple addresses, with their sizes and strides. Strides count in units of
/// `run`, the elements that a tuple selects.
struct Tuples {
    sizes: Vec<usize>,
    steps: Vec<usize>,
    run: usize,
}

impl Tuples {
    fn new(data: &[usize], indices: &[usize], batch: usize) -> Result<Tuples> {
        let invalid =
            || error!(InvalidArgument, "data of shape {data:?} do not match indices of shape {indices:?}");
        let (depth, outer) = indices.split_last().ok_or_else(invalid)?;
        ensure!(
            data.get(..batch) == outer.get(..batch),
            InvalidArgument,
            "data of shape {data:?} do not match indices of shape {indices:?}"
        );
        let rest = data.get(batch..).ok_or_else(invalid)?;
        let (sizes, inner) = rest.split_at_checked(*depth).ok_or_else(invalid)?;
        let run = inner.iter().fold(1usize, |run, size| run.saturating_mul(*size));
        Ok(Tuples { sizes: sizes.to_vec(), steps: strides(sizes), run })
    }

    /// Returns how many positions a tuple can address.
    fn slots(&self) -> usize {
        self.sizes.iter().product()
    }
}

fn gather_nd(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let batch = usize::try_from(cx.attrs.int("batch_dims")?).unwrap_or(usize::MAX);
    let tuples = Tuples::new(&data.shape, &indices.shape, batch)?;
    let (_, outer) = indices.shape.split_last().unwrap_or((&0, &[]));
    let per_batch = outer.get(batch..).unwrap_or(&[]).iter().product();
    let expected = outer.iter().product::<usize>().saturating_mul(tuples.run);
    let count = y.count();
    ensure!(count == expected, Fail, "{expected} elements are picked for shape {:?}", y.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let bytes = element_bytes(data.dtype)?;
    let unit = unit(bytes, [tuples.run]);
    let launch = by_bytes("gather", "gather_nd", bytes * unit).threads(count / unit)?;
    // Tuples without an index have no memory.
    let launch = launch.tensor(data).find_tensor(Some(indices)).tensor(y).uint(wide(indices)?)?;
    let launch = launch.uint(count / unit)?.uint(tuples.run / unit)?.uint(per_batch)?.uint(tuples.slots())?;
    let launch = launch.uint(tuples.sizes.len())?.uints::<MOST_AXES>(&tuples.sizes)?;
    Ok(vec![launch.uints::<MOST_AXES>(&tuples.steps)?])
}

fn one_hot(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (indices, values, y) = (cx.input(0)?, cx.input(2)?, cx.output(0)?);
    ensure!(values.count() == 2, InvalidArgument, "OneHot needs two values, got {}", values.count());
    let [_, depth, inner] = around(&y.shape, cx.axis(cx.attrs.int("axis")?, y.rank())?);
    let count = y.count();
    ensure!(count == indices.count().saturating_mul(depth), Fail, "the output has shape {:?}", y.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = by_bytes("gather", "one_hot", element_bytes(y.dtype)?).threads(count)?;
    let launch = launch.tensor(indices).tensor(values).tensor(y).uint(wide(indices)?)?.uint(count)?;
    Ok(vec![launch.uint(depth)?.uint(inner)?])
}

/// The targets of a scatter: `tuples` updates of `run` elements, each to one of the `slots` of the
/// data.
pub(super) struct Target {
    pub(super) tuples: usize,
    pub(super) run: usize,
    slots: usize,
    /// The kernels' structure, in order: whether indices have 64 bits, whether each is a single
    /// index along an axis, that axis's size and stride, the number of axes walked or addressed,
    /// their sizes, their strides.
    words: Vec<i64>,
}

impl Target {
    pub(super) fn new(cx: &OpCx<'_>) -> Result<Target> {
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let (count, wide) = (data.count(), wide(indices)?);
        ensure!(count <= i32::MAX as usize, NotImplemented, "data {:?} are beyond 31 bits", data.shape);
        if cx.op == "ScatterElements" {
            let axis = cx.axis(cx.attrs.int("axis")?, data.rank())?;
            let walk = elements_walk(&data.shape, &indices.shape, axis)?;
            let steps = walk.steps.first().map_or(&[][..], Vec::as_slice);
            let head = [wide, 1, data.size(axis), around(&data.shape, axis)[2], walk.sizes.len()];
            let words = target_words(head, &walk.sizes, steps)?;
            return Ok(Target { tuples: indices.count(), run: 1, slots: count, words });
        }
        let tuples = Tuples::new(&data.shape, &indices.shape, 0)?;
        let outer = indices.shape.split_last().map_or(0, |(_, outer)| outer.iter().product());
        let steps: Vec<i64> = tuples.steps.iter().map(|step| *step as i64).collect();
        let words = target_words([wide, 0, 0, 0, tuples.sizes.len()], &tuples.sizes, &steps)?;
        Ok(Target { tuples: outer, run: tuples.run, slots: tuples.slots(), words })
    }

    pub(super) fn pass(&self, launch: Launch) -> Result<Launch> {
        launch.ints::<{ 5 + 2 * MOST_AXES }>(&self.words)
    }
}

fn target_words(head: [usize; 5], sizes: &[usize], steps: &[i64]) -> Result<Vec<i64>> {
    ensure!(sizes.len() <= MOST_AXES, NotImplemented, "{} axes where a kernel has {MOST_AXES}", sizes.len());
    let missing = || std::iter::repeat_n(0, MOST_AXES - sizes.len());
    let numbers = head.iter().chain(sizes).map(|number| *number as i64);
    Ok(numbers.chain(missing()).chain(steps.iter().copied()).collect())
}

/// Returns the workspace for duplicate indices: each slot stores the number of its last update, so
/// that the last one wins deterministically.
fn owners_bytes(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    owners(cx, &Target::new(cx)?, &mut taken);
    Ok(taken)
}

/// Reserves one number per slot: the last update that targets it, from 1 on. `None` if there is
/// only one update.
fn owners(cx: &OpCx<'_>, target: &Target, taken: &mut usize) -> Option<Operand> {
    (target.tuples > 1).then(|| cx.workspace(taken, DType::U32, &[target.slots]))
}

fn replace(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, updates, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let target = Target::new(cx)?;
    let count = target.tuples.saturating_mul(target.run);
    ensure!(updates.count() == count, InvalidArgument, "{} updates, expected {count}", updates.count());
    let mut launches = copied(data, y)?;
    if count == 0 || y.count() == 0 {
        return Ok(launches);
    }
    let owners = owners(cx, &target, &mut 0);
    if let Some(owners) = &owners {
        // Mark each slot with the largest number of its updates, so that only the last one is
        // written.
        for entry in ["scatter_clear", "scatter_mark"] {
            let launch = Launch::new("gather", entry).threads(target.tuples)?;
            let launch = launch.tensor(indices).tensor(owners).uint(target.tuples)?;
            launches.push(target.pass(launch)?);
        }
    }
    let bytes = element_bytes(y.dtype)?;
    let unit = unit(bytes, [target.run]);
    let launch = by_bytes("gather", "scatter", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(indices).find_tensor(owners.as_ref()).tensor(updates).tensor(y);
    launches.push(target.pass(launch.uint(count / unit)?.uint(target.run / unit)?)?);
    Ok(launches)
}

fn tensor_scatter(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (cache, update, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let axis = cx.axis(cx.attrs.int("axis")?, cache.rank())?;
    let [prefixes, size, run] = around(&cache.shape, axis);
    let (length, batch) = (update.size(axis), cache.size(0));
    let mut sizes = cache.shape.iter().zip(&update.shape).enumerate();
    let same = cache.rank() == update.rank() && sizes.all(|(other, (a, b))| other == axis || a == b);
    ensure!(
        axis > 0 && same && length <= size,
        InvalidArgument,
        "an update of shape {:?} for a cache of shape {:?}",
        update.shape,
        cache.shape
    );
    let starts = cx.find_input(2);
    if let Some(starts) = starts {
        ensure!(
            starts.count() == batch,
            InvalidArgument,
            "got {} write indices, expected {batch}",
            starts.count()
        );
    }
    let circular = cx.attrs.string("mode")? == "circular";
    let mut launches = copied(cache, y)?;
    let count = update.count();
    if count == 0 {
        return Ok(launches);
    }
    let bytes = element_bytes(y.dtype)?;
    let unit = unit(bytes, [run]);
    let launch = by_bytes("gather", "tensor_scatter", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(update).find_tensor(starts).tensor(y).uint(count / unit)?;
    let launch = launch.uint(run / unit)?.uint(length)?.uint(size)?;
    let per_batch = prefixes.checked_div(batch).unwrap_or(0);
    launches.push(launch.uint(per_batch)?.uint(circular.into())?);
    Ok(launches)
}

#[cfg(test)]
mod tests {
    use super::{MOST_AXES, Result, around, target_words};

    #[test]
    fn a_scalar_has_an_axis() {
        assert_eq!(around(&[], 0), [1, 1, 1]);
        assert_eq!(around(&[2, 3, 4, 5], 2), [6, 4, 5]);
        assert_eq!(around(&[2, 0, 4], 0), [1, 2, 0]);
    }

    #[test]
    fn steps_begin_behind_all_sizes() -> Result<()> {
        let words = target_words([1, 0, 0, 0, 2], &[3, 4], &[4, 1])?;
        assert_eq!(words.get(5..7), Some(&[3, 4][..]));
        assert_eq!(words.get(5 + MOST_AXES..), Some(&[4, 1][..]));
        Ok(())
    }
}
