//! `TopK`: short lines by counting, for each element, those that come before it; longer ones sorted in parts that are merged.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::movement::element_bytes;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

/// Up to this length the elements that come before another are counted.
const SHORT: usize = 64;
/// The elements that a block sorts, and the parts that are merged at once, as in cu/sort.cu.
const BLOCK: usize = 2048;
const WAYS: usize = 8;
/// The most threads of a block that sorts.
const THREADS: usize = 256;

cuda_kernels![CudaKernel {
    workspace: Some(workspace),
    ..CudaKernel::new(
        KernelDef { op: "TopK", types: &[("T", TypeSet::NUMERIC)], host_inputs: &[1], ..KernelDef::BASE },
        launches
    )
}];

/// The number of a type in cu/sort.cu, and whether its keys have 64 bits.
fn kind_of(dtype: DType) -> Result<(usize, bool)> {
    Ok(match dtype {
        DType::F32 => (0, false),
        DType::F16 => (1, false),
        DType::BF16 => (2, false),
        DType::F64 => (3, true),
        DType::I8 => (4, false),
        DType::I16 => (5, false),
        DType::I32 => (6, false),
        DType::I64 => (7, true),
        DType::U8 => (8, false),
        DType::U16 => (9, false),
        DType::U32 => (10, false),
        DType::U64 => (11, true),
        other => return Err(error!(NotImplemented, "sorting elements of {}", other.name())),
    })
}

/// The lines of a tensor along an axis.
struct Lines {
    count: usize,
    len: usize,
    inner: usize,
    /// The results of each.
    kept: usize,
    kind: usize,
    wide: bool,
}

impl Lines {
    fn new(cx: &OpCx<'_>) -> Result<Lines> {
        let x = cx.input(0)?;
        let y = cx.find_output(0).map_or_else(|| cx.output(1), Ok)?;
        let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
        let (len, kept) = (x.size(axis), y.size(axis));
        ensure!(kept <= len, InvalidArgument, "K must be one number from 0 to the axis' size {len}");
        let product = |sizes: &[usize]| sizes.iter().copied().fold(1, usize::saturating_mul);
        let (outer, inner) = (x.shape.get(..axis), x.shape.get(axis + 1..));
        let inner = product(inner.unwrap_or_default());
        let count = if kept == 0 { 0 } else { product(outer.unwrap_or_default()).saturating_mul(inner) };
        ensure!(x.count() <= i32::MAX as usize, NotImplemented, "{:?} is beyond 31 bits", x.shape);
        let (kind, wide) = kind_of(x.dtype)?;
        Ok(Lines { count, len, inner, kept, kind, wide })
    }

    /// How many sorted parts of so many elements a line has, and how many entries of each are kept.
    fn parts(&self, size: usize) -> [usize; 2] {
        [self.len.div_ceil(size), self.kept.min(size)]
    }

    /// The sizes of parts from pass to pass, until one is the whole line.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let whole = self.len;
        std::iter::successors(Some(BLOCK), |size| size.checked_mul(WAYS))
            .take_while(move |size| *size < whole)
    }

    /// Entries between the passes, two buffers that are used in turn: none where a block takes a whole line.
    fn buffers(&self, cx: &OpCx<'_>, taken: &mut usize) -> [Operand; 2] {
        let of_line = self.sizes().map(|size| self.parts(size).into_iter().fold(1, usize::saturating_mul));
        let words = if self.wide { 2 } else { 1 };
        let shape = [self.count, of_line.max().unwrap_or(0), words];
        [(); 2].map(|()| cx.workspace(taken, DType::U64, &shape))
    }

    /// A launch with the input, the results where they are wanted, and what else goes before the structure `Lines`.
    fn launch(&self, cx: &OpCx<'_>, entry: &str, entries: &[Option<&Operand>]) -> Result<Launch> {
        let suffix = if self.wide { "wide" } else { "narrow" };
        let launch = Launch::new("sort", format!("{entry}_{suffix}")).tensor(cx.input(0)?);
        let launch = launch.find_tensor(cx.find_output(0)).find_tensor(cx.find_output(1));
        let launch = entries.iter().fold(launch, |launch, entries| launch.find_tensor(*entries));
        let bytes = element_bytes(cx.input(0)?.dtype)?;
        let largest = usize::from(cx.attrs.flag("largest")?);
        launch.uints::<7>(&[self.count, self.len, self.inner, self.kept, self.kind, bytes, largest])
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let lines = Lines::new(cx)?;
    let mut taken = 0;
    lines.buffers(cx, &mut taken);
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let lines = Lines::new(cx)?;
    let asked = cx.ints(1)?;
    let fits = matches!(asked.as_slice(), [k] if usize::try_from(*k) == Ok(lines.kept));
    ensure!(fits, InvalidArgument, "K is {asked:?}, expected {}", lines.kept);
    if lines.count == 0 {
        return Ok(Vec::new());
    }
    if lines.len <= SHORT {
        let count = lines.count.saturating_mul(lines.len);
        return Ok(vec![lines.launch(cx, "count_ranks", &[])?.threads(count)?.uint(count)?]);
    }
    let [mut from, mut to] = lines.buffers(cx, &mut 0);
    let size = lines.len.min(BLOCK).next_power_of_two();
    let [parts, capacity] = lines.parts(size);
    let entries = Some(&from).filter(|_| lines.len > BLOCK);
    let sort = lines.launch(cx, "sort_part", &[entries])?.grid([lines.count.saturating_mul(parts), 1, 1])?;
    let sort = sort.block([(size / 2).min(THREADS) as u32, 1, 1]);
    let mut launches = vec![sort.uint(parts)?.uint(capacity)?.uint(size)?];
    for size in lines.sizes() {
        let [parts, capacity] = lines.parts(size);
        let merged_size = size.saturating_mul(WAYS);
        let [merged_parts, merged] = lines.parts(merged_size);
        let target = Some(&to).filter(|_| merged_parts > 1);
        let count = lines.count.saturating_mul(parts).saturating_mul(capacity);
        let launch = lines.launch(cx, "merge_parts", &[Some(&from), target])?.threads(count)?;
        let launch = launch.uints::<3>(&[parts, capacity, size])?;
        let sizes = [merged_parts, merged, merged_size.min(i32::MAX as usize)];
        launches.push(launch.uints::<3>(&sizes)?.uint(count)?);
        std::mem::swap(&mut from, &mut to);
    }
    Ok(launches)
}
