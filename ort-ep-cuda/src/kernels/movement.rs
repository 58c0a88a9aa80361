//! Data movement: `Transpose`, `Slice`, `Concat`, `Split`, reshapes and the like. Kernels are
//! chosen by element size only, and move several elements at once where these stay adjacent.

use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::ir::ValueType;
use ort_core::ops::tensor::geometry::Strided;
use ort_core::{Result, ensure};
use ort_gpu::read;

use super::elements::{MOVED, WIDEST, by_bytes, element_bytes, few_axes, unit};
use super::pad::filled;
use super::{CudaKernel, MOST_AXES, cuda_kernels, elements};
use crate::launch::{Launch, OpCx, Operand, Walk};

/// Rows and columns of a transposed tile.
const TILE: usize = 32;
/// Rows of threads in the block of a tile.
const TILE_ROWS: u32 = 8;
/// The least rows and columns worth a tile.
const LEAST_TILED: usize = 16;

/// The most parts that one launch moves, as in `cu/movement.cu`.
const MOST_PARTS: usize = 8;
/// A tensor of at most this many units takes no longer than its launch. Its parts are then moved in
/// one launch, even if each access moves few elements.
const LITTLE: usize = 1 << 16;

const T: &[(&str, TypeSet)] = &[("T", MOVED)];

const fn movement(
    op: &'static str,
    host_inputs: &'static [usize],
    launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
) -> CudaKernel {
    CudaKernel::new(KernelDef { op, types: T, host_inputs, when: few_axes, ..KernelDef::BASE }, launches)
}

const fn reshape(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> CudaKernel {
    let def = KernelDef { op, types, in_place: &[(0, 0)], host_inputs: &[1], ..KernelDef::BASE };
    CudaKernel::new(def, same_elements)
}

cuda_kernels![
    movement("Transpose", &[], rearrange),
    movement("Expand", &[1], rearrange),
    movement("Slice", &[1, 2, 3, 4], rearrange),
    movement("Concat", &[], concat),
    movement("Split", &[1], split),
    movement("DepthToSpace", &[], rearrange),
    movement("SpaceToDepth", &[], rearrange),
    reshape("Reshape", T),
    reshape("Flatten", T),
    reshape("Squeeze", T),
    reshape("Unsqueeze", T),
    reshape("BitCast", &[("T1", MOVED), ("T2", MOVED)]),
    CudaKernel::new(
        KernelDef {
            op: "Identity",
            types: &[("V", MOVED)],
            in_place: &[(0, 0)],
            when: |node| matches!(node.input_type(0), ValueType::Tensor(_)),
            ..KernelDef::BASE
        },
        same_elements,
    ),
    CudaKernel::new(
        KernelDef {
            op: "Dropout",
            types: &[("T", TypeSet::FLOATS)],
            in_place: &[(0, 0)],
            host_inputs: &[1, 2],
            when: read::is_inference,
            ..KernelDef::BASE
        },
        dropout,
    ),
];

/// Fills `y` with the elements of `x` in the given order.
pub(super) fn gather(x: &Operand, order: &Strided, y: &Operand) -> Result<Vec<Launch>> {
    ensure!(order.count() == y.count(), Fail, "{} elements moved to {}", order.count(), y.count());
    copy((x, order), (y, &Strided::contiguous(&order.sizes)))
}

/// Returns the launches that copy `x` to `y`, or none if they alias.
pub(super) fn copied(x: &Operand, y: &Operand) -> Result<Vec<Launch>> {
    let (from, to) = (&x.shape, &y.shape);
    ensure!(
        x.count() == y.count(),
        InvalidArgument,
        "the input of shape {from:?} cannot be reshaped to {to:?}"
    );
    // Input and output share memory if they are the same argument.
    if x.arg == y.arg { Ok(Vec::new()) } else { gather(x, &Strided::contiguous(from), y) }
}

/// Copies elements in the order `from` to those in the order `to`, which has the same sizes and
/// visits no element twice.
fn copy((x, from): (&Operand, &Strided), (y, to): (&Operand, &Strided)) -> Result<Vec<Launch>> {
    ensure!(from.sizes == to.sizes, Fail, "{:?} is copied to {:?}", from.sizes, to.sizes);
    // Kernels compute addresses without a check, so the bounds are checked here.
    ensure!(from.fits(x.count()) && to.fits(y.count()), Fail, "a copy leaves its tensors");
    if from.sizes.contains(&0) {
        return Ok(Vec::new());
    }
    let steps = |order: &Strided| order.strides.iter().map(|step| *step as i64).collect::<Vec<i64>>();
    let moved = StridedCopy {
        x,
        y,
        bytes: element_bytes(x.dtype)?,
        starts: [from.offset, to.offset],
        walk: Walk::new(&from.sizes, &[steps(from), steps(to)]),
    };
    let launch = match (moved.walk.sizes.as_slice(), moved.plane()) {
        // In order of preference: a flat byte copy, a tiled transpose, a strided copy.
        (&[], _) => moved.in_order(1)?,
        (&[count], _) if moved.axis(0).is_some_and(|axis| axis.steps == [1, 1]) => moved.in_order(count)?,
        (_, Some(plane)) => moved.transposed(plane)?,
        (_, None) => moved.by_units()?,
    };
    Ok(vec![launch])
}

/// A copy over a common walk.
struct StridedCopy<'a> {
    x: &'a Operand,
    y: &'a Operand,
    /// The bytes of an element.
    bytes: usize,
    starts: [usize; 2],
    walk: Walk,
}

