//! Gather and scatter kernels: `Gather`, `GatherElements`, `GatherND`, `OneHot`, `ScatterElements`,
//! `ScatterND` and `TensorScatter`.
//!
//! Unlike the CPU, the device cannot report an index out of range. Reads take the nearest valid
//! element, and writes are skipped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{
    ElementTargets, IndexTuples, OneHot, Scatter, ScatterTargets, TensorScatter, axis_extents, check_source,
    combines,
};
use ort_core::{Result, ensure};

use super::elements::{MOVED, by_bytes, element_bytes, few_axes, unit};
use super::movement::copied;
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, Walk};

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
        when: |node| !combines(node.attrs()) && few_axes(node),
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

/// Whether indices have 64 bits, as a kernel parameter.
fn wide(indices: &Operand) -> Result<usize> {
    let dtype = indices.dtype;
    ensure!(INDICES.contains(dtype), InvalidArgument, "indices of type {}", dtype.name());
    Ok((dtype == DType::I64).into())
}

fn gather(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let extents = axis_extents(cx.attrs, &data.shape)?;
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
    check_source(&data.shape, &y.shape)?;
    let (picks, count) = (indices.count(), y.count());
    let expected = outer.saturating_mul(picks).saturating_mul(run);
    ensure!(count == expected, Fail, "{expected} elements are picked for shape {:?}", y.shape);
    let bytes = element_bytes(data.dtype)?;
    // The unit divides a slice, so that no access crosses from one picked slice to the next.
    let unit = unit(bytes, [run]);
    let launch = by_bytes("gather", "gather", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(data).tensor(indices).tensor(y).uint(wide(indices)?)?.uint(count / unit)?;
    launch.uint(size)?.uint(run / unit)?.uint(picks)
}

fn gather_elements(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(&data.shape, &y.shape)?;
    let (targets, count) = (ElementTargets::new(cx.attrs, &data.shape, &indices.shape)?, y.count());
    ensure!(count == indices.count(), Fail, "{} indices for shape {:?}", indices.count(), y.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let walk = Walk::new(&targets.indices, &[targets.steps]);
    let launch = by_bytes("gather", "gather_elements", element_bytes(data.dtype)?).threads(count)?;
    let launch = launch.tensor(data).tensor(indices).tensor(y).uint(wide(indices)?)?.uint(count)?;
    let launch = launch.uint(targets.size)?.uint(targets.step)?;
    let launch = launch.uint(walk.sizes.len())?.uints::<MOST_AXES>(&walk.sizes)?;
    Ok(vec![launch.ints::<MOST_AXES>(walk.steps.first().map_or(&[], Vec::as_slice))?])
}

fn gather_nd(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(&data.shape, &y.shape)?;
    let tuples = IndexTuples::of_gather(cx.attrs, &data.shape, &indices.shape)?;
    let (expected, count) = (tuples.count.saturating_mul(tuples.run), y.count());
    ensure!(count == expected, Fail, "{expected} elements are picked for shape {:?}", y.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let bytes = element_bytes(data.dtype)?;
    let unit = unit(bytes, [tuples.run]);
    let launch = by_bytes("gather", "gather_nd", bytes * unit).threads(count / unit)?;
    // Tuples without an index have no memory.
    let launch = launch.tensor(data).find_tensor(Some(indices)).tensor(y).uint(wide(indices)?)?;
    let launch = launch.uint(count / unit)?.uint(tuples.run / unit)?;
    let launch = launch.uint(tuples.per_batch)?.uint(tuples.slots())?;
    let launch = launch.uint(tuples.sizes.len())?.uints::<MOST_AXES>(&tuples.sizes)?;
    Ok(vec![launch.uints::<MOST_AXES>(&tuples.steps)?])
}

fn one_hot(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (indices, values, y) = (cx.input(0)?, cx.input(2)?, cx.output(0)?);
    let OneHot { depth, inner } = OneHot::new(cx.attrs, indices.count(), values.count(), &y.shape)?;
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = by_bytes("gather", "one_hot", element_bytes(y.dtype)?).threads(count)?;
    let launch = launch.tensor(indices).tensor(values).tensor(y).uint(wide(indices)?)?.uint(count)?;
    Ok(vec![launch.uint(depth)?.uint(inner)?])
}

/// The targets of a scatter, with the kernels' structure.
pub(super) struct Target {
    pub(super) scatter: Scatter,
    /// In order: whether indices have 64 bits, whether each is a single index along an axis, that
    /// axis's size and stride, the number of axes walked or addressed, their sizes, their strides.
    words: Vec<i64>,
}

impl Target {
    pub(super) fn new(cx: &OpCx<'_>) -> Result<Target> {
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let scatter = Scatter::new(cx.op, cx.attrs, &data.shape, &indices.shape)?;
        let wide = wide(indices)?;
        let words = match &scatter.targets {
            ScatterTargets::Elements(targets) => {
                let walk = Walk::new(&targets.indices, std::slice::from_ref(&targets.steps));
                let steps = walk.steps.first().map_or(&[][..], Vec::as_slice);
                let head = [wide, 1, targets.size, targets.step, walk.sizes.len()];
                target_words(head, &walk.sizes, steps)?
            }
            ScatterTargets::Tuples(tuples) => {
                let steps: Vec<i64> = tuples.steps.iter().map(|step| *step as i64).collect();
                target_words([wide, 0, 0, 0, tuples.sizes.len()], &tuples.sizes, &steps)?
            }
        };
        Ok(Target { scatter, words })
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
    owners(cx, &Target::new(cx)?.scatter, &mut taken);
    Ok(taken)
}

/// Reserves one number per slot: the last update that targets it, from 1 on. `None` if there is
/// only one update.
fn owners(cx: &OpCx<'_>, scatter: &Scatter, taken: &mut usize) -> Option<Operand> {
    (scatter.tuples > 1).then(|| cx.workspace(taken, DType::U32, &[scatter.slots]))
}

fn replace(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, updates, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let target = Target::new(cx)?;
    let scatter = &target.scatter;
    let count = scatter.check_updates(updates.count())?;
    // The result starts as a copy of the data, unless both share their memory.
    let mut launches = copied(data, y)?;
    if count == 0 || y.count() == 0 {
        return Ok(launches);
    }
    let owners = owners(cx, scatter, &mut 0);
    if let Some(owners) = &owners {
        // Mark each slot with the largest number of its updates, so that only the last one is
        // written.
        for entry in ["scatter_clear", "scatter_mark"] {
            let launch = Launch::new("gather", entry).threads(scatter.tuples)?;
            let launch = launch.tensor(indices).tensor(owners).uint(scatter.tuples)?;
            launches.push(target.pass(launch)?);
        }
    }
    let bytes = element_bytes(y.dtype)?;
    let unit = unit(bytes, [scatter.run]);
    let launch = by_bytes("gather", "scatter", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(indices).find_tensor(owners.as_ref()).tensor(updates).tensor(y);
    launches.push(target.pass(launch.uint(count / unit)?.uint(scatter.run / unit)?)?);
    Ok(launches)
}

fn tensor_scatter(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (cache, update, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let starts = cx.find_input(2);
    let scatter = TensorScatter::new(cx.attrs, &cache.shape, &update.shape, starts.map(Operand::count))?;
    let mut launches = copied(cache, y)?;
    let count = update.count();
    if count == 0 {
        return Ok(launches);
    }
    let bytes = element_bytes(y.dtype)?;
    let unit = unit(bytes, [scatter.run]);
    let launch = by_bytes("gather", "tensor_scatter", bytes * unit).threads(count / unit)?;
    let launch = launch.tensor(update).find_tensor(starts).tensor(y).uint(count / unit)?;
    let launch = launch.uint(scatter.run / unit)?.uint(scatter.length)?.uint(scatter.size)?;
    launches.push(launch.uint(scatter.per_batch)?.uint(scatter.circular.into())?);
    Ok(launches)
}

#[cfg(test)]
mod tests {
    use super::{MOST_AXES, Result, target_words};

    #[test]
    fn steps_begin_behind_all_sizes() -> Result<()> {
        let words = target_words([1, 0, 0, 0, 2], &[3, 4], &[4, 1])?;
        assert_eq!(words.get(5..7), Some(&[3, 4][..]));
        assert_eq!(words.get(5 + MOST_AXES..), Some(&[4, 1][..]));
        Ok(())
    }
}
