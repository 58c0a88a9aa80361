//! `Unique`: sorts the items, which are elements or slices along an axis, marks where groups of
//! equal ones start, and numbers the groups.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::RankedRows;
use ort_core::ops::tensor::geometry::around_axis;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};
use smallvec::smallvec;

use super::gather::picked;
use super::select::Flags;
use super::sort::{SortRows, SortTensors, kind_of};
use super::{Counted, CudaKernel, count, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel::counting(
    KernelDef {
        op: "Unique",
        types: &[("T", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool])))],
        ..KernelDef::BASE
    },
    count_groups,
    workspace,
    Counted { shapes, write },
)];

/// The items, and their workspace.
struct Items {
    /// Elements outside the axis, its size, and elements inside.
    extents: [usize; 3],
    total: Operand,
    /// The items in key order.
    order: Operand,
    /// Whether a group starts at each item in key order, and how many started before.
    heads: (Operand, Flags),
    /// The same in position order, if groups are ordered by their first items.
    firsts: Option<(Operand, Flags)>,
    /// Where groups start, in key order.
    starts: Operand,
    /// The first position of each group, in position order.
    first_places: Operand,
    /// The first item of each group, in result order.
    first_items: Operand,
    /// Buffers of the sort passes.
    sorting: [Operand; 2],
}

impl Items {
    fn new(cx: &OpCx<'_>, taken: &mut usize) -> Result<Items> {
        let x = cx.input(0)?;
        let extents = match cx.attrs.find_int("axis") {
            None => [1, x.count(), 1],
            Some(axis) => around_axis(&x.shape, cx.axis(axis, x.rank())?),
        };
        let size = extents[1];
        ensure!(x.count().max(size) <= i32::MAX as usize, NotImplemented, "{:?} is beyond 31 bits", x.shape);
        let total = count(cx, taken);
        let order = cx.workspace(taken, DType::I64, &[size]);
        // Later passes reuse the memory of the sort buffers.
        let mut sorted = *taken;
        let sorting = match is_flat(cx) {
            true => flat(x)?.1.buffers(cx, &mut sorted),
            false => [(); 2].map(|()| cx.workspace(&mut sorted, DType::I64, &[size])),
        };
        let mut flags = || {
            let bytes = cx.workspace(taken, DType::U8, &[size]);
            let flags = Flags::new(cx, taken, &bytes, size);
            (bytes, flags)
        };
        let heads = flags();
        let firsts = if cx.attrs.flag("sorted")? { None } else { Some(flags()) };
        let mut list = || cx.workspace(taken, DType::I64, &[size]);
        let (starts, first_places, first_items) = (list(), list(), list());
        *taken = sorted.max(*taken);
        Ok(Items { extents, total, order, heads, firsts, starts, first_places, first_items, sorting })
    }

    fn size(&self) -> usize {
        self.extents[1]
    }

    /// Returns a launch of an entry of `cu/unique.cu` for the input's key type, with a thread per
    /// item.
    fn launch(&self, entry: &str, x: &Operand) -> Result<Launch> {
        let (_, suffix) = kind_of(x.dtype)?;
        Launch::new("unique", format!("{entry}_{suffix}")).threads(self.size())
    }

    /// Appends the structure `Slices`.
    fn slices(&self, launch: Launch, x: &Operand) -> Result<Launch> {
        let [outer, size, run] = self.extents;
        let outer = if x.count() == 0 { 0 } else { outer };
        launch.uints::<4>(&[outer, size, run, kind_of(x.dtype)?.0])
    }