/// An axis of a walk, with its strides in `x` and `y`.
#[derive(Clone, Copy)]
struct CopyAxis {
    size: usize,
    steps: [i64; 2],
}

/// Two axes to transpose, by number: `x` is contiguous along the rows, `y` along the columns.
#[derive(Clone, Copy)]
struct TransposedAxes {
    rows: (usize, CopyAxis),
    columns: (usize, CopyAxis),
}

impl StridedCopy<'_> {
    fn axis(&self, axis: usize) -> Option<CopyAxis> {
        let step = |tensor: usize| self.walk.steps.get(tensor)?.get(axis).copied();
        Some(CopyAxis { size: *self.walk.sizes.get(axis)?, steps: [step(0)?, step(1)?] })
    }

    fn axes(&self) -> impl Iterator<Item = (usize, CopyAxis)> + '_ {
        (0..self.walk.sizes.len()).filter_map(|axis| Some((axis, self.axis(axis)?)))
    }

    /// Returns the axes to transpose in tiles, if they are large enough.
    fn plane(&self) -> Option<TransposedAxes> {
        let mut large =
            self.axes().filter(|(_, axis)| axis.size >= LEAST_TILED).collect::<Vec<_>>().into_iter();
        let rows = large.clone().find(|(_, axis)| axis.steps[0] == 1 && axis.steps[1] != 1)?;
        let columns =
            large.find(|(_, axis)| axis.steps[1] == 1 && axis.steps[0] != 1 && axis.steps[0] != 0)?;
        Some(TransposedAxes { rows, columns })
    }

    /// Appends the axes as parameters: their count, sizes, and each tensor's strides and first
    /// element.
    fn walked(&self, launch: Launch, axes: &[CopyAxis], unit: usize) -> Result<Launch> {
        let sizes: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
        let steps = |of: fn(&CopyAxis) -> i64| axes.iter().map(of).collect::<Vec<i64>>();
        let [x_start, y_start] = self.starts;
        launch
            .uint(axes.len())?
            .uints::<MOST_AXES>(&sizes)?
            .ints::<MOST_AXES>(&steps(|axis| axis.steps[0]))?
            .uint(x_start / unit)?
            .ints::<MOST_AXES>(&steps(|axis| axis.steps[1]))?
            .uint(y_start / unit)
    }

    /// A flat copy of `count` elements.
    fn in_order(&self, count: usize) -> Result<Launch> {
        let bytes = count.saturating_mul(self.bytes);
        let (units, rest) = (bytes / WIDEST, bytes % WIDEST);
        let launch = Launch::new("movement", "copy_bytes").threads(units + rest)?;
        let launch = launch.tensor(self.x).tensor(self.y).uint(units)?.uint(rest)?;
        // Offsets in bytes can exceed 32 bits although counts of elements do not.
        let start = |start: usize| (start.saturating_mul(self.bytes) as u64).to_ne_bytes();
        let [x_start, y_start] = self.starts;
        Ok(launch.bytes(&start(x_start)).bytes(&start(y_start)))
    }

    /// A strided copy of units: as many elements as stay adjacent throughout the walk.
    fn by_units(&self) -> Result<Launch> {
        let mut axes: Vec<CopyAxis> = self.axes().map(|(_, axis)| axis).collect();
        let mut unit = 1;
        if let Some((last, others)) = axes.split_last_mut().filter(|(last, _)| last.steps == [1, 1]) {
            let steps = others.iter().flat_map(|axis| axis.steps).map(|step| step.unsigned_abs() as usize);
            unit = elements::unit(self.bytes, steps.chain(self.starts).chain([last.size]));
            last.size /= unit;
            others.iter_mut().flat_map(|axis| &mut axis.steps).for_each(|step| *step /= unit as i64);
        }
        let count = axes.iter().map(|axis| axis.size).product();
        let launch = by_bytes("movement", "copy_strided", self.bytes * unit).threads(count)?;
        self.walked(launch.tensor(self.x).tensor(self.y).uint(count)?, &axes, unit)
    }

    /// A tiled transpose through shared memory, so that both reads and writes coalesce.
    fn transposed(&self, plane: TransposedAxes) -> Result<Launch> {
        let ((row_axis, rows), (column_axis, columns)) = (plane.rows, plane.columns);
        let kept = |axis: usize| axis != row_axis && axis != column_axis;
        let batch: Vec<CopyAxis> =
            self.axes().filter(|(axis, _)| kept(*axis)).map(|(_, axis)| axis).collect();
        let squares = rows.size.div_ceil(TILE).saturating_mul(columns.size.div_ceil(TILE));
        let count = batch.iter().fold(squares, |count, axis| count.saturating_mul(axis.size));
        let launch = by_bytes("movement", "transpose", self.bytes);
        let launch = launch.grid([count, 1, 1])?.block([TILE as u32, TILE_ROWS, 1]);
        let launch = launch.tensor(self.x).tensor(self.y).uint(rows.size)?.uint(columns.size)?;
        self.walked(launch.int(columns.steps[0])?.int(rows.steps[1])?, &batch, 1)
    }
}

fn rearrange(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    gather(cx.input(0)?, &read::order(cx)?, cx.output(0)?)
}

fn concat(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (y, (inputs, parts)) = (cx.output(0)?, read::joined(cx)?);
    let (mut launches, mut joined) = (Vec::new(), Vec::new());
    for ((x, size), order) in inputs.into_iter().zip(&parts.sizes).zip(parts.orders()) {
        launches.extend(copy((x, &Strided::contiguous(&x.shape)), (y, &order))?);
        joined.push((Some(x), *size));
    }
    together("join_parts", (y, parts.axis), &joined, launches)
}

fn split(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, parts) = (cx.input(0)?, read::split(cx)?);
    let (mut launches, mut outputs) = (Vec::new(), Vec::new());
    for ((index, size), order) in parts.sizes.iter().enumerate().zip(parts.orders()) {
        // A part without a reader keeps its place, since the parts' starts are sums of the sizes
        // before.
        outputs.push((cx.find_output(index), *size));
        if let Some(y) = cx.find_output(index) {
            launches.extend(gather(x, &order, y)?);
        }
    }
    together("split_parts", (x, parts.axis), &outputs, launches)
}

/// Merges the copies of parts along an axis into few launches, or returns the launches of `each` if
/// merging is not faster.
fn together(
    entry: &str,
    (whole, axis): (&Operand, usize),
    parts: &[(Option<&Operand>, usize)],
    each: Vec<Launch>,
) -> Result<Vec<Launch>> {
    let of_axes = |axes: Option<&[usize]>| axes.map_or(1, |sizes| sizes.iter().product::<usize>());
    let (rows, inner) = (of_axes(whole.shape.get(..axis)), of_axes(whole.shape.get(axis + 1..)));
    let bytes = element_bytes(whole.dtype)?;
    let mut starts = vec![0];
    for (_, size) in parts {
        starts.push(starts.last().unwrap_or(&0) + size * inner);
    }
    let row = whole.size(axis) * inner;
    let unit = unit(bytes, starts.iter().copied().chain([row]));
    // With a single row, separate flat copies always move the most bytes at once.
    let is_worth = rows > 1 || unit * bytes == WIDEST || whole.count() / unit <= LITTLE;
    // A launch costs some two microseconds, often more than a part takes to move.
    if each.len() < 2 || !is_worth {
        return Ok(each);
    }
    let mut launches = Vec::new();
    for (index, parts) in parts.chunks(MOST_PARTS).enumerate() {
        let starts = starts.iter().skip(index * MOST_PARTS).take(parts.len() + 1).map(|start| start / unit);
        let mut starts: Vec<usize> = starts.collect();
        let [first, last] = [starts.first(), starts.last()].map(|start| start.copied().unwrap_or(0));
        // Missing parts start where the last one ends, so no column belongs to them.
        starts.resize(MOST_PARTS + 1, last);
        let count = rows * (last - first);
        if count == 0 {
            continue;
        }
        let mut launch = by_bytes("movement", entry, bytes * unit).threads(count)?.tensor(whole);
        for place in 0..MOST_PARTS {
            launch = launch.find_tensor(parts.get(place).and_then(|(part, _)| *part));
        }
        launches.push(launch.uint(count)?.uint(row / unit)?.uints::<{ MOST_PARTS + 1 }>(&starts)?);
    }
    Ok(launches)
}