    /// Returns the launches that sort the items.
    fn sorted(&self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        let x = cx.input(0)?;
        if is_flat(cx) {
            let (x, rows) = flat(x)?;
            let tensors = SortTensors { x: &x, values: None, places: Some(&self.order), descending: false };
            return rows.sort(&tensors, self.sorting.clone());
        }
        let [spare, _] = &self.sorting;
        // A pass merges runs of `length` items in pairs, and the first finds runs of one item.
        let mut lengths: Vec<usize> = vec![1];
        lengths.extend(
            std::iter::successors(Some(2), |length| Some(length * 2))
                .take_while(|length| *length < self.size()),
        );
        let mut launches = Vec::new();
        for (pass, length) in lengths.iter().enumerate() {
            // Buffers alternate so that the last pass writes the order.
            let is_order = (lengths.len() - pass) % 2 == 1;
            let (from, to) = if is_order { (spare, &self.order) } else { (&self.order, spare) };
            let launch = self.launch("merge_slices", x)?.find_tensor(Some(x));
            // The first pass has no order to read: its runs are single items in position order.
            let launch = launch.find_tensor(Some(from).filter(|_| pass > 0)).tensor(to);
            launches.push(self.slices(launch, x)?.uint(*length)?);
        }
        Ok(launches)
    }
}

/// Whether the items are single elements.
fn is_flat(cx: &OpCx<'_>) -> bool {
    cx.attrs.find_int("axis").is_none()
}

/// Views all elements as one row.
fn flat(x: &Operand) -> Result<(Operand, SortRows)> {
    let x = x.with_shape(&[x.count()]);
    let rows = SortRows::new(&x, RankedRows::along_axis(&x.shape, 0, x.count())?)?;
    Ok((x, rows))
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    Items::new(cx, &mut taken)?;
    Ok(taken)
}

fn count_groups(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, items) = (cx.input(0)?, Items::new(cx, &mut 0)?);
    if items.size() == 0 {
        return Ok(Vec::new());
    }
    let mut launches = items.sorted(cx)?;
    let mark = items.launch("mark_heads", x)?.find_tensor(Some(x)).tensor(&items.order);
    let mark = mark.tensor(&items.heads.0).find_tensor(items.firsts.as_ref().map(|(bytes, _)| bytes));
    launches.push(items.slices(mark, x)?);
    launches.extend(items.heads.1.counted(&items.total)?);
    Ok(launches)
}

fn shapes(cx: &OpCx<'_>, count: usize) -> Result<Vec<Shape>> {
    let x = cx.input(0)?;
    let (mut y, mut items) = (smallvec![count], x.count());
    if let Some(axis) = cx.attrs.find_int("axis") {
        y = x.shape.clone();
        let size = y.get_mut(cx.axis(axis, x.rank())?);
        items =
            std::mem::replace(size.ok_or_else(|| error!(InvalidArgument, "a scalar has no axis"))?, count);
    }
    Ok(vec![y, smallvec![count], smallvec![items], smallvec![count]])
}

fn write(cx: &OpCx<'_>, count: usize) -> Result<Vec<Launch>> {
    let (x, items) = (cx.input(0)?, Items::new(cx, &mut 0)?);
    let size = items.size();
    if size == 0 {
        return Ok(Vec::new());
    }
    let [y, indices, inverse, counts] = [0, 1, 2, 3].map(|index| cx.find_output(index));
    let mut launches = vec![items.heads.1.places(&items.starts)?];
    if let Some((_, firsts)) = &items.firsts {
        launches.extend(firsts.counted(&items.total)?);
        launches.push(firsts.places(&items.first_places)?);
    }
    let first_places = items.firsts.as_ref().map(|_| &items.first_places);
    let of_groups = |entry: &str| {
        let launch = Launch::new("unique", entry).tensor(&items.order).tensor(&items.starts);
        launch.find_tensor(first_places)
    };
    // The output doubles as the list if it is requested.
    let first_items = indices.unwrap_or(&items.first_items);
    if y.is_some() || indices.is_some() || counts.is_some() {
        let launch = of_groups("groups").threads(count)?.tensor(first_items).find_tensor(counts);
        launches.push(launch.uint(count)?.uint(size)?);
    }
    if let Some(inverse) = inverse {
        let launch = of_groups("inverse").threads(size)?.tensor(inverse);
        launches.push(launch.uint(count)?.uint(size)?);
    }
    if let Some(y) = y.filter(|y| y.count() > 0) {
        launches.push(picked(x, items.extents, &first_items.with_shape(&[count]), y)?);
    }
    Ok(launches)
}