fn same_elements(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    copied(cx.input(0)?, cx.output(0)?)
}

fn dropout(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let mut launches = match cx.find_output(0) {
        Some(_) => same_elements(cx)?,
        None => Vec::new(),
    };
    if let Some(mask) = cx.find_output(1) {
        // Inference drops nothing, so the whole mask is true.
        launches.extend(filled(mask, &[1])?);
    }
    Ok(launches)
}

#[cfg(test)]
mod tests {
    use ort_core::dtype::DType;
    use ort_core::ops::tensor::geometry::SliceAxis;
    use ort_gpu::Arg;

    use super::*;

    fn entry(shape: &[usize], order: &Strided) -> Result<String> {
        let x = Operand { arg: Arg::Input(0), dtype: DType::F32, shape: shape.into() };
        let y = Operand { arg: Arg::Output(0), shape: order.sizes.iter().copied().collect(), ..x.clone() };
        Ok(gather(&x, order, &y)?.into_iter().map(|launch| launch.entry).collect())
    }

    #[test]
    fn neighbours_move_together() -> Result<()> {
        let transposed = |shape: &[usize], order: &[usize]| entry(shape, &Strided::transpose(shape, order));
        assert_eq!(transposed(&[2, 5, 3, 64], &[0, 2, 1, 3])?, "copy_strided_b16");
        assert_eq!(transposed(&[2, 5, 3, 6], &[0, 2, 1, 3])?, "copy_strided_b8");
        assert_eq!(transposed(&[2, 5, 3, 7], &[0, 2, 1, 3])?, "copy_strided_b4");
        assert_eq!(transposed(&[2, 64, 48], &[0, 2, 1])?, "transpose_b4");
        assert_eq!(transposed(&[2, 64, 3], &[0, 2, 1])?, "copy_strided_b4");
        assert_eq!(transposed(&[1, 64, 3], &[1, 0, 2])?, "copy_bytes");
        let back = [SliceAxis { start: 3, step: -1, count: 4 }, SliceAxis::all(8)];
        assert_eq!(entry(&[4, 8], &Strided::slice(&[4, 8], &back))?, "copy_strided_b16");
        Ok(())
    }

    #[test]
    fn parts_move_together_where_that_is_no_slower() -> Result<()> {
        let of = |shape: &[usize]| Operand { arg: Arg::Input(0), dtype: DType::F16, shape: shape.into() };
        let twos: [&[usize]; 9] = [&[2]; 9];
        let entries = |axis: usize, parts: &[&[usize]]| -> Result<Vec<String>> {
            let parts: Vec<Operand> = parts.iter().map(|shape| of(shape)).collect();
            let mut whole = parts[0].clone();
            whole.shape[axis] = parts.iter().map(|part| part.size(axis)).sum();
            let y = |part: &Operand| Operand { arg: Arg::Output(0), ..part.clone() };
            let each = parts.iter().map(|part| copied(part, &y(part)));
            let each = each.collect::<Result<Vec<_>>>()?.concat();
            let parts: Vec<_> = parts.iter().map(|part| (Some(part), part.size(axis))).collect();
            let launches = together("join_parts", (&whole, axis), &parts, each)?;
            Ok(launches.into_iter().map(|launch| launch.entry).collect())
        };
        assert_eq!(entries(1, &[&[12, 128, 64], &[12, 1, 64]])?, ["join_parts_b16"]);
        assert_eq!(entries(1, &[&[500, 300, 1], &[500, 3, 1]])?, ["join_parts_b2"]);
        assert_eq!(entries(0, &[&[65_537], &[3]])?, ["copy_bytes"; 2]);
        assert_eq!(entries(0, &twos)?, ["join_parts_b4"; 2]);
        assert_eq!(entries(0, &[&[8]])?, ["copy_bytes"]);
        Ok(())
    }
}
